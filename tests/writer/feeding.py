"""A feed on a log, on the real catalog and store, without the sockets before it: for tests of what it does."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson
from prometheus_client import CollectorRegistry

from lakefeed.contract.changes import SourceId
from lakefeed.contract.errors import StorageError
from lakefeed.settings import MIB
from lakefeed.storage.store import ObjectStore, open_store
from lakefeed.writer.commit.committer import Committer
from lakefeed.writer.commit.rest_catalog import open_catalog
from lakefeed.writer.config import LogConfig, WriterConfig
from lakefeed.writer.metrics import WriterMetrics
from lakefeed.writer.rows.table_settings import TableSections
from lakefeed.writer.tables.context import TableContext
from lakefeed.writer.tables.feed import Feed
from lakefeed.writer.wal.log import FileLog
from lakefeed.writer.wal.payload import Encoding, Frame, encode_frame
from lakefeed.writer.wal.protocol import Log
from tests.writer.conftest import Lake

WAIT_S = 120.0
LOG_CONFIG = LogConfig(segment_max_bytes=MIB, max_bytes=64 * MIB)


@dataclass(slots=True)
class SwitchedStore:
    """The real store behind a switch: while `broken` matches a location, the object store is down for it.

    What `slow` matches is written once the gate is open; `begun` has every write that
    was tried.
    """

    store: ObjectStore
    broken: Callable[[str], bool] = field(default=lambda _: False)
    slow: Callable[[str], bool] = field(default=lambda _: False)
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    begun: list[str] = field(default_factory=list)

    async def write(self, location: str, data: Any) -> None:
        self._check(location)
        self.begun.append(location)
        if self.slow(location):
            await self.gate.wait()
        await self.store.write(location, data)

    async def read(self, location: str) -> bytes:
        self._check(location)
        return await self.store.read(location)

    async def delete(self, location: str) -> None:
        await self.store.delete(location)

    def _check(self, location: str) -> None:
        if self.broken(location):
            raise StorageError(f"store is down: location={location}")


@dataclass(slots=True)
class Running:
    """A feed on a log, without the sockets before it."""

    log: Log
    feed: Feed
    store: SwitchedStore
    registry: CollectorRegistry

    async def append(
        self,
        sequences: range,
        *,
        source: str = "shop",
        epoch: int = 0,
        table: str = "users",
        row: Callable[[int], Any] = lambda n: {"id": n},
        declared: Mapping[str, Any] | None = None,
    ) -> None:
        """Log one batch of inserts into one table, as the intake would."""
        inserts = [(n, table, row(n)) for n in sequences]
        await self.append_inserts(
            *inserts, source=source, epoch=epoch, declared=None if declared is None else {table: declared}
        )

    async def append_inserts(
        self,
        *inserts: tuple[int, str, Any],
        source: str = "shop",
        epoch: int = 0,
        declared: Mapping[str, Any] | None = None,
    ) -> None:
        """Log one batch of inserts, each given as its sequence, table and row."""
        events = [
            {"sequence": n, "operation": "INSERT", "table": table, "rowId": str(n), "after": row}
            for n, table, row in inserts
        ]
        frame = Frame(
            source=SourceId(source),
            epoch=epoch,
            after_sequence=-1,
            last_sequence=inserts[-1][0],
            received_at_us=1_794_800_000_000_000,
            encoding=Encoding.JSON_BATCH,
            body=orjson.dumps({"type": "cdc_batch", "events": events}),
            declared="" if declared is None else orjson.dumps(declared).decode(),
        )
        await self.log.append([encode_frame(frame)], head=lambda: b"{}")

    async def flush(self, table: str | None = None) -> dict[str, Any]:
        async with asyncio.timeout(WAIT_S):
            return (await self.feed.flush(table)).to_json()

    def status(self, table: str) -> dict[str, Any]:
        found = (each for each in self.feed.status.table_status(now=time.monotonic()) if each["table"] == table)
        return next(found, {})

    def is_evicted(self, table: str) -> bool:
        """Return whether a table is paused, and its waiting rows are in the log only."""
        status = self.status(table)
        return status["state"] == "paused" and status["resumeOffset"] is not None

    def metric(self, name: str, table: str) -> float:
        return self.registry.get_sample_value(name, {"table": table}) or 0.0


@contextlib.asynccontextmanager
async def running_feed(
    directory: Path,
    lake: Lake,
    *,
    catalog_url: str = "",
    catalog_timeout_s: float = 30.0,
    log_config: LogConfig = LOG_CONFIG,
    tables: Mapping[str, Mapping[str, Any]] | None = None,
    log: Log | None = None,
    **settings: Any,
) -> AsyncIterator[Running]:
    """Run a feed; leaving the block stops it where it stands, as a crash would."""
    config = WriterConfig(**{"flush_max_age_s": 3600.0, "flush_check_interval_s": 0.02, **settings})
    registry = CollectorRegistry()
    log = log or FileLog.open(directory / "log", log_config)
    with ThreadPoolExecutor(2) as decoders, ThreadPoolExecutor(1) as encoders:
        async with (
            open_store(lake.storage) as store,
            open_catalog(catalog_url or lake.catalog_url, timeout_s=catalog_timeout_s) as catalog,
            asyncio.TaskGroup() as tasks,
        ):
            await catalog.load_config()
            switched = SwitchedStore(store)
            context = TableContext(
                node="test-node",
                config=config,
                committer=Committer(catalog, switched),
                store=switched,
                decoders=decoders,
                encoders=encoders,
                metrics=WriterMetrics(registry),
                clock=time.monotonic,
                tables=TableSections(tables or {}),
            )
            share = log_config.table_max_share
            feed = Feed(log, context, tasks=tasks, marks_at_start={}, table_max_share=share)
            background = [tasks.create_task(run()) for run in feed_tasks(feed)]
            yield Running(log, feed, switched, registry)
            for task in background:
                task.cancel()
            feed.stop()
    await log.close()


async def wait_for(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():  # noqa: ASYNC110 - the state under test has no event for everything
            await asyncio.sleep(0.01)


def read_sequences(lake: Lake, table: str = "default.users") -> list[tuple[str, int]]:
    """Read (source, sequence) of all rows, in the order of snapshots and of rows within them."""
    with contextlib.closing(lake.open_pyiceberg()) as catalog:
        rows = catalog.load_table(table).scan().to_arrow()
    return sorted(zip(rows["_cdc_source"].to_pylist(), rows["_cdc_sequence"].to_pylist(), strict=True))


def read_columns(lake: Lake, *names: str, table: str = "default.users") -> list[tuple[Any, ...]]:
    """Read some columns of all rows, by sequence."""
    with contextlib.closing(lake.open_pyiceberg()) as catalog:
        rows = catalog.load_table(table).scan().to_arrow().sort_by("_cdc_sequence")
    return [tuple(row[name] for name in names) for row in rows.to_pylist()]


def shop(*sequences: int) -> list[tuple[str, int]]:
    return [("shop", sequence) for sequence in sequences]


def feed_tasks(feed: Feed) -> list[Callable[[], Coroutine[Any, Any, None]]]:
    """The feed's tasks, as the service starts them."""
    return [feed.run_reader, feed.run_applier, feed.run_catch_up, feed.run_timer]
