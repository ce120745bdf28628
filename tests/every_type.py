"""One row with a value of every type, nested ones too, in the forms that sources send and as every engine must show it.

Columns that not every engine has a type for stand in a table of their own: Spark 3.5 reads no time of day.
"""

from __future__ import annotations

import datetime as dt
import io
import json
import uuid
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

import pyarrow as pa
from websockets.sync.client import connect

from tests.service_process import ServiceProcess

SOURCE = "shop"

_UTC = dt.UTC
_TOKEN = uuid.UUID("f79c3e09-677c-4bbd-a479-3f349cb785e7")
_LINE = {
    "type": "struct",
    "fields": {"sku": "string", "price": "decimal(9, 2)", "tags": {"type": "list", "element": "int"}},
}
_ARROW_LINE = pa.struct([("sku", pa.string()), ("price", pa.decimal128(9, 2)), ("tags", pa.list_(pa.int32()))])
_LINE_VALUE = {"sku": "a", "price": Decimal("0.10"), "tags": [1, None]}

# name, declared type, Arrow type, value as JSON has it, value as Python has it
_COLUMNS: list[tuple[str, Any, pa.DataType, Any, Any]] = [
    ("truth", "boolean", pa.bool_(), True, True),
    ("small", "int", pa.int32(), -(2**31), -(2**31)),
    ("large", "long", pa.int64(), f"__bigint__:{2**63 - 1}", 2**63 - 1),
    ("single", "float", pa.float32(), 0.15625, 0.15625),
    ("real", "double", pa.float64(), 0.1, 0.1),
    ("money", "decimal(9, 2)", pa.decimal128(9, 2), "1234567.89", Decimal("1234567.89")),
    ("exact", "decimal(18, 4)", pa.decimal128(18, 4), 12345.6789, Decimal("12345.6789")),
    ("vast", "decimal(38, 10)", pa.decimal128(38, 10), "-1234567890123456789012345678.0123456789",
     Decimal("-1234567890123456789012345678.0123456789")),
    ("words", "string", pa.string(), "Zoë ☂ \u0000\n", "Zoë ☂ \u0000\n"),
    ("bytes", "binary", pa.binary(), "AP+A", b"\x00\xff\x80"),
    ("block", "fixed[4]", pa.binary(4), "AQIDBA==", b"\x01\x02\x03\x04"),
    ("token", "uuid", pa.uuid(), str(_TOKEN), _TOKEN),
    ("day", "date", pa.date32(), "1582-10-04", dt.date(1582, 10, 4)),
    ("clock", "timestamp", pa.timestamp("us"), "1969-12-31T23:59:59.999999",
     dt.datetime(1969, 12, 31, 23, 59, 59, 999999)),
    ("moment", "timestamptz", pa.timestamp("us", "UTC"), "2026-11-16T07:28:00.123456+02:00",
     dt.datetime(2026, 11, 16, 5, 28, 0, 123456, _UTC)),
    ("line", _LINE, _ARROW_LINE, {"sku": "a", "price": "0.10", "tags": [1, None]}, _LINE_VALUE),
    ("lines", {"type": "list", "element": _LINE}, pa.list_(_ARROW_LINE),
     [{"sku": "a", "price": 0.1, "tags": [1, None]}, None, {"sku": None}],
     [_LINE_VALUE, None, {"sku": None, "price": None, "tags": None}]),
    ("rates", {"type": "map", "key": "string", "value": "double"}, pa.map_(pa.string(), pa.float64()),
     {"EUR": 1.5, "": None}, {"EUR": 1.5, "": None}),
    ("days", {"type": "map", "key": "date", "value": _LINE}, pa.map_(pa.date32(), _ARROW_LINE),
     {"2026-11-16": {"sku": "a", "price": "0.1", "tags": [1, None]}}, {dt.date(2026, 11, 16): _LINE_VALUE}),
    ("deep", {"type": "list", "element": {"type": "map", "key": "int", "value": {"type": "list", "element": "uuid"}}},
     pa.list_(pa.map_(pa.int32(), pa.list_(pa.binary(16)))), [{"7": [str(_TOKEN)]}, {}], [{7: [_TOKEN]}, {}]),
]  # fmt: skip
_TIMES: list[tuple[str, Any, pa.DataType, Any, Any]] = [
    ("hour", "time", pa.time64("us"), "23:59:59.999999", dt.time(23, 59, 59, 999999)),
    ("hours", {"type": "map", "key": "time", "value": "time"}, pa.map_(pa.time64("us"), pa.time64("us")),
     {"00:00:00": "12:30:00.5"}, {dt.time(0): dt.time(12, 30, 0, 500000)}),
]  # fmt: skip

TABLES = {"every_type": _COLUMNS, "times": _TIMES}

