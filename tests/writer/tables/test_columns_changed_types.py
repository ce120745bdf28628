"""Buffered rows whose table gets columns of other types meanwhile: values are read again by the new types' rules."""

from __future__ import annotations

import contextlib
import datetime as dt
import json
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pyiceberg.schema import Schema
from pyiceberg.types import (
    BinaryType,
    BooleanType,
    DateType,
    DecimalType,
    DoubleType,
    IcebergType,
    ListType,
    LongType,
    NestedField,
    StringType,
    StructType,
    TimestampType,
    TimestamptzType,
    UUIDType,
)

from lakefeed.writer.rows.runs import DecodedRun, decode_run
from tests.writer.conftest import Lake
from tests.writer.feeding import Running, read_columns, running_feed, wait_for

UUID_TEXT = "12345678-1234-5678-1234-567812345678"
MOMENT = dt.datetime(2024, 11, 16, 15, 0, tzinfo=dt.UTC)

# What came, the type that the column has in the table, what the column shows, and what is rescued.
CASES: dict[str, tuple[Any, IcebergType, Any, Any]] = {
    "long to timestamptz": (1731769200000, TimestamptzType(), None, 1731769200000),
    "long to timestamp": (1731769200000, TimestampType(), None, 1731769200000),
    "long to boolean": (7, BooleanType(), None, 7),
    "long to date": (20000, DateType(), None, 20000),
    "long to text": (7, StringType(), None, 7),
    "long to double": (7, DoubleType(), 7.0, None),
    "double to long": (1.5, LongType(), None, 1.5),
    "double to decimal": (1.5, DecimalType(9, 2), "1.50", None),
    "text to long": ("12", LongType(), None, "12"),
    "text to binary": ("YWJj", BinaryType(), b"abc", None),
    "text to uuid": ("sixteen bytes ok", UUIDType(), None, "sixteen bytes ok"),
    "uuid to uuid": (UUID_TEXT, UUIDType(), uuid.UUID(UUID_TEXT), None),
    "text to timestamptz": ("2024-11-16T16:00:00+01:00", TimestamptzType(), MOMENT, None),
    "text to struct": ("a", StructType(NestedField(99, "a", LongType(), required=False)), None, "a"),
    "struct to text": ({"a": 1}, StringType(), None, {"a": 1}),
    "list to text": ([1], StringType(), None, [1]),
    "text to list": ("a", ListType(99, LongType(), element_required=False), None, "a"),
    "elements": ([7], ListType(99, BooleanType(), element_required=False), None, [7]),
    "members": ({"a": 7}, StructType(NestedField(99, "a", BooleanType(), required=False)), {"a": None}, {"a": 7}),
}


def create_users(lake: Lake, type_: IcebergType, *, replace: bool = False, comment: str | None = None) -> None:
    """Create the table as another client would: with a type of its own for the column."""
    with contextlib.closing(lake.open_pyiceberg()) as catalog:
        catalog.create_namespace_if_not_exists("default")
        if replace:
            catalog.drop_table("default.users")
        catalog.create_table("default.users", Schema(NestedField(1, "v", type_, required=False, doc=comment)))


def alter_users(lake: Lake, type_: IcebergType, *, comment: str | None = None) -> None:
    """Drop the column and add another of the same name."""
    with contextlib.closing(lake.open_pyiceberg()) as catalog:
        table = catalog.load_table("default.users")
        with table.update_schema() as update:
            update.delete_column("v")
        with table.update_schema() as update:
            update.add_column("v", type_, doc=comment)


def shown(lake: Lake) -> list[tuple[Any, Any]]:
    """Read the column and what is rescued of it, as one value each."""
    rows = read_columns(lake, "v", "_cdc_rescued")
    return [(plain(value), json.loads(text)["v"] if text else None) for value, text in rows]


def plain(value: Any) -> Any:
    return str(value) if type(value).__name__ == "Decimal" else value


