"""What a name stands for. Core: owns which two contents are told apart though their files have one name."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# Enough of a SHA-256 that two contents never share a digest.
_DIGEST_CHARS = 32


@dataclass(frozen=True, slots=True)
class Pointer:
    """Where the metadata of a table or view is, which content that file had, and whose it is.

    `digest` is that of a file that was registered: writers without a catalog (`v1.metadata.json`) use names again. It
    is empty for files that the catalog writes, whose names are used once. `table_uuid` tells that two names are one
    table, wherever the metadata of each has gone since; it is empty for views, and for tables of which it is not known.
    """

    location: str
    digest: str = ""
    table_uuid: str = ""

    def is_version(self, other: Pointer) -> bool:
        """Tell whether two point at the same content."""
        return (self.location, self.digest) == (other.location, other.digest)


def point_at(location: str, document: Mapping[str, Any], *, digest: str = "") -> Pointer:
    """Point at a document that is in a file."""
    # A view may carry anything under the name of a table's uuid.
    table_uuid = None if "view-uuid" in document else document.get("table-uuid")
    return Pointer(location, digest, table_uuid if isinstance(table_uuid, str) else "")


def digest_of(raw: bytes) -> str:
    """Tell the content of a file from others."""
    return hashlib.sha256(raw).hexdigest()[:_DIGEST_CHARS]
