"""Low watermark of a source over all tables: every change up to it is committed, in whichever table. Pure.

    shop   10 a   11 b   12 a   13 c   14 a        table a has committed all of its changes, b and c have not
                 ^ complete up to 10: 11 waits for b

A source that moves to another node, or back to one that has lost its log, resumes there (commit/sources.py). A single
table's mark is not enough: a table without rows of the source has no mark and would not hold the watermark back. Each
commit therefore records, next to its own marks, the watermark that holds once it has landed. Epochs sort before
sequences: while something of an old epoch is uncommitted, nothing of a later one is complete.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from lakefeed.contract.changes import Position, SourceId, Span
from lakefeed.contract.properties import is_own_mark
from lakefeed.writer.tables.pending import Flushing, Pending


class SourceWatermarks:
    """How far each source was delivered to its tables, and how far it is committed in all of them."""

    def __init__(self, *, marks_at_start: Mapping[SourceId, Position]) -> None:
        self._marks_at_start = marks_at_start
        self._delivered: dict[SourceId, Position] = {}
        self._tables: list[Pending] = []

    def add_table(self, pending: Pending) -> None:
        """Add a table whose uncommitted rows hold the watermarks back."""
        self._tables.append(pending)

    def note_delivered(self, spans: Mapping[SourceId, Span]) -> None:
        """Record changes that their tables were offered."""
        for source, span in spans.items():
            self._delivered[source] = max(span.last, self._delivered.get(source, span.last))

    def committed(self, source: SourceId) -> Position | None:
        """Return how far a source is committed, or None if nothing is known of it."""
        firsts = [first for table in self._tables if (first := table.first_uncommitted(source)) is not None]
        if firsts:
            return _before(min(firsts))
        return self._delivered.get(source) or self._marks_at_start.get(source)

    def complete_with(self, flushes: Sequence[Flushing]) -> dict[SourceId, Position]:
        """Return, for the sources in these flushes, the watermark that holds once they are committed."""
        return complete_positions(
            {source for flush in flushes for source in flush.rows.spans},
            waiting=(spans for table in self._tables for spans in table.uncommitted_spans(landing=flushes)),
            applied=self._delivered,
        )


def complete_positions(
    sources: Iterable[SourceId],
    *,
    waiting: Iterable[Mapping[SourceId, Span]],
    applied: Mapping[SourceId, Position],
) -> dict[SourceId, Position]:
    """Return up to where sources are complete: right below the first change that waits, or all that was delivered.

    `waiting` is everything uncommitted, of all tables and in any parts.
    """
    wanted = {source for source in sources if source in applied and not is_own_mark(source)}
    firsts: dict[SourceId, Position] = {}
    for spans in waiting:
        # Thousands of sources may be in hundreds of parts, at every commit: walk the smaller side.
        few: Collection[SourceId] = wanted if len(wanted) < len(spans) else spans
        many: Collection[SourceId] = spans if few is wanted else wanted
        for source in few:
            if source in many:
                first, known = spans[source].first, firsts.get(source)
                if known is None or (first.epoch, first.sequence) < (known.epoch, known.sequence):
                    firsts[source] = first
    return {source: _before(firsts[source]) if source in firsts else applied[source] for source in wanted}


def _before(first: Position) -> Position:
    return Position(first.epoch, first.sequence - 1)
