"""Debezium requests, decoded into events.

    body: one event, or a list of them; each with its schema ({"schema": ..., "payload": ...}) or without

    op r, c, u, d, t, m        Change: READ, INSERT, UPDATE, DELETE, TRUNCATE, MESSAGE
    status BEGIN, END          TransactionMark
    ts_ms alone                Ignored: a heartbeat
    null                       Ignored: a tombstone
    tableChanges               Ignored: a schema change

Anything else is refused with the whole request: a success must not hide a lost event.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any, Literal

import msgspec

from lakefeed.contract.changes import INT64_MAX, TIMESTAMP_MAX_MS, TIMESTAMP_MIN_MS
from lakefeed.ingest.debezium import forms, values
from lakefeed.ingest.debezium.events import (
    NO_IMAGE,
    NULL,
    Change,
    DebeziumConfig,
    DebeziumEvent,
    DebeziumMalformed,
    Ignored,
    Origin,
    SourceOperation,
    TableKeys,
    TransactionMark,
    TransactionStatus,
)
from lakefeed.ingest.debezium.forms import RawChange
from lakefeed.ingest.debezium.values import Image, row_id_of, split_schema
from lakefeed.writer.wire.json_batch import ADMISSION_HEADROOM_FRAMES, Sequence

NAME_MAX_CHARS = 255

_OPERATIONS = {
    "r": SourceOperation.READ,
    "c": SourceOperation.INSERT,
    "u": SourceOperation.UPDATE,
    "d": SourceOperation.DELETE,
    "t": SourceOperation.TRUNCATE,
    "m": SourceOperation.MESSAGE,
}
_WITH_AFTER = (SourceOperation.READ, SourceOperation.INSERT, SourceOperation.UPDATE)
_ORIGIN_FIELDS = ("db", "schema", "table", "snapshot", "lsn", "txId", "sequence")
_HEARTBEAT = {"ts_ms", "ts_us", "ts_ns"}
_MARK = {"status", "id", "event_count", "data_collections", "ts_ms"}
_SCHEMA_CHANGE = "tableChanges"

# A dot would split a name and no catalog accepts the others; escaped as Iceberg does in Avro names.
_UNUSABLE = re.compile(r"[\x00-\x1f\x7f./\\%?#]")
_SPACE = b" \t\r\n"
_MISSING = (NO_IMAGE, NULL)

_encode = msgspec.json.Encoder().encode
_decode_list = msgspec.json.Decoder(list[msgspec.Raw]).decode
_decode_pair = msgspec.json.Decoder(tuple[Sequence | None, Sequence | None], strict=False).decode
_decode_mark = msgspec.json.Decoder(dict[str, Any]).decode
_decode_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


def read_events(body: bytes, headers: Mapping[str, str], config: DebeziumConfig) -> list[DebeziumEvent]:
    """Read all events of a request, in order.

    Raises: DebeziumMalformed.
    """
    try:
        body.decode()
        # The writer decodes the rows again on another stack. A deeper stack here makes its limit the looser one.
        return _read_below(body, headers, config, frames=ADMISSION_HEADROOM_FRAMES)
    except UnicodeDecodeError:
        raise DebeziumMalformed("body", "expected UTF-8") from None
    except RecursionError:
        raise DebeziumMalformed("body", "a value is nested too deeply") from None
    except msgspec.MsgspecError:
        raise DebeziumMalformed("body", "expected JSON") from None


def _read_below(body: bytes, headers: Mapping[str, str], config: DebeziumConfig, *, frames: int) -> list[DebeziumEvent]:
    if frames:
        return _read_below(body, headers, config, frames=frames - 1)
    first = forms.own_headers(headers)
    if not body.lstrip(_SPACE).startswith(b"["):
        return [_read_event(body, first, config, path="event")]
    events = [
        _read_event(json, first if index == 0 else {}, config, path=f"events[{index}]")
        for index, json in enumerate(_decode_list(body))
    ]
    return _link_key_changes(events)


def _read_event(
    json: bytes | msgspec.Raw, headers: Mapping[str, str], config: DebeziumConfig, *, path: str
) -> DebeziumEvent:
    payload, schema = split_schema(json, path)
    if payload == NULL:
        return Ignored("tombstone")
    fields = values.decode_object(payload, path)
    raw = forms.read_change(fields, schema, headers, path)
    if raw is not None:
        return _change_of(raw, headers, config)
    if fields and fields.keys() <= _HEARTBEAT:
        return Ignored("heartbeat")
    if fields.keys() >= {"status", "id"} and fields.keys() <= _MARK:
        return _mark_of(_decode_mark(payload), path)
    if _SCHEMA_CHANGE in fields:
        return Ignored("schema change")
    raise DebeziumMalformed(path, "expected a change, a transaction marker or a heartbeat")


def _mark_of(mark: dict[str, Any], path: str) -> TransactionMark:
    if mark["status"] not in ("BEGIN", "END"):
        raise DebeziumMalformed(f"{path}.status", "expected one of BEGIN, END")
    return TransactionMark(
        TransactionStatus(mark["status"]),
        _transaction_of(mark["id"], f"{path}.id"),
        _count(mark.get("event_count"), f"{path}.event_count"),
        _counts_of(mark.get("data_collections"), f"{path}.data_collections"),
    )


def _counts_of(collections: Any, path: str) -> dict[str, int]:
    if not isinstance(collections, list | None):
        raise DebeziumMalformed(path, "expected a list")
    counts: dict[str, int] = {}
    for entry in collections or ():
        if not isinstance(entry, dict) or not isinstance(entry.get("data_collection"), str):
            raise DebeziumMalformed(path, "expected names and counts")
        counts[entry["data_collection"]] = _count(entry.get("event_count"), path)
    return counts


def _count(value: Any, path: str) -> int:
    if value is None:
        return 0
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= INT64_MAX:
        raise DebeziumMalformed(path, "expected a count")
    return value


def _transaction_of(identity: Any, path: str) -> str:
    """Return the id of a transaction. The part after the colon is the position of the single event."""
    if identity is None:
        return ""
    if not isinstance(identity, str):
        raise DebeziumMalformed(path, "expected text")
    if len(identity) > NAME_MAX_CHARS:
        raise DebeziumMalformed(path, f"expected at most {NAME_MAX_CHARS} characters")
    return identity.partition(":")[0]


def _change_of(raw: RawChange, headers: Mapping[str, str], config: DebeziumConfig) -> Change:
    operation = _OPERATIONS.get(raw.op)
    if operation is None:
        raise DebeziumMalformed(f"{raw.path}.op", "expected one of r, c, u, d, t, m")
    origin = _origin_of(raw)
    old_key, new_key = forms.read_key(headers, forms.OLD_KEY), forms.read_key(headers, forms.NEW_KEY)
    keys = config.keys_of(origin.collection)
    key_columns = keys.columns or tuple(old_key or new_key)
    before = _image(raw, "before", config, trusted=None if keys.replica_identity_full else key_columns)
    after = _image(raw, "after", config, trusted=None)
    stored = before if operation is SourceOperation.DELETE else after
    moved_from, moved_to = row_id_of(old_key, key_columns), row_id_of(new_key, key_columns)
    _check_rows(operation, raw)
    return Change(
        operation=operation,
        table=_table_of(operation, origin, config, raw.path),
        row_id=row_id_of(stored.columns, key_columns),
        timestamp_ms=_timestamp_ms_of(raw),
        before=before.json,
        after=raw.message if operation is SourceOperation.MESSAGE else after.json,
        unchanged=stored.unchanged,
        irregular=stored.irregular,
        metadata=_metadata_of(
            raw,
            irregular=list(stored.irregular),
            movedFrom=moved_from,
            movedTo=moved_to,
            oldKey=old_key,
            newKey=new_key,
            untrustedBefore=_untrusted(raw, key_columns, keys),
        ),
        origin=origin,
        transaction=_transaction_of(forms.plain(raw.transaction.get("id")), f"{raw.path}.transaction.id"),
        moved_from=moved_from,
        moved_to=moved_to,
    )


def _untrusted(raw: RawChange, key_columns: Collection[str], keys: TableKeys) -> msgspec.Raw | None:
    """Return a before-image whose columns cannot be trusted, to be kept in the metadata."""
    is_known = bool(key_columns) or keys.replica_identity_full
    return None if is_known or raw.before in _MISSING else raw.before


def _image(
    raw: RawChange, name: Literal["before", "after"], config: DebeziumConfig, *, trusted: Collection[str] | None
) -> Image:
    return values.read_image(
        raw.before if name == "before" else raw.after,
        path=f"{raw.path}.{name}",
        unavailable_value=config.unavailable_value,
        converters=raw.schema.row(name),
        trusted=trusted,
    )


def _check_rows(operation: SourceOperation, raw: RawChange) -> None:
    if operation in _WITH_AFTER and raw.after in _MISSING:
        raise DebeziumMalformed(f"{raw.path}.after", "expected a row")
    if operation is SourceOperation.MESSAGE and raw.message in _MISSING:
        raise DebeziumMalformed(f"{raw.path}.message", "expected a message")


def _origin_of(raw: RawChange) -> Origin:
    source = {name: forms.plain(raw.source.get(name)) for name in _ORIGIN_FIELDS}
    for name in ("db", "schema", "table"):
        if not isinstance(source[name], str | None):
            raise DebeziumMalformed(f"{raw.path}.source.{name}", "expected text")
    snapshot = source["snapshot"]
    return Origin(
        database=source["db"] or "",
        schema=source["schema"] or "",
        table=source["table"] or "",
        snapshot=snapshot if isinstance(snapshot, str) and snapshot != "false" else "",
        lsn=_as_integer(source["lsn"]),
        tx_id="" if source["txId"] is None else str(source["txId"]),
        sequence=_as_pair(source["sequence"]),
    )


def _as_integer(value: Any) -> int | None:
    if isinstance(value, str) and re.fullmatch(r"-?[0-9]{1,19}", value):
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _as_pair(value: Any) -> tuple[int | None, int | None] | None:
    """Return PostgreSQL's sequence; None for the forms of other connectors, which are not compared."""
    if not isinstance(value, str):
        return None
    try:
        return _decode_pair(value)
    except msgspec.MsgspecError:
        return None


