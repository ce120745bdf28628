"""What was refused of each source and has not come again. Owns the gaps and the rule that nothing passes over one.

A gap is a refused batch: the span of its new changes, `first` to `last`, in one epoch. While the mark is below `last`,
an offer has to begin at or below the gap's *expected* sequence:

    every number of the span is a change      the first one above the mark; so the batch may return in other cuts
    numbers are left out                      `first`: which number follows the mark is not known here, so the return
                                              has to begin where the refused batch did; what is above the mark is taken

A gap is closed once the mark has reached `last`, and forgotten when its source connects anew: it then knows where to
resume. Room is bounded in all and per source. Where a source has too many, its last two become one: more has to come
again at once than was refused, but still nothing is passed over. A source that finds no room at all is told to its
connection (intake.py), which takes nothing more until the source connects.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ingest.offers import Offer
from writer.changes import Position, SourceId

# Below every sequence, so that a new source's first change is above its mark.
BEFORE_ALL = -1

# Of one source: more than a connection has in flight.
GAPS_MAX_PER_SOURCE = 1024

# Of all sources: some MiB, and far more than there are connections.
GAPS_MAX = 65_536


@dataclass(frozen=True, slots=True, order=True)
class Gap:
    """The changes of a refused batch; `is_dense` tells that every number from first to last is one of them."""

    epoch: int
    first: int
    last: int
    is_dense: bool

    def expected(self, after_sequence: int) -> int:
        """Tell up to where an offer may begin without passing over a change."""
        return max(self.first, after_sequence + 1) if self.is_dense else self.first

    def joined(self, later: Gap) -> Gap:
        """Reach over a later gap of the same epoch."""
        touches = later.first <= self.last + 1
        return Gap(self.epoch, self.first, max(self.last, later.last), self.is_dense and later.is_dense and touches)


@dataclass(slots=True)
class Gaps:
    """The open gaps of all sources, each source's in order."""

    max_in_all: int = GAPS_MAX
    max_per_source: int = GAPS_MAX_PER_SOURCE
    _count: int = 0
    _open: dict[SourceId, list[Gap]] = field(default_factory=dict)

    def holds(self, source: SourceId) -> bool:
        """Tell whether a source has open gaps."""
        return source in self._open

    def first_passed(self, offer: Offer, after_sequence: int) -> Gap | None:
        """Find the first gap that an offer would pass over. A source that started over is not held by its past."""
        open_ones = (
            gap for gap in self._open.get(offer.source, ()) if gap.epoch == offer.epoch and gap.last > after_sequence
        )
        return next((gap for gap in open_ones if offer.first_sequence > gap.expected(after_sequence)), None)

    def open(self, offer: Offer, after_sequence: int) -> bool:
        """Remember what is new of a refused offer; false if there is no room for another source."""
        new = offer.first_after(after_sequence)
        if new is None:
            return True
        known = self._open.get(offer.source, [])
        if not known and self._count >= self.max_in_all:
            return False
        is_dense = offer.last_sequence - new + 1 == offer.changes_after(after_sequence)
        self._keep(offer.source, sorted({*known, Gap(offer.epoch, new, offer.last_sequence, is_dense)}))
        return True

    def close(self, source: SourceId, mark: Position) -> None:
        """Forget the gaps that a source's mark has passed."""
        if source in self._open:
            self._keep(source, [gap for gap in self._open[source] if Position(gap.epoch, gap.last) > mark])

    def forget(self, source: SourceId) -> bool:
        """Forget all gaps of a source; tells whether there were any."""
        was_held = source in self._open
        self._keep(source, [])
        return was_held

    def _keep(self, source: SourceId, gaps: list[Gap]) -> None:
        self._count -= len(self._open.pop(source, ()))
        room = max(1, min(self.max_per_source, self.max_in_all - self._count))
        while len(gaps) > room:
            gaps = _with_last_two_joined(gaps)
        if gaps:
            self._open[source] = gaps
            self._count += len(gaps)


def _with_last_two_joined(gaps: list[Gap]) -> list[Gap]:
    """Make room for one more; of two epochs the earlier one is over, and holds nothing any more."""
    *others, earlier, later = gaps
    return [*others, earlier.joined(later) if earlier.epoch == later.epoch else later]
