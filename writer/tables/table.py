"""One table from decoded changes to snapshots. Owns its intake task and every change of its state.

    offer --> received --(intake task: fitting.py)--> buffer --> flush (rounds.py, flush.py) --> snapshot
      ^                                                 |
      +-------- read again from the log <-- eviction ---+

Parts: `state` (state.py), `pending` (pending.py), `columns` (columns.py), `retry` (state.py), `policy`
(flush_policy.py). Only the table's own tasks ever wait for it. Failures are retried forever with growing delays;
meanwhile its records stay in the log, and its rows in memory, up to its share of that (memory.py).
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lakefeed.contract.changes import SourceId, Span, TableName
from lakefeed.contract.errors import WriterError
from lakefeed.contract.properties import is_quarantine
from lakefeed.writer.metrics import WriterMetrics
from lakefeed.writer.rows.groups import Expected
from lakefeed.writer.rows.runs import Decoded
from lakefeed.writer.tables.columns import TableColumns
from lakefeed.writer.tables.context import FeedSignals, FlushRequest, TableContext
from lakefeed.writer.tables.fitting import Fit, Quarantine, RowFitter
from lakefeed.writer.tables.flush import Attempts, Flushed, FlushWaiters, TableFlush, fail_waiters, resolve_waiters
from lakefeed.writer.tables.flush_policy import FlushPolicy, Threshold
from lakefeed.writer.tables.pending import Chunk, FlushReason, Pending, PendingRun, Waiter
from lakefeed.writer.tables.state import Event, FlushPhase, Health, Lifecycle, RetryState

logger = logging.getLogger(__name__)

# How long changes may wait to be fitted, or a flush may take, before the table counts as stuck: rows that it collects
# meanwhile are evicted if others need the memory. Longer than a flush of full size usually takes; short enough that
# others do not wait long. The flush itself continues while it makes progress.
LAG_MAX_S = 5.0


@dataclass(slots=True)
class CommitTotals:
    """What this process has committed of the table."""

    rows: int = 0
    commits: int = 0
    last_commit_at: float | None = None
    last_reason: FlushReason | None = None


class TableWriter:
    """Receives, buffers and commits the changes of one table."""

    def __init__(
        self,
        name: TableName,
        context: TableContext,
        signals: FeedSignals,
        *,
        quarantine: Quarantine | None,
        round_request: FlushRequest | None = None,
    ) -> None:
        self.name = name
        self.state = Lifecycle()
        self.pending = Pending()
        self.columns = TableColumns(name, context)
        self.retry = RetryState()
        self.policy = FlushPolicy(self.columns.settings.config)
        self.totals = CommitTotals()
        self.flush_request = FlushRequest()
        self._round_request = round_request
        self._context = context
        self._config = self.columns.settings.config
        self._clock = context.clock
        self._signals = signals
        self._fitter = RowFitter(self.columns, quarantine, context.metrics)
        self._flush: TableFlush | None = None
        self._flush_waiters = FlushWaiters()
        self._intake_attempts = Attempts()
        self._has_work = asyncio.Event()
        # A flush has begun or ended, or rows were evicted.
        self._buffer_taken = asyncio.Event()

    # -- receiving changes

    @property
    def expected(self) -> Expected:
        """The columns that rows of the table are decoded to."""
        return self.columns.expected

    def offer(self, decoded: Decoded, spans: Mapping[SourceId, Span]) -> None:
        """Receive changes from the live reader, in log order. A table that is behind reads them later."""
        if self.state.is_behind:
            self.pending.backlog.pass_by(spans)
        else:
            self._receive(decoded, spans)

    def offer_reread(self, decoded: Decoded) -> None:
        """Receive changes from catch-up, in log order."""
        spans = decoded.group.spans()
        self.pending.backlog.reread(spans)
        self._receive(decoded, spans)

    def advance_to(self, offset: int, *, applied_offset: int) -> None:
        """Record that catch-up has delivered everything up to `offset`."""
        if self.pending.backlog.advance(offset, applied_offset=applied_offset):
            self.state.advance(Event.CAUGHT_UP)
            logger.info("table_caught_up", extra={"table": str(self.name), "offset": offset})
        # A caller may wait for a flush up to here, and perhaps no further row comes.
        self._flush_if_due()

    def put(self, decoded: Decoded) -> asyncio.Future[None]:
        """Receive changes that are not the log's next ones; the future is done when they are committed."""
        committed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._receive(decoded, decoded.group.spans(), committed)
        return committed

    def _receive(self, decoded: Decoded, spans: Mapping[SourceId, Span], waiter: Waiter | None = None) -> None:
        self.pending.received.add(PendingRun(decoded, spans, self._clock(), waiter))
        self._has_work.set()

    # -- the intake task: from received to buffered rows

    async def run_intake(self) -> None:
        """Fit received changes into the table's columns. Cancelling it leaves everything in the log."""
        while True:
            await self._has_work.wait()
            self._has_work.clear()
            while self.pending.received or self._must_open:
                try:
                    if not self.state.is_open:
                        await self._open()
                    elif self.pending.received:
                        await self._take_in(self.pending.received.first)
                except WriterError as error:
                    await self._fail_intake(str(error))
                except Exception as error:
                    logger.exception("table_intake_failed", extra={"table": str(self.name)})
                    await self._fail_intake(f"unexpected error: {type(error).__name__}")

    @property
    def _must_open(self) -> bool:
        return not self.state.is_open and self.state.is_behind and not self.is_draining

    async def _open(self) -> None:
        try:
            await self._fitter.open()
        except WriterError:
            if not self.is_draining:
                raise
            # Without marks, rows that the table has may go to quarantine too: a replay leaves them out.
        self.state.advance(Event.OPENED)
        self._recover_if_empty()
        self._signals.changed.notify()

    async def _take_in(self, run: PendingRun) -> None:
        generation = self.pending.generation
        fit = Fit([])
        if self.is_draining:
            await self._fitter.drain(run.decoded, problem=self.retry.reason)
        else:
            fit = await self._fitter.fit(run.decoded)
            await self._end_epoch(fit.chunks, generation)
        if generation != self.pending.generation:
            return  # the run was evicted with everything else, and will be read again
        for chunk in fit.chunks:
            self.pending.buffer.add(chunk, now=self._clock())
        if fit.refused is not None:
            await self._commit_all(generation)
            # Rows that do not fit the table's columns may fit since another writer has changed them.
            if generation == self.pending.generation and not await self.columns.refresh():
                await self._fitter.quarantine(*fit.refused)
            return  # the run is taken in again, for what lies behind
        self.pending.buffer_first()
        self._signals.changed.notify()
        self._flush_if_due()

    async def _end_epoch(self, chunks: list[Chunk], generation: int) -> None:
        """Wait until the buffer is empty if a source starts over here: a flush holds one epoch of each source."""
        pending = self.pending
        while generation == pending.generation and any(pending.buffer.begins_epoch(chunk) for chunk in chunks):
            await self._wait_for_flush(FlushReason.EPOCH)

    async def _commit_all(self, generation: int) -> None:
        """Wait until all buffered rows are committed: the rows behind them are about to be quarantined."""
        pending = self.pending
        while generation == pending.generation and (pending.buffer.rows or pending.flushing is not None):
            await self._wait_for_flush(FlushReason.REQUEST)

    async def _wait_for_flush(self, reason: FlushReason) -> None:
        """Wait until a flush has begun or ended, or rows were evicted."""
        self._buffer_taken.clear()
        self.pending.has_barrier = True
        try:
            self.request_flush(reason)
            self._signals.changed.notify()
            await self._buffer_taken.wait()
        finally:
            self.pending.has_barrier = False

    async def _fail_intake(self, reason: str) -> None:
        self.fail(reason)
        await self._intake_attempts.delay(self.retry.retry_at - self._clock())

    # -- requesting flushes

    def maybe_flush(self) -> None:
        """Request a flush if the buffer is due."""
        reason = self.policy.due(self.pending.buffer, now=self._clock())
        if reason is not None:
            self.request_flush(reason)

    def request_flush(self, reason: FlushReason) -> None:
        """Request a flush of what is buffered, with the other tables if this one takes part in rounds."""
        request = self.flush_request
        if self._round_request is not None and self.joins_rounds:
            request = self._round_request
        request.request(reason)

    def flush(self, reason: FlushReason, *, until: int) -> asyncio.Future[Flushed]:
        """Request a flush; the future is done when everything below an offset is committed, or the table is paused."""
        answer = self._flush_waiters.add(until, snapshot_id=self.columns.snapshot_id)
        self._settle()
        if not answer.done():
            self.request_flush(reason)
            self._intake_attempts.retry_now()
            if self._flush is not None:
                self._flush.attempts.retry_now()
        return answer

    def _flush_if_due(self) -> None:
        """Flush what is due, what a caller waits for, or what shows whether a failing table works again."""
        self._settle()
        pending = self.pending
        is_awaited = not pending.received and not self.state.is_behind and self._flush_waiters
        if pending.buffer.rows and (pending.waiters or is_awaited or self.is_failing):
            self.request_flush(FlushReason.REQUEST)
        self.maybe_flush()

    # -- flushing, as rounds.py does it

    def start_flush(self, reason: FlushReason) -> TableFlush:
        """Start a flush of what is buffered; the caller runs it to its end."""
        flushing = self.pending.take(now=self._clock())
        self.state.advance(Event.FLUSH_STARTED)
        self._flush = TableFlush(
            flushing,
            self._context,
            state=self.state,
            pending=self.pending,
            columns=self.columns,
            policy=self.policy,
            reason=reason,
        )
        self._buffer_taken.set()
        return self._flush

    def finish_flush(self, flush: TableFlush, flushed: Flushed) -> None:
        """Continue from a flush that is committed."""
        now = self._clock()
        self.pending.finish(flush.flushing)
        self.state.advance(Event.FLUSH_COMMITTED)
        self.retry.clear()
        self._flush = None
        self._buffer_taken.set()
        self.totals.rows += flushed.rows
        self.totals.commits += 1
        self.totals.last_commit_at = now
        self.totals.last_reason = flush.reason
        record = flush.record(flushed, now=now)
        self.policy.record(record)
        _report_flush(self.name, flushed, reason=flush.reason, seconds=record.seconds, metrics=self._context.metrics)
        resolve_waiters(flush.flushing.waiters)
        self._flush_waiters.note(flushed)
        self._flush_if_due()
        self._signals.changed.notify()
        self._signals.table_commits += not is_quarantine(self.name)
        self._signals.committed.notify()

    async def expire_snapshots(self) -> None:
        """Remove old snapshots if it is time to. A failure affects no row and is left to the next time."""
        try:
            await self.columns.expire_snapshots()
        except Exception:
            logger.exception("table_not_tidied", extra={"table": str(self.name)})

    # -- failures

    def fail(self, reason: str) -> None:
        """Record a failure, and answer waiting callers if the table is paused by now."""
        now = self._clock()
        jitter = random.random()  # noqa: S311
        event = self.retry.note_failure(reason, now=now, jitter=jitter, commits=self._signals.table_commits)
        self.state.advance(event)
        self._context.metrics.flush_failures.labels(str(self.name)).inc()
        logger.warning(
            "table_failed",
            extra={
                "table": str(self.name),
                "error": reason,
                "attempts": self.retry.attempts,
                "retry_s": round(self.retry.retry_at - now, 3),
            },
        )
        if self.state.is_paused:
            self._flush_waiters.refuse(self.problem)
        self._signals.changed.notify()

    def _settle(self) -> None:
        """Answer the callers for whom everything is committed."""
        self._recover_if_empty()
        if self.pending.needed_offset is None:
            resolve_waiters(self.pending.waiters)
            self.pending.waiters = []
        self._flush_waiters.answer(needed_offset=self.pending.needed_offset)

    def _recover_if_empty(self) -> None:
        """Forget failures once nothing is left that could fail."""
        if self.pending.needed_offset is None and self.state.health is not Health.OK:
            was_draining = self.is_draining
            self.retry.clear()
            self.state.advance(Event.EMPTIED)
            if was_draining:
                self._end_draining()

    # -- eviction

    def evict_waiting(self) -> None:
        """Evict the rows that no flush has taken. They are read again from the log."""
        self._on_evicted(self.pending.evict_waiting())

    def evict_all(self) -> None:
        """Evict all rows, including those of the flush under way, which ends as it would in a crash."""
        flush, self._flush = self._flush, None
        waiters = self.pending.evict_all()
        if flush is not None:
            flush.attempts.interrupt()
        self._close()
        self._on_evicted(waiters)

    def _close(self) -> None:
        """Discard the table's marks; they are loaded again before the next row."""
        self.state.advance(Event.CLOSED)
        self.columns.forget()
        self._has_work.set()

    def _on_evicted(self, waiters: list[Waiter] | None) -> None:
        if waiters is None:
            return
        self.state.advance(Event.ROWS_EVICTED)
        fail_waiters(waiters)
        self._buffer_taken.set()
        resume_offset = self.pending.backlog.resume_offset
        logger.warning(
            "table_evicted", extra={"table": str(self.name), "resume_offset": resume_offset, "reason": self.problem}
        )
        self._signals.changed.notify()

    def start_draining(self) -> None:
        """Send rows that are read again to quarantine instead of the table."""
        logger.warning("table_drains_to_quarantine", extra=self._draining_facts())
        self.evict_all()
        self.state.advance(Event.LOG_SHARE_EXCEEDED)
        self._intake_attempts.retry_now()

    def stop_draining(self) -> None:
        """Write rows to the table again."""
        self.state.advance(Event.LOG_SHARE_FREED)
        self._end_draining()

    def _end_draining(self) -> None:
        logger.warning("table_drain_ended", extra=self._draining_facts())
        self._close()  # the marks may not have been loaded
        self._intake_attempts.retry_now()

    def _draining_facts(self) -> dict[str, Any]:
        return {"table": str(self.name), "offset": self.pending.needed_offset, "reason": self.problem}

    # -- how the table is doing

    @property
    def problem(self) -> str | None:
        """Why the table is not committed, or None."""
        of_quarantine = self._fitter.quarantine_problem if self.pending.received else None
        if self.retry.reason is not None:
            return f"{self.retry.reason}; {of_quarantine}" if of_quarantine else self.retry.reason
        if self._flush is not None and self._flush.retry_reason is not None:
            return self._flush.retry_reason
        if self._flush is not None and (seconds := self._clock() - self._flush.flushing.started_at) > LAG_MAX_S:
            return f"flush takes long: seconds={seconds:.0f}"
        return of_quarantine

    @property
    def is_failing(self) -> bool:
        """Whether the last attempt to open or to flush the table has failed."""
        return self.state.health is not Health.OK

    @property
    def is_draining(self) -> bool:
        """Whether rows that are read again go to quarantine."""
        return self.state.health is Health.QUARANTINING

    @property
    def is_flushing(self) -> bool:
        """Whether a flush is under way."""
        return self.state.flush is not FlushPhase.IDLE

    def is_stuck(self, *, now: float) -> bool:
        """Return whether the table fails, or takes so long that others should not share their memory with it."""
        started = [self.pending.received.first.arrived_at] if self.pending.received else []
        if self._flush is not None and not self._flush.is_shared:  # a shared one takes as long as the slowest table
            started.append(self._flush.flushing.started_at)
        return self.is_failing or any(now - each > LAG_MAX_S for each in started)

    def may_interrupt(self, *, now: float) -> bool:
        """Return whether the flush under way is worth nothing: it has failed, its commit fails, or it is stalled.

        Any other flush is not interrupted, because a restart would cost the same time again.
        """
        flush = self._flush
        if flush is None or flush.is_shared:
            return self.is_failing
        return self.is_failing or flush.retrying_s(now=now) > LAG_MAX_S or flush.is_stalled(now=now)

    def may_reread(self, *, now: float) -> bool:
        """Return whether catch-up may deliver the table's next run."""
        if not self.state.is_behind or self.pending.received:
            return False
        if self.is_draining:
            return True
        if not self.state.is_open:
            return False
        if self.is_stuck(now=now):
            return self.pending.bytes == 0 and now >= self.retry.retry_at  # one run, as a probe
        return self.pending.waiting_bytes < self._config.flush_max_bytes

    def late_s(self, *, now: float) -> float | None:
        """Return for how long the oldest change should have been on its way into a snapshot; None if there is none."""
        due_at = self.pending.due_at(flush_max_age_s=self._config.flush_max_age_s)
        return None if due_at is None else now - due_at

    def oldest_age_s(self, *, now: float) -> float | None:
        """Return for how long the oldest uncommitted change has been here, or None."""
        oldest_at = self.pending.oldest_at
        return None if oldest_at is None else now - oldest_at

    @property
    def quarantined_rows(self) -> int:
        """Rows that this process has put into quarantine."""
        return self._fitter.quarantined_rows

    def next_flush(self, *, now: float) -> Threshold | None:
        """Return when and why the buffer will be flushed at the present rate; None while it is empty."""
        return self.policy.next_flush(self.pending.buffer, now=now)

    def explain_flush(self, *, now: float) -> dict[str, Any]:
        """Explain why the last flush happened, and when and why the next will."""
        explained = self.policy.explain(self.pending.buffer, now=now)
        return {"table": str(self.name), "flushing": self.is_flushing, **explained}

    # -- rounds with other tables

    @property
    def is_in_rounds(self) -> bool:
        """Whether the table is flushed with others, as a rule."""
        return self._round_request is not None

    @property
    def joins_rounds(self) -> bool:
        """Whether the table takes part in the next round: the live reader delivers to it, and it works."""
        is_held_up = bool(self.pending.received) and self._fitter.quarantine_problem is not None
        return self.is_in_rounds and not (self.state.is_behind or self.state.is_paused or is_held_up)

    @property
    def is_settled(self) -> bool:
        """Whether the buffer holds everything that a flush could take now."""
        return not self.is_flushing and (not self.pending.received or self.pending.has_barrier)

    @property
    def is_cut_short(self) -> bool:
        """Whether the next flush takes only a part of what the table received."""
        return self.pending.has_barrier and bool(self.pending.received)


def _report_flush(
    name: TableName, flushed: Flushed, *, reason: FlushReason, seconds: float, metrics: WriterMetrics
) -> None:
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
