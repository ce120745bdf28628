"""One table's life from decoded changes to snapshots. Owns its place in the log, its buffer, and its two tasks.

    offer --> inbox --(intake task: table_intake.py)--> buffer --take--> flush (flush task: flush.py) --> snapshot
      ^                                                   |
      +------ read again from the log <------ park <------+

Nobody ever waits for a table but its own tasks. What fails is tried again for ever, with growing pauses (state.py);
meanwhile its records stay in the log, and its rows in memory; beyond its share of that, they leave it (state.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import pyarrow as pa

from lakefeed.contract.changes import Position, SourceId, Span, TableName
from lakefeed.contract.errors import Fenced, RowsUnfit, WriterError
from lakefeed.contract.properties import Reason, Refusal
from lakefeed.writer.metrics import WriterMetrics
from lakefeed.writer.rows.groups import Expected, Group
from lakefeed.writer.rows.runs import Decoded, SplitReason, spans_of
from lakefeed.writer.tables.columns import TableColumns, TableContext
from lakefeed.writer.tables.flush import CompleteWith, Flushed, TableFlush, nothing_is_known
from lakefeed.writer.tables.flush_policy import FlushControl, Threshold
from lakefeed.writer.tables.pending import Arrival, Chunk, FlushReason, Inbox, TableBuffer
from lakefeed.writer.tables.state import Holding, Standing, Trouble

# --- writer.table_rows ------------------------------------------------------------------------------------------------
#
# The changes of one table that are not committed: where they are, how many, how old. Owns the places, not the moves.
#
# in the log only (standing) --> inbox --> buffer --> running flush --> committed


class TableRows:
    """What a table has to commit yet; its writer moves it on."""

    def __init__(self) -> None:
        self.standing = Standing()
        self._inbox = Inbox()
        self._buffer = TableBuffer()
        self._running: TableFlush | None = None
        # What is in the inbox has to wait for a flush of what is in the buffer.
        self._awaits_flush = False

    @property
    def is_idle(self) -> bool:
        """Tell whether everything that the table was given is committed."""
        return self.needed_offset is None

    @property
    def open_bytes(self) -> int:
        """Arrow data that a flush could take now."""
        return self._buffer.bytes

    @property
    def open_rows(self) -> int:
        """Rows that a flush could take now."""
        return self._buffer.rows

    @property
    def is_flushing(self) -> bool:
        """Tell whether a flush is under way."""
        return self._running is not None

    @property
    def is_settled(self) -> bool:
        """Tell whether the buffer holds all that a flush could take of what the table was given."""
        return self._running is None and (not self._inbox or self._awaits_flush)

    @property
    def is_cut_short(self) -> bool:
        """Tell whether the next flush takes only a part of what the table was given."""
        return self._awaits_flush and bool(self._inbox)

    def runs(self, flush: TableFlush) -> bool:
        """Tell whether this flush is under way: its rows may have left memory since it began."""
        return self._running is flush

    @property
    def holding(self) -> Holding:
        """Tell what the table holds in memory."""
        flushing = self._running.gathered.bytes if self._running else 0
        return Holding(self._inbox.bytes + self._buffer.bytes, flushing)

    @property
    def buffered_bytes(self) -> int:
        """Bytes in memory, flushing or not."""
        return self.holding.waiting_bytes + self.holding.flushing_bytes

    @property
    def buffered_rows(self) -> int:
        """Rows in memory, flushing or not."""
        return self._inbox.rows + self._buffer.rows + (self._running.gathered.rows if self._running else 0)

    @property
    def pending_rows(self) -> int:
        """Rows in memory that have not been fitted into the table's columns yet."""
        return self._inbox.rows

    @property
    def needed_offset(self) -> int | None:
        """The oldest log offset that is not committed, or None."""
        offsets = [self._inbox.needed_offset, self.standing.resume_offset]
        if self._running is not None:
            offsets.append(self._running.gathered.log_from)
        if self._buffer.rows:
            offsets.append(self._buffer.log_from)
        return min((offset for offset in offsets if offset is not None), default=None)

    def first_waiting(self, source: SourceId) -> Position | None:
        """Find a source's first position that is not committed, or None."""
        spans = [self._buffer.spans.get(source)]
        if self._running is not None:
            spans.append(self._running.gathered.spans.get(source))
        firsts = [span.first for span in spans if span is not None]
        others = (self._inbox.first_waiting(source), self.standing.first_passed(source))
        return min([*firsts, *(each for each in others if each is not None)], default=None)

    def waiting_spans(self, *, landing: frozenset[TableFlush]) -> list[Mapping[SourceId, Span]]:
        """List, part by part, what is not committed once the flushes `landing` are."""
        parts: list[Mapping[SourceId, Span]] = []
        if self._inbox:
            parts += (arrival.spans for arrival in self._inbox)
        if self.standing.is_behind:
            parts.append(self.standing.passed_spans)
        if self._buffer.rows:
            parts.append(self._buffer.spans)
        if self._running is not None and self._running not in landing:
            parts.append(self._running.gathered.spans)
        return parts

    @property
    def oldest_at(self) -> float | None:
        """When the oldest change came that is not committed, or None."""
        moments = [self.standing.since]
        if self._running is not None:
            moments.append(self._running.gathered.oldest_at)
        if self._buffer.rows:
            moments.append(self._buffer.oldest_at)
        if self._inbox:
            moments.append(self._inbox.first.arrived_at)
        return min((each for each in moments if each is not None), default=None)

    def due_since(self, *, flush_max_age_s: float) -> float | None:
        """Tell when the oldest change had to leave for a snapshot, or None; a buffer may gather for `flush_max_age_s`.

        It lies ahead while all that there is may gather for some time yet.
        """
        moments = [self.standing.since]
        if self._running is not None:
            moments.append(self._running.started_at)
        if self._buffer.rows:
            moments.append(self._buffer.oldest_at + flush_max_age_s)
        if self._inbox:
            moments.append(self._inbox.first.arrived_at)
        return min((each for each in moments if each is not None), default=None)

    def oldest_age_s(self, *, now: float) -> float | None:
        """Tell how long the oldest change that is not committed has been here, or None."""
        oldest_at = self.oldest_at
        return None if oldest_at is None else now - oldest_at

    def _leaving(self) -> list[tuple[int, Mapping[SourceId, Span]]]:
        """List what no flush has taken: the first offset and the spans of each part."""
        waiting = [(each.decoded.group.first_offset, each.spans) for each in self._inbox]
        return [*waiting, (self._buffer.log_from, self._buffer.spans)] if self._buffer.rows else waiting


