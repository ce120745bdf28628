"""The feed, from the log to the tables: reads behind the log's end and offers each table its changes, in log order.

    reader     tail -> decode threads (several runs at once) -> queue of futures, in log order
    applier    awaits them in that order -> offers each table its changes, and waits for no table;
               with transactions, it holds back those that are open (rows/runs.py)
    catch-up   reads again what evicted tables have missed, one run at a time, through the same decode threads, which
               bounds what it takes from the other tables
    timer      flushes by age, evicts and drains stuck tables (memory.py), trims the log

Owns the tables and their tasks; `status` (status.py) reports on them. A record is needed until every table has
committed what it holds; the log is trimmed below the oldest one needed.

A table leaves catch-up when it has read as far as the applier, at that very offset. Under steady changes the applier
would have moved on each time, so the last run, which is as short as the one before it took, is read while the applier
is held still.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import logging
from collections.abc import Iterable, Mapping, Sequence

from lakefeed.contract.changes import Position, SourceId, TableName, table_name_of
from lakefeed.contract.errors import WalFailed
from lakefeed.contract.properties import is_quarantine
from lakefeed.writer.config import WriterConfig
from lakefeed.writer.rows.runs import (
    DecodedRun,
    Open,
    OpenTransactions,
    Part,
    TransactionGate,
    cut_run,
    cut_whole,
    decode_run,
)
from lakefeed.writer.tables.context import Flushed, TableContext
from lakefeed.writer.tables.feed_state import FeedState
from lakefeed.writer.tables.memory import STUCK_MAX_SHARE, MemoryPressure
from lakefeed.writer.tables.pending import CatchUpRange, FlushReason, plan_catch_up
from lakefeed.writer.tables.quarantine import QuarantineSink
from lakefeed.writer.tables.rounds import FlushRounds
from lakefeed.writer.tables.status import FeedStatus, FlushReport
from lakefeed.writer.tables.table import TableWriter
from lakefeed.writer.wal.protocol import Log, LogTail
from lakefeed.writer.wal.records import Record

logger = logging.getLogger(__name__)

# One decode job. Smaller jobs cost more per change, larger ones delay the first row and hold more memory.
RUN_MAX_BYTES = 4 * 1024 * 1024

# Runs that the memory for rows must hold at least, where it is so small that one run would fill it.
_RUNS_IN_MEMORY = 8

# How long a requested flush waits for a paused table: for the one attempt that the request itself causes, if that is
# answered soon. Otherwise the reason is known already.
PAUSED_FLUSH_MAX_S = 1.0

# Open transactions that a warning names: enough to know where to look.
TRANSACTIONS_SHOWN = 10


class Feed:
    """The writer as the rest of the service sees it."""

    def __init__(
        self,
        log: Log,
        context: TableContext,
        *,
        tasks: asyncio.TaskGroup,
        marks_at_start: Mapping[SourceId, Position],
        table_max_share: float,
    ) -> None:
        config = context.config
        self._state = FeedState(log, context, marks_at_start=marks_at_start)
        self.tables = self._state.tables
        self.applier = self._state.applier
        self._log = log
        self._context = context
        self._config = config
        self._clock = context.clock
        self._signals = self._state.signals
        self._tasks = tasks
        self._table_tasks: list[asyncio.Task[None]] = []
        self._tail = log.tail(log.first_offset)
        self._runs: asyncio.Queue[tuple[asyncio.Future[DecodedRun], Open]] = asyncio.Queue(config.decode_threads)
        self._gate: TransactionGate[DecodedRun] = TransactionGate(
            OpenTransactions(),
            # The rest is for tables, so that there is always one that can release memory.
            max_bytes=min(config.transaction_max_bytes, int(config.buffer_max_bytes * STUCK_MAX_SHARE)),
            max_wait_s=config.transaction_max_wait_s,
        )
        self._memory = MemoryPressure(self._state, table_max_share=table_max_share)
        self._catch_up = CatchUp(self._state, self._memory)
        self._quarantine = QuarantineSink(
            context,
            write=lambda name, decoded: self._table_of(name).put(decoded),
            failure_of=lambda name: table.retry.reason if (table := self.tables.get(str(name))) else None,
        )
        self._rounds = FlushRounds(self._state, tasks=tasks)
        if config.transactions:
            self._table_tasks.append(tasks.create_task(self._rounds.run(), name="flush-rounds"))
        self.status = FeedStatus(self._state, self._memory)

    # -- the tasks

    async def run_reader(self) -> None:
        """Read runs behind the log's end and start decoding them. Cancelling it loses nothing: the log has it all."""
        loop = asyncio.get_running_loop()
        max_bytes = run_max_bytes(self._config)
        while True:
            await self._log.wait_beyond(self._tail.offset)
            await self._wait_for_memory()
            read = functools.partial(self._tail.read, until=self._log.durable_end, max_bytes=max_bytes)
            records = await loop.run_in_executor(self._context.decoders, read)
            for part in self._cut(records, max_bytes=max_bytes):
                await self._wait_for_memory()
                # Rows of a table that is behind are not decoded here: the applier only passes them.
                expected = {
                    name: each.columns.expected for name, each in self.tables.items() if not each.state.is_behind
                }
                decode = functools.partial(
                    decode_run,
                    part.records,
                    expected,
                    next_offset=part.next_offset,
                    name_of=self._context.name_of,
                )
                decoding = loop.run_in_executor(self._context.decoders, decode)
                await self._runs.put((decoding, part.open_transactions))

    async def _wait_for_memory(self) -> None:
        while True:
            seen = self._signals.changed.count
            if self._memory.has_live_room():
                return
            if not self._memory.evict():
                self._memory.flush_largest()
                # Until something changes, or a table counts as stuck by now, which nothing reports.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._config.flush_check_interval_s):
                        await self._signals.changed.wait(seen)

    def _cut(self, records: Sequence[Record], *, max_bytes: int) -> Iterable[Part]:
        next_offset = self._tail.offset
        if self._context.commits_together:
            return cut_whole(records, self._gate.transactions, max_bytes=max_bytes, next_offset=next_offset)
        return (Part(*each) for each in cut_run(records, max_bytes=max_bytes, next_offset=next_offset))

    async def run_applier(self) -> None:
        """Offer decoded runs to their tables, in log order. Cancelling it loses nothing."""
        while True:
            following = await self._next_run()
            async with self.applier.held:
                for run in self._pass_gate(following):
                    self._apply(run)
                self._memory.held_bytes = self._gate.held_bytes
                self.applier.held.notify_all()

    async def _next_run(self) -> tuple[DecodedRun, Open] | None:
        """Return the next run and what is open behind it; None if an open transaction was awaited for long enough."""
        try:
            async with asyncio.timeout(self._gate.wait_s(now=self._clock())):
                decoding, awaited = await self._runs.get()
        except TimeoutError:
            return None
        return await decoding, awaited

    def _pass_gate(self, following: tuple[DecodedRun, Open] | None) -> list[DecodedRun]:
        """Return the runs that may be applied now: up to an offset where no transaction is open, or one is given up."""
        now = self._clock()
        released: list[DecodedRun] = []
        if following is not None:
            run, awaited = following
            released = self._gate.take(run, awaited, size_bytes=run.held_bytes, now=now)
            self.applier.met_offset = run.next_offset
            self.applier.moved_at = now
        why = self._gate.limit_reached(now=now)
        if why is None:
            return released
        given_up = dict(self._gate.awaited)
        self._context.metrics.split_transactions.labels(why.value).inc(len(given_up))
        shown = dict(itertools.islice(given_up.items(), TRANSACTIONS_SHOWN))
        logger.warning("transactions_not_awaited", extra={"reason": why.value, "open": shown, "count": len(given_up)})
        return self._gate.give_up()

    def _apply(self, run: DecodedRun) -> None:
        """Offer a run. No table sees a part of it: tables that catch up become live at the offset behind a run."""
        offered = [(decoded, decoded.group.spans()) for decoded in run.tables]
        for decoded, spans in offered:
            name = decoded.group.table
            table = self.tables.get(name) or self._table_of(table_name_of(name, self._config.default_namespace))
            table.offer(decoded, spans)
        # Not before: a source's change in a table to come may lie below its last one in this table.
        for _, spans in offered:
            self._state.note_delivered(spans)
        self.applier.offset = run.next_offset

    async def run_catch_up(self) -> None:
        """Read again for tables that are behind. Cancelling it loses nothing."""
        await self._catch_up.run()

    async def run_timer(self) -> None:
        """Flush tables by age, evict and drain stuck tables, trim the log, and refresh the gauges."""
        while True:
            await asyncio.sleep(self._config.flush_check_interval_s)
            for table in self.tables.values():
                table.maybe_flush()
            self._memory.evict()
            self._memory.drain_log()
            await self._trim()
            self.status.set_gauges()

    async def _trim(self) -> None:
        """Trim the log below what is committed. If the disk refuses, report it; the timer tries again."""
        problem = None
        try:
            await self._log.trim(self._memory.trim_point)
        except WalFailed as error:
            problem = str(error)
        if problem is not None and self.status.trim_problem is None:
            logger.warning("log_not_trimmed", extra={"reason": problem})
        self.status.trim_problem = problem

    def stop(self) -> None:
        """Cancel the tables' tasks; what they have not committed stays in the log."""
        for task in self._table_tasks:
            task.cancel()
        self._rounds.stop()
        self._tail.close()
        self._catch_up.close()

    # -- the tables

    def _table_of(self, name: TableName) -> TableWriter:
        if str(name) not in self.tables:
            table = self.tables[str(name)] = self._start_table(name)
            if self._context.limit is not None and not is_quarantine(name):
                self._context.limit.note(name, marks=lambda: table.columns.marks)
        return self.tables[str(name)]

    def _start_table(self, name: TableName) -> TableWriter:
        table = TableWriter(
            name,
            self._context,
            self._signals,
            quarantine=None if is_quarantine(name) else self._quarantine,
            round_request=self._rounds.request if self._context.commits_together and not is_quarantine(name) else None,
        )
        for work, kind in ((table.run_intake(), "intake"), (self._rounds.run_table(table), "flushes")):
            self._table_tasks.append(self._tasks.create_task(work, name=f"table-{name}-{kind}"))
        return table

    # -- flushing

    async def flush(self, table: str | None = None, *, reason: FlushReason = FlushReason.REQUEST) -> FlushReport:
        """Commit everything that is durable now, of one table or all; returns after the commits.

        A paused table is not waited for: the report has its reason. Nor is the end of a transaction: what is open
        stays in the log. Cancelling stops the waiting only.
        """
        started = self._clock()
        target = self._log.durable_end
        async with self.applier.held:
            await self.applier.held.wait_for(lambda: self.applier.met_offset >= target)
        chosen = [self.tables.get(self._context.name_of(table))] if table is not None else list(self.tables.values())
        waits = {
            str(each.name): self._flush_table(each, reason=reason, until=target) for each in chosen if each is not None
        }
        results = dict(zip(waits, await asyncio.gather(*waits.values()), strict=True))
        await self._trim()
        return FlushReport(results, self._clock() - started)

    async def _flush_table(self, table: TableWriter, *, reason: FlushReason, until: int) -> Flushed:
        was_paused = table.state.is_paused
        answer = table.flush(reason, until=until)
        if not was_paused:
            return await answer
        try:
            async with asyncio.timeout(0 if reason is FlushReason.SHUTDOWN else PAUSED_FLUSH_MAX_S):
                return await answer
        except TimeoutError:
            return Flushed(table.columns.snapshot_id).refused(table.problem)

    async def wait_for_commit(self, seen: int) -> int:
        """Wait for a commit after the first `seen` ones; return how many there are. Cancelling it changes nothing."""
        return await self._signals.committed.wait(seen)


