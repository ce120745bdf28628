"""From the log to the tables: reads behind the log's end and hands each table its changes, in log order.

Owns the tail's position and the tables' writers; memory and log are kept by memory.py, and what others may know is in
status.py. Its tasks keep cores busy:

    reader:   tail -> decode threads (several runs at once) -> queue of futures, in log order
    applier:  awaits them in that order -> offers each table its changes, and waits for none of them
              with transactions, it holds back those that are open (rows/runs.py)
    catch-up: reads again what tables have missed (catch_up.py)
    timer:    flushes by age, takes memory from tables that cannot be written, trims the log

A record is needed until every table has committed what it holds; the log is trimmed below the oldest one needed.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from lakefeed.contract.changes import Position, SourceId, Span, TableName, table_name_of
from lakefeed.contract.properties import is_quarantine
from lakefeed.writer.config import WriterConfig
from lakefeed.writer.rows.runs import (
    DecodedRun,
    Open,
    OpenTransactions,
    Part,
    SplitReason,
    TransactionGate,
    cut_run,
    cut_whole,
    decode_run,
    spans_of,
)
from lakefeed.writer.tables.columns import TableContext
from lakefeed.writer.tables.flush import Flushed
from lakefeed.writer.tables.memory import TableRoom
from lakefeed.writer.tables.pending import FlushReason
from lakefeed.writer.tables.quarantine import SetAside
from lakefeed.writer.tables.rounds import FlushGroups
from lakefeed.writer.tables.state import STUCK_MAX_SHARE, Stretch, plan_stretch
from lakefeed.writer.tables.status import FeedStatus, FlushReport
from lakefeed.writer.tables.table import TableWriter
from lakefeed.writer.wal.protocol import Log, LogTail
from lakefeed.writer.wal.records import Record

# --- writer.catch_up --------------------------------------------------------------------------------------------------
#
# Reads the log again for tables that are behind. Owns the second tail; who reads what next is state.py's.
#
# One task, one run at a time, through the same decode threads as the feed's own: what it takes from the tables that
# flow
# is bounded by that. A table leaves it the moment it has read as far as the applier, at that very offset. Under steady
# changes the applier would have moved on each time, so the last run, which is as short as the one before it took, is
# read
# while the applier holds still.


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
        self._tail: LogTail | None = None
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
            self._tail = self._log.tail(stretch.start)
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


# --- writer.feed ------------------------------------------------------------------------------------------------------


logger = logging.getLogger(__name__)

# How long a flush on request waits for a table that is paused: for the one attempt that the request itself causes, if
# that is answered soon. Otherwise the reason is known already.
PAUSED_FLUSH_MAX_S = 1.0

# Open transactions that a warning names: enough to know where to look.
TRANSACTIONS_SHOWN = 10


class Feed(FeedStatus):
    """The writer as the rest of the service sees it."""

    def __init__(
        self,
        log: Log,
        context: TableContext,
        *,
        tasks: asyncio.TaskGroup,
        marks_at_start: Mapping[SourceId, Position],
        table_max_share: float,
        room: TableRoom | None = None,
    ) -> None:
        config = context.config
        self._room = room
        self._gate: TransactionGate[DecodedRun] = TransactionGate(
            OpenTransactions(),
            # The rest is for tables, so that there is always one that can give up memory.
            max_bytes=min(config.transaction_max_bytes, int(config.buffer_max_bytes * STUCK_MAX_SHARE)),
            max_wait_s=config.transaction_max_wait_s,
        )
        super().__init__(
            log,
            context,
            marks_at_start=marks_at_start,
            held_bytes=lambda: self._gate.held_bytes,
            table_max_share=table_max_share,
        )
        self._tasks = tasks
        self._tail = log.tail(log.first_offset)
        self._table_tasks: list[asyncio.Task[None]] = []
        self._decoders = context.decoders
        self._runs: asyncio.Queue[tuple[asyncio.Future[DecodedRun], Open]] = asyncio.Queue(config.decode_threads)
        # Behind what was applied or is held by the gate.
        self._met_offset = log.first_offset
        self._applied = asyncio.Condition()
        self._buffers_changed = asyncio.Event()
        self._commits = 0
        self._table_commits = 0
        self._committed = asyncio.Event()
        self._catch_up = CatchUp(log, context, self, name_of=self._name_of)
        self._set_aside = SetAside(context, writer_of=self._table_of)
        self._groups: FlushGroups | None = None
        if self._config.transactions:
            self._groups = FlushGroups(context, self, tasks=tasks)
            self._table_tasks.append(tasks.create_task(self._groups.run(), name="flush-groups"))

    # -- the tasks

    async def run_reader(self) -> None:
        """Read runs behind the log's end and start decoding them. Cancelling it loses nothing: the log has it all."""
        loop = asyncio.get_running_loop()
        max_bytes = run_max_bytes(self._config)
        while True:
            await self._log.wait_beyond(self._tail.offset)
            await self._wait_for_memory()
            read = functools.partial(self._tail.read, until=self._log.durable_end, max_bytes=max_bytes)
            records = await loop.run_in_executor(self._decoders, read)
            for part in self._cut(records, max_bytes=max_bytes):
                await self._wait_for_memory()
                # Rows of a table that is behind are not decoded here: it is only passed by.
                expected = {name: each.expected for name, each in self.tables.items() if not each.standing.is_behind}
                decode = functools.partial(
                    decode_run,
                    part.records,
                    expected,
                    next_offset=part.next_offset,
                    keep_before=self._context.tables.keeps_before(self._config),
                    name_of=self._name_of,
                )
                decoding = loop.run_in_executor(self._decoders, decode)
                await self._runs.put((decoding, part.open_transactions))

    def _cut(self, records: Sequence[Record], *, max_bytes: int) -> Iterable[Part]:
        next_offset = self._tail.offset
        if self._context.commits_together:
            return cut_whole(records, self._gate.transactions, max_bytes=max_bytes, next_offset=next_offset)
        return (Part(*each) for each in cut_run(records, max_bytes=max_bytes, next_offset=next_offset))

    async def run_applier(self) -> None:
        """Give decoded runs to their tables, in log order. Cancelling it loses nothing."""
        while True:
            following = await self._next_run()
            async with self._applied:
                for run in self._pass_gate(following):
                    self._apply(run)
                self._applied.notify_all()

    async def _next_run(self) -> tuple[DecodedRun, Open] | None:
        """Give the next run and what is open behind it; None if an open transaction has been waited for long enough."""
        try:
            async with asyncio.timeout(self._gate.wait_s(now=self._clock())):
                decoding, awaited = await self._runs.get()
        except TimeoutError:
            return None
        return await decoding, awaited

    def _pass_gate(self, following: tuple[DecodedRun, Open] | None) -> list[DecodedRun]:
        """Give the runs that may be applied now: up to a place where no transaction is open, or one is given up."""
        now = self._clock()
        released: list[DecodedRun] = []
        if following is not None:
            run, awaited = following
            released = self._gate.take(run, awaited, size_bytes=run.held_bytes, now=now)
            self._met_offset = run.next_offset
            self._applied_at = now
        why = self._gate.limit_reached(now=now)
        return released if why is None else self._give_up_transactions(why)

    def _give_up_transactions(self, why: SplitReason) -> list[DecodedRun]:
        given_up = dict(self._gate.awaited)
        self._context.metrics.split_transactions.labels(why.value).inc(len(given_up))
        shown = dict(itertools.islice(given_up.items(), TRANSACTIONS_SHOWN))
        logger.warning("transactions_not_awaited", extra={"reason": why.value, "open": shown, "count": len(given_up)})
        return self._gate.give_up()

    def _apply(self, run: DecodedRun) -> None:
        """Offer a run. No table sees a part of it: tables that are behind join at the offset behind a run."""
        offered = [(decoded, spans_of(decoded.group)) for decoded in run.tables]
        for decoded, spans in offered:
            self._table(decoded.group.table).offer(decoded, spans)
        # Not before: a source's change in a table to come may lie below its last one in this table.
        for _, spans in offered:
            self._note_positions(spans)
        self.applied_offset = run.next_offset

    def _note_positions(self, spans: Mapping[SourceId, Span]) -> None:
        for source, span in spans.items():
            self._applied_positions[source] = max(span.last, self._applied_positions.get(source, span.last))

    async def run_catch_up(self) -> None:
        """Read again for tables that are behind. Cancelling it loses nothing."""
        await self._catch_up.run()

    async def run_timer(self) -> None:
        """Flush tables by age, keep memory and log for those that work, and keep the gauges true."""
        while True:
            await asyncio.sleep(self._config.flush_check_interval_s)
            for table in self.tables.values():
                table.maybe_flush()
            self._relief.relieve_memory()
            self._relief.relieve_log()
            await self._log.trim(self._relief.trim_point)
            self._set_gauges()

    def stop(self) -> None:
        """End the tables' tasks; what they have not committed stays in the log."""
        for task in self._table_tasks:
            task.cancel()
        if self._groups is not None:
            self._groups.stop()
        self._tail.close()
        self._catch_up.close()

    # -- flushing

    async def flush(self, table: str | None = None, *, reason: FlushReason = FlushReason.REQUEST) -> FlushReport:
        """Commit everything that is durable now, of one table or all; returns after the commits.

        A table that is paused is not waited for: the report has its reason. Nor is the end of a transaction: what is
        open stays in the log. Cancelling stops the waiting only.
        """
        started = self._clock()
        target = self._log.durable_end
        async with self._applied:
            await self._applied.wait_for(lambda: self._met_offset >= target)
        chosen = [self._find(table)] if table is not None else list(self.tables.values())
        waits = {
            str(each.name): self._flush_table(each, reason=reason, until=target) for each in chosen if each is not None
        }
        results = dict(zip(waits, await asyncio.gather(*waits.values()), strict=True))
        await self._log.trim(self._relief.trim_point)
        return FlushReport(results, self._clock() - started)

    async def _flush_table(self, table: TableWriter, *, reason: FlushReason, until: int) -> Flushed:
        was_paused = table.trouble.is_paused
        answer = table.flush(reason, until=until)
        if not was_paused:
            return await answer
        try:
            async with asyncio.timeout(0 if reason is FlushReason.SHUTDOWN else PAUSED_FLUSH_MAX_S):
                return await answer
        except TimeoutError:
            return Flushed(table.columns.snapshot_id).refused(table.problem)

    def _table(self, name: str) -> TableWriter:
        return self.tables.get(name) or self._table_of(table_name_of(name, self._config.default_namespace))

    def _table_of(self, name: TableName) -> TableWriter:
        if str(name) not in self.tables:
            self.tables[str(name)] = self._start_table(name)
            if self._room is not None and not is_quarantine(name):
                self._room.note(name)
        return self.tables[str(name)]

    def _start_table(self, name: TableName) -> TableWriter:
        writer = TableWriter(
            name,
            self._context,
            quarantine=None if is_quarantine(name) else self._set_aside,
            on_change=self._note_change,
            on_commit=functools.partial(self._note_commit, name),
            count_commits=lambda: self._table_commits,
            groups=self._groups if self._context.commits_together and not is_quarantine(name) else None,
            complete_with=self.complete_with,
        )
        for run, kind in ((writer.run_intake, "intake"), (writer.run_flushes, "flushes")):
            self._table_tasks.append(self._tasks.create_task(run(), name=f"table-{name}-{kind}"))
        return writer

    def _note_change(self) -> None:
        self._buffers_changed.set()
        self._catch_up.wake()
        if self._groups is not None:
            self._groups.wake()

    def _note_commit(self, name: TableName) -> None:
        self._commits += 1
        self._table_commits += not is_quarantine(name)
        self._committed.set()  # wakes those who wait now; the next commit is another event
        self._committed = asyncio.Event()

    async def wait_for_commit(self, seen: int) -> int:
        """Wait for a commit after the first `seen` ones; how many there are now. Cancelling it changes nothing."""
        while self._commits <= seen:
            await self._committed.wait()
        return self._commits

    # -- memory

    async def _wait_for_memory(self) -> None:
        while not self._relief.may_read_on():
            self._buffers_changed.clear()
            if self._relief.relieve_memory():
                continue
            self._relief.flush_largest()
            await self._buffers_changed.wait()

    @property
    def applying(self) -> asyncio.Condition:
        """Hold the applier still while the block runs."""
        return self._applied

    @property
    def has_memory(self) -> bool:
        """Tell whether there is room for more rows."""
        return self._relief.has_memory
