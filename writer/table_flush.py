"""One flush of one table: agree on columns, write files, commit. Owns what is done of it: a retry does the rest.

Steps, and what a crash after each leaves behind:

    1. take the buffer               nothing; the log has the rows
    2. create or alter the table     a table without the rows, or with an empty column
    3. write data files              files that no snapshot names (orphans)
    4. write manifest and list       likewise
    5. commit through the catalog    the rows and the marker that says so, at once
    6. trim the log                  nothing

When to try again, and what others are told meanwhile, is table_writer's.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pyarrow as pa

from writer.buffer import FlushReason, Gathered
from writer.commit_plan import Flush
from writer.errors import RowsAlreadyCommitted, RowsUnfit, TableMissing, TableReplaced
from writer.file_writing import write_files
from writer.flush_control import FlushControl, FlushRecord
from writer.iceberg.table_state import TableState
from writer.table_columns import TableColumns
from writer.table_context import TableContext


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
    ) -> None:
        self.gathered = gathered
        self.reason = reason
        self.started_at = context.clock()
        self.partition_count = 0
        self._columns = columns
        self._context = context
        self._control = control
        self._prepared: Flush | None = None

    async def attempt(self) -> Flushed:
        """Do what is still to be done. Cancelling leaves it committed or not; the table's marks tell.

        Raises:
            RowsUnfit: the table's columns are others now: decode the rows again.
            WriterError: not committed, as far as we know; call again later.
        """
        while self.gathered.rows:
            try:
                return await self._commit()
            except RowsAlreadyCommitted as error:
                self.gathered = self.gathered.after(error.marks)
                self._start_over()
            except (TableMissing, TableReplaced):
                self._start_over()
                raise
            except pa.ArrowInvalid:
                self._start_over()
                # What Arrow says of it would show a row's value.
                raise RowsUnfit("buffered rows do not fit the table's columns any more") from None
        return Flushed(self._columns.snapshot_id)

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

    def _start_over(self) -> None:
        self._prepared = None
        self._columns.forget()

    async def _commit(self) -> Flushed:
        if self._prepared is None:
            state = await self._columns.agree()
            self._prepared = await self._write_files(state)
        assert self._columns.state is not None
        flush = self._prepared
        started = self._context.clock()
        result = await self._context.committer.commit(self._columns.state, flush)
        self._context.metrics.commit_s.observe(self._context.clock() - started)
        await self._columns.follow(result.state)
        return Flushed(
            snapshot_id=result.snapshot_id,
            rows=sum(file.record_count for file in flush.files),
            bytes=sum(file.size_bytes for file in flush.files),
            paths=[file.location for file in flush.files],
        )

    async def _write_files(self, state: TableState) -> Flush:
        gathered = self.gathered
        flush_id = str(uuid.uuid4())
        files = await write_files(
            gathered.tables,
            state,
            self._context,
            config=self._columns.settings.config,
            flush_id=flush_id,
            files_for=self._control.files_for,
        )
        self.partition_count = len({file.partition for file in files})
        return Flush(
            id=flush_id,
            node=self._context.node,
            log_from=gathered.log_from,
            log_to=gathered.log_to,
            spans=gathered.spans,
            files=files,
        )
