"""One flush of one table: agree on columns, write files, commit. Owns what is done of it: a retry does the rest.

Steps, and what a crash after each leaves behind:

    1. take the buffer               nothing; the log has the rows
    2. create or alter the table     a table without the rows, or with an empty column
    3. write data files              files that no snapshot names (orphans)
    4. write manifest and list       likewise
    5. commit through the catalog    the rows and the marker that says so, at once
    6. trim the log                  nothing

When to try again, and what others are told meanwhile, is table_writer's.

A flush that could not be committed for long writes its files again: those that no snapshot names are taken for orphans
one day (docs/maintenance.md), and must not be committed after that.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeAlias

import pyarrow as pa

from lakefeed.contract.changes import Position, SourceId
from lakefeed.contract.errors import ColumnsChanged, RowsAlreadyCommitted, RowsUnfit, TableMissing, TableReplaced
from lakefeed.writer.commit.committer import CommitResult
from lakefeed.writer.commit.plan import Flush
from lakefeed.writer.commit.state import TableState
from lakefeed.writer.files.write import write_files
from lakefeed.writer.tables.columns import TableColumns, TableContext
from lakefeed.writer.tables.flush_policy import FlushControl, FlushRecord
from lakefeed.writer.tables.pending import FlushReason, Gathered

# Half of the least age at which orphan removal takes a file. By the wall clock: a machine that sleeps ages too.
FILES_MAX_AGE_S = 12 * 60 * 60.0

# How long a flush may show no progress: that long, and longer the more there is to write. Slower than this, in bytes of
# Arrow, no store can be used. Requests that hang end by their own limits and make the flush fail, mostly before this.
STILL_MAX_S = 30.0
SLOWEST_BYTES_PER_S = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Flushed:
    """What a flush committed; of a table with nothing to flush, its current snapshot and no rows.

    `problem` tells why the rest is not committed, if there is a rest.
    """

    snapshot_id: int | None
    rows: int = 0
    bytes: int = 0
    paths: Sequence[str] = ()
    problem: str | None = None

    @property
    def files(self) -> int:
        """Count the data files."""
        return len(self.paths)

    def joined(self, later: Flushed) -> Flushed:
        """Add what a later flush of the same table committed."""
        return Flushed(later.snapshot_id, self.rows + later.rows, self.bytes + later.bytes, (*self.paths, *later.paths))

    def refused(self, problem: str | None) -> Flushed:
        """Tell that the rest is not committed."""
        return replace(self, problem=problem or "not committed yet")


class Carrier(Protocol):
    """Whoever brings flushes of several tables to their end together."""

    def nudge(self) -> None:
        """Try again at once."""

    def interrupt(self) -> None:
        """Look again which flushes there are: the rows of one have left memory."""


# Tells of the sources in some flushes up to where they are in all of their tables, once these have landed.
CompleteWith: TypeAlias = "Callable[[Sequence[TableFlush]], Mapping[SourceId, Position]]"


def nothing_is_known(_: Sequence[TableFlush]) -> Mapping[SourceId, Position]:
    """Stand for whoever knows all tables, where nobody does."""
    return {}


class TableFlush:
    """A flush under way, from the rows that were taken to their snapshot."""

    def __init__(
        self,
        gathered: Gathered,
        columns: TableColumns,
        context: TableContext,
        *,
        reason: FlushReason,
        control: FlushControl,
        complete_with: CompleteWith = nothing_is_known,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self.gathered = gathered
        self.reason = reason
        self.started_at = context.clock()
        # When it last got on by a step: a file is stored, the commit begins.
        self._moved_at = self.started_at
        self._hindered_at: float | None = None
        self.partition_count = 0
        # Why the commit is being tried again, before anybody gives it up.
        self.hindrance: str | None = None
        # Who brings it to its end, if that is not the table itself.
        self.carrier: Carrier | None = None
        self._columns = columns
        self._context = context
        self._control = control
        self._complete_with = complete_with
        self._wall_clock = wall_clock
        # With the table that the files were written for: what it is by now may be looked up meanwhile, by the intake.
        self._prepared: tuple[TableState, Flush] | None = None
        self._prepared_at = 0.0

    async def attempt(self) -> Flushed:
        """Do what is still to be done. Cancelling leaves it committed or not; the table's marks tell.

        Raises:
            RowsUnfit: the table's columns are others now: decode the rows again.
            WriterError: not committed, as far as we know; call again later.
        """
        while await self.prepare():
            started = self._context.clock()
            self._note_progress()
            try:
                prepared = self.prepared_with(self._complete_with([self]))
                result = await self._context.committer.commit(*prepared, on_retry=self.note_hindrance)
            except RowsAlreadyCommitted as error:
                self.leave_out(error.marks)
            except ColumnsChanged:
                self.start_over()
            except (TableMissing, TableReplaced):
                self.start_over()
                raise
            else:
                self._context.metrics.commit_s.observe(self._context.clock() - started)
                return await self.land(result)
        return Flushed(self._columns.snapshot_id)

    async def prepare(self) -> bool:
        """Write the files, unless that is done; tell whether there is something to commit.

        Raises: as `attempt`.
        """
        if self._prepared is not None and self._wall_clock() - self._prepared_at > FILES_MAX_AGE_S:
            self.start_over()  # should it have been committed unheard, the table's marks tell
        if self.gathered.rows and self._prepared is None:
            try:
                self._prepared_at = self._wall_clock()
                state = await self._columns.agree()
                self._prepared = state, await self._write_files(state)
            except (TableMissing, TableReplaced):
                self.start_over()
                raise
            except pa.ArrowInvalid:
                self.start_over()
                # What Arrow says of it would show a row's value.
                raise RowsUnfit("buffered rows do not fit the table's columns any more") from None
        return bool(self.gathered.rows)

    def prepared_with(self, complete: Mapping[SourceId, Position]) -> tuple[TableState, Flush]:
        """Give what to commit, after `prepare`; `complete` is up to where sources are in all tables by then."""
        assert self._prepared is not None
        state, flush = self._prepared
        own = {source: position for source, position in complete.items() if source in flush.spans}
        return state, replace(flush, complete=own)

    async def land(self, result: CommitResult) -> Flushed:
        """Go on from a commit that succeeded."""
        assert self._prepared is not None
        files = self._prepared[1].files
        await self._columns.follow(result.state)
        return Flushed(
            snapshot_id=result.snapshot_id,
            rows=sum(file.record_count for file in files),
            bytes=sum(file.size_bytes for file in files),
            paths=[file.location for file in files],
        )

    def leave_out(self, marks: Mapping[SourceId, Position]) -> None:
        """Drop the rows that the table turned out to have."""
        self.gathered = self.gathered.after(marks)
        self.start_over()

    def start_over(self) -> None:
        """Look at the table anew, and write the files again for what it is now."""
        self._prepared = None
        self._columns.forget()

    def record(self, flushed: Flushed, *, now: float) -> FlushRecord:
        """Describe the flush for flush_control, once it is committed."""
        return FlushRecord(
            reason=self.reason,
            finished_at=now,
            seconds=now - self.started_at,
            rows=flushed.rows,
            arrow_bytes=self.gathered.bytes,
            file_bytes=flushed.bytes,
            files=flushed.files,
            partitions=self.partition_count,
        )

    def note_hindrance(self, reason: str) -> None:
        """Tell why the commit is being tried again."""
        self.hindrance = reason
        if self._hindered_at is None:
            self._hindered_at = self._context.clock()

    def hindered_s(self, *, now: float) -> float:
        """Tell for how long the commit has been tried again and again."""
        return 0.0 if self._hindered_at is None else now - self._hindered_at

    def stands_still(self, *, now: float) -> bool:
        """Tell whether nothing has come of it for so long that nothing may ever: not because it is large, or slow."""
        return now - self._moved_at > STILL_MAX_S + self.gathered.bytes / SLOWEST_BYTES_PER_S

    def _note_progress(self) -> None:
        self._moved_at = self._context.clock()
        self._hindered_at = None

    async def _write_files(self, state: TableState) -> Flush:
        gathered = self.gathered
        flush_id = str(uuid.uuid4())
        written = await write_files(
            gathered.tables,
            state,
            self._context,
            config=self._columns.settings.config,
            flush_id=flush_id,
            files_for=self._control.files_for,
            spans=gathered.spans,
            on_file=self._note_progress,
        )
        self.partition_count = len({file.partition for file in written.files})
        return Flush(
            id=flush_id,
            node=self._context.node,
            log_from=gathered.log_from,
            log_to=gathered.log_to,
            spans=gathered.spans,
            files=written.files,
            ledger=written.ledger,
        )
