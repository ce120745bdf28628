"""Changes fitted into a table's columns. Owns which rows are left out, and which go to quarantine in which order.

    group --(the table's own marks, and those of its quarantine)--> rows that are in neither
          --(decoded already? else bisect)------------------------> chunks for the buffer
                                           +----------------------> rows that cannot be decoded --> quarantine

Quarantined rows keep the order of the log: the table commits what lies before them, then the quarantine commits them,
then the table continues behind them. The marks of both together therefore tell of every row that it is in one of them.
A row that was quarantined and is read again is left out like one that is in the table, even if it could be decoded now.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import pyarrow as pa

from lakefeed.contract.changes import Position, SourceId, TableName
from lakefeed.contract.errors import WriterError
from lakefeed.contract.properties import Reason, Refusal
from lakefeed.writer.metrics import WriterMetrics
from lakefeed.writer.rows.groups import Group
from lakefeed.writer.rows.runs import Decoded
from lakefeed.writer.tables.columns import TableColumns
from lakefeed.writer.tables.pending import Chunk


class Quarantine(Protocol):
    """Where rows go that a table cannot take (quarantine.py)."""

    async def put(self, group: Group, *, table: TableName, reason: Reason) -> None:
        """Write whole changes; returns once they are committed there."""

    async def quarantined_marks(self, table: TableName) -> Mapping[SourceId, Position]:
        """Return up to where a table's changes are in the table or in quarantine."""

    def problem_of(self, table: TableName) -> str | None:
        """Return why the table's quarantine cannot be written, or None."""


@dataclass(frozen=True, slots=True)
class Fit:
    """Chunks for the buffer, and the next changes, which cannot be decoded; what follows is fitted after them."""

    chunks: list[Chunk]
    refused: tuple[Group, Reason] | None = None


class RowFitter:
    """Fits one table's changes into its columns. The fitter of a quarantine table has no quarantine itself."""

    def __init__(self, columns: TableColumns, quarantine: Quarantine | None, metrics: WriterMetrics) -> None:
        self._columns = columns
        self._quarantine = quarantine
        self._metrics = metrics
        self._quarantined: Mapping[SourceId, Position] = {}
        # By this process, for /status.
        self.quarantined_rows = 0

    async def open(self) -> None:
        """Load the marks of the table and of its quarantine.

        Raises: WriterError, after which to retry.
        """
        if self._quarantine is not None:
            self._quarantined = await self._quarantine.quarantined_marks(self._columns.name)
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
        kept = [(part, rows) for part, rows in fitted.kept if first is None or _start(part) < _start(first[0])]
        return Fit([_chunk(part, rows) for part, rows in kept], first)

    async def drain(self, decoded: Decoded, *, problem: str | None) -> None:
        """Write changes to quarantine that fit the table, because the table cannot be written."""
        group = self._fresh_part(decoded.group)
        if len(group):
            await self.quarantine(group, Reason(Refusal.LOG_SHARE, f"table stood still for too long: {problem}"))

    async def quarantine(self, group: Group, reason: Reason) -> None:
        """Write changes to quarantine. Everything before them in the log is committed; everything behind them waits."""
        if self._quarantine is None:
            raise WriterError(f"quarantine cannot take its own rows: rows={len(group)} reason={reason.text}")
        await self._quarantine.put(group, table=self._columns.name, reason=reason)
        self.quarantined_rows += len(group)
        self._quarantined = {**self._quarantined, **{source: span.last for source, span in group.spans().items()}}

    @property
    def quarantine_problem(self) -> str | None:
        """Why the table's quarantine cannot be written, or None."""
        return self._quarantine.problem_of(self._columns.name) if self._quarantine else None

    def _fresh_part(self, group: Group) -> Group:
        fresh = group.after(self._columns.marks)
        if self._quarantined:
            fresh = fresh.after(self._quarantined)
        if len(fresh) < len(group):
            self._metrics.duplicate_changes.labels(str(self._columns.name)).inc(len(group) - len(fresh))
        return fresh


def _start(group: Group) -> tuple[int, int]:
    """Return where a part of a group begins, in log order."""
    return group.first_offset, group.sequence_at(0)


def _chunk(group: Group, rows: pa.Table) -> Chunk:
    return Chunk(rows=rows, log_from=group.first_offset, log_to=group.last_offset + 1, spans=group.spans())