# --- writer.table_intake ----------------------------------------------------------------------------------------------
#
# From what a table was given to rows in its columns. Owns what is left out, what is set aside, and the order of both.
#
# group --(the table's own marks, and those of its quarantine: leave out)--> fresh part
#       --(decoded already? else fit)--> chunks for the buffer
#                              +--------> rows that nothing can decode --> quarantine
#
# What is set aside goes in the order of the log too: the table commits what lies before it, then the quarantine commits
# it, then comes what lies behind it. So the marks of both together say of every row that it is in one of them, and a
# row
# that was set aside and is read again, well by then or not, is left out like one that is in the table.


class Quarantine(Protocol):
    """Where rows go that a table can never take."""

    async def put(self, group: Group, *, table: TableName, reason: Reason) -> None:
        """Keep changes, whole; returns once they are committed there."""

    async def moved_marks(self, table: TableName) -> Mapping[SourceId, Position]:
        """Tell up to where a table's changes are in the table or there."""

    def problem_of(self, table: TableName) -> str | None:
        """Tell what keeps the table's quarantine from being written."""


@dataclass(frozen=True, slots=True)
class Fit:
    """Chunks for the buffer, and the changes behind them that nothing can decode; what follows is fitted after them."""

    chunks: list[Chunk]
    refused: tuple[Group, Reason] | None = None


