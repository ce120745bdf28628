"""The three forms in which Debezium writes a change, and the headers of its HTTP sink.

    envelope     {"op": "u", "before": {...}, "after": {...}, "source": {...}, "transaction": {...}, "ts_ms": ...}
    unwrapped    {"id": 1, ..., "__op": "u", "__deleted": "false", "__source_table": "orders", ...}
    CloudEvent   {"specversion": "1.0", "iodebeziumop": "u", "iodebeziumtable": "orders", ..., "data": {"before": ...}}

An unwrapped row carries what `add.fields` and `add.headers` name. The source table is required.

The HTTP sink of Debezium Server adds headers: who sends, and the two keys of a key change. Names are in upper case
whatever the record said, and a batch carries the headers of its first event only:

    X-DEBEZIUM-__DEBEZIUM.NEWKEY: base64 of {"schema": ..., "payload": {"id": 1001}}
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from lakefeed.ingest.debezium.events import NO_IMAGE, NULL, DebeziumMalformed
from lakefeed.ingest.debezium.values import ValueSchema, decode_object, read_fields, split_schema

_EXTENSION = "iodebezium"
_SOURCE = "__source_"
_TRANSACTION = "__transaction_"

# CloudEvents allow no underscores in names: these are the fields of `source` that lost theirs.
_CLOUD_NAMES = {"tsms": "ts_ms", "tsus": "ts_us", "tsns": "ts_ns", "originlsn": "origin_lsn"}
# Fields of the transaction; `txid` is its id, while `txId` is a field of the source.
_CLOUD_TRANSACTION = {"txid": "id", "txtotalorder": "total_order", "txdatacollectionorder": "data_collection_order"}

# Fields that `add.fields` can name without a prefix; a column that starts with two underscores is a column otherwise.
_UNWRAPPED_SOURCE = frozenset(
    ("version", "connector", "name", "snapshot", "db", "sequence", "schema", "table", "txid", "lsn", "xmin")
)
_UNWRAPPED_TIMES = frozenset(("__ts_ms", "__ts_us", "__ts_ns"))
_UNWRAPPED_OWN = ("__op", "__deleted")
# Headers arrive in upper case, so names are compared in lower case; this one has both.
_UNWRAPPED_NAMES = {"__source_txid": "txId", "__txid": "txId"}

# Headers of the HTTP sink.
PREFIX = "x-debezium-"
OLD_KEY = "__debezium.oldkey"
NEW_KEY = "__debezium.newkey"

_CONTEXT = "__debezium.context."
_OWN = "__debezium."

_encode = msgspec.json.Encoder().encode
_decode_text = msgspec.json.Decoder(str).decode
_decode_any = msgspec.json.Decoder().decode


@dataclass(frozen=True, slots=True, kw_only=True)
class RawChange:
    """A change in any of the forms, its values undecoded."""

    path: str
    op: str
    source: dict[str, msgspec.Raw]
    transaction: dict[str, msgspec.Raw]
    before: msgspec.Raw
    after: msgspec.Raw
    message: msgspec.Raw
    schema: ValueSchema
    timestamp_ms: msgspec.Raw | None = None


def read_change(
    fields: dict[str, msgspec.Raw], schema: ValueSchema, headers: Mapping[str, str], path: str
) -> RawChange | None:
    """Read a change in any of the forms; None if the event is no change. `headers` are Debezium's own.

    Raises: DebeziumMalformed.
    """
    if "specversion" in fields and f"{_EXTENSION}op" in fields:
        return _read_cloud_event(fields, path)
    if "op" in fields and "source" in fields:
        return _read_envelope(fields, schema, path)
    # An unwrapped row, or its headers, name the operation or the table.
    header_fields = _unwrapped_fields(headers)
    names = (*_UNWRAPPED_OWN, "__table", f"{_SOURCE}table")
    if any(name in fields or name in header_fields for name in names):
        return _read_unwrapped(fields, schema, path, header_fields=header_fields)
    return None


def _read_envelope(fields: dict[str, msgspec.Raw], schema: ValueSchema, path: str) -> RawChange:
    return RawChange(
        path=path,
        op=_text(fields["op"], f"{path}.op"),
        source=_object(fields["source"], f"{path}.source"),
        transaction=_object(fields.get("transaction"), f"{path}.transaction"),
        before=fields.get("before", NO_IMAGE),
        after=fields.get("after", NO_IMAGE),
        message=fields.get("message", NO_IMAGE),
        schema=schema,
        timestamp_ms=fields.get("ts_ms"),
    )


def _read_cloud_event(fields: dict[str, msgspec.Raw], path: str) -> RawChange:
    """Read a CloudEvent, whose values outside `data` are all text."""
    extensions = {name.removeprefix(_EXTENSION): value for name, value in fields.items() if name.startswith(_EXTENSION)}
    payload, schema = split_schema(fields.get("data", msgspec.Raw(b"{}")), f"{path}.data")
    data = decode_object(payload, f"{path}.data")
    source = {
        _CLOUD_NAMES.get(name, name): value
        for name, value in extensions.items()
        if name != "op" and name not in _CLOUD_TRANSACTION
    }
    transaction = {known: extensions[name] for name, known in _CLOUD_TRANSACTION.items() if name in extensions}
    return RawChange(
        path=path,
        op=_text(extensions["op"], f"{path}.{_EXTENSION}op"),
        source=source,
        transaction=transaction,
        before=data.get("before", NO_IMAGE),
        after=data.get("after", NO_IMAGE),
        message=data.get("message", NO_IMAGE),
        schema=schema,
    )


def _read_unwrapped(
    fields: dict[str, msgspec.Raw], schema: ValueSchema, path: str, *, header_fields: Mapping[str, msgspec.Raw]
) -> RawChange:
    """Read an unwrapped row: its own fields, and the rest, which is the row."""
    own = {name.lower(): value for name, value in fields.items() if _is_own(name)}
    own = {**header_fields, **own}
    source = {
        _UNWRAPPED_NAMES.get(name, name.removeprefix(_SOURCE).removeprefix("__")): value
        for name, value in own.items()
        if name not in _UNWRAPPED_OWN and name not in _UNWRAPPED_TIMES and not name.startswith(_TRANSACTION)
    }
    transaction = {
        name.removeprefix(_TRANSACTION): value for name, value in own.items() if name.startswith(_TRANSACTION)
    }
    op = _unwrapped_op(own, path)
    row = msgspec.Raw(_encode({name: value for name, value in fields.items() if not _is_own(name)}))
    return RawChange(
        path=path,
        op=op,
        source=source,
        transaction=transaction,
        before=row if op == "d" else NO_IMAGE,
        after=row if op != "d" else NO_IMAGE,
        message=NO_IMAGE,
        schema=ValueSchema(rows={"before": schema.converters, "after": schema.converters}),
        timestamp_ms=own.get("__ts_ms"),
    )


def _is_own(name: str) -> bool:
    lower = name.lower()
    return lower.startswith("__") and (
        lower in _UNWRAPPED_OWN
        or lower in _UNWRAPPED_TIMES
        or lower.startswith((_SOURCE, _TRANSACTION))
        or lower.removeprefix("__") in _UNWRAPPED_SOURCE
    )


def _unwrapped_op(own: Mapping[str, msgspec.Raw], path: str) -> str:
    if plain(own.get("__deleted")) in (True, "true"):
        return "d"
    # Without an operation the row replaces what is known of it.
    return _text(own["__op"], f"{path}.__op") if "__op" in own else "u"


def _text(value: msgspec.Raw, path: str) -> str:
    text = plain(value)
    if not isinstance(text, str):
        raise DebeziumMalformed(path, "expected text")
    return text


def plain(value: msgspec.Raw | None) -> Any:
    """Return a decoded value of the event itself; None if it is missing."""
    return None if value is None else _decode_any(value)


def _object(value: msgspec.Raw | None, path: str) -> dict[str, msgspec.Raw]:
    return {} if value is None or value == NULL else decode_object(value, path)


@dataclass(frozen=True, slots=True)
class Context:
    """Which run of which connector sends. A restarted server has another `run_id`; fields are empty if not sent."""

    run_id: str = ""
    logical_name: str = ""


def read_context(headers: Mapping[str, str]) -> Context:
    """Return who sends a request.

    Raises: DebeziumMalformed.
    """
    own = own_headers(headers)
    return Context(
        run_id=_headers_text(own, f"{_CONTEXT}runid"),
        logical_name=_headers_text(own, f"{_CONTEXT}connectorlogicalname"),
    )


def own_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """Return Debezium's headers, by lower-case name without the prefix."""
    lower = ((name.lower(), value) for name, value in headers.items())
    return {name.removeprefix(PREFIX): value for name, value in lower if name.startswith(PREFIX)}