async def buffer(running: Running, rows: int) -> None:
    def is_buffered() -> bool:
        status = running.status("default.users")
        return status.get("pendingRows") == 0 and running.feed.status.buffer_status()["eventCount"] == rows

    await wait_for(is_buffered)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
async def test_rows_of_a_table_that_another_client_creates_meanwhile_keep_their_values(
    tmp_path: Path, local_lake: Lake, case: tuple[Any, IcebergType, Any, Any]
) -> None:
    value, type_, kept, rescued = case
    async with running_feed(tmp_path, local_lake, partition="none") as running:
        await running.append(range(1, 3), row=lambda _: {"v": value})
        await buffer(running, 2)
        create_users(local_lake, type_)
        await running.flush()
        # What comes now is decoded for the table as it is, and shows what the others have to look like.
        await running.append(range(3, 4), row=lambda _: {"v": value})
        await running.flush()
        assert running.status("default.users")["problem"] is None
    assert shown(local_lake) == [(kept, rescued)] * 3


@pytest.mark.parametrize("change", [alter_users, lambda lake, type_: create_users(lake, type_, replace=True)])
async def test_rows_of_a_column_that_is_dropped_and_added_again_are_read_by_its_new_type(
    tmp_path: Path, local_lake: Lake, change: Callable[[Lake, IcebergType], None]
) -> None:
    async with running_feed(tmp_path, local_lake, partition="none") as running:
        await running.append(range(1, 2), row=lambda _: {"v": 7})
        await running.flush()
        await running.append(range(2, 4), row=lambda _: {"v": 1731769200000})
        await buffer(running, 2)
        change(local_lake, TimestamptzType())
        await running.flush()
    assert shown(local_lake)[-2:] == [(None, 1731769200000)] * 2


async def test_text_is_written_as_json_where_the_table_says_that_its_column_is_json(
    tmp_path: Path, local_lake: Lake
) -> None:
    async with running_feed(tmp_path, local_lake, partition="none") as running:
        await running.append(range(1, 3), row=lambda _: {"v": "a"})
        await buffer(running, 2)
        create_users(local_lake, StringType(), comment="json")
        await running.flush()
        await running.append(range(3, 4), row=lambda _: {"v": "a"})
        await running.flush()
    assert shown(local_lake) == [('"a"', None)] * 3


async def test_text_of_a_column_that_is_made_anew_for_json_is_written_as_json(tmp_path: Path, local_lake: Lake) -> None:
    async with running_feed(tmp_path, local_lake, partition="none") as running:
        await running.append(range(1, 2), row=lambda _: {"v": "a"})
        await running.flush()
        await running.append(range(2, 3), row=lambda _: {"v": "a"})
        await buffer(running, 1)
        alter_users(local_lake, StringType(), comment="json")
        await running.flush()
    assert shown(local_lake) == [(None, None), ('"a"', None)]