# Of each table: its columns in order, and the value of each, the same in all rows but the last, which has none.
NAMES = {table: [column[0] for column in columns] for table, columns in TABLES.items()}
VALUES = {table: {column[0]: column[4] for column in columns} for table, columns in TABLES.items()}

# PyIceberg rebuilds lists and maps of structs from their offsets alone, so that one that is null becomes an empty one.
NULLS_IN_PYICEBERG = {"lines": [], "days": {}}


def expected(table: str) -> list[dict[str, Any]]:
    """Give the rows that every engine must show: as JSON, as Arrow, and one with nothing but nulls."""
    return [VALUES[table], VALUES[table], dict.fromkeys(NAMES[table])]


def push_every_type(service: ServiceProcess) -> None:
    """Declare all columns, then send the row as JSON, as Arrow and empty, each committed before the next."""
    for number, (table, columns) in enumerate(TABLES.items()):
        declared = {"columns": {column[0]: column[1] for column in columns}}
        with connect(service.ws_url) as socket:
            message = {"type": "connect", "sourceDoId": f"{SOURCE}-{number}", "tables": {table: declared}}
            assert _ask(socket, json.dumps(message))["type"] == "status"
            assert _ask(socket, _json_batch(1, table, {column[0]: column[3] for column in columns}))["status"] == "ok"
            assert service.flush()["success"]
            assert _ask(socket, _arrow_batch(2, table, columns))["status"] == "ok"
            assert _ask(socket, _json_batch(3, table, {}))["status"] == "ok"
            assert service.flush()["success"]


def _ask(socket: Any, message: str | bytes) -> dict[str, Any]:
    socket.send(message)
    while (answer := json.loads(socket.recv(timeout=240))).get("status") == "persisted":
        pass
    return answer


def _json_batch(sequence: int, table: str, row: dict[str, Any]) -> str:
    event = {"sequence": sequence, "operation": "INSERT", "table": table, "rowId": "1", "after": row}
    return json.dumps({"type": "cdc_batch", "events": [event]})


def _arrow_batch(sequence: int, table: str, columns: list[tuple[str, Any, pa.DataType, Any, Any]]) -> bytes:
    arrays = {name: _arrow_array(value, type_) for name, _, type_, _, value in columns}
    rows = pa.table({"_cdc_sequence": pa.array([sequence], pa.int64())} | arrays)
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, rows.schema.with_metadata({"lakefeed.table": table})) as stream:
        stream.write_table(rows)
    return sink.getvalue()


def _arrow_array(value: Any, type_: pa.DataType) -> pa.Array:
    """Build an array of one value; Arrow wants maps as pairs and UUIDs as bytes."""
    if type_ == pa.uuid():
        return pa.array([value.bytes], pa.binary(16)).cast(type_)
    return pa.array([_arrow_value(value, type_)], type_)


def _arrow_value(value: Any, type_: pa.DataType) -> Any:
    if value is None:
        return None
    if pa.types.is_map(type_):
        return [(key, _arrow_value(each, type_.item_type)) for key, each in value.items()]
    if pa.types.is_struct(type_):
        return {field.name: _arrow_value(value[field.name], field.type) for field in type_}
    if pa.types.is_list(type_):
        return [_arrow_value(each, type_.value_type) for each in value]
    return value.bytes if isinstance(value, uuid.UUID) else value


def plain(value: Any, like: Any) -> Any:
    """Bring what an engine shows to the form of the expected value: maps as dictionaries, UUIDs as such, and so on."""
    match like:
        case None:
            return value
        case uuid.UUID():
            return value if isinstance(value, uuid.UUID) else _uuid_of(value)
        case bytes():
            return bytes(value)
        case dt.datetime() if like.tzinfo is not None and value.tzinfo is not None:
            return value.astimezone(dt.UTC)
        case list():
            return value if value is None else [plain(each, one) for each, one in zip(value, like, strict=True)]
        case dict():
            entries = value.items() if hasattr(value, "items") else value
            keyed = [(plain(key, next(iter(like), None)), each) for key, each in entries]
            return {key: plain(each, like.get(key)) for key, each in keyed}
    return value


def _uuid_of(value: str | bytes) -> uuid.UUID:
    return uuid.UUID(value) if isinstance(value, str) else uuid.UUID(bytes=bytes(value))


def check_rows(rows: list[dict[str, Any]], table: str, *, nulls: Mapping[str, Any] | None = None) -> None:
    """Compare what an engine shows, value by value. `nulls` is what it shows of some columns that are null."""
    assert len(rows) == len(expected(table))
    for number, (row, wanted) in enumerate(zip(rows, expected(table), strict=True)):
        for name, written in wanted.items():
            value = (nulls or {}).get(name) if written is None else written
            shown = plain(row[name], value)
            assert (shown, type(shown)) == (value, type(value)), f"row {number}, column {name}"
