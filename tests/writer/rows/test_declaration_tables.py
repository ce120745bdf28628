"""Declared columns on their way from the log into a table: what they hold, how they change, and over crashes."""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import logging
import uuid
from decimal import Decimal
from typing import Any

import pytest
from pyiceberg.schema import Schema as PyIcebergSchema
from pyiceberg.types import IntegerType, LongType, NestedField

from lakefeed.writer.tables.pending import FlushReason
from tests.writer.conftest import Lake
from tests.writer.feeding import running_feed, wait_for

UTC = dt.UTC

TYPES = {
    "id": "long",
    "price": "decimal(18, 2)",
    "token": "uuid",
    "day": "date",
    "hour": "time",
    "local": "timestamp",
    "at": "timestamptz",
    "blob": "binary",
    "code": "fixed[3]",
    "small": "int",
    "ratio": "float",
    "rates": {"type": "map", "key": "int", "value": "decimal(5, 3)"},
    "lines": {"type": "list", "element": {"type": "struct", "fields": {"sku": "string", "when": "date"}}},
    "document": "json",
}
ROW = {
    "id": "__bigint__:9007199254740993",
    "price": "1234567890123456.78",
    "token": "123E4567-e89b-12d3-a456-426614174000",
    "day": "2026-11-16",
    "hour": "05:28:00.000001",
    "local": "2026-11-16T05:28:00.123456",
    "at": "2026-11-16T05:28:00.5+02:00",
    "blob": "AP8=",
    "code": "AQID",
    "small": -7,
    "ratio": 0.1,
    "rates": {"1": 0.125, "-20": "1.5"},
    "lines": [{"sku": "a", "when": "2026-01-01"}, None],
    "document": {"any": [1, "x"]},
}
VALUES = {
    "id": 9007199254740993,
    "price": Decimal("1234567890123456.78"),
    "token": uuid.UUID("123e4567-e89b-12d3-a456-426614174000"),
    "day": dt.date(2026, 11, 16),
    "hour": dt.time(5, 28, 0, 1),
    "local": dt.datetime(2026, 11, 16, 5, 28, 0, 123456),
    "at": dt.datetime(2026, 11, 16, 3, 28, 0, 500000, UTC),
    "blob": b"\x00\xff",
    "code": b"\x01\x02\x03",
    "small": -7,
    "ratio": pytest.approx(0.1),
    "rates": [(1, Decimal("0.125")), (-20, Decimal("1.500"))],
    "lines": [{"sku": "a", "when": dt.date(2026, 1, 1)}, None],
    "document": '{"any":[1,"x"]}',
}


def read(lake: Lake, table: str = "default.users") -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Read a table's fields by name, and its rows in order without the columns of the change."""
    with contextlib.closing(lake.open_pyiceberg()) as catalog:
        loaded = catalog.load_table(table)
        rows = loaded.scan().to_arrow().sort_by("_cdc_sequence").to_pylist()
    own = [
        {name: value for name, value in row.items() if not name.startswith("_cdc_") or name == "_cdc_rescued"}
        for row in rows
    ]
    return {field.name: field for field in loaded.schema().fields}, own


async def read_later(lake: Lake) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    return await asyncio.to_thread(read, lake)


def plain(value: Any) -> Any:
    return value if not isinstance(value, bytes) or len(value) != 16 else uuid.UUID(bytes=value)


@pytest.mark.parametrize("where", ["from the source", "in the configuration"])
async def test_declared_columns_take_the_json_text_of_their_type_exactly(tmp_path, local_lake, where):
    declared = {"columns": TYPES, "identifier": ["id"]}
    from_source = declared if where == "from the source" else None
    tables = {} if from_source else {"default.users": declared}
    async with running_feed(tmp_path, local_lake, tables=tables) as running:
        await running.append(range(1, 2), row=lambda _: ROW, declared=from_source)
        await running.flush()
        status = running.status("default.users")
    fields, (row,) = await read_later(local_lake)
    assert {name: plain(value) for name, value in row.items()} == VALUES | {"_cdc_rescued": None}
    assert (fields["id"].doc, fields["document"].doc, fields["price"].required) == ("key", "json", False)
    assert status["schemaChanges"][:2] == ["id long", "price decimal(18, 2)"]