def read_key(own: Mapping[str, str], name: str) -> dict[str, msgspec.Raw]:
    """Return the columns of a key; empty if the header is missing.

    Raises: DebeziumMalformed.
    """
    if name not in own:
        return {}
    payload, schema = split_schema(_decode(own, name), _header_path(name))
    key = decode_object(payload, _header_path(name))
    read_fields(key, schema.converters)
    return key


def _unwrapped_fields(own: Mapping[str, str]) -> dict[str, msgspec.Raw]:
    """Return the fields that ExtractNewRecordState adds as headers, such as `__op` and `__source_table`."""
    names = [name for name in own if name.startswith("__") and not name.startswith(_OWN)]
    return {name: split_schema(_decode(own, name), _header_path(name))[0] for name in names}


def _headers_text(own: Mapping[str, str], name: str) -> str:
    if name not in own:
        return ""
    try:
        payload, _ = split_schema(_decode(own, name), _header_path(name))
        return _decode_text(payload)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        raise DebeziumMalformed(_header_path(name), "expected text") from None


def _decode(own: Mapping[str, str], name: str) -> bytes:
    try:
        json = base64.b64decode(own[name], validate=True)
        json.decode()
    except (binascii.Error, ValueError):
        raise DebeziumMalformed(_header_path(name), "expected base64 of JSON") from None
    return json


def _header_path(name: str) -> str:
    return f"header {(PREFIX + name).upper()}"