def _table_of(operation: SourceOperation, origin: Origin, config: DebeziumConfig, path: str) -> str:
    if operation is SourceOperation.MESSAGE:
        return config.messages_table
    if not origin.table:
        raise DebeziumMalformed(f"{path}.source.table", "expected the name of a table")
    parts = [part for part in (origin.schema or origin.database, origin.table) if part]
    name = ".".join(_UNUSABLE.sub(lambda match: f"_x{ord(match[0]):X}", part) for part in parts)
    if len(name) > NAME_MAX_CHARS:
        raise DebeziumMalformed(f"{path}.source.table", f"expected at most {NAME_MAX_CHARS} characters")
    return name


def _timestamp_ms_of(raw: RawChange) -> int:
    """Return when the change was committed; 0 if unknown, as Debezium has it in snapshots."""
    for name, per_ms in (("ts_us", 1_000), ("ts_ms", 1), ("ts_ns", 1_000_000)):
        ticks = _as_integer(forms.plain(raw.source.get(name)))
        if ticks is not None:
            return _as_timestamp_ms(ticks // per_ms)
    return _as_timestamp_ms(forms.plain(raw.timestamp_ms))


def _as_timestamp_ms(value: Any) -> int:
    ms = _as_integer(value)
    return ms if ms is not None and TIMESTAMP_MIN_MS <= ms <= TIMESTAMP_MAX_MS else 0


def _metadata_of(raw: RawChange, **more: Any) -> msgspec.Raw:
    """Return the source's metadata of a change as JSON, without nulls."""
    document: dict[str, Any] = {
        "op": raw.op,
        "source": {name: value for name, value in raw.source.items() if value != NULL and name != "version"},
        "transaction": {name: value for name, value in raw.transaction.items() if value != NULL},
        **more,
    }
    return msgspec.Raw(_encode({name: value for name, value in document.items() if value}))


def _link_key_changes(events: list[DebeziumEvent]) -> list[DebeziumEvent]:
    """Link the two halves of key changes where no header does: in a batch, after its first event.

    Only an update that changes the key makes a delete and an insert of one table at one position in the log.
    """
    linked = list(events)
    for index in range(1, len(events)):
        old, new = events[index - 1], events[index]
        if isinstance(old, Change) and isinstance(new, Change) and _is_key_change(old, new):
            moved_to, moved_from = old.moved_to or new.row_id, new.moved_from or old.row_id
            linked[index - 1] = replace(old, moved_to=moved_to, metadata=_with(old.metadata, movedTo=moved_to))
            linked[index] = replace(new, moved_from=moved_from, metadata=_with(new.metadata, movedFrom=moved_from))
    return linked


def _with(metadata: msgspec.Raw, **more: str) -> msgspec.Raw:
    document: dict[str, Any] = _decode_fields(metadata)
    return msgspec.Raw(_encode(document | {name: value for name, value in more.items() if value}))


def _is_key_change(old: Change, new: Change) -> bool:
    return (
        old.operation is SourceOperation.DELETE
        and new.operation is SourceOperation.INSERT
        and old.table == new.table
        and old.origin.lsn is not None
        and (old.origin.lsn, old.origin.tx_id) == (new.origin.lsn, new.origin.tx_id)
    )
