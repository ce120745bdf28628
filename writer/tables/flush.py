"""One flush of one table: agree on columns, write files, commit. Owns which steps are done, so a retry does the rest.

Steps, and what a crash after each leaves behind:

    1. take the buffer               nothing; the log has the rows
    2. create or alter the table     a table without the rows, or with an empty column
    3. write data files              files that no snapshot names (orphans)
    4. write manifest and list       likewise
    5. commit through the catalog    the rows and the marker that says so, at once
    6. trim the log                  nothing

A flush that was not committed for long writes its files again: orphan removal deletes old files that no snapshot names
(docs/maintenance.md), so they must not be committed after that. When to retry is decided in rounds.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import pyarrow as pa

from lakefeed.contract.changes import Position, SourceId, Span
from lakefeed.contract.errors import RowsUnfit, TableMissing, TableReplaced, WriterError
from lakefeed.writer.commit.committer import CommitResult
from lakefeed.writer.commit.plan import Flush
from lakefeed.writer.commit.state import TableState
from lakefeed.writer.config import WriterConfig
from lakefeed.writer.files.write import write_files
from lakefeed.writer.tables.columns import TableColumns
from lakefeed.writer.tables.context import TableContext
from lakefeed.writer.tables.flush_policy import FlushPolicy, FlushRecord
from lakefeed.writer.tables.pending import Flushing, FlushReason, Pending, Waiter
from lakefeed.writer.tables.state import Event, Lifecycle

# Half of the least age at which orphan removal takes a file. By the wall clock: a machine that sleeps ages too.
FILES_MAX_AGE_S = 12 * 60 * 60.0

# A flush without progress for this long, and longer the more it has to write, is stalled. A store that is slower than
# this, in bytes of Arrow, cannot be used. Requests that hang mostly fail by their own timeouts before this.
STALLED_AFTER_S = 30.0
SLOWEST_BYTES_PER_S = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Flushed:
    """What a flush committed; for a table with nothing to flush, its current snapshot and no rows.

    `problem` is why the remaining rows are not committed, if there are any.
    """

    snapshot_id: int | None
    rows: int = 0
    bytes: int = 0
    paths: Sequence[str] = ()
    problem: str | None = None

    @property
    def files(self) -> int:
        """The number of data files."""
        return len(self.paths)

    def joined(self, later: Flushed) -> Flushed:
        """Add what a later flush of the same table committed."""
        return Flushed(later.snapshot_id, self.rows + later.rows, self.bytes + later.bytes, (*self.paths, *later.paths))

    def refused(self, problem: str | None) -> Flushed:
        """Return the same with the reason why the remaining rows are not committed."""
        return replace(self, problem=problem or "not committed yet")


class Attempts:
    """The attempts of a task: others interrupt the one under way, or end the delay before the next."""

    def __init__(self) -> None:
        self._timeout: asyncio.Timeout | None = None
        self._retry_now = asyncio.Event()

    async def run(self, attempt: Callable[[], Awaitable[None]]) -> None:
        """Make one attempt, delays of its own included; returns when it has ended or was interrupted."""
        with contextlib.suppress(TimeoutError):  # only `interrupt` sets a deadline
            async with asyncio.timeout(None) as self._timeout:
                await attempt()
        self._timeout = None

    def interrupt(self) -> None:
        """End the attempt under way."""
        if self._timeout is not None:
            self._timeout.reschedule(asyncio.get_running_loop().time())
            self._timeout = None

    async def delay(self, seconds: float) -> None:
        """Wait before the next attempt."""
        self._retry_now.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._retry_now.wait()

    def retry_now(self) -> None:
        """End the delay."""
        self._retry_now.set()


class TableFlush:
    """A flush under way, from the rows that were taken to their snapshot."""

    def __init__(
        self,
        flushing: Flushing,
        context: TableContext,
        *,
        state: Lifecycle,
        pending: Pending,
        columns: TableColumns,
        policy: FlushPolicy,
        reason: FlushReason,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self.flushing = flushing
        self.reason = reason
        # Of the task that runs it.
        self.attempts = Attempts()
        # Whether other tables' flushes are committed with it.
        self.is_shared = False
        # Why the commit under way is being retried.
        self.retry_reason: str | None = None
        self._context = context
        self._state = state
        self._pending = pending
        self._columns = columns
        self._policy = policy
        self._wall_clock = wall_clock
        # When a file was last stored, or the commit began.
        self._progress_at = flushing.started_at
        self._retrying_since: float | None = None
        # With the table's state that the files were written for: the intake may load a newer one meanwhile.
        self._prepared: tuple[TableState, Flush] | None = None
        self._prepared_at = 0.0

    @property
    def is_current(self) -> bool:
        """Whether its rows are still in memory: if not, they are read again and come with a later flush."""
        return self._pending.flushing is self.flushing

    def _advance(self, event: Event) -> None:
        if self.is_current:
            self._state.advance(event)

    async def prepare(self) -> bool:
        """Write the files, unless that is done; return whether there is something to commit.

        Cancelling leaves orphan files.

        Raises:
            RowsUnfit: the table's columns have changed: decode the rows again.
            WriterError: call again later.
        """
        if self._prepared is not None and self._wall_clock() - self._prepared_at > FILES_MAX_AGE_S:
            self.discard_files()  # if it was committed unheard, the table's marks show it
        if self.flushing.rows.rows and self._prepared is None:
            try:
                self._prepared_at = self._wall_clock()
                state = await self._columns.agree()
                rows = self.flushing.rows
                flush = await write_flush(
                    rows.tables,
                    state,
                    self._context,
                    config=self._columns.settings.config,
                    policy=self._policy,
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
        return bool(self.flushing.rows.rows)

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
        await self._columns.follow(result.state)
        return Flushed(
            snapshot_id=result.snapshot_id,
            rows=sum(file.record_count for file in files),
            bytes=sum(file.size_bytes for file in files),
            paths=[file.location for file in files],
        )

    def drop_rows_up_to(self, marks: Mapping[SourceId, Position]) -> None:
        """Drop the rows that the table turned out to have."""
        self.flushing.rows = self.flushing.rows.after(marks)
        self.discard_files()

    def discard_files(self) -> None:
        """Load the table again, and write the files for what it is then."""
        self._prepared = None
        self._columns.forget()
        self._advance(Event.FILES_STALE)

    def record(self, flushed: Flushed, *, now: float) -> FlushRecord:
        """Return what the flush policy learns from it, once it is committed."""
        return FlushRecord(
            reason=self.reason,
            finished_at=now,
            seconds=now - self.flushing.started_at,
            rows=flushed.rows,
            arrow_bytes=self.flushing.rows.bytes,
            file_bytes=flushed.bytes,
            files=flushed.files,
            partitions=len({file.partition for file in self._prepared[1].files}) if self._prepared else 0,
        )

    # -- progress

    def note_retry(self, reason: str) -> None:
        """Record why the commit is being retried."""
        self.retry_reason = reason
        if self._retrying_since is None:
            self._retrying_since = self._context.clock()

    def retrying_s(self, *, now: float) -> float:
        """Return for how long the commit has been retried."""
        return 0.0 if self._retrying_since is None else now - self._retrying_since

    def is_stalled(self, *, now: float) -> bool:
        """Return whether it has made no progress for longer than a large flush to a slow store explains."""
        return now - self._progress_at > STALLED_AFTER_S + self.flushing.rows.bytes / SLOWEST_BYTES_PER_S

    def _note_progress(self) -> None:
        self._progress_at = self._context.clock()
        self._retrying_since = None


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


@dataclass(slots=True)
class _FlushWaiter:
    """A caller that waits, and what was committed meanwhile."""

    until: int
    future: asyncio.Future[Flushed]
    flushed: Flushed


@dataclass(slots=True)
class FlushWaiters:
    """The callers that wait until a table is committed up to an offset."""

    _waiters: list[_FlushWaiter] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self._waiters)

    def add(self, until: int, *, snapshot_id: int | None) -> asyncio.Future[Flushed]:
        """Return a future that is done when everything below an offset is committed."""
        waiter = _FlushWaiter(until, asyncio.get_running_loop().create_future(), Flushed(snapshot_id))
        self._waiters.append(waiter)
        return waiter.future

    def note(self, flushed: Flushed) -> None:
        """Count a flush for all callers."""
        for waiter in self._waiters:
            waiter.flushed = waiter.flushed.joined(flushed)

    def answer(self, *, needed_offset: int | None) -> None:
        """Answer the callers for whom everything is committed."""
        for waiter in self._waiters:
            if (needed_offset is None or needed_offset >= waiter.until) and not waiter.future.done():
                waiter.future.set_result(waiter.flushed)
        self._waiters = [waiter for waiter in self._waiters if not waiter.future.done()]

    def refuse(self, problem: str | None) -> None:
        """Answer all callers with the problem."""
        for waiter in self._waiters:
            if not waiter.future.done():
                waiter.future.set_result(waiter.flushed.refused(problem))
        self._waiters = []


def resolve_waiters(waiters: Iterable[Waiter]) -> None:
    """Answer the callers whose rows are committed."""
    for waiter in waiters:
        if not waiter.done():
            waiter.set_result(None)


def fail_waiters(waiters: Iterable[Waiter]) -> None:
    """Raise in the callers whose rows have left memory."""
    for waiter in waiters:
        if not waiter.done():
            waiter.set_exception(WriterError("rows have left memory before they were committed"))