async def test_a_declaration_applies_to_the_rows_after_it_and_not_to_those_before(tmp_path, local_lake):
    async with running_feed(tmp_path, local_lake) as running:
        await running.append(range(1, 2), row=lambda _: {"at": "soon"})
        await running.append(
            range(2, 3),
            row=lambda _: {"at": "2026-11-16T00:00:00Z", "day": "2026-11-16"},
            declared={"columns": {"at": "timestamptz", "day": "date"}},
        )
        await running.flush()
        assert running.status("default.users")["declarationsNotFollowed"] == [
            "at stays string: declared as timestamptz"
        ]
    fields, rows = await read_later(local_lake)
    assert (str(fields["at"].field_type), str(fields["day"].field_type)) == ("string", "date")
    assert [row["at"] for row in rows] == ["soon", "2026-11-16T00:00:00Z"]


async def test_a_declaration_survives_a_crash_together_with_its_rows(tmp_path, local_lake):
    async with running_feed(tmp_path, local_lake) as running:
        await running.append(range(1, 2), row=lambda _: {"day": "2026-11-16"}, declared={"columns": {"day": "date"}})
        await wait_for(lambda: running.status("default.users").get("bufferedRows") == 1)
    async with running_feed(tmp_path, local_lake) as running:
        await running.append(range(2, 3), row=lambda _: {"day": "2026-11-17"})
        await running.flush()
    _, rows = await read_later(local_lake)
    assert [row["day"] for row in rows] == [dt.date(2026, 11, 16), dt.date(2026, 11, 17)]


async def test_a_renamed_column_stays_one_column_when_the_process_dies_between_schema_and_rows(tmp_path, local_lake):
    renaming = {"columns": {"customer": {"type": "string", "renamedFrom": "client"}}}
    async with running_feed(tmp_path, local_lake) as running:
        await running.append(range(1, 2), row=lambda _: {"client": "Ada"})
        await running.flush()
        running.store.broken = lambda location: "/data/" in location
        await running.append(range(2, 3), row=lambda _: {"client": "Grace"})
        await running.append(range(3, 4), row=lambda _: {"customer": "Edsger"}, declared=renaming)
        await wait_for(lambda: running.status("default.users").get("bufferedRows") == 2)
        flushing = asyncio.ensure_future(running.feed.flush(reason=FlushReason.REQUEST))
        await wait_for(lambda: "customer" in read(local_lake)[0])
        flushing.cancel()
    async with running_feed(tmp_path, local_lake) as running:
        await running.append(range(4, 5), row=lambda _: {"client": "late"})
        await running.flush()
    fields, rows = await read_later(local_lake)
    assert "client" not in fields
    assert fields["customer"].doc == 'formerly ["client"]'
    assert [row["customer"] for row in rows] == ["Ada", "Grace", "Edsger", "late"]
    assert [row["_cdc_rescued"] for row in rows] == [None] * 4


async def test_columns_of_the_configuration_are_added_renamed_and_widened_in_a_table_that_exists(tmp_path, local_lake):
    async with running_feed(tmp_path, local_lake) as running:
        await running.append(range(1, 2), row=lambda _: {"n": 7, "client": "Ada"}, declared={"columns": {"n": "int"}})
        await running.flush()
    columns = {"n": "long", "customer": {"type": "string", "renamedFrom": "client"}, "day": "date"}
    tables = {"default.*": {"columns": {"day": "string"}}, "default.users": {"columns": columns}}
    async with running_feed(tmp_path, local_lake, tables=tables) as running:
        await running.append(range(2, 3), row=lambda _: {"n": 2**40, "customer": "Grace", "day": "2026-11-16"})
        await running.flush()
        assert running.status("default.users")["schemaChanges"] == [
            "customer renamed from client",
            "n int -> long",
            "day date",
        ]
    _, rows = await read_later(local_lake)
    assert [(row["n"], row["customer"], row["day"]) for row in rows] == [
        (7, "Ada", None),
        (2**40, "Grace", dt.date(2026, 11, 16)),
    ]


