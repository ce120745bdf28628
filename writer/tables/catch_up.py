"""Catch-up: reads the log again for tables that are behind. Owns the second tail.

One task, one run at a time, through the same decode threads as the live reader, which bounds what it takes from the
other tables. A table leaves catch-up when it has read as far as the applier, at that very offset. Under steady changes
the applier would have moved on each time, so the last run, which is as short as the one before it took, is read while
the applier is held still.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence

from lakefeed.writer.config import WriterConfig
from lakefeed.writer.rows.runs import DecodedRun, cut_run, decode_run
from lakefeed.writer.tables.context import Applier, FeedSignals, TableContext
from lakefeed.writer.tables.memory import MemoryPressure
from lakefeed.writer.tables.pending import CatchUpRange, FlushReason, plan_catch_up
from lakefeed.writer.tables.table import TableWriter
from lakefeed.writer.wal.protocol import Log, LogTail
from lakefeed.writer.wal.records import Record

# One decode job. Smaller jobs cost more per change, larger ones delay the first row and hold more memory.
RUN_MAX_BYTES = 4 * 1024 * 1024

# Runs that the memory for rows must hold at least, where it is so small that one run would fill it.
_RUNS_IN_MEMORY = 8


def run_max_bytes(config: WriterConfig) -> int:
    """Return how much of the log is read and decoded at a time."""
    return min(RUN_MAX_BYTES, config.buffer_max_bytes // _RUNS_IN_MEMORY)


class CatchUp:
    """The reading task of all tables that are behind."""

    def __init__(
        self,
        log: Log,
        context: TableContext,
        signals: FeedSignals,
        *,
        tables: Mapping[str, TableWriter],
        memory: MemoryPressure,
        applier: Applier,
        name_of: Callable[[str], str],
    ) -> None:
        self._log = log
        self._context = context
        self._config = context.config
        self._signals = signals
        self._tables = tables
        self._memory = memory
        self._applier = applier
        self._name_of = name_of
        self._tail: LogTail | None = None
        # Where the applier was when a run was read that reached it.
        self._end_seen: int | None = None

    async def run(self) -> None:
        """Read for the tables that are behind. Cancelling it loses nothing."""
        while True:
            seen = self._signals.changed.count
            following = self._plan()
            if following is None:
                await self._wait(seen)
            elif following.start != self._end_seen:
                await self._read(following)
            else:
                async with self._applier.held:
                    self._end_seen = None  # if it is more than a run after all, the applier may move meanwhile
                    following = self._plan()
                    if following is not None:
                        await self._read(following)

    def close(self) -> None:
        """Close the file that is being read."""
        if self._tail is not None:
            self._tail.close()

    def _plan(self) -> CatchUpRange[str] | None:
        now = self._context.clock()
        behind = {name: table for name, table in self._tables.items() if table.state.is_behind}
        working = [table for table in behind.values() if not table.is_stuck(now=now)]
        if not self._memory.has_catch_up_room(working):
            largest = max(working, key=lambda table: table.pending.buffer.bytes, default=None)
            if largest is not None and largest.pending.buffer.bytes:
                largest.request_flush(FlushReason.MEMORY)
            return None
        ready = {
            name: table.pending.backlog.resume_offset
            for name, table in behind.items()
            if table.pending.backlog.resume_offset is not None and table.may_reread(now=now)
        }
        return plan_catch_up(ready, applied_offset=self._applier.offset)

    async def _wait(self, seen: int) -> None:
        """Wait until something changes, or a table's next attempt may be due."""
        is_needed = any(table.state.is_behind for table in self._tables.values())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._config.flush_check_interval_s if is_needed else None):
                await self._signals.changed.wait(seen)

    async def _read(self, following: CatchUpRange[str]) -> None:
        loop = asyncio.get_running_loop()
        applied_offset = self._applier.offset
        if self._tail is None or self._tail.offset != following.start:
            self.close()
            self._tail = self._log.tail(following.start)
        max_bytes = run_max_bytes(self._config)
        read = functools.partial(self._tail.read, until=following.until, max_bytes=max_bytes)
        records = await loop.run_in_executor(self._context.decoders, read)
        start = following.start
        for part, next_offset in cut_run(records, max_bytes=max_bytes, next_offset=self._tail.offset):
            decode = self._decoding(part, next_offset, following.tables)
            self._deliver(await loop.run_in_executor(self._context.decoders, decode), following.tables, start)
            start = next_offset
        self._end_seen = start if start == applied_offset else None

    def _decoding(self, records: Sequence[Record], next_offset: int, names: frozenset[str]) -> Callable[[], DecodedRun]:
        tables = [self._tables[name] for name in names]
        return functools.partial(
            decode_run,
            records,
            {str(table.name): table.expected for table in tables if not table.is_draining},
            next_offset=next_offset,
            # Rows go to quarantine whole.
            keep_before=self._context.tables.keeps_before(self._config) or any(table.is_draining for table in tables),
            name_of=self._name_of,
            only=names,
        )

    def _deliver(self, run: DecodedRun, names: frozenset[str], start: int) -> None:
        """Hand the run to the tables that still wait at its start: one may have been evicted meanwhile."""
        waiting = {name for name in names if self._tables[name].pending.backlog.resume_offset == start}
        for decoded in run.tables:
            if decoded.group.table in waiting:
                self._tables[decoded.group.table].offer_reread(decoded)
        for name in waiting:
            self._tables[name].advance_to(run.next_offset, applied_offset=self._applier.offset)
