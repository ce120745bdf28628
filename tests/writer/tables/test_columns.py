"""A table whose columns another writer changes while this one runs, and what /status shows of columns."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from lakefeed.writer.tables.columns import CHANGES_MAX
from tests.unwritable_tables import (
    create_unwritable,
    create_with_columns,
    load_columns,
    load_schema,
    make_writable,
    set_columns,
)
from tests.writer.conftest import Lake
from tests.writer.feeding import read_columns, read_sequences, running_feed, shop, wait_for

FIRST_COLUMNS = ["id long", "note string", "home struct"]
QUARANTINE = "default.lakefeed_quarantine"


def change_schema(lake: Lake, change) -> None:
    with (
        contextlib.closing(lake.open_pyiceberg()) as catalog,
        catalog.load_table("default.users").update_schema() as it,
    ):
        change(it)


def column_names(lake: Lake) -> list[str]:
    with contextlib.closing(lake.open_pyiceberg()) as catalog:
        names = catalog.load_table("default.users").schema().column_names
    return sorted(name for name in names if not name.startswith("_cdc_"))


async def test_rows_go_to_a_table_again_as_soon_as_its_columns_are_mended(tmp_path: Path, local_lake: Lake) -> None:
    create_unwritable(local_lake.catalog_url, "users")
    async with running_feed(tmp_path, local_lake) as running:
        await running.append(range(1, 3))
        await running.flush()
        assert running.status("default.users")["quarantinedRows"] == 2
        make_writable(local_lake.catalog_url, "users")
        await running.append(range(3, 5), row=lambda n: {"id": n, "score": n / 2})
        await running.flush()
        assert running.status("default.users")["quarantinedRows"] == 2
    assert read_columns(local_lake, "_cdc_sequence", "id", "score") == [(3, 3, 1.5), (4, 4, 2.0)]
    assert column_names(local_lake) == ["id", "score"]


async def test_a_column_that_another_writer_dropped_does_not_come_back_by_itself(
    tmp_path: Path, local_lake: Lake
) -> None:
    async with running_feed(tmp_path, local_lake) as running:
        await running.append(range(1, 2), row=lambda n: {"id": n, "note": "a", "home": {"zip": 1, "city": "b"}})
        await running.flush()
        change_schema(local_lake, lambda it: it.delete_column("note").delete_column("home.zip"))
        await running.append(range(2, 3), row=lambda n: {"id": n})
        await running.flush()
        assert column_names(local_lake) == ["home", "home.city", "id"]
        assert running.status("default.users")["schemaChanges"] == FIRST_COLUMNS
        await running.append(range(3, 4), row=lambda n: {"id": n, "note": "c"})
        await running.flush()
    assert read_columns(local_lake, "id", "note") == [(1, None), (2, None), (3, "c")]


async def test_buffered_values_of_a_column_that_another_writer_drops_are_not_lost(
    tmp_path: Path, local_lake: Lake
) -> None:
    async with running_feed(tmp_path, local_lake) as running:
        await running.append(range(1, 2), row=lambda n: {"id": n, "note": "a", "home": {"zip": 1, "city": "b"}})
        await running.flush()
        await running.append(range(2, 3), row=lambda n: {"id": n, "note": "c", "home": {"zip": 2, "city": "d"}})
        await wait_for(lambda: running.feed.status.buffer_status()["eventCount"] == 1)
        change_schema(local_lake, lambda it: it.delete_column("note").delete_column("home.zip"))
        await running.flush()
        assert running.status("default.users")["problem"] is None
    assert read_columns(local_lake, "id", "note", "home") == [
        (1, None, {"city": "b", "zip": None}),
        (2, "c", {"city": "d", "zip": 2}),
    ]


async def test_each_row_that_comes_after_a_column_was_dropped_brings_it_back(tmp_path: Path, local_lake: Lake) -> None:
    async with running_feed(tmp_path, local_lake) as running:
        for first in (1, 3, 5):
            await running.append(range(first, first + 2), row=lambda n: {"id": n, "note": f"n{n}"})
            await running.flush()
            if first < 5:
                change_schema(local_lake, lambda it: it.delete_column("note"))
    assert read_columns(local_lake, "id", "note") == [(n, f"n{n}" if n > 4 else None) for n in range(1, 7)]


async def test_a_renamed_column_comes_back_only_with_rows_that_use_its_old_name(
    tmp_path: Path, local_lake: Lake
) -> None:
    async with running_feed(tmp_path, local_lake) as running:
        await running.append(range(1, 2), row=lambda n: {"id": n, "note": "a"})
        await running.flush()
        change_schema(local_lake, lambda it: it.rename_column("note", "remark"))
        await running.append(range(2, 3), row=lambda n: {"id": n})
        await running.flush()
        assert column_names(local_lake) == ["id", "remark"]
        await running.append(range(3, 4), row=lambda n: {"id": n, "remark": "b"})
        await running.append(range(4, 5), row=lambda n: {"id": n, "note": "c"})
        await running.flush()
    assert read_columns(local_lake, "remark", "note") == [("a", None), (None, None), ("b", None), (None, "c")]


async def test_values_under_the_old_name_of_a_column_that_is_renamed_during_their_flush_keep_that_name(
    tmp_path: Path, local_lake: Lake
) -> None:
    async with running_feed(tmp_path, local_lake) as running:
        for n in (1, 2, 3):
            await running.append(range(n, n + 1), row=lambda n: {"id": n, "note": f"n{n}"})
            await running.flush()
            if n == 1:
                change_schema(local_lake, lambda it: it.rename_column("note", "remark"))
    assert read_columns(local_lake, "remark", "note") == [("n1", None), (None, "n2"), (None, "n3")]


async def test_own_columns_that_another_writer_drops_come_back_with_the_next_row(
    tmp_path: Path, local_lake: Lake
) -> None:
    async with running_feed(tmp_path, local_lake) as running:
        await running.append(range(1, 2))
        await running.flush()
        change_schema(local_lake, lambda it: it.delete_column("_cdc_rescued").delete_column("_cdc_row_id"))
        await running.append(range(2, 3), row=lambda n: {"id": "no number"})
        await running.flush()
    assert read_columns(local_lake, "_cdc_row_id", "_cdc_rescued") == [(None, None), ("2", '{"id":"no number"}')]


STRANGE_COLUMNS: list[dict[str, Any]] = [
    {"id": 1, "name": "shape", "required": False, "type": "geometry(srid:3857)"},
    {"id": 2, "name": "data", "required": False, "type": "variant"},
    {"id": 3, "name": "id", "required": False, "type": "long"},
    {
        "id": 4,
        "name": "places",
        "required": False,
        "type": {"type": "list", "element-id": 5, "element": "geography", "element-required": False},
    },
    {
        "id": 6,
        "name": "home",
        "required": False,
        "type": {"type": "struct", "fields": [{"id": 7, "name": "at", "required": False, "type": "geometry"}]},
    },
]


async def test_optional_columns_of_types_that_are_not_known_stay_null_and_stay(
    tmp_path: Path, local_lake: Lake
) -> None:
    create_with_columns(local_lake.catalog_url, "users", STRANGE_COLUMNS)
    created = load_columns(local_lake.catalog_url, "users")  # the catalog has numbered them
    async with running_feed(tmp_path, local_lake) as running:
        await running.append(range(1, 3))
        await running.flush()
        await running.append(range(3, 4), row=lambda n: {"id": n, "more": True, "data": None})
        await running.flush()
        await running.append(range(4, 5), row=lambda n: {"id": n, "home": {"at": "here"}, "data": [1]})
        await running.flush()
        assert running.status("default.users")["quarantinedRows"] == 0
    assert [field for field in load_columns(local_lake.catalog_url, "users") if field in created] == created
    rows = read_files(tmp_path)
    assert [(row["id"], row.get("more"), row["_cdc_rescued"]) for row in rows] == [
        (1, None, None),
        (2, None, None),
        (3, True, None),
        (4, None, '{"home":{"at":"here"},"data":[1]}'),
    ]
    assert {name for row in rows for name in row if not name.startswith("_cdc_")} == {"id", "more"}


def read_files(directory: Path) -> list[dict[str, Any]]:
    """Read all data files below a directory: no engine here knows such columns, but all leave null what files lack."""
    rows = [row for path in directory.rglob("*.parquet") for row in pq.ParquetFile(path).read().to_pylist()]
    return sorted(rows, key=lambda row: row["_cdc_sequence"])


async def test_a_column_of_a_type_that_is_not_known_can_be_dropped_while_rows_come(
    tmp_path: Path, local_lake: Lake
) -> None:
    create_with_columns(local_lake.catalog_url, "users", STRANGE_COLUMNS)
    async with running_feed(tmp_path, local_lake) as running:
        await running.append(range(1, 3))
        await running.flush()
        gone = ("shape", "data", "places", "home")
        columns = load_columns(local_lake.catalog_url, "users")
        set_columns(local_lake.catalog_url, "users", [field for field in columns if field["name"] not in gone])
        await running.append(range(3, 4))
        await running.flush()
    left = [field["name"] for field in load_columns(local_lake.catalog_url, "users")]
    assert [name for name in left if not name.startswith("_cdc_")] == ["id"]
    assert [row["id"] for row in read_files(tmp_path)] == [1, 2, 3]


async def test_what_others_say_of_columns_stays_when_columns_are_added(tmp_path: Path, local_lake: Lake) -> None:
    said = [
        {"id": 1, "name": "id", "required": True, "type": "long"},
        {
            "id": 2,
            "name": "grade",
            "required": False,
            "type": "string",
            "initial-default": "none",
            "write-default": "low",
            "masked-by": {"policy": "of a later version"},
        },
        {
            "id": 3,
            "name": "home",
            "required": False,
            "type": {
                "type": "struct",
                "fields": [{"id": 4, "name": "zip", "required": False, "type": "int", "initial-default": 7}],
            },
        },
    ]
    create_with_columns(local_lake.catalog_url, "users", said, **{"identifier-field-ids": [1], "owner": "data team"})
    async with running_feed(tmp_path, local_lake) as running:
        await running.append(range(1, 2), row=lambda n: {"id": n, "more": True, "home": {"zip": 1, "city": "a"}})
        await running.flush()
        schema = load_schema(local_lake.catalog_url, "users")
        assert (schema["identifier-field-ids"], schema["owner"]) == ([1], "data team")
        assert schema["fields"][:2] == said[:2]
        assert schema["fields"][2]["type"]["fields"][0] == said[2]["type"]["fields"][0]
        # A key that may be null is none.
        await running.append(range(2, 3), row=lambda n: {"more": False})
        await running.flush()
    assert not load_schema(local_lake.catalog_url, "users").get("identifier-field-ids")


async def test_quarantine_says_which_type_is_not_known(tmp_path: Path, local_lake: Lake) -> None:
    create_unwritable(local_lake.catalog_url, "users")
    async with running_feed(tmp_path, local_lake) as running:
        await running.append(range(1, 2))
        await running.flush()
    assert read_sequences(local_lake, QUARANTINE) == [("shop\x1fdefault.users", 1)]
    with contextlib.closing(local_lake.open_pyiceberg()) as catalog:
        (reason,) = catalog.load_table(QUARANTINE).scan().to_arrow()["reason_text"].to_pylist()
    assert "geometry" in reason


async def test_of_many_schema_changes_the_newest_are_kept(tmp_path: Path, local_lake: Lake) -> None:
    async with running_feed(tmp_path, local_lake) as running:
        await running.append(range(1, 2), row=lambda _: {f"c{n:03}": n for n in range(CHANGES_MAX + 5)})
        await running.flush()
        shown = running.status("default.users")["schemaChanges"]
        counted = running.metric("lakefeed_writer_schema_changes_total", "default.users")
    assert shown == [f"c{n:03} long" for n in range(5, CHANGES_MAX + 5)]
    assert counted == CHANGES_MAX + 5
    assert read_sequences(local_lake) == shop(1)
