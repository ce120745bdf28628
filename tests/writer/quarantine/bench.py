"""A lake with tables and a quarantine, written by the writers that the service uses, without sockets and log."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

from prometheus_client import CollectorRegistry

from lakefeed.contract.changes import TableName
from lakefeed.contract.properties import Reason, Refusal, quarantine_of
from lakefeed.storage.store import open_store
from lakefeed.writer.commit.committer import Committer
from lakefeed.writer.commit.rest_catalog import open_catalog
from lakefeed.writer.config import WriterConfig
from lakefeed.writer.metrics import WriterMetrics
from lakefeed.writer.quarantine.replay import Replay, ReplayReport
from lakefeed.writer.quarantine.store import Contents, Filter, Quarantine
from lakefeed.writer.rows.groups import Group, JsonGroup
from lakefeed.writer.rows.runs import Decoded
from lakefeed.writer.tables.context import TableContext
from lakefeed.writer.tables.feed_state import FeedState
from lakefeed.writer.tables.quarantine import quarantine_rows
from lakefeed.writer.tables.rounds import FlushRounds
from lakefeed.writer.tables.table import TableWriter
from tests.fakes import FlakyCatalog
from tests.writer.conftest import Lake
from tests.writer.sample_rows import event, frame, json_groups
from tests.writer.wal.memory_log import MemoryLog

DEADLINE_S = 30.0
USERS = TableName(("default",), "users")
ORDERS = TableName(("default",), "orders")
QUARANTINE = TableName(("default",), "lakefeed_quarantine")
NOW_US = 1_794_800_000_000_000


def changes_of(rows: dict[int, Any], *, source: str = "shop", epoch: int = 0, offset: int = 0) -> JsonGroup:
    """Make a group of inserts, sequence -> row; a row given as bytes stays as it is."""
    events = [
        event(sequence, rowId=str(sequence), timestamp=1_763_000_000_000 + sequence, after=row)
        for sequence, row in rows.items()
    ]
    body = json.dumps({"events": events}).encode()
    (group,) = json_groups([(offset, frame(body, source=source, epoch=epoch))]).values()
    return group


@dataclass(slots=True)
class Bench:
    """Writers and commands on one lake."""

    lake: Lake
    context: TableContext
    flaky: FlakyCatalog

    async def write(self, name: TableName, *groups: Group) -> None:
        """Let a table's writer take groups and commit them; a new writer each time, as after a restart."""
        state = FeedState(MemoryLog(), self.context, marks_at_start={})
        state.tables[str(name)] = writer = TableWriter(name, self.context, state.signals, quarantine=None)
        async with asyncio.TaskGroup() as group_tasks:
            rounds = FlushRounds(state, tasks=group_tasks)
            tasks = [group_tasks.create_task(work) for work in (writer.run_intake(), rounds.run_table(writer))]
            async with asyncio.timeout(DEADLINE_S):
                await asyncio.gather(*(writer.put(Decoded(group, None, held_bytes=0)) for group in groups))
            for task in tasks:
                task.cancel()

    async def quarantine(
        self, *groups: Group, table: TableName = USERS, refusal: Refusal = Refusal.UNDECODABLE
    ) -> None:
        """Put groups of one table into quarantine."""
        kept = [quarantined(group, table=table, refusal=refusal) for group in groups]
        await self.write(quarantine_of(table), *kept)

    async def contents(self) -> Contents:
        contents = await Quarantine(("default",), self.context).load()
        assert contents is not None
        return contents

    async def replay(self, wanted: Filter | None = None, *, table: TableName = USERS) -> ReplayReport:
        replay = Replay(table, Quarantine(table.namespace, self.context), now_us=lambda: NOW_US)
        async with asyncio.timeout(DEADLINE_S):
            return await replay.run(await self.contents(), wanted or Filter())

    def rows(self, name: TableName, *columns: str) -> list[tuple[Any, ...]]:
        """Read columns of a table with PyIceberg, sorted; of the same values, null comes first."""
        with contextlib.closing(self.lake.open_pyiceberg()) as catalog:
            rows = catalog.load_table(str(name)).scan(selected_fields=columns).to_arrow()
        found = zip(*(rows[column].to_pylist() for column in columns), strict=True)
        return sorted(found, key=lambda row: [(value is not None, value) for value in row])

    def properties(self, name: TableName) -> dict[str, str]:
        with contextlib.closing(self.lake.open_pyiceberg()) as catalog:
            return catalog.load_table(str(name)).properties


def quarantined(group: Group, *, table: TableName = USERS, refusal: Refusal = Refusal.UNDECODABLE) -> Group:
    reason = Reason(refusal, "ValueError: field=id")
    return quarantine_rows(group, table=table, reason=reason, node="n1", recorded_at_us=NOW_US)


def sequences(rows: Sequence[tuple[Any, ...]]) -> list[Any]:
    return [row[0] for row in rows]


@asynccontextmanager
async def lake_bench(lake: Lake, **settings: Any) -> AsyncIterator[Bench]:
    with ThreadPoolExecutor(2) as decoders, ThreadPoolExecutor(1) as encoders:
        async with (
            FlakyCatalog(lake.catalog_url) as flaky,
            open_store(lake.storage) as store,
            open_catalog(flaky.url, timeout_s=2.0) as catalog,
        ):
            await catalog.load_config()
            context = TableContext(
                node="n1",
                config=replace(WriterConfig(), **settings),
                committer=Committer(catalog, store),
                store=store,
                decoders=decoders,
                encoders=encoders,
                metrics=WriterMetrics(CollectorRegistry()),
                clock=time.monotonic,
            )
            yield Bench(lake, context, flaky)
