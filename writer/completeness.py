"""Up to where a source is committed, whichever table its changes belong to. Owns the reckoning; tables say what waits.

    shop   10 a   11 b   12 a   13 c   14 a        a has committed all of its changes, b and c have not
                 ^ complete up to 10: 11 waits for b

A source that goes to another node, or back to one that has lost its log, resumes from there (table_marks.py). Marks of
single tables do not do: a table that has nothing of the source yet has none, and would hold nothing back. So whoever
commits writes beside its own marks what is complete once its commit has landed. Epochs sort before sequences: while
something of an old epoch waits, nothing of a later one is complete.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from writer.changes import Position, SourceId, Span
from writer.quarantine.names import is_own_mark


def complete_positions(
    sources: Iterable[SourceId],
    *,
    waiting: Iterable[Mapping[SourceId, Span]],
    applied: Mapping[SourceId, Position],
) -> dict[SourceId, Position]:
    """Tell up to where sources are complete: right below the first change that waits, or all that was applied.

    `waiting` is what is not committed, of all tables and in whichever parts.
    """
    wanted = {source for source in sources if source in applied and not is_own_mark(source)}
    firsts: dict[SourceId, Position] = {}
    for spans in waiting:
        # Thousands of sources may be in hundreds of parts, at every commit.
        few, many = (wanted, spans) if len(wanted) < len(spans) else (spans, wanted)
        for source in few:
            if source in many:
                first, known = spans[source].first, firsts.get(source)
                if known is None or (first.epoch, first.sequence) < (known.epoch, known.sequence):
                    firsts[source] = first
    return {source: _before(firsts[source]) if source in firsts else applied[source] for source in wanted}


def _before(first: Position) -> Position:
    return Position(first.epoch, first.sequence - 1)
