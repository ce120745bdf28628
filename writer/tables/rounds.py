"""Commit rounds: flushes of one or more tables, prepared, committed in one request, and retried. Owns who takes part.

    a table alone         wanted --> take its buffer ------------------------------------------+
    tables of one round   wanted --> none has a flush under way --> hold the applier           +--> write files, each
                          --> all have fitted what they received --> take all buffers ---------+    table its own
                          --> release the applier                                                   --> one commit

With transactions, the applier stands where none is open (rows/runs.py). What a round takes there is whole transactions,
and readers see all of a round or nothing of it.

Failures are retried forever, by the round as a whole, because an outage of catalog or store is not one table's fault. A
table whose own files cannot be written leaves its round after the usual number of failures. If the commit is refused as
often, all tables continue alone, because the refusal does not say which table it is about. A paused table is not waited
for: the next rounds go without it. Each of these splits transactions, which is counted and logged.

Steps of a flush, and what a crash after each leaves behind. Of a round, everything is committed or nothing.

    1. take the buffer               nothing; the log has the rows
    2. create or alter the table     a table without the rows, or with an empty column
    3. write data files              files that no snapshot names (orphans)
    4. write manifest and list       likewise
    5. commit through the catalog    the rows and the marker that says so, at once
    6. trim the log                  nothing

A flush that was not committed for long writes its files again: orphan removal deletes old files that no snapshot names
(docs/maintenance.md), so they must not be committed after that.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import pyarrow as pa

from lakefeed.contract.changes import Position, SourceId, Span, TableName
from lakefeed.contract.errors import (
    CatalogUnavailable,
    ColumnsChanged,
    CommitUnknown,
    Fenced,
    RowsAlreadyCommitted,
    RowsUnfit,
    TableMissing,
    TableReplaced,
    WriterError,
)
from lakefeed.writer.commit.committer import CommitResult
from lakefeed.writer.commit.plan import Flush
from lakefeed.writer.commit.state import TableState
from lakefeed.writer.config import WriterConfig
from lakefeed.writer.files.parquet import write_files
from lakefeed.writer.rows.runs import SplitReason
from lakefeed.writer.tables.context import Attempts, Flushed, FlushRequest, TableContext
from lakefeed.writer.tables.feed_state import FeedState
from lakefeed.writer.tables.flush_policy import FlushPolicy
from lakefeed.writer.tables.pending import FlushReason
from lakefeed.writer.tables.state import PAUSED_AFTER_ATTEMPTS, Event
from lakefeed.writer.tables.table import TableWriter

logger = logging.getLogger(__name__)

# Half of the least age at which orphan removal takes a file. By the wall clock: a machine that sleeps ages too.
FILES_MAX_AGE_S = 12 * 60 * 60.0

# How long a round waits, and the applier with it, until its tables have fitted what they received: far longer than it
# takes to decode all that memory holds. A table that takes longer is left out.
SETTLE_MAX_S = 60.0

# Attempts of one commit to several tables, with the delays about half a second: if only one table is refused, the
# others should not wait for long. A commit to one table is tried more often (commit/committer.py).
SHARED_ATTEMPTS_MAX = 4


class TableFlush:
    """A flush under way of one table, from the rows that were taken to their snapshot. Owns which steps are done."""

    def __init__(self, table: TableWriter, reason: FlushReason) -> None:
        self.table = table
        self.flushing = table.start_flush(reason)
        self._context = table.context
        # With the table's state that the files were written for: the intake may load a newer one meanwhile.
        self._prepared: tuple[TableState, Flush] | None = None
        self._prepared_at = 0.0

    @property
    def is_current(self) -> bool:
        """Whether its rows are still in memory: if not, they are read again and come with a later flush."""
        return self.table.pending.flushing is self.flushing

    def _advance(self, event: Event) -> None:
        if self.is_current:
            self.table.state.advance(event)

    def _note_progress(self) -> None:
        self.flushing.note_progress(now=self._context.clock())

    async def prepare(self) -> bool:
        """Write the files, unless that is done; return whether there is something to commit.

        Cancelling leaves orphan files.

        Raises:
            RowsUnfit: the table's columns have changed: decode the rows again.
            WriterError: call again later.
        """
        if self._prepared is not None and time.time() - self._prepared_at > FILES_MAX_AGE_S:
            self.discard_files()  # if it was committed unheard, the table's marks show it
        rows = self.flushing.rows
        if rows.rows and self._prepared is None:
            try:
                self._prepared_at = time.time()
                state = await self.table.columns.agree()
                flush = await write_flush(
                    rows.tables,
                    state,
                    self._context,
                    config=self.table.columns.settings.config,
                    policy=self.table.policy,
                    spans=rows.spans,
                    log_range=(rows.log_from, rows.log_to),
                    on_file=self._note_progress,
                )
                self._prepared = state, flush
            except (TableMissing, TableReplaced):
                self.discard_files()
                raise
            self._advance(Event.FILES_WRITTEN)
        self._note_progress()
        return bool(rows.rows)

    def prepared_with(self, complete: Mapping[SourceId, Position]) -> tuple[TableState, Flush]:
        """Return what to commit, after `prepare`; `complete` has the watermarks that hold once it has landed."""
        assert self._prepared is not None
        state, flush = self._prepared
        own = {source: position for source, position in complete.items() if source in flush.spans}
        return state, replace(flush, complete=own)

    async def on_committed(self, result: CommitResult) -> Flushed:
        """Continue from a commit that succeeded."""
        assert self._prepared is not None
        files = self._prepared[1].files
        await self.table.columns.follow(result.state)
        return Flushed(
            snapshot_id=result.snapshot_id,
            rows=sum(file.record_count for file in files),
            bytes=sum(file.size_bytes for file in files),
            paths=[file.location for file in files],
            partitions=len({file.partition for file in files}),
        )

    def drop_rows_up_to(self, marks: Mapping[SourceId, Position]) -> None:
        """Drop the rows that the table turned out to have."""
        self.flushing.rows = self.flushing.rows.after(marks)
        self.discard_files()

    def discard_files(self) -> None:
        """Load the table again, and write the files for what it is then."""
        self._prepared = None
        self.table.columns.forget()
        self._advance(Event.FILES_STALE)


async def write_flush(
    tables: Sequence[pa.Table],
    state: TableState,
    context: TableContext,
    *,
    config: WriterConfig,
    policy: FlushPolicy,
    spans: Mapping[SourceId, Span],
    log_range: tuple[int, int] = (0, 0),
    on_file: Callable[[], object] = lambda: None,
) -> Flush:
    """Write rows as data files, and return what to commit. Cancelling leaves orphan files.

    Raises: RowsUnfit if they do not fit the table's columns; WriterError if not all are written.
    """
    flush_id = str(uuid.uuid4())
    try:
        written = await write_files(
            context.store,
            context.encoders,
            tables,
            state,
            config=config,
            flush_id=flush_id,
            files_for=policy.files_for,
            spans=spans,
            on_file=on_file,
        )
    except pa.ArrowInvalid:  # its own message would show a row's value
        raise RowsUnfit(f"rows do not fit the table's columns any more: table={state.name}") from None
    return Flush(
        id=flush_id,
        node=context.node,
        log_from=log_range[0],
        log_to=log_range[1],
        spans=spans,
        files=written.files,
        ledger=written.ledger,
    )


class FlushRounds:
    """Starts rounds, one after the other; those that fail continue beside the next ones."""

    def __init__(self, feed: FeedState, *, tasks: asyncio.TaskGroup) -> None:
        self.request = FlushRequest()
        self.feed = feed
        self.context = feed.context
        self._signals = feed.signals
        self._tables = feed.tables
        self._tasks = tasks
        self._running: set[asyncio.Task[None]] = set()
        # Their next round waits until their old snapshots are removed.
        self._expiring: set[TableName] = set()
        self._left_out: frozenset[str] = frozenset()

    # -- starting

    async def run(self) -> None:
        """Start a round of all tables whenever one is requested. Cancelling it leaves the rows in the log."""
        while True:
            await self.request.wait()
            await self._wait_until(
                lambda: not any(table.is_flushing or table.name in self._expiring for table in self._participants())
            )
            self.request.clear()
            if members := await self._take():
                self._start(members)

    async def run_table(self, table: TableWriter) -> None:
        """Flush a table alone whenever that is requested. Cancelling it leaves the rows in the log."""
        while True:
            await table.flush_request.wait()
            table.flush_request.clear()
            if table.is_flushing or not table.pending.buffer.rows:  # the end of that flush looks again what is due
                continue
            if table.joins_rounds:  # it did not when the flush was requested
                table.request_flush(table.flush_request.reason)
                continue
            if table.is_in_rounds:
                self.context.metrics.split_transactions.labels(SplitReason.TABLE_OUT.value).inc()
            await _Round([TableFlush(table, table.flush_request.reason)], self).run()

    def stop(self) -> None:
        """Cancel the rounds under way; what they have not committed stays in the log."""
        for task in self._running:
            task.cancel()

    def _start(self, members: Sequence[TableFlush]) -> None:
        name = f"flush-round-{members[0].table.name}-{len(members)}"
        task = self._tasks.create_task(_Round(members, self).run(), name=name)
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    def _participants(self) -> list[TableWriter]:
        """List the tables that take part in the next round, if they have rows."""
        return [table for table in self._tables.values() if table.joins_rounds]

    async def _wait_until(self, condition: Callable[[], bool]) -> None:
        while True:
            seen = self._signals.changed.count
            if condition():
                return
            await self._signals.changed.wait(seen)

    async def _take(self) -> list[TableFlush]:
        """Take all buffers at one offset of the log."""
        async with self.feed.applier.held:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(SETTLE_MAX_S):
                    await self._wait_until(lambda: all(table.is_settled for table in self._participants()))
            settled = [table for table in self._participants() if table.is_settled]
            cut_short = [table for table in settled if table.pending.received]  # a barrier holds up the rest
            reason = self.request.reason
            members = [TableFlush(table, reason) for table in settled if table.pending.buffer.rows]
        if members:
            self._note_left_out({str(member.table.name) for member in members})
            if cut_short:
                self.note_split(SplitReason.CUT_SHORT, cut_short)
        return members

    def _note_left_out(self, names: set[str]) -> None:
        """Report the tables whose rows are not in this round, once for the same tables."""
        left_out = [
            table
            for name, table in self._tables.items()
            if table.is_in_rounds and name not in names and table.pending.needed_offset is not None
        ]
        known, self._left_out = self._left_out, frozenset(str(table.name) for table in left_out)
        if self._left_out - known:
            self.note_split(SplitReason.TABLE_OUT, left_out)
        elif left_out:
            self.context.metrics.split_transactions.labels(SplitReason.TABLE_OUT.value).inc()

    # -- for the rounds under way

    def split(self, members: Sequence[TableFlush]) -> None:
        """Move tables out of their round, each into one of its own."""
        self.note_split(SplitReason.TABLE_LEFT, [member.table for member in members])
        for member in members:
            self._start([member])

    def note_split(self, why: SplitReason, tables: Sequence[TableWriter]) -> None:
        """Count and log that transactions may be split."""
        self.context.metrics.split_transactions.labels(why.value).inc()
        logger.warning("transactions_split", extra={"reason": why.value, "tables": [str(each.name) for each in tables]})

    async def expire_snapshots(self, tables: Sequence[TableWriter]) -> None:
        """Remove old snapshots; the next round of these tables waits for it."""
        names = {table.name for table in tables}
        self._expiring |= names
        try:
            await asyncio.gather(*(table.columns.expire_snapshots() for table in tables))
        finally:
            self._expiring -= names
            self._signals.changed.notify()


class _Round:
    """One round, until all of it that is left in memory is committed."""

    def __init__(self, members: Sequence[TableFlush], rounds: FlushRounds) -> None:
        self._members = list(members)
        self._rounds = rounds
        self._context = rounds.context
        self._refusals = 0
        self._attempts = Attempts()
        for member in members:
            member.table.flush_attempts = self._attempts
            member.flushing.is_shared = len(members) > 1

    async def run(self) -> None:
        """Commit all, however long it takes. Cancelling it leaves the rows in the log."""
        tables = [member.table for member in self._members]
        while self._members:
            await self._attempts.run(self._attempt)
            self._members = [member for member in self._members if member.is_current]
        # Tables that left are in rounds of their own.
        await self._rounds.expire_snapshots([table for table in tables if not table.is_flushing])

    async def _attempt(self) -> None:
        count = len(self._members)
        if failed := await self._prepare():
            await self._continue_without(failed)
        if failed or len(self._members) < count:  # the next attempt is for those that are left
            return
        try:
            if self._members:
                await self._commit()
        except Fenced:
            raise  # nothing of this service can be committed any more: it stops
        except RowsAlreadyCommitted as error:
            for member in self._members:
                if member.table.name == error.table:
                    member.drop_rows_up_to(error.marks)
        except ColumnsChanged as error:
            for member in self._members:
                if member.table.name == error.table:
                    member.discard_files()
        except Exception as error:  # noqa: BLE001 - the boundary of a task; unexpected errors are logged below
            await self._on_refused(error)

    async def _prepare(self) -> list[TableFlush]:
        """Write the files of tables that have none yet; return the tables that failed and still have their rows."""
        preparing = (member.prepare() for member in self._members)
        failed = []
        for member, outcome in zip(
            self._members, await asyncio.gather(*preparing, return_exceptions=True), strict=True
        ):
            if isinstance(outcome, Fenced) or not isinstance(outcome, Exception | bool):
                raise outcome
            if isinstance(outcome, Exception):
                _fail(member, outcome)
                failed.append(member)
            elif not outcome and member.is_current:  # another node was first: the table has all of its rows
                member.table.finish_flush(Flushed(member.table.columns.snapshot_id))
        self._members = [member for member in self._members if member.is_current]
        # Their rows have left memory: they are decoded again, and come with a later round.
        unfit = [member.table for member in failed if not member.is_current]
        if unfit and self._members:
            self._rounds.note_split(SplitReason.TABLE_LEFT, unfit)
        return [member for member in failed if member.is_current]

    async def _continue_without(self, failed: Sequence[TableFlush]) -> None:
        """Retry later; if the others are ready, without the tables that are paused."""
        leaving = [member for member in failed if member.table.state.is_paused]
        if len(failed) == len(self._members):
            leaving = []
        self._leave(leaving)
        if len(leaving) < len(failed):
            await self._delay()

    def _leave(self, leaving: Sequence[TableFlush]) -> None:
        """Continue tables alone. Rows that were evicted are not flushed here: they are read again."""
        leaving = [member for member in leaving if member.is_current]
        if leaving:
            self._members = [member for member in self._members if member not in leaving]
            self._rounds.split(leaving)

    async def _commit(self) -> None:
        started = self._context.clock()
        members = list(self._members)
        complete = self._rounds.feed.complete_with([member.flushing for member in members])
        results = await self._context.committer.commit_all(
            [member.prepared_with(complete) for member in members],
            on_retry=self._note_retry,
            attempts_max=SHARED_ATTEMPTS_MAX if len(members) > 1 else None,
        )
        self._context.metrics.commit_s.observe(self._context.clock() - started)
        pairs = zip(members, results, strict=True)
        landed = [(member, await member.on_committed(result)) for member, result in pairs if member.is_current]
        for member, flushed in landed:  # all in one step, so that the next round finds all or none of them ready
            if member.is_current:
                member.table.finish_flush(flushed)

    def _note_retry(self, reason: str) -> None:
        for member in self._members:
            member.flushing.note_retry(reason, now=self._context.clock())

    async def _on_refused(self, error: Exception) -> None:
        """Retry later; each table alone, if the commit was refused often enough, as no table is known to cause it."""
        for member in self._members:
            if isinstance(error, TableMissing | TableReplaced):
                member.discard_files()
            _fail(member, error)
        if len(self._members) > 1:
            self._refusals += not await self._is_outage(error)
            if self._refusals >= PAUSED_AFTER_ATTEMPTS:
                self._leave(list(self._members))
                return
        await self._delay()

    async def _is_outage(self, error: Exception) -> bool:
        """Return whether the catalog answers nothing at all, so that no table is the cause."""
        if isinstance(error, CatalogUnavailable | CommitUnknown):
            try:
                await self._context.committer.load(self._members[0].table.name)
            except WriterError as failure:
                return isinstance(failure, CatalogUnavailable)
        return False

    async def _delay(self) -> None:
        retry_at = max((member.table.retry.retry_at for member in self._members), default=0.0)
        await self._attempts.delay(retry_at - self._context.clock())


def _fail(member: TableFlush, error: Exception) -> None:
    reason = str(error)
    if isinstance(error, RowsUnfit):
        member.table.evict_all()
    elif not isinstance(error, WriterError):
        logger.error("table_flush_failed", extra={"table": str(member.table.name)}, exc_info=error)
        reason = f"unexpected error: {type(error).__name__}"
    member.table.fail(reason)
