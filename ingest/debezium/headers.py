"""What Debezium Server's HTTP sink says beside the body: who sends, and the two keys of a key change.

    X-DEBEZIUM-__DEBEZIUM.NEWKEY: base64 of {"schema": ..., "payload": {"id": 1001}}

Names are in upper case whatever the record said. A batch carries the headers of its first event only.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from ingest.debezium.errors import DebeziumMalformed
from ingest.debezium.images import decode_object
from ingest.debezium.schemas import split_schema
from ingest.debezium.values import read_fields

PREFIX = "x-debezium-"
OLD_KEY = "__debezium.oldkey"
NEW_KEY = "__debezium.newkey"

_CONTEXT = "__debezium.context."
_OWN = "__debezium."

_decode_text = msgspec.json.Decoder(str).decode


@dataclass(frozen=True, slots=True)
class Context:
    """Which run of which connector speaks. A restarted server has another `run_id`; each is empty if not said."""

    run_id: str = ""
    logical_name: str = ""
    connector: str = ""
    task_id: str = ""


def read_context(headers: Mapping[str, str]) -> Context:
    """Read who sends a request.

    Raises: DebeziumMalformed.
    """
    own = own_headers(headers)
    return Context(
        run_id=_text(own, f"{_CONTEXT}runid"),
        logical_name=_text(own, f"{_CONTEXT}connectorlogicalname"),
        connector=_text(own, f"{_CONTEXT}connectorname"),
        task_id=_text(own, f"{_CONTEXT}taskid"),
    )


def own_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """Pick Debezium's headers, by lower-case name without the prefix."""
    lower = ((name.lower(), value) for name, value in headers.items())
    return {name.removeprefix(PREFIX): value for name, value in lower if name.startswith(PREFIX)}


def read_key(own: Mapping[str, str], name: str) -> dict[str, msgspec.Raw]:
    """Read a key's columns; empty if the header is missing.

    Raises: DebeziumMalformed.
    """
    if name not in own:
        return {}
    payload, schema = split_schema(_decode(own, name), _place(name))
    key = decode_object(payload, _place(name))
    read_fields(key, schema.converters)
    return key


def unwrapped_fields(own: Mapping[str, str]) -> dict[str, msgspec.Raw]:
    """Read what ExtractNewRecordState was told to add as headers, such as `__op` and `__source_table`.

    Raises: DebeziumMalformed.
    """
    names = [name for name in own if name.startswith("__") and not name.startswith(_OWN)]
    return {name: split_schema(_decode(own, name), _place(name))[0] for name in names}


def _text(own: Mapping[str, str], name: str) -> str:
    if name not in own:
        return ""
    try:
        payload, _ = split_schema(_decode(own, name), _place(name))
        return _decode_text(payload)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        raise DebeziumMalformed(_place(name), "expected text") from None


def _decode(own: Mapping[str, str], name: str) -> bytes:
    try:
        json = base64.b64decode(own[name], validate=True)
        json.decode()
    except (binascii.Error, ValueError):
        raise DebeziumMalformed(_place(name), "expected base64 of JSON") from None
    return json


def _place(name: str) -> str:
    return f"header {(PREFIX + name).upper()}"
