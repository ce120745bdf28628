"""From the log to the tables, on the real catalog: what is reported as committed, and that a bad table stops alone."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from pyiceberg.schema import Schema as PyIcebergSchema
from pyiceberg.types import LongType, NestedField

from lakefeed.contract.changes import Position, SourceId
from tests.fakes import CatalogFault, FlakyCatalog
from tests.writer.conftest import Lake
from tests.writer.feeding import Running, running_feed, wait_for

SHOP = SourceId("shop")


@contextlib.asynccontextmanager
async def flaky_feed(directory: Path, lake: Lake, **settings: Any) -> AsyncIterator[tuple[Running, FlakyCatalog]]:
    async with (
        FlakyCatalog(lake.catalog_url) as flaky,
        running_feed(directory, lake, catalog_url=flaky.url, **settings) as running,
    ):
        yield running, flaky


async def flush(running: Running, table: str | None = None) -> dict[str, Any]:
    return (await running.flush(table))["tables"]


async def test_flush_commits_every_table_and_the_committed_position_advances(tmp_path, local_lake):
    async with running_feed(tmp_path, local_lake) as running:
        await running.append_inserts((1, "users", {"id": 1}), (2, "orders", {"id": 1}))
        await running.append_inserts((3, "users", {"id": 2}))
        flushed = await flush(running)
        assert {name: each["rows"] for name, each in flushed.items()} == {"default.users": 2, "default.orders": 1}
        assert running.feed.status.committed_position(SHOP) == Position(0, 3)
        assert running.feed.status.log_status()["uncommittedRecords"] == 0


async def test_source_is_committed_only_up_to_its_first_change_that_waits(tmp_path, local_lake):
    async with running_feed(tmp_path, local_lake) as running:
        await running.append_inserts((1, "users", {"id": 1}), (2, "orders", {"id": 1}), (3, "users", {"id": 2}))
        await flush(running, "users")
        assert running.feed.status.committed_position(SHOP) == Position(0, 1)
        await flush(running)
        assert running.feed.status.committed_position(SHOP) == Position(0, 3)


async def test_change_of_a_table_that_is_still_to_come_is_neither_reported_as_committed_nor_trimmed(
    tmp_path, local_lake
):
    async with flaky_feed(tmp_path, local_lake, flush_max_changes=2) as (running, flaky):
        await running.append_inserts((0, "users", {"id": 0}), (1, "users", {"id": 1}))
        await wait_for(lambda: running.feed.status.committed_position(SHOP) == Position(0, 1))
        flaky.load_faults.extend([CatalogFault.ERROR_BEFORE] * 1_000)  # `orders` cannot be looked up
        await running.append_inserts((2, "users", {"id": 2}), (3, "orders", {"id": 1}), (4, "users", {"id": 3}))
        await wait_for(lambda: running.status("default.users")["committedRows"] == 4)
        assert running.feed.status.committed_position(SHOP) == Position(0, 2)
        assert running.feed.status.log_status()["uncommittedRecords"] == 1
        flaky.load_faults.clear()
        await flush(running)
        assert running.feed.status.committed_position(SHOP) == Position(0, 4)


async def test_two_source_names_of_one_table_share_it(tmp_path, local_lake):
    async with running_feed(tmp_path, local_lake) as running:
        await running.append_inserts((1, "users", {"id": 1}), (2, "default.users", {"id": 2}))
        flushed = await flush(running)
        assert {name: each["rows"] for name, each in flushed.items()} == {"default.users": 2}
        assert running.feed.status.knows("users")
        assert running.feed.status.knows("default.users")
        assert not running.feed.status.knows("orders")


async def test_source_that_starts_over_is_committed_epoch_by_epoch(tmp_path, local_lake):
    async with running_feed(tmp_path, local_lake) as running:
        await running.append_inserts((8, "users", {"id": 8}), (9, "users", {"id": 9}))
        await running.append_inserts((1, "users", {"id": 1}), epoch=1)
        await flush(running)
        assert running.feed.status.committed_position(SHOP) == Position(1, 1)
    with local_lake.open_duckdb() as connection:
        rows = connection.execute("SELECT id FROM lake.default.users ORDER BY id").fetchall()
    assert rows == [(1,), (8,), (9,)]


@pytest.mark.parametrize(
    "fault", [CatalogFault.CONFLICT, CatalogFault.ERROR_AFTER, CatalogFault.HANG_UP_AFTER, CatalogFault.SLOW_DOWN]
)
async def test_commit_that_goes_wrong_is_made_once(tmp_path, local_lake, fault):
    async with flaky_feed(tmp_path, local_lake) as (running, flaky):
        await running.append_inserts((1, "users", {"id": 1}))
        await flush(running)
        flaky.commit_faults.append(fault)
        await running.append_inserts((2, "users", {"id": 2}))
        assert (await flush(running))["default.users"]["rows"] == 1
    with local_lake.open_duckdb() as connection:
        rows = connection.execute("SELECT _cdc_sequence FROM lake.default.users ORDER BY 1").fetchall()
    assert rows == [(1,), (2,)]


async def test_table_that_cannot_take_its_rows_stops_only_itself_and_says_why(tmp_path, local_lake):
    async with running_feed(tmp_path, local_lake) as running:
        # Its rows are decoded again for the columns that it turns out to have, and then fail for the store.
        running.store.broken = lambda location: "/users-" in location
        await running.append_inserts((1, "users", {"id": "not a number"}))
        await wait_for(lambda: bool(running.status("default.users").get("bufferedRows")))
        await asyncio.to_thread(create_with_other_columns, local_lake)
        waiting = asyncio.create_task(flush(running, "users"))
        await wait_for(lambda: bool(running.status("default.users")["problem"]))
        await running.append_inserts((2, "orders", {"id": 1}))
        assert (await flush(running, "orders"))["default.orders"]["rows"] == 1
        assert running.feed.status.committed_position(SHOP) == Position(0, 0)
        (problem,) = running.feed.status.problems(now=time.monotonic() + 60, stalled_after_s=30)
        assert problem.startswith("table is not committed: table=default.users")
        waiting.cancel()


def create_with_other_columns(lake) -> None:
    catalog = lake.open_pyiceberg()
    catalog.create_namespace_if_not_exists("default")
    catalog.create_table("default.users", PyIcebergSchema(NestedField(1, "id", LongType(), required=False)))