async def test_every_change_of_the_columns_is_a_log_line_a_metric_and_in_the_status(tmp_path, local_lake, caplog):
    types = {
        "n": "int",
        "price": "decimal(4, 2)",
        "home": {"type": "struct", "fields": {"in": {"type": "struct", "fields": {"zip": "int"}}}},
        "lines": {"type": "list", "element": {"type": "struct", "fields": {"sku": "string"}}},
        "rates": {"type": "map", "key": "string", "value": {"type": "struct", "fields": {"x": "float"}}},
    }
    first = {"n": 1, "price": 1, "home": {"in": {"zip": 1}}, "lines": [{"sku": "a"}], "rates": {"a": {"x": 0.5}}}
    grown = {
        "n": 2**40,
        "price": "123456.78",
        "home": {"in": {"zip": 2**33, "city": "Ulm"}},
        "lines": [{"count": 3}],
        "rates": {"b": {"x": 0.123456789, "y": True}},
        "note": "new",
    }
    with caplog.at_level(logging.INFO, logger="lakefeed.writer"):
        async with running_feed(tmp_path, local_lake) as running:
            await running.append(range(1, 2), row=lambda _: first, declared={"columns": types})
            await running.flush()
            await running.append(range(2, 3), row=lambda _: grown)
            await running.flush()
            shown = running.status("default.users")["schemaChanges"]
            counted = running.metric("lakefeed_writer_schema_changes_total", "default.users")
    expected = [
        *("n int -> long", "price decimal(4, 2) -> decimal(8, 2)"),
        *("home.in.zip int -> long", "home.in.city string", "lines.element.count long"),
        *("rates.value.x float -> double", "rates.value.y boolean", "note string"),
    ]
    assert sorted(shown[len(types) :]) == sorted(expected)
    assert counted == len(shown)
    assert [change for line in caplog.records for change in getattr(line, "changes", ())] == shown
    _, rows = await read_later(local_lake)
    assert rows[1]["rates"] == [("b", {"x": 0.123456789, "y": True})]
    assert rows[1]["lines"] == [{"sku": None, "count": 3}]
    assert rows[0]["rates"] == [("a", {"x": 0.5, "y": None})]


def create_with_required_column(lake: Lake) -> None:
    with contextlib.closing(lake.open_pyiceberg()) as catalog:
        catalog.create_namespace("default")
        schema = PyIcebergSchema(
            NestedField(1, "id", LongType(), required=True), NestedField(2, "n", IntegerType(), required=True)
        )
        catalog.create_table("default.users", schema)


async def test_a_required_column_that_a_row_leaves_out_becomes_optional_in_a_table_of_others(tmp_path, local_lake):
    await asyncio.to_thread(create_with_required_column, local_lake)
    async with running_feed(tmp_path, local_lake, partition="none") as running:
        await running.append(range(1, 3), row=lambda n: {"id": n} if n == 1 else {"id": n, "n": n})
        await running.flush()
        assert running.status("default.users")["schemaChanges"] == ["n required -> optional"]
    fields, rows = await read_later(local_lake)
    assert (fields["id"].required, fields["n"].required) == (True, False)
    assert [(row["id"], row["n"]) for row in rows] == [(1, None), (2, 2)]


async def test_tables_of_format_three_keep_nanoseconds(tmp_path, local_lake):
    moment = "2026-11-16T05:28:00.123456789"
    types = {"local": "timestamp_ns", "at": "timestamptz_ns"}
    async with running_feed(tmp_path, local_lake, format_version=3) as running:
        await running.append(
            range(1, 2), row=lambda _: {"local": moment, "at": f"{moment}+02:00"}, declared={"columns": types}
        )
        await running.flush()
    with contextlib.closing(local_lake.open_pyiceberg()) as catalog:
        rows = catalog.load_table("default.users").scan().to_arrow()
    whole = dt.datetime(2026, 11, 16, 5, 28, tzinfo=UTC).timestamp()
    local = int(whole) * 1_000_000_000 + 123_456_789
    assert [rows[name][0].value for name in types] == [local, local - 2 * 3600 * 1_000_000_000]


async def test_tables_of_format_two_keep_what_has_whole_microseconds_and_rescue_the_rest(tmp_path, local_lake):
    async with running_feed(tmp_path, local_lake) as running:
        texts = ["2026-11-16T05:28:00.123456", "2026-11-16T05:28:00.123456789"]
        await running.append(range(2), row=lambda n: {"at": texts[n]}, declared={"columns": {"at": "timestamp_ns"}})
        await running.flush()
    _, rows = await read_later(local_lake)
    assert [row["at"] for row in rows] == [dt.datetime(2026, 11, 16, 5, 28, 0, 123456), None]
    assert rows[1]["_cdc_rescued"] == '{"at":"2026-11-16T05:28:00.123456789"}'