class TableIntake:
    """Fits one table's changes into its columns. A table without a quarantine is one itself."""

    def __init__(self, columns: TableColumns, quarantine: Quarantine | None, metrics: WriterMetrics) -> None:
        self._columns = columns
        self._quarantine = quarantine
        self._metrics = metrics
        self._moved: Mapping[SourceId, Position] = {}
        # What this process has put into quarantine, for /status.
        self.quarantined_rows = 0

    async def open(self) -> None:
        """Look the table up, and what was moved away from it.

        Raises: WriterError, after which to try again later.
        """
        if self._quarantine is not None:
            self._moved = await self._quarantine.moved_marks(self._columns.name)
        await self._columns.open()

    async def fit(self, decoded: Decoded) -> Fit:
        """Turn changes into chunks for the buffer, up to the first that cannot be decoded."""
        group = self._fresh_part(decoded.group)
        if not len(group):
            return Fit([])
        if decoded.rows is not None and group is decoded.group and self._columns.takes_rows_of(decoded.columns):
            return Fit([_chunk(group, decoded.rows)])
        self._metrics.slow_groups.labels(str(self._columns.name)).inc()
        fitted = await self._columns.decode(group, refused_for=decoded.columns if decoded.rows is None else None)
        first = fitted.refused[0] if fitted.refused else None
        kept = [(part, rows) for part, rows in fitted.kept if first is None or _place(part) < _place(first[0])]
        return Fit([_chunk(part, rows) for part, rows in kept], first)

    async def move_away(self, decoded: Decoded, *, problem: str | None) -> None:
        """Put changes into quarantine that the table could take, if only it could be written."""
        group = self._fresh_part(decoded.group)
        if not len(group):
            return
        await self.set_aside(group, Reason(Refusal.LOG_SHARE, f"table stood still for too long: {problem}"))

    @property
    def quarantine_problem(self) -> str | None:
        """Tell what keeps the table's quarantine from being written."""
        return self._quarantine.problem_of(self._columns.name) if self._quarantine else None

    def _fresh_part(self, group: Group) -> Group:
        fresh = group.after(self._columns.marks)
        if self._moved:
            fresh = fresh.after(self._moved)
        if len(fresh) < len(group):
            self._metrics.duplicate_changes.labels(str(self._columns.name)).inc(len(group) - len(fresh))
        return fresh

    async def set_aside(self, group: Group, reason: Reason) -> None:
        """Put changes into quarantine. What lies before them in the log is committed; what lies behind them waits."""
        if self._quarantine is None:
            raise WriterError(f"quarantine cannot take its own rows: rows={len(group)} reason={reason.text}")
        await self._quarantine.put(group, table=self._columns.name, reason=reason)
        self.quarantined_rows += len(group)
        self._moved = {**self._moved, **{source: span.last for source, span in spans_of(group).items()}}


def _place(group: Group) -> tuple[int, int]:
    """Tell where a part of a group begins, in the order of the log."""
    return group.first_offset, group.sequence_at(0)


def _chunk(group: Group, rows: pa.Table) -> Chunk:
    return Chunk(rows=rows, log_from=group.first_offset, log_to=group.last_offset + 1, spans=spans_of(group))


# --- writer.flush_waiters ---------------------------------------------------------------------------------------------
#
# Those who wait for commits of a table: up to an offset, or of certain rows. Owns when and what they are answered.


@dataclass(slots=True)
class _Waiter:
    """Somebody who waits, and what was committed meanwhile."""

    until: int
    future: asyncio.Future[Flushed]
    flushed: Flushed


@dataclass(slots=True)
class FlushWaiters:
    """All who wait for one table."""

    _waiters: list[_Waiter] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self._waiters)

    def add(self, until: int, *, snapshot_id: int | None) -> asyncio.Future[Flushed]:
        """Wait until everything below an offset is committed."""
        waiter = _Waiter(until, asyncio.get_running_loop().create_future(), Flushed(snapshot_id))
        self._waiters.append(waiter)
        return waiter.future

    def note(self, flushed: Flushed) -> None:
        """Count a flush for all who wait."""
        for waiter in self._waiters:
            waiter.flushed = waiter.flushed.joined(flushed)

    def answer(self, *, needed_offset: int | None) -> None:
        """Answer those for whom everything is committed."""
        for waiter in self._waiters:
            if (needed_offset is None or needed_offset >= waiter.until) and not waiter.future.done():
                waiter.future.set_result(waiter.flushed)
        self._waiters = [waiter for waiter in self._waiters if not waiter.future.done()]

    def refuse(self, problem: str | None) -> None:
        """Tell everybody that nothing will come of it for now."""
        for waiter in self._waiters:
            if not waiter.future.done():  # whoever waited may have given up
                waiter.future.set_result(waiter.flushed.refused(problem))
        self._waiters = []


