"""What the parts of a feed share: catalog, store, threads and settings, and the signals between their tasks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass, field

from lakefeed.contract.changes import TableName
from lakefeed.storage.store import ObjectStore
from lakefeed.writer.commit.committer import Committer
from lakefeed.writer.config import WriterConfig
from lakefeed.writer.metrics import WriterMetrics
from lakefeed.writer.rows.table_settings import TableSections, TableSettings
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

    @property
    def commits_together(self) -> bool:
        """Return whether tables of one source transaction are committed together: configured, and the catalog can."""
        return self.config.transactions and self.committer.has_transactions

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


class FlushRequest:
    """A flush that is wanted; requests that come meanwhile join it."""

    def __init__(self) -> None:
        self.reason = FlushReason.REQUEST
        self._wanted = asyncio.Event()

    def request(self, reason: FlushReason) -> None:
        """Ask for a flush. Does nothing while one is wanted already."""
        if not self._wanted.is_set():
            self.reason = reason
            self._wanted.set()

    async def wait(self) -> None:
        """Wait until a flush is wanted."""
        await self._wanted.wait()

    def clear(self) -> None:
        """Accept the request: later ones ask for another flush."""
        self._wanted.clear()


class FeedSignals:
    """What tables tell the feed's tasks."""

    def __init__(self) -> None:
        # A table's memory or state has changed.
        self.changed = Signal()
        # Commits of all tables, quarantines included.
        self.committed = Signal()
        # Commits of change tables: while there are some, catalog and store work.
        self.table_commits = 0


class Applier:
    """How far the applier has come, which offers each table its changes in log order."""

    def __init__(self, offset: int, *, now: float) -> None:
        # Everything below was offered to its table.
        self.offset = offset
        # Everything below was offered, or is held back because a transaction is open.
        self.met_offset = offset
        self.moved_at = now
        # Holding it keeps the applier still; it is notified whenever the applier has moved.
        self.held = asyncio.Condition()
