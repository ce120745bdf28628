"""State of a feed that its tasks share: the tables, how far the applier has come, and the low watermark of each source.

The watermark of a source holds over all tables: every change up to it is committed, in whichever table.

    shop   10 a   11 b   12 a   13 c   14 a        table a has committed all of its changes, b and c have not
                 ^ complete up to 10: 11 waits for b

A source that moves to another node, or back to one that has lost its log, resumes there (commit/sources.py). A single
table's mark is not enough: a table without rows of the source has no mark and would not hold the watermark back. Each
commit therefore records, next to its own marks, the watermark that holds once it has landed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from lakefeed.contract.changes import Position, SourceId, Span
from lakefeed.writer.tables.context import FeedSignals, TableContext
from lakefeed.writer.tables.pending import Flushing, complete_positions
from lakefeed.writer.tables.table import TableWriter
from lakefeed.writer.wal.protocol import Log


class Applier:
    """How far the applier has come, which offers each table its changes in log order."""

    def __init__(self, offset: int, *, now: float) -> None:
        # Everything below was offered to its table.
        self.offset = offset
        # Everything below was offered, or is held back because a transaction is open.
        self.met_offset = offset
        self.moved_at = now
        # Holding it keeps the applier still; it is notified whenever the applier has moved.
        self.held = asyncio.Condition()


class FeedState:
    """The state of one feed."""

    def __init__(self, log: Log, context: TableContext, *, marks_at_start: Mapping[SourceId, Position]) -> None:
        self.log = log
        self.context = context
        self.tables: dict[str, TableWriter] = {}
        self.applier = Applier(log.first_offset, now=context.clock())
        self.signals = FeedSignals()
        self._marks_at_start = marks_at_start
        self._delivered: dict[SourceId, Position] = {}

    def note_delivered(self, spans: Mapping[SourceId, Span]) -> None:
        """Record changes that their tables were offered."""
        for source, span in spans.items():
            self._delivered[source] = max(span.last, self._delivered.get(source, span.last))

    def committed(self, source: SourceId) -> Position | None:
        """Return how far a source is committed, or None if nothing is known of it."""
        waiting = (spans for table in self.tables.values() for spans in table.pending.uncommitted_spans())
        return complete_positions([source], waiting=waiting, applied=self._delivered).get(
            source, self._marks_at_start.get(source)
        )

    def complete_with(self, flushes: Sequence[Flushing]) -> dict[SourceId, Position]:
        """Return, for the sources in these flushes, the watermark that holds once they are committed."""
        return complete_positions(
            {source for flush in flushes for source in flush.rows.spans},
            waiting=(
                spans for table in self.tables.values() for spans in table.pending.uncommitted_spans(landing=flushes)
            ),
            applied=self._delivered,
        )