def keep_promises(promises: list[asyncio.Future[None]]) -> None:
    """Tell those who wait for certain rows that these are committed."""
    for promise in promises:
        if not promise.done():  # whoever waited may have given up
            promise.set_result(None)


def break_promises(promises: list[asyncio.Future[None]]) -> None:
    """Tell those who wait for certain rows that these have left memory."""
    for promise in promises:
        if not promise.done():
            promise.set_exception(WriterError("rows have left memory before they were committed"))


@dataclass(slots=True)
class Totals:
    """What this process has committed of the table."""

    rows: int = 0
    commits: int = 0
    last_commit_at: float | None = None
    last_reason: FlushReason | None = None

    def add(self, flushed: Flushed, *, reason: FlushReason, now: float) -> None:
        """Count a flush."""
        self.rows += flushed.rows
        self.commits += 1
        self.last_commit_at = now
        self.last_reason = reason


def report_flush(
    name: TableName, flushed: Flushed, *, reason: FlushReason, seconds: float, metrics: WriterMetrics
) -> None:
    """Count a flush that is committed and log its line."""
    table = str(name)
    metrics.flushes.labels(reason.value).inc()
    metrics.flush_s.observe(seconds)
    metrics.committed_changes.labels(table).inc(flushed.rows)
    metrics.committed_bytes.labels(table).inc(flushed.bytes)
    metrics.committed_files.labels(table).inc(flushed.files)
    logger.info(
        "flush_committed",
        extra={
            "table": table,
            "rows": flushed.rows,
            "files": flushed.files,
            "bytes": flushed.bytes,
            "snapshot": flushed.snapshot_id,
            "reason": reason.value,
            "seconds": round(seconds, 3),
        },
    )


# --- writer.table_health ----------------------------------------------------------------------------------------------
#
# How a table gets on, as others see it: its memory, its trouble, when it flushes. Owns these answers, moves nothing.
#
# The feed asks before it gives or takes memory, feed.py before it reads again, rounds.py before it flushes all
# tables together, /status and /health whenever somebody looks.


# How long changes may wait to be fitted, or a flush may take, before the table counts as stuck: rows that it gathers
# meanwhile leave memory if others need it. Longer than a flush of full size takes as a rule; short enough that others
# do not wait long. The flush itself goes on for as long as it gets on.
LAG_MAX_S = 5.0


class Groups(Protocol):
    """Where flushes of all tables are asked for, where these are committed together (rounds.py)."""

    def request(self, reason: FlushReason) -> None:
        """Start a flush of all tables."""


