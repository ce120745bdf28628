"""Reads the log again for tables that are behind. Owns the second tail; who reads what next is parking.py's.

One task, one run at a time, through the same decode threads as the feed's own: what it takes from the tables that flow
is bounded by that. A table leaves it the moment it has read as far as the applier, at that very offset. Under steady
changes the applier would have moved on each time, so the last run, which is as short as the one before it took, is read
while the applier holds still.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from writer.buffer import FlushReason
from writer.config import WriterConfig
from writer.decoding import DecodedRun, cut_run, decode_run
from writer.parking import STUCK_MAX_SHARE, Stretch, plan_stretch
from writer.table_context import TableContext
from writer.table_writer import TableWriter
from writer.wal.log import Log
from writer.wal.record import Record
from writer.wal.tail import Tail

# One decode job. Smaller jobs cost more per change, larger ones make the first row wait and hold more memory.
RUN_MAX_BYTES = 4 * 1024 * 1024

# Runs that the memory for rows must hold at least, where it is so small that one run would fill it.
_RUNS_IN_MEMORY = 8


def run_max_bytes(config: WriterConfig) -> int:
    """Tell how much of the log is read and decoded at a time."""
    return min(RUN_MAX_BYTES, config.buffer_max_bytes // _RUNS_IN_MEMORY)


class Flow(Protocol):
    """What the feed tells of its tables and of how far it has come."""

    @property
    def tables(self) -> Mapping[str, TableWriter]:
        """All tables by name."""

    @property
    def applied_offset(self) -> int:
        """Where the applier is: everything below has been offered to its table."""

    @property
    def has_memory(self) -> bool:
        """Tell whether there is room for more rows."""

    @property
    def applying(self) -> AbstractAsyncContextManager[object]:
        """Hold the applier still while the block runs."""


class CatchUp:
    """The reading task of all tables that are behind."""

    def __init__(self, log: Log, context: TableContext, flow: Flow, *, name_of: Callable[[str], str]) -> None:
        self._log = log
        self._context = context
        self._config = context.config
        self._flow = flow
        self._name_of = name_of
        self._tail: Tail | None = None
        # Where the applier was when a run was read that reached it.
        self._end_seen: int | None = None
        self._changed = asyncio.Event()

    def wake(self) -> None:
        """Look again who is behind and ready."""
        self._changed.set()

    async def run(self) -> None:
        """Read for whoever is behind. Cancelling it loses nothing."""
        while True:
            self._changed.clear()
            stretch = self._plan()
            if stretch is None:
                await self._wait()
            elif stretch.start != self._end_seen:
                await self._read(stretch)
            else:
                async with self._flow.applying:
                    await self._read_last()

    def close(self) -> None:
        """Close the file that is being read."""
        if self._tail is not None:
            self._tail.close()

    def _plan(self) -> Stretch[str] | None:
        now = self._context.clock()
        behind = {name: table for name, table in self._flow.tables.items() if table.standing.is_behind}
        well = [table for table in behind.values() if not table.is_stuck(now=now)]
        held_bytes = sum(table.buffered_bytes for table in well)
        if not self._flow.has_memory or held_bytes >= self._config.buffer_max_bytes * STUCK_MAX_SHARE:
            largest = max(well, key=lambda table: table.open_bytes, default=None)
            if largest is not None and largest.open_bytes:
                largest.request_flush(FlushReason.MEMORY)
            return None
        ready = {
            name: table.standing.resume_offset
            for name, table in behind.items()
            if table.standing.resume_offset is not None and table.is_ready(now=now)
        }
        return plan_stretch(ready, applied_offset=self._flow.applied_offset)

    async def _wait(self) -> None:
        """Wait until something changes; a table's next try comes by time alone."""
        is_needed = any(table.standing.is_behind for table in self._flow.tables.values())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._config.flush_check_interval_s if is_needed else None):
                await self._changed.wait()

    async def _read_last(self) -> None:
        self._end_seen = None  # if it is more than a run after all, the applier may go on meanwhile
        stretch = self._plan()
        if stretch is not None:
            await self._read(stretch)

    async def _read(self, stretch: Stretch[str]) -> None:
        loop = asyncio.get_running_loop()
        applied_offset = self._flow.applied_offset
        if self._tail is None or self._tail.offset != stretch.start:
            self.close()
            self._tail = Tail(self._log, stretch.start)
        max_bytes = run_max_bytes(self._config)
        read = functools.partial(self._tail.read, until=stretch.until, max_bytes=max_bytes)
        records = await loop.run_in_executor(self._context.decoders, read)
        start = stretch.start
        for part, next_offset in cut_run(records, max_bytes=max_bytes, next_offset=self._tail.offset):
            decode = self._decoding(part, next_offset, stretch.tables)
            self._give(await loop.run_in_executor(self._context.decoders, decode), stretch.tables, start)
            start = next_offset
        self._end_seen = start if start == applied_offset else None

    def _decoding(self, records: Sequence[Record], next_offset: int, names: frozenset[str]) -> Callable[[], DecodedRun]:
        tables = [self._flow.tables[name] for name in names]
        return functools.partial(
            decode_run,
            records,
            {str(table.name): table.expected for table in tables if not table.moves_away},
            next_offset=next_offset,
            # What goes to the quarantine goes whole.
            keep_before=self._context.tables.keeps_before(self._config) or any(table.moves_away for table in tables),
            name_of=self._name_of,
            only=names,
        )

    def _give(self, run: DecodedRun, names: frozenset[str], start: int) -> None:
        """Hand the run to those tables that still wait at its start: one may have been parked meanwhile."""
        there = {name for name in names if self._flow.tables[name].standing.resume_offset == start}
        for decoded in run.tables:
            if decoded.group.table in there:
                self._flow.tables[decoded.group.table].offer_again(decoded)
        self._advance(there, start, run.next_offset)

    def _advance(self, names: set[str] | frozenset[str], start: int, offset: int) -> None:
        for name in names:
            table = self._flow.tables[name]
            if table.standing.resume_offset == start:
                table.advance(offset, applied_offset=self._flow.applied_offset)
