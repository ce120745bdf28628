"""One table's life from decoded changes to snapshots. Owns its place in the log, its buffer, and its two tasks.

    offer --> inbox --(intake task: table_intake.py)--> buffer --take--> flush (flush task: table_flush.py) --> snapshot
      ^                                                   |
      +------ read again from the log <------ park <------+

Nobody ever waits for a table but its own tasks. What fails is tried again for ever, with growing pauses (trouble.py);
meanwhile its records stay in the log, and its rows in memory; beyond its share of that, they leave it (parking.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable, Mapping

from writer.buffer import Chunk, FlushReason
from writer.changes import SourceId, Span, TableName
from writer.decoding import Decoded, Expected, spans_of
from writer.errors import Fenced, RowsUnfit, WriterError
from writer.flush_waiters import FlushWaiters, break_promises, keep_promises
from writer.inbox import Arrival
from writer.table_context import TableContext
from writer.table_flush import CompleteWith, Flushed, TableFlush, nothing_is_known
from writer.table_health import Groups, TableHealth
from writer.table_intake import Fit, Quarantine
from writer.table_status import report_flush
from writer.transactions import Split

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
            self._context.metrics.split_transactions.labels(Split.TABLE_OUT.value).inc()
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