async def test_text_that_was_decoded_before_its_table_was_opened_anew_is_written_as_json_if_that_is_wanted_by_then(
    tmp_path: Path, local_lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: list[DecodedRun] = []

    def noted(*args: Any, **more: Any) -> DecodedRun:
        runs.append(decode_run(*args, **more))
        return runs[-1]

    async with running_feed(tmp_path, local_lake, partition="none") as running:
        await running.append(range(1, 2), row=lambda _: {"v": "a"})
        await running.flush()
        monkeypatch.setattr("lakefeed.writer.tables.feed.decode_run", noted)
        async with running.feed.applier.held:
            await running.append(range(2, 3), row=lambda _: {"v": "a"})
            await wait_for(lambda: bool(runs))
            alter_users(local_lake, StringType(), comment="json")
            running.feed.tables["default.users"].evict_all()
        await running.flush()
    assert runs[0].tables[0].rows is not None, "it was decoded for the columns of before"
    assert shown(local_lake) == [(None, None), ('"a"', None)]


async def test_text_of_a_column_that_turns_out_to_be_json_when_the_layout_is_changed_is_written_as_json(
    tmp_path: Path, local_lake: Lake
) -> None:
    async with running_feed(tmp_path, local_lake, partition="none") as running:
        await running.append(range(1, 2), row=lambda n: {"id": n, "v": "a"})
        await running.flush()
    async with running_feed(tmp_path, local_lake, partition="none", sort="id") as running:
        await running.append(range(2, 3), row=lambda n: {"id": n, "v": "a"})
        await buffer(running, 1)
        alter_users(local_lake, StringType(), comment="json")
        await running.flush()
    assert shown(local_lake) == [(None, None), ('"a"', None)]


async def test_files_that_wait_for_their_commit_are_written_again_if_the_column_is_found_to_be_json_meanwhile(
    tmp_path: Path, local_lake: Lake
) -> None:
    async with running_feed(tmp_path, local_lake, partition="none") as running:
        await running.append(range(1, 2), row=lambda _: {"v": "a"})
        await running.flush()
        running.store.broken = lambda location: location.endswith(".avro")
        await running.append(range(2, 3), row=lambda _: {"v": "a"})
        assert not (await running.flush())["success"], "its files are written, and not its manifests"
        alter_users(local_lake, StringType(), comment="json")
        await running.feed.tables["default.users"].columns.refresh()
        running.store.broken = lambda _: False
        await wait_for(lambda: running.feed.status.buffer_status()["pausedTables"] == 0)
        await running.flush()
    assert shown(local_lake) == [(None, None), ('"a"', None)]


async def test_a_column_that_the_table_spells_with_other_letters_is_no_second_one(
    tmp_path: Path, local_lake: Lake
) -> None:
    async with running_feed(tmp_path, local_lake, partition="none") as running:
        await running.append(range(1, 3), row=lambda _: {"V": 7})
        await buffer(running, 2)
        create_users(local_lake, LongType())
        await running.flush()
    assert read_columns(local_lake, "v", "_cdc_rescued") == [(None, '{"V":7}')] * 2


async def test_json_is_no_text_where_the_table_says_nothing_of_json(tmp_path: Path, local_lake: Lake) -> None:
    varying: list[Any] = ["a", {"b": 1}, [2]]
    async with running_feed(tmp_path, local_lake, partition="none") as running:
        await running.append(range(1, 4), row=lambda n: {"v": varying[n - 1]})
        await buffer(running, 3)
        create_users(local_lake, StringType())
        await running.flush()
    assert shown(local_lake) == [("a", None), (None, {"b": 1}), (None, [2])]


async def test_nanoseconds_are_rescued_where_the_table_turns_out_to_be_of_a_format_without_them(
    tmp_path: Path, local_lake: Lake
) -> None:
    texts = ["2024-11-16T15:00:00Z", "2024-11-16T15:00:00.123456789Z"]
    declared = {"columns": {"at": "timestamptz_ns"}}
    async with running_feed(tmp_path, local_lake, partition="none", format_version=3) as running:
        await running.append(range(1, 3), row=lambda n: {"at": texts[n - 1]}, declared=declared)
        await buffer(running, 2)
        create_users(local_lake, LongType())
        await running.flush()
        assert running.status("default.users")["problem"] is None
    found = read_columns(local_lake, "at", "_cdc_rescued")
    assert found == [(MOMENT, None), (None, f'{{"at":"{texts[1]}"}}')]


async def test_a_column_that_has_only_been_null_takes_whatever_type_the_table_has(
    tmp_path: Path, local_lake: Lake
) -> None:
    declared = {"columns": {"v": "long"}}
    async with running_feed(tmp_path, local_lake, partition="none") as running:
        await running.append(range(1, 3), row=lambda _: {"v": None}, declared=declared)
        await buffer(running, 2)
        create_users(local_lake, TimestamptzType())
        await running.flush()
        assert running.status("default.users")["failedAttempts"] == 0
    assert shown(local_lake) == [(None, None)] * 2
