"""What all tables use: catalog, store, threads and settings; and how tasks wait for each other.

Signal          something has changed               FlushRequest    a flush is wanted
Attempts        interrupt one, or retry now         FlushWaiters    callers that wait for commits, and what they get
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace

from lakefeed.contract.changes import TableName, table_name_of
from lakefeed.storage.store import ObjectStore
from lakefeed.writer.commit.committer import Committer
from lakefeed.writer.config import WriterConfig
from lakefeed.writer.metrics import WriterMetrics
from lakefeed.writer.rows.table_settings import TableSections, TableSettings
from lakefeed.writer.tables.limit import TableLimit
from lakefeed.writer.tables.pending import FlushReason


@dataclass(frozen=True, slots=True, kw_only=True)
class TableContext:
    """What all tables use."""

    node: str
    config: WriterConfig
    committer: Committer
    store: ObjectStore
    decoders: Executor
    encoders: Executor
    metrics: WriterMetrics
    clock: Callable[[], float]
    tables: TableSections = field(default_factory=TableSections)
    limit: TableLimit | None = None

    @property
    def commits_together(self) -> bool:
        """Return whether tables of one source transaction are committed together: configured, and the catalog can."""
        return self.config.transactions and self.committer.has_transactions

    def name_of(self, source_table: str) -> str:
        """Return the table of a source's table: two source names can mean one (`users` and `default.users`)."""
        return str(table_name_of(source_table, self.config.default_namespace))

    def settings_for(self, name: TableName) -> TableSettings:
        """Return the settings of one table."""
        return self.tables.settings_for(str(name), self.config)


class Signal:
    """A counter that tasks wait on. Between looking at `count` and waiting, nothing is missed."""

    def __init__(self) -> None:
        self.count = 0
        self._raised = asyncio.Event()

    def notify(self) -> None:
        """Count one more and wake all tasks that wait."""
        self.count += 1
        self._raised.set()
        self._raised = asyncio.Event()

    async def wait(self, seen: int) -> int:
        """Wait until more than `seen` were counted; return how many there are. Cancelling it changes nothing."""
        while self.count <= seen:
            await self._raised.wait()
        return self.count


class FlushRequest(asyncio.Event):
    """A flush that is wanted while it is set. Requests that come meanwhile join it; `clear` accepts it."""

    reason = FlushReason.REQUEST

    def request(self, reason: FlushReason) -> None:
        """Ask for a flush. Does nothing while one is wanted already."""
        if not self.is_set():
            self.reason = reason
            self.set()


class Attempts:
    """The attempts of a task: others interrupt the one under way, or end the delay before the next."""

    def __init__(self) -> None:
        self._timeout: asyncio.Timeout | None = None
        self._retry_now = asyncio.Event()

    async def run(self, attempt: Callable[[], Awaitable[None]]) -> None:
        """Make one attempt, delays of its own included; returns when it has ended or was interrupted."""
        with contextlib.suppress(TimeoutError):  # only `interrupt` sets a deadline
            async with asyncio.timeout(None) as self._timeout:
                await attempt()
        self._timeout = None

    def interrupt(self) -> None:
        """End the attempt under way."""
        if self._timeout is not None:
            self._timeout.reschedule(asyncio.get_running_loop().time())
            self._timeout = None

    async def delay(self, seconds: float) -> None:
        """Wait before the next attempt."""
        self._retry_now.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._retry_now.wait()

    def retry_now(self) -> None:
        """End the delay."""
        self._retry_now.set()


@dataclass(frozen=True, slots=True)
class Flushed:
    """What a flush committed; for a table with nothing to flush, its current snapshot and no rows.

    `problem` is why the remaining rows are not committed, if there are any.
    """

    snapshot_id: int | None
    rows: int = 0
    bytes: int = 0
    paths: Sequence[str] = ()
    partitions: int = 0
    problem: str | None = None

    @property
    def files(self) -> int:
        """The number of data files."""
        return len(self.paths)

    def joined(self, later: Flushed) -> Flushed:
        """Add what a later flush of the same table committed."""
        rows, size_bytes, paths = self.rows + later.rows, self.bytes + later.bytes, (*self.paths, *later.paths)
        return replace(later, rows=rows, bytes=size_bytes, paths=paths)

    def refused(self, problem: str | None) -> Flushed:
        """Return the same with the reason why the remaining rows are not committed."""
        return replace(self, problem=problem or "not committed yet")


@dataclass(slots=True)
class _FlushWaiter:
    """A caller that waits, and what was committed meanwhile."""

    until: int
    future: asyncio.Future[Flushed]
    flushed: Flushed


@dataclass(slots=True)
class FlushWaiters:
    """The callers that wait until a table is committed up to an offset."""

    _waiters: list[_FlushWaiter] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self._waiters)

    def add(self, until: int, *, snapshot_id: int | None) -> asyncio.Future[Flushed]:
        """Return a future that is done when everything below an offset is committed."""
        waiter = _FlushWaiter(until, asyncio.get_running_loop().create_future(), Flushed(snapshot_id))
        self._waiters.append(waiter)
        return waiter.future

    def note(self, flushed: Flushed) -> None:
        """Count a flush for all callers."""
        for waiter in self._waiters:
            waiter.flushed = waiter.flushed.joined(flushed)

    def answer(self, *, needed_offset: int | None) -> None:
        """Answer the callers for whom everything is committed."""
        for waiter in self._waiters:
            if (needed_offset is None or needed_offset >= waiter.until) and not waiter.future.done():
                waiter.future.set_result(waiter.flushed)
        self._waiters = [waiter for waiter in self._waiters if not waiter.future.done()]

    def refuse(self, problem: str | None) -> None:
        """Answer all callers with the problem."""
        for waiter in self._waiters:
            if not waiter.future.done():
                waiter.future.set_result(waiter.flushed.refused(problem))
        self._waiters = []


class FeedSignals:
    """What tables tell the feed's tasks."""

    def __init__(self) -> None:
        # A table's memory or state has changed.
        self.changed = Signal()
        # Commits of all tables, quarantines included.
        self.committed = Signal()
        # Commits of change tables: while there are some, catalog and store work.
        self.table_commits = 0