class TableHealth(TableRows):
    """A table's rows and columns, and whether it gets on with them."""

    def __init__(
        self, name: TableName, context: TableContext, *, quarantine: Quarantine | None, groups: Groups | None
    ) -> None:
        super().__init__()
        self.name = name
        self.trouble = Trouble()
        self.totals = Totals()
        self.columns = TableColumns(name, context)
        self.control = FlushControl(self.columns.settings.config)
        self.moves_away = False
        self._config = self.columns.settings.config
        self._clock = context.clock
        self._intake = TableIntake(self.columns, quarantine, context.metrics)
        self._groups = groups

    @property
    def problem(self) -> str | None:
        """Tell why the table is not committed, or None."""
        aside = self._intake.quarantine_problem if self._inbox else None
        if self.trouble.reason is not None:
            return f"{self.trouble.reason}; {aside}" if aside else self.trouble.reason
        if self._running is not None and self._running.hindrance is not None:
            return self._running.hindrance
        if self._running is not None and self._clock() - self._running.started_at > LAG_MAX_S:
            return f"flush takes long: seconds={self._clock() - self._running.started_at:.0f}"
        return aside

    def late_s(self, *, now: float) -> float | None:
        """Tell for how long the oldest change should have been on its way into a snapshot; None if there is none."""
        since = self.due_since(flush_max_age_s=self._config.flush_max_age_s)
        return None if since is None else now - since

    @property
    def is_failing(self) -> bool:
        """Tell whether the last attempt to open or to flush the table has failed."""
        return self.trouble.reason is not None

    def is_stuck(self, *, now: float) -> bool:
        """Tell whether the table fails, or takes so long that others should not share their memory with it."""
        # With others it takes as long as the slowest of them.
        started = [self._running.started_at] if self._running and self._running.carrier is None else []
        if self._inbox:
            started.append(self._inbox.first.arrived_at)
        return self.is_failing or any(now - each > LAG_MAX_S for each in started)

    def may_be_interrupted(self, *, now: float) -> bool:
        """Tell whether the flush under way is worth nothing: it has failed, or its commit does, or it stands still.

        Any other is left to it, however long it takes: begun again, it would take as long again.
        """
        if self._running is None or self._running.carrier is not None:
            return self.is_failing
        running = self._running
        return self.is_failing or running.hindered_s(now=now) > LAG_MAX_S or running.stands_still(now=now)

    def is_ready(self, *, now: float) -> bool:
        """Tell whether the table, which is behind, can be read again: one run at a time while it does not work."""
        if not self.standing.is_behind or self._inbox or not (self.columns.is_open or self.moves_away):
            return False
        if self.moves_away:
            return True
        if self.is_stuck(now=now):
            return self.buffered_bytes == 0 and now >= self.trouble.retry_at
        return self.holding.waiting_bytes < self._config.flush_max_bytes

    @property
    def quarantined_rows(self) -> int:
        """Rows that this process has put into quarantine."""
        return self._intake.quarantined_rows

    def next_flush(self, *, now: float) -> Threshold | None:
        """Tell when the buffer will be flushed and why, as changes come now; None while it is empty."""
        return self.control.next_flush(self._buffer, now=now)

    def explain_flush(self, *, now: float) -> dict[str, Any]:
        """Say why the last flush happened, and when and why the next will."""
        is_flushing = self._running is not None
        return {"table": str(self.name), "flushing": is_flushing, **self.control.explain(self._buffer, now=now)}

    def snapshot_with(self, source: SourceId) -> int | None:
        """Give the table's snapshot if it holds changes of a source."""
        return self.columns.snapshot_id if source in self.columns.marks else None

    # -- flushes with others

    @property
    def is_grouped(self) -> bool:
        """Tell whether the table is flushed with others, as a rule."""
        return self._groups is not None

    @property
    def joins_groups(self) -> bool:
        """Tell whether the table takes part in the next flush with others: it is where the applier is, and works."""
        is_held_up = bool(self._inbox) and self._intake.quarantine_problem is not None
        return self.is_grouped and not (self.standing.is_behind or self.trouble.is_paused or is_held_up)


# --- writer.table_writer ----------------------------------------------------------------------------------------------


logger = logging.getLogger(__name__)


