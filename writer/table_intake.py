"""From what a table was given to rows in its columns. Owns what is left out, what is set aside, and the order of both.

group --(the table's own marks, and those of its quarantine: leave out)--> fresh part
      --(decoded already? else sift)--> chunks for the buffer
                             +--------> rows that nothing can decode --> quarantine

What is set aside goes in the order of the log too: the table commits what lies before it, then the quarantine commits
it, then comes what lies behind it. So the marks of both together say of every row that it is in one of them, and a row
that was set aside and is read again, well by then or not, is left out like one that is in the table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import pyarrow as pa

from writer.buffer import Chunk
from writer.changes import Position, SourceId, TableName
from writer.decoding import Decoded, spans_of
from writer.errors import WriterError
from writer.metrics import WriterMetrics
from writer.quarantine.names import Refusal
from writer.quarantine.rows import Reason
from writer.rows.groups import Group
from writer.table_columns import TableColumns


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
        sifted = await self._columns.decode(group)
        first = sifted.refused[0] if sifted.refused else None
        kept = [(part, rows) for part, rows in sifted.kept if first is None or _place(part) < _place(first[0])]
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
