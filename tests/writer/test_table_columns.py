"""A table whose columns somebody else changes while the writer runs, and what is told of columns."""

from __future__ import annotations

import contextlib
from pathlib import Path

from tests.unwritable_tables import create_unwritable, make_writable
from tests.writer.conftest import Lake
from tests.writer.feeding import read_columns, read_sequences, running_feed, shop, wait_for
from writer.table_columns import CHANGES_MAX

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


async def test_a_column_that_somebody_dropped_does_not_come_back_by_itself(tmp_path: Path, local_lake: Lake) -> None:
    async with running_feed(tmp_path, local_lake) as running:
        await running.append(range(1, 2), row=lambda n: {"id": n, "note": "a", "home": {"zip": 1, "city": "b"}})
        await running.flush()
        change_schema(local_lake, lambda it: it.delete_column("note").delete_column("home.zip"))
        # The new column makes the writer look at the table's columns.
        await running.append(range(2, 3), row=lambda n: {"id": n, "more": True})
        await running.flush()
        assert column_names(local_lake) == ["home", "home.city", "id", "more"]
        await running.append(range(3, 4), row=lambda n: {"id": n, "note": "c"})
        await running.flush()
    assert read_columns(local_lake, "id", "note") == [(1, None), (2, None), (3, "c")]


async def test_buffered_values_of_a_column_that_somebody_drops_are_not_lost(tmp_path: Path, local_lake: Lake) -> None:
    async with running_feed(tmp_path, local_lake) as running:
        await running.append(range(1, 2), row=lambda n: {"id": n, "note": "a", "home": {"zip": 1, "city": "b"}})
        await running.flush()
        await running.append(range(2, 3), row=lambda n: {"id": n, "note": "c", "home": {"zip": 2, "city": "d"}})
        await wait_for(lambda: running.feed.buffer_status()["eventCount"] == 1)
        change_schema(local_lake, lambda it: it.delete_column("note").delete_column("home.zip"))
        await running.append(range(3, 4), row=lambda n: {"id": n, "more": True})
        await running.flush()
    assert read_columns(local_lake, "id", "note", "home", "more") == [
        (1, None, {"city": "b", "zip": None}, None),
        (2, "c", {"city": "d", "zip": 2}, None),
        (3, None, None, True),
    ]


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
        counted = running.metric("writer_schema_changes_total", "default.users")
    assert shown == [f"c{n:03} long" for n in range(5, CHANGES_MAX + 5)]
    assert counted == CHANGES_MAX + 5
    assert read_sequences(local_lake) == shop(1)
