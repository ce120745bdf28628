"""The one spelling of uuids that documents take."""

from __future__ import annotations

import re

from catalog.errors import BadRequest

_UUID = re.compile(r"[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")


def check_uuid(text: str) -> str:
    """Return a uuid as it was sent.

    Raises: BadRequest.
    """
    if _UUID.fullmatch(text) is None:
        raise BadRequest(f"Invalid uuid: {text}")
    return text