class CatchUp:
    """The reading task of all tables that are behind."""

    def __init__(self, feed: FeedState, memory: MemoryPressure) -> None:
        self._log = feed.log
        self._context = feed.context
        self._config = feed.context.config
        self._signals = feed.signals
        self._tables = feed.tables
        self._applier = feed.applier
        self._memory = memory
        self._tail: LogTail | None = None
        # Where the applier was when a run was read that reached it.
        self._end_seen: int | None = None

    async def run(self) -> None:
        """Read for the tables that are behind. Cancelling it loses nothing."""
        while True:
            seen = self._signals.changed.count
            following = self._plan()
            if following is None:  # until something changes, or a table's next attempt may be due
                is_needed = any(table.state.is_behind for table in self._tables.values())
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._config.flush_check_interval_s if is_needed else None):
                        await self._signals.changed.wait(seen)
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

    def _plan(self) -> CatchUpRange | None:
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

    async def _read(self, following: CatchUpRange) -> None:
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
            tables = [self._tables[name] for name in following.tables]
            decode = functools.partial(
                decode_run,
                part,
                {str(table.name): table.columns.expected for table in tables if not table.is_draining},
                next_offset=next_offset,
                name_of=self._context.name_of,
                only=following.tables,
            )
            self._deliver(await loop.run_in_executor(self._context.decoders, decode), following.tables, start)
            start = next_offset
        self._end_seen = start if start == applied_offset else None

    def _deliver(self, run: DecodedRun, names: frozenset[str], start: int) -> None:
        """Hand the run to the tables that still wait at its start: one may have been evicted meanwhile."""
        waiting = {name for name in names if self._tables[name].pending.backlog.resume_offset == start}
        for decoded in run.tables:
            if decoded.group.table in waiting:
                self._tables[decoded.group.table].offer_reread(decoded)
        for name in waiting:
            self._tables[name].advance_to(run.next_offset, applied_offset=self._applier.offset)


def run_max_bytes(config: WriterConfig) -> int:
    """Return how much of the log is read and decoded at a time."""
    return min(RUN_MAX_BYTES, config.buffer_max_bytes // _RUNS_IN_MEMORY)
