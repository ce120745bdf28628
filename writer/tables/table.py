"""One table from decoded changes to snapshots. Owns its intake task and every change of its state.

    offer --> received --(intake task: columns.py)--> buffer --> flush (rounds.py) --> snapshot
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
from typing import Any

from lakefeed.contract.changes import SourceId, Span, TableName
from lakefeed.contract.errors import WriterError
from lakefeed.contract.properties import is_quarantine
from lakefeed.writer.rows.runs import Decoded
from lakefeed.writer.tables.columns import RowFitter, TableColumns
from lakefeed.writer.tables.context import Attempts, FeedSignals, Flushed, FlushRequest, FlushWaiters, TableContext
from lakefeed.writer.tables.flush_policy import FlushPolicy, FlushRecord
from lakefeed.writer.tables.pending import Chunk, Flushing, FlushReason, Pending, PendingRun, Waiter
from lakefeed.writer.tables.quarantine import QuarantineSink
from lakefeed.writer.tables.state import Event, FlushPhase, Health, Lifecycle, Reading, RetryState

logger = logging.getLogger(__name__)

# How long changes may wait to be fitted, or a flush may take, before the table counts as stuck: rows that it collects
# meanwhile are evicted if others need the memory. Longer than a flush of full size usually takes; short enough that
# others do not wait long. The flush itself continues while it makes progress.
LAG_MAX_S = 5.0


class TableWriter:
    """Receives, buffers and commits the changes of one table."""

    def __init__(
        self,
        name: TableName,
        context: TableContext,
        signals: FeedSignals,
        *,
        quarantine: QuarantineSink | None,
        round_request: FlushRequest | None = None,
    ) -> None:
        self.name = name
        self.state = Lifecycle()
        self.pending = Pending()
        self.columns = TableColumns(name, context)
        self.retry = RetryState()
        self.policy = FlushPolicy(self.columns.settings.config)
        # What this process has committed of the table.
        self.committed_rows = 0
        self.commits = 0
        self.flush_request = FlushRequest()
        # Whether the table is flushed with others, as a rule.
        self.is_in_rounds = round_request is not None
        self._round_request = round_request
        self.context = context
        self._config = self.columns.settings.config
        self._clock = context.clock
        self._signals = signals
        self.fitter = RowFitter(self.columns, quarantine, context.metrics)
        # Of the task that runs the flush under way.
        self.flush_attempts: Attempts | None = None
        self._flush_waiters = FlushWaiters()
        self._intake_attempts = Attempts()
        self._has_work = asyncio.Event()
        # A flush has begun or ended, or rows were evicted.
        self._buffer_taken = asyncio.Event()

    # -- receiving changes

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

        def settle(error: WriterError | None) -> None:
            if committed.done():  # or the caller has stopped waiting
                return
            if error is None:
                committed.set_result(None)
            else:
                committed.set_exception(error)

        self._receive(decoded, decoded.group.spans(), settle)
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
            while self.pending.received or (self.state.reading is Reading.REOPENING and not self.is_draining):
                try:
                    if not self.state.is_open:
                        await self._open()
                    elif self.pending.received:
                        await self._take_in(self.pending.received.first)
                except Exception as error:
                    reason = str(error)
                    if not isinstance(error, WriterError):
                        logger.exception("table_intake_failed", extra={"table": str(self.name)})
                        reason = f"unexpected error: {type(error).__name__}"
                    self.fail(reason)
                    await self._intake_attempts.delay(self.retry.retry_at - self._clock())

    async def _open(self) -> None:
        try:
            await self.fitter.open()
        except WriterError:
            if not self.is_draining:
                raise
            # Without marks, rows that the table has may go to quarantine too: a replay leaves them out.
        self.state.advance(Event.OPENED)
        self._recover_if_empty()
        self._signals.changed.notify()

    async def _take_in(self, run: PendingRun) -> None:
        pending, generation = self.pending, self.pending.generation
        chunks: list[Chunk] = []
        refused = None
        if self.is_draining:
            await self.fitter.drain(run.decoded, problem=self.retry.reason)
        else:
            chunks, refused = await self.fitter.fit(run.decoded)
            # A flush holds one epoch of each source.
            while generation == pending.generation and any(pending.buffer.begins_epoch(chunk) for chunk in chunks):
                await self._wait_for_flush(FlushReason.EPOCH)
        if generation != pending.generation:
            return  # the run was evicted with everything else, and will be read again
        for chunk in chunks:
            pending.buffer.add(chunk, now=self._clock())
        if refused is not None:
            # What lies before rows that go to quarantine is committed first.
            while generation == pending.generation and (pending.buffer.rows or pending.flushing is not None):
                await self._wait_for_flush(FlushReason.REQUEST)
            # Rows that do not fit the table's columns may fit since another writer has changed them.
            if generation == pending.generation and not await self.columns.refresh():
                await self.fitter.quarantine(*refused)
            return  # the run is taken in again, for what lies behind
        pending.buffer_first()
        self._signals.changed.notify()
        self._flush_if_due()

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
            if self.flush_attempts is not None:
                self.flush_attempts.retry_now()
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

    def start_flush(self, reason: FlushReason) -> Flushing:
        """Start a flush of what is buffered; the caller runs it to its end."""
        flushing = self.pending.take(reason, now=self._clock())
        self.state.advance(Event.FLUSH_STARTED)
        self._buffer_taken.set()
        return flushing

    def finish_flush(self, flushed: Flushed) -> None:
        """Continue from a flush that is committed."""
        now = self._clock()
        flushing = self.pending.finish()
        self.state.advance(Event.FLUSH_COMMITTED)
        self.retry.clear()
        self.flush_attempts = None
        self._buffer_taken.set()
        self.committed_rows += flushed.rows
        self.commits += 1
        record = FlushRecord(
            reason=flushing.reason,
            finished_at=now,
            seconds=now - flushing.started_at,
            rows=flushed.rows,
            arrow_bytes=flushing.rows.bytes,
            file_bytes=flushed.bytes,
            files=flushed.files,
            partitions=flushed.partitions,
        )
        self.policy.record(record)
        self._report(record, snapshot_id=flushed.snapshot_id)
        for waiter in flushing.waiters:
            waiter(None)
        self._flush_waiters.note(flushed)
        self._flush_if_due()
        self._signals.changed.notify()
        self._signals.table_commits += not is_quarantine(self.name)
        self._signals.committed.notify()

    def _report(self, flush: FlushRecord, *, snapshot_id: int | None) -> None:
        table, metrics = str(self.name), self.context.metrics
        metrics.flushes.labels(flush.reason.value).inc()
        metrics.flush_s.observe(flush.seconds)
        metrics.committed_changes.labels(table).inc(flush.rows)
        metrics.committed_bytes.labels(table).inc(flush.file_bytes)
        metrics.committed_files.labels(table).inc(flush.files)
        logger.info(
            "flush_committed",
            extra={
                "table": table,
                "rows": flush.rows,
                "files": flush.files,
                "bytes": flush.file_bytes,
                "snapshot": snapshot_id,
                "reason": flush.reason.value,
                "seconds": round(flush.seconds, 3),
            },
        )

    # -- failures

    def fail(self, reason: str) -> None:
        """Record a failure, and answer waiting callers if the table is paused by now."""
        now = self._clock()
        jitter = random.random()  # noqa: S311
        event = self.retry.note_failure(reason, now=now, jitter=jitter, commits=self._signals.table_commits)
        self.state.advance(event)
        self.context.metrics.flush_failures.labels(str(self.name)).inc()
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
            for waiter in self.pending.waiters:
                waiter(None)
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
        self._on_evicted(self.pending.evict(flushing=False))

    def evict_all(self) -> None:
        """Evict all rows, including those of the flush under way, which ends as it would in a crash."""
        waiters = self.pending.evict(flushing=True)
        if self.flush_attempts is not None:
            self.flush_attempts.interrupt()
            self.flush_attempts = None
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
        for waiter in waiters:
            waiter(WriterError("rows have left memory before they were committed"))
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
        of_quarantine = self.fitter.quarantine_problem if self.pending.received else None
        if self.retry.reason is not None:
            return f"{self.retry.reason}; {of_quarantine}" if of_quarantine else self.retry.reason
        flushing = self.pending.flushing
        if flushing is not None and flushing.retry_reason is not None:
            return flushing.retry_reason
        if flushing is not None and (seconds := self._clock() - flushing.started_at) > LAG_MAX_S:
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
        flushing = self.pending.flushing
        if flushing is not None and not flushing.is_shared:  # a shared one takes as long as the slowest table
            started.append(flushing.started_at)
        return self.is_failing or any(now - each > LAG_MAX_S for each in started)

    def may_interrupt(self, *, now: float) -> bool:
        """Return whether the flush under way is worth nothing: it has failed, its commit fails, or it is stalled.

        Any other flush is not interrupted, because a restart would cost the same time again.
        """
        flushing = self.pending.flushing
        if self.is_failing or flushing is None or flushing.is_shared:
            return self.is_failing
        return flushing.is_retried_for(LAG_MAX_S, now=now) or flushing.is_stalled(now=now)

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

    def oldest_age_s(self, *, now: float) -> float | None:
        """Return for how long the oldest uncommitted change has been here, or None."""
        oldest_at = self.pending.oldest_at
        return None if oldest_at is None else now - oldest_at

    # -- rounds with other tables

    @property
    def joins_rounds(self) -> bool:
        """Whether the table takes part in the next round: the live reader delivers to it, and it works."""
        is_held_up = bool(self.pending.received) and self.fitter.quarantine_problem is not None
        return self.is_in_rounds and not (self.state.is_behind or self.state.is_paused or is_held_up)

    @property
    def is_settled(self) -> bool:
        """Whether the buffer holds everything that a flush could take now."""
        return not self.is_flushing and (not self.pending.received or self.pending.has_barrier)
