"""From the log to the tables, on the real catalog: what is told as committed, and what one bad table does to others."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

import orjson
import pytest
from prometheus_client import CollectorRegistry
from pyiceberg.schema import Schema as PyIcebergSchema
from pyiceberg.types import LongType, NestedField

from tests.fakes import CatalogFault, FlakyCatalog
from tests.writer.feeding import feed_tasks
from writer.changes import Position, SourceId
from writer.committer import Committer
from writer.config import MIB, LogConfig, WriterConfig
from writer.feed import Feed
from writer.frames import Encoding, Frame, encode_frame
from writer.iceberg.catalog_client import open_catalog
from writer.metrics import WriterMetrics
from writer.storage import open_store
from writer.table_context import TableContext
from writer.wal.log import Log

DEADLINE_S = 30.0
SHOP = SourceId("shop")
NEVER = {"flush_max_age_s": 3600.0, "flush_check_interval_s": 0.01}


class Bench:
    """A feed at work behind a log."""

    def __init__(self, log: Log, feed: Feed, flaky: FlakyCatalog) -> None:
        self.log = log
        self.feed = feed
        self.flaky = flaky

    async def append(self, *events: tuple[int, str, dict[str, Any]], epoch: int = 0) -> None:
        """Make one batch durable."""
        body = orjson.dumps(
            {
                "type": "cdc_batch",
                "events": [
                    {"sequence": sequence, "operation": "INSERT", "table": table, "after": row}
                    for sequence, table, row in events
                ],
            }
        )
        received_at_us = 1_763_251_200_000_000
        frame = Frame(SHOP, epoch, -1, events[-1][0], received_at_us, Encoding.JSON_BATCH, body)
        await self.log.append([encode_frame(frame)], head=lambda: b"{}")

    async def flush(self, table: str | None = None) -> dict[str, Any]:
        async with asyncio.timeout(DEADLINE_S):
            return (await self.feed.flush(table)).to_json()["tables"]

    def status(self, table: str) -> dict[str, Any]:
        now = time.monotonic()
        return next((each for each in self.feed.table_status(now=now) if each["table"] == table), {})

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not condition():  # noqa: ASYNC110 - the feed tells nobody when it gets on
                await asyncio.sleep(0.005)


@asynccontextmanager
async def working(tmp_path, lake, **settings) -> AsyncIterator[Bench]:
    log = Log.open(tmp_path / "log", LogConfig(segment_max_bytes=MIB, max_bytes=8 * MIB))
    with ThreadPoolExecutor(2) as decoders, ThreadPoolExecutor(1) as encoders:
        async with (
            FlakyCatalog(lake.catalog_url) as flaky,
            open_store(lake.storage) as store,
            open_catalog(flaky.url) as catalog,
            asyncio.TaskGroup() as tasks,
        ):
            await catalog.load_config()
            context = TableContext(
                node="n1",
                config=WriterConfig(**{**NEVER, **settings}),
                committer=Committer(catalog, store),
                store=store,
                decoders=decoders,
                encoders=encoders,
                metrics=WriterMetrics(CollectorRegistry()),
                clock=time.monotonic,
            )
            feed = Feed(log, context, tasks=tasks, marks_at_start={}, table_max_share=0.5)
            own = [tasks.create_task(run()) for run in feed_tasks(feed)]
            try:
                yield Bench(log, feed, flaky)
            finally:
                for task in own:
                    task.cancel()
                feed.stop()
    await log.close()


async def test_flush_commits_every_table_and_tells_the_position(tmp_path, local_lake):
    async with working(tmp_path, local_lake) as bench:
        await bench.append((1, "users", {"id": 1}), (2, "orders", {"id": 1}))
        await bench.append((3, "users", {"id": 2}))
        flushed = await bench.flush()
        assert {name: each["rows"] for name, each in flushed.items()} == {"default.users": 2, "default.orders": 1}
        assert bench.feed.committed_position(SHOP) == Position(0, 3)
        assert bench.feed.log_status()["uncommittedRecords"] == 0


async def test_source_is_committed_only_up_to_its_first_change_that_waits(tmp_path, local_lake):
    async with working(tmp_path, local_lake) as bench:
        await bench.append((1, "users", {"id": 1}), (2, "orders", {"id": 1}), (3, "users", {"id": 2}))
        await bench.flush("users")
        assert bench.feed.committed_position(SHOP) == Position(0, 1)
        await bench.flush()
        assert bench.feed.committed_position(SHOP) == Position(0, 3)


async def test_change_of_a_table_that_is_still_to_come_is_neither_told_as_committed_nor_trimmed(tmp_path, local_lake):
    async with working(tmp_path, local_lake, flush_max_changes=2) as bench:
        await bench.append((0, "users", {"id": 0}), (1, "users", {"id": 1}))
        await bench.until(lambda: bench.feed.committed_position(SHOP) == Position(0, 1))
        bench.flaky.load_faults.extend([CatalogFault.ERROR_BEFORE] * 1_000)  # `orders` cannot be looked up
        await bench.append((2, "users", {"id": 2}), (3, "orders", {"id": 1}), (4, "users", {"id": 3}))
        await bench.until(lambda: bench.status("default.users")["committedRows"] == 4)
        assert bench.feed.committed_position(SHOP) == Position(0, 2)
        assert bench.feed.log_status()["uncommittedRecords"] == 1
        bench.flaky.load_faults.clear()
        await bench.flush()
        assert bench.feed.committed_position(SHOP) == Position(0, 4)


async def test_two_source_names_of_one_table_share_it(tmp_path, local_lake):
    async with working(tmp_path, local_lake) as bench:
        await bench.append((1, "users", {"id": 1}), (2, "default.users", {"id": 2}))
        flushed = await bench.flush()
        assert {name: each["rows"] for name, each in flushed.items()} == {"default.users": 2}
        assert bench.feed.knows("users")
        assert bench.feed.knows("default.users")
        assert not bench.feed.knows("orders")


async def test_source_that_starts_over_is_committed_epoch_by_epoch(tmp_path, local_lake):
    async with working(tmp_path, local_lake) as bench:
        await bench.append((8, "users", {"id": 8}), (9, "users", {"id": 9}))
        await bench.append((1, "users", {"id": 1}), epoch=1)
        await bench.flush()
        assert bench.feed.committed_position(SHOP) == Position(1, 1)
    with local_lake.open_duckdb() as connection:
        rows = connection.execute("SELECT id FROM lake.default.users ORDER BY id").fetchall()
    assert rows == [(1,), (8,), (9,)]


@pytest.mark.parametrize(
    "fault", [CatalogFault.CONFLICT, CatalogFault.ERROR_AFTER, CatalogFault.HANG_UP_AFTER, CatalogFault.SLOW_DOWN]
)
async def test_commit_that_goes_wrong_is_made_once(tmp_path, local_lake, fault):
    async with working(tmp_path, local_lake) as bench:
        await bench.append((1, "users", {"id": 1}))
        await bench.flush()
        bench.flaky.commit_faults.append(fault)
        await bench.append((2, "users", {"id": 2}))
        assert (await bench.flush())["default.users"]["rows"] == 1
    with local_lake.open_duckdb() as connection:
        rows = connection.execute("SELECT _cdc_sequence FROM lake.default.users ORDER BY 1").fetchall()
    assert rows == [(1,), (2,)]


async def test_table_that_cannot_take_its_rows_stops_only_itself_and_says_why(tmp_path, local_lake):
    async with working(tmp_path, local_lake) as bench:
        await bench.append((1, "users", {"id": "not a number"}))
        await bench.until(lambda: bench.status("default.users").get("bufferedRows"))
        await asyncio.to_thread(create_with_other_columns, local_lake)
        waiting = asyncio.create_task(bench.flush("users"))
        await bench.until(lambda: bench.status("default.users")["problem"])
        await bench.append((2, "orders", {"id": 1}))
        assert (await bench.flush("orders"))["default.orders"]["rows"] == 1
        assert bench.feed.committed_position(SHOP) == Position(0, 0)
        (problem,) = bench.feed.problems(now=time.monotonic() + 60, stalled_after_s=30)
        assert problem.startswith("table is not committed: table=default.users")
        waiting.cancel()


def create_with_other_columns(lake) -> None:
    catalog = lake.open_pyiceberg()
    catalog.create_namespace_if_not_exists("default")
    catalog.create_table("default.users", PyIcebergSchema(NestedField(1, "id", LongType(), required=False)))