class TableWriter(TableHealth):
    """Takes, buffers and commits the changes of one table."""

    def __init__(
        self,
        name: TableName,
        context: TableContext,
        *,
        quarantine: Quarantine | None,
        on_change: Callable[[], None],
        on_commit: Callable[[], None],
        count_commits: Callable[[], int],
        groups: Groups | None = None,
        complete_with: CompleteWith = nothing_is_known,
    ) -> None:
        super().__init__(name, context, quarantine=quarantine, groups=groups)
        self._context = context
        self._opened_in_vain = False
        self._on_change = on_change
        self._on_commit = on_commit
        self._count_commits = count_commits
        self._complete_with = complete_with
        self._promises: list[asyncio.Future[None]] = []
        self._flushing_promises: list[asyncio.Future[None]] = []
        self._patience: asyncio.Timeout | None = None
        self._waiters = FlushWaiters()
        # Counts parkings: whoever was at work on rows that have left memory meanwhile finds out by it.
        self._parkings = 0
        self._has_work = asyncio.Event()
        self._wanted = asyncio.Event()
        self._reason = FlushReason.REQUEST
        self._nudge = asyncio.Event()
        self._emptied = asyncio.Event()

    # -- being given changes

    @property
    def expected(self) -> Expected:
        """What rows of the table are decoded to."""
        return self.columns.expected

    def offer(self, decoded: Decoded, spans: Mapping[SourceId, Span]) -> None:
        """Take changes, in log order; a table that is behind is passed by and reads them later."""
        if self.standing.is_behind:
            self.standing.pass_by(spans)
        else:
            self._receive(Arrival(decoded, spans, self._clock()))

    def offer_again(self, decoded: Decoded) -> None:
        """Take changes that were read again, in log order."""
        spans = spans_of(decoded.group)
        self.standing.take_again(spans)
        self._receive(Arrival(decoded, spans, self._clock()))

    def advance(self, offset: int, *, applied_offset: int) -> None:
        """Note that all changes up to `offset` were offered again."""
        self.standing.advance(offset, applied_offset=applied_offset)
        if not self.standing.is_behind:
            logger.info("table_caught_up", extra={"table": str(self.name), "offset": offset})
        # Whoever waits for a flush waits until the table has come here, perhaps without another row.
        self._flush_if_due()

    def put(self, decoded: Decoded) -> asyncio.Future[None]:
        """Take changes that are not the log's next ones; the future is done when they are committed."""
        committed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._receive(Arrival(decoded, spans_of(decoded.group), self._clock(), committed))
        return committed

    def _receive(self, arrival: Arrival) -> None:
        self._inbox.add(arrival)
        self._has_work.set()

    # -- the intake task: from the inbox to the buffer

    async def run_intake(self) -> None:
        """Fit what arrives into the table's columns. Cancelling it leaves everything in the log."""
        while True:
            await self._has_work.wait()
            self._has_work.clear()
            while self._inbox or self._must_open:
                try:
                    await self._work()
                except WriterError as error:
                    await self._fail(str(error))
                except Exception as error:
                    logger.exception("table_intake_failed", extra={"table": str(self.name)})
                    await self._fail(f"unexpected error: {type(error).__name__}")

    @property
    def _must_open(self) -> bool:
        return not self.columns.is_open and not self.moves_away and self.standing.is_behind

    async def _work(self) -> None:
        if not self.columns.is_open and not self._opened_in_vain:
            await self._open()
        elif self._inbox:
            await self._take(self._inbox.first)

    async def _open(self) -> None:
        try:
            await self._intake.open()
        except WriterError:
            if not self.moves_away:
                raise
            # What it has already cannot be told, and its rows must go on: whoever replays them looks first.
            self._opened_in_vain = True
        if self.is_idle:
            self.trouble.note_success()
        self._on_change()

    async def _take(self, arrival: Arrival) -> None:
        parkings = self._parkings
        fit = Fit([])
        if self.moves_away:
            await self._intake.move_away(arrival.decoded, problem=self.trouble.reason)
        else:
            fit = await self._intake.fit(arrival.decoded)
            await self._end_epoch(fit.chunks, parkings)
        if parkings != self._parkings:
            return  # it has left memory with everything else, and will be read again
        for chunk in fit.chunks:
            self._buffer.add(chunk, now=self._clock())
        if fit.refused is not None:
            await self._commit_all(parkings)
            # What fails for the table's columns may do well since somebody mended them.
            if parkings == self._parkings and not await self.columns.refresh():
                await self._intake.set_aside(*fit.refused)
            return  # the arrival is taken again, for what lies behind
        self._inbox.drop_first()
        if arrival.committed is not None:
            self._promises.append(arrival.committed)
        self._on_change()
        self._flush_if_due()

    async def _end_epoch(self, chunks: list[Chunk], parkings: int) -> None:
        """Wait until the buffer is gone if a source starts over here: a flush holds one epoch of each source."""
        while parkings == self._parkings and any(self._buffer.begins_epoch(chunk) for chunk in chunks):
            await self._wait_for_flush(FlushReason.EPOCH)

    async def _commit_all(self, parkings: int) -> None:
        """Wait until everything in the buffer is committed: rows behind it are about to be set aside."""
        while parkings == self._parkings and (self._buffer.rows or self._running is not None):
            await self._wait_for_flush(FlushReason.REQUEST)

    async def _wait_for_flush(self, reason: FlushReason) -> None:
        """Wait until a flush has begun or ended, or rows have left memory."""
        self._emptied.clear()
        self._awaits_flush = True
        try:
            self.request_flush(reason)
            await self._emptied.wait()
        finally:
            self._awaits_flush = False

    # -- when to flush

    def maybe_flush(self) -> None:
        """Start a flush if the buffer is due."""
        reason = self.control.due(self._buffer, now=self._clock())
        if reason is not None:
            self.request_flush(reason)

    def request_flush(self, reason: FlushReason) -> None:
        """Start a flush of what is buffered; does nothing while one is wanted already."""
        if self._groups is not None and self.joins_groups:
            self._groups.request(reason)
        elif not self._wanted.is_set():
            self._reason = reason
            self._wanted.set()

    def flush(self, reason: FlushReason, *, until: int) -> asyncio.Future[Flushed]:
        """Start a flush; the future is done when everything below an offset is committed, or the table is paused."""
        answer = self._waiters.add(until, snapshot_id=self.columns.snapshot_id)
        self._settle()
        if not answer.done():
            self.request_flush(reason)
            self._nudge.set()
            if self._running is not None and self._running.carrier is not None:
                self._running.carrier.nudge()
        return answer

    def _flush_if_due(self) -> None:
        """Flush what is due, what somebody waits for, or what tells whether a paused table works again."""
        self._settle()
        is_awaited = not self._inbox and not self.standing.is_behind and self._waiters
        if self._buffer.rows and (self._promises or is_awaited or self.trouble.reason is not None):
            self.request_flush(FlushReason.REQUEST)
        self.maybe_flush()

    # -- the flush task: from the buffer to a snapshot

    async def run_flushes(self) -> None:
        """Flush whenever asked to. Cancelling it leaves the rows in the log."""
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            if self._running is not None or not self._buffer.rows:  # with others, and then its end looks what is due
                continue
            if self.joins_groups:  # it was not when it asked for it
                self.request_flush(self._reason)
            else:
                await self._flush_buffer(self._reason)

    def take_buffer(self, reason: FlushReason) -> TableFlush:
        """Begin a flush of what is buffered; whoever calls it brings it to its end."""
        gathered = self._buffer.take()
        running = TableFlush(
            gathered,
            self.columns,
            self._context,
            reason=reason,
            control=self.control,
            complete_with=self._complete_with,
        )
        self._running = running
        self._flushing_promises, self._promises = self._promises, []
        self._emptied.set()
        return running

    async def _flush_buffer(self, reason: FlushReason) -> None:
        running = self.take_buffer(reason)
        if self.is_grouped:
            self._context.metrics.split_transactions.labels(SplitReason.TABLE_OUT.value).inc()
        with contextlib.suppress(TimeoutError):  # only parking ends it: the rows have left memory by then
            async with asyncio.timeout(None) as self._patience:
                flushed = await self._commit_until_done(running)
                self.finish(running, flushed)
        self._patience = None
        await self.tidy()

    async def tidy(self) -> None:
        """Let old snapshots go. Whatever fails there concerns no row."""
        try:
            await self.columns.tidy()
        except Exception:
            logger.exception("table_not_tidied", extra={"table": str(self.name)})

    async def _commit_until_done(self, running: TableFlush) -> Flushed:
        while True:
            try:
                return await running.attempt()
            except Fenced:
                raise  # nothing of ours can be committed any more: the service ends
            except RowsUnfit as error:
                self.park_everything()
                await self._fail(str(error))
            except WriterError as error:
                await self._fail(str(error))
            except Exception as error:
                logger.exception("table_flush_failed", extra={"table": str(self.name)})
                await self._fail(f"unexpected error: {type(error).__name__}")

    def finish(self, running: TableFlush, flushed: Flushed) -> None:
        """Go on from a flush that is committed."""
        now = self._clock()
        if self._running is running:
            self._running = None
        self._emptied.set()
        self.trouble.note_success()
        self.totals.add(flushed, reason=running.reason, now=now)
        self.control.record(running.record(flushed, now=now))
        seconds = now - running.started_at
        report_flush(self.name, flushed, reason=running.reason, seconds=seconds, metrics=self._context.metrics)
        keep_promises(self._flushing_promises)
        self._waiters.note(flushed)
        self._flush_if_due()
        self._on_change()
        self._on_commit()

    # -- trouble, and who is told

    async def _fail(self, reason: str) -> None:
        """Note a failure and rest before the next attempt."""
        self.note_failure(reason)
        self._nudge.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.trouble.retry_at - self._clock()):
                await self._nudge.wait()

    def note_failure(self, reason: str) -> None:
        """Note a failure, and answer those who wait if the table is paused by now."""
        jitter = random.random()  # noqa: S311
        self.trouble.note_failure(reason, now=self._clock(), jitter=jitter, commits=self._count_commits())
        self._context.metrics.flush_failures.labels(str(self.name)).inc()
        rest_s = self.trouble.retry_at - self._clock()
        logger.warning(
            "table_failed",
            extra={
                "table": str(self.name),
                "error": reason,
                "attempts": self.trouble.attempts,
                "retry_s": round(rest_s, 3),
            },
        )
        if self.trouble.is_paused:
            self._waiters.refuse(self.problem)
        self._on_change()

    def _settle(self) -> None:
        """Answer those for whom everything is committed."""
        if self.is_idle:
            self.trouble.note_success()
            keep_promises(self._promises)
            self._promises = []
        self._waiters.answer(needed_offset=self.needed_offset)

    # -- giving up memory

    def park_waiting(self) -> None:
        """Let the rows that no flush has taken leave memory. They are read again from the log."""
        self._park(self._leaving(), self.oldest_at)

    def park_everything(self) -> None:
        """Let all rows leave memory, also those of the flush under way: it ends as it would in a crash."""
        leaving, since = self._leaving(), self.oldest_at
        if self._running is not None:
            running, self._running = self._running, None
            gathered = running.gathered
            leaving.append((gathered.log_from, gathered.spans))
            break_promises(self._flushing_promises)
            if running.carrier is not None:
                running.carrier.interrupt()
            elif self._patience is not None:
                self._patience.reschedule(asyncio.get_running_loop().time())
        self._park(leaving, since)
        self.columns.close()
        self._has_work.set()

    def _park(self, leaving: list[tuple[int, Mapping[SourceId, Span]]], since: float | None) -> None:
        if not leaving:
            return
        assert since is not None, "what leaves has come at some time"
        offsets = [offset for offset, _ in leaving]
        if self.standing.resume_offset is not None:
            offsets.append(self.standing.resume_offset)
        self.standing.park(min(offsets), [spans for _, spans in leaving], since=since)
        self._parkings += 1
        break_promises([*self._promises, *(each.committed for each in self._inbox if each.committed is not None)])
        self._promises = []
        self._inbox.clear()
        self._buffer.take()
        self._emptied.set()
        logger.warning(
            "table_parked",
            extra={"table": str(self.name), "resume_offset": self.standing.resume_offset, "reason": self.problem},
        )
        self._on_change()

    def set_moving(self, *, moves_away: bool) -> None:
        """Choose whether rows that are read again go to the quarantine instead of the table."""
        if moves_away == self.moves_away:
            return
        logger.warning(
            "table_moves_to_quarantine" if moves_away else "table_moves_no_more",
            extra={"table": str(self.name), "offset": self.needed_offset, "reason": self.problem},
        )
        if moves_away:
            self.park_everything()
        self.moves_away = moves_away
        self._opened_in_vain = False
        self._nudge.set()
        self._has_work.set()
