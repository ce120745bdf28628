"""Rows for tests of decoding: frames from plain values, tables built from nothing, rows rebuilt from their columns."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable
from decimal import Decimal

import numpy as np
import pyarrow as pa

from lakefeed.contract.changes import SourceId
from lakefeed.iceberg.types import Field, ListType, MapType, StructType, Type
from lakefeed.writer.rows.comments import JSON_DOC
from lakefeed.writer.rows.evolution import initial_columns, own_fields
from lakefeed.writer.rows.groups import Expected, Fitted, Group, JsonGroup, NumberedFrame, group_json
from lakefeed.writer.rows.json_exact import NOTHING
from lakefeed.writer.rows.values import Misfit
from lakefeed.writer.wal.payload import Encoding, Frame

RECEIVED_AT_US = 1_763_251_200_000_000


def frame(events: list[dict] | bytes, *, source: str = "shop-1", epoch: int = 0, after_sequence: int = 0) -> Frame:
    body = events if isinstance(events, bytes) else json.dumps({"type": "cdc_batch", "events": events}).encode()
    return Frame(SourceId(source), epoch, after_sequence, 2**62, RECEIVED_AT_US, Encoding.JSON_BATCH, body)


def event(sequence: int, **fields) -> dict:
    return {"sequence": sequence, "operation": "INSERT", "table": "users", **fields}


def json_groups(frames: Iterable[NumberedFrame]) -> dict[str, JsonGroup]:
    """Group JSON frames, by table."""
    return {group.table: group for group in group_json(list(frames))}


def raw_group(*images: bytes | str) -> JsonGroup:
    """Make a group of inserts whose rows are exactly these bytes."""
    texts = [image if isinstance(image, bytes) else image.encode() for image in images]
    events = [
        b'{"sequence":%d,"operation":"INSERT","table":"users","after":%s}' % (sequence, text)
        for sequence, text in enumerate(texts, start=1)
    ]
    body = b'{"events":[' + b",".join(events) + b"]}"
    return json_groups([(0, frame(body))])["users"]


def group(*rows) -> JsonGroup:
    return raw_group(*(json.dumps(row) for row in rows))


def fit(images: Group, columns: StructType | None = None, **options) -> Fitted:
    start = columns or initial_columns(keep_before=False)
    return images.fit(Expected(start, **options), last_field_id=highest_id(start), refused_for=start)


def decode_group(images: Group, columns: StructType) -> pa.Table:
    """Decode a group strictly, or raise Misfit."""
    rows = images.strict(Expected(columns))
    if rows is None:
        raise Misfit("the strict decoder refused the rows")
    return rows


def declared(*fields: Field) -> StructType:
    return StructType((*initial_columns(keep_before=False).fields, *fields))


def highest_id(type_: Type) -> int:
    match type_:
        case StructType(fields):
            return max((max(field.id, highest_id(field.type)) for field in fields), default=0)
        case ListType(element_id, element, _):
            return max(element_id, highest_id(element))
        case MapType(key_id, _, value_id, value, _):
            return max(key_id, value_id, highest_id(value))
    return 0


def own_rows(table: pa.Table) -> list[dict]:
    """The rows' own columns, without those that are null."""
    own = [name for name in table.column_names if not name.startswith("_cdc_")]
    return [{k: v for k, v in row.items() if v is not None} for row in table.select(own).to_pylist()]


def rescued(table: pa.Table) -> list:
    return [None if text is None else json.loads(text) for text in table["_cdc_rescued"].to_pylist()]


def exact(text: bytes | str):
    """Parse JSON with numbers by value, without nulls in objects: a column cannot tell a null from nothing."""
    return _without_nulls(json.loads(text, parse_int=Decimal, parse_float=Decimal))


def rebuilt_rows(table: pa.Table, columns: StructType) -> list:
    """Build each row's JSON value from its columns and what was rescued."""
    return [
        _row(row, columns, NOTHING if row["_cdc_rescued"] is None else exact(row["_cdc_rescued"]))
        for row in table.to_pylist()
    ]


def _row(row: dict, columns: StructType, left):
    own = StructType(own_fields(columns))
    if left is NOTHING:
        return _value(row, own, NOTHING)
    left = dict(left)
    whole = left.pop("", NOTHING)
    value = _value(row, own, left)
    if whole is NOTHING:
        return value
    if isinstance(whole, dict):
        if set(whole) == {"_cdc_base64"}:
            return base64.b64decode(whole["_cdc_base64"])
        return value | whole
    assert value == {}
    return whole


def _value(value, type_: Type, left, doc: str | None = None):
    if value is None:
        return left
    if doc == JSON_DOC:
        return exact(value)
    match type_:
        case StructType(fields):
            rest = {} if left is NOTHING else dict(left)
            members = {
                each.name: member
                for each in fields
                if (member := _value(value[each.name], each.type, rest.pop(each.name, NOTHING), each.doc))
                is not NOTHING
            }
            return members | rest
        case ListType(element=element):
            assert left is NOTHING
            return [None if each is None else _value(each, element, NOTHING) for each in value]
        case MapType(value=value_type):
            assert left is NOTHING
            return {key: _value(each, value_type, NOTHING) for key, each in value if each is not None}
    assert left is NOTHING
    if isinstance(value, float):
        return np.float32(value) if type_ == "float" else value
    return Decimal(value) if type(value) is int else value


def is_same(value, original) -> bool:
    """Return whether a rebuilt value is the original. Numbers count by value, however they were written."""
    if isinstance(original, dict):
        return (
            isinstance(value, dict)
            and value.keys() == original.keys()
            and all(is_same(value[name], member) for name, member in original.items())
        )
    if isinstance(original, list):
        return isinstance(value, list) and len(value) == len(original) and all(map(is_same, value, original))
    if isinstance(original, str) and isinstance(value, Decimal | float | np.float32):
        original = Decimal(original.removeprefix("__bigint__:"))
    if isinstance(value, float | np.float32):
        ways = (str(value), f"{value:.16e}", Decimal(float(value)))
        return isinstance(original, Decimal) and original in map(Decimal, ways)
    return type(value) is type(original) and value == original


def _without_nulls(value):
    if isinstance(value, dict):
        return {name: _without_nulls(member) for name, member in value.items() if member is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value
