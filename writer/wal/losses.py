"""Which changes of which sources are missing where the log has a gap. Owns the comparison, and no bytes.

Every frame says up to where its source had come before it, and every segment begins with how far all sources had come.
So the first word of a source behind a gap tells exactly what of it is missing:

    shop-1 up to 40 | gap | frame of shop-1, after 40     nothing is
    shop-1 up to 40 | gap | frame of shop-1, after 55     41 to 55
    shop-1 up to 40 | gap | segment, shop-1 up to 55      41 to 55
    shop-1 up to 40 | gap | end of the log                unsettled: whatever came after 40, if anything
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from writer.changes import Position, SourceId
from writer.frames import Frame

# Where a source is before its first change; in every epoch, its first frame comes after this sequence.
_BEFORE_ALL = Position(0, -1)


@dataclass(frozen=True, slots=True)
class Gap:
    """Numbers that no record has: damaged now, or missing since an earlier repair.

    It is empty where the first header of the log is lost: how many records before the first good one nobody knows.
    """

    offset: int
    next_offset: int
    repaired: bool


@dataclass(frozen=True, slots=True)
class Loss:
    """Changes of a source that are missing: those above `after_sequence`, up to `last_sequence`.

    They are not certain to be where nobody knows how far the source had come before the gap, because the head that told
    it is lost; nor where it then began a new epoch. `last_sequence` is then None, since nobody knows where the old one
    ended, and whether there were others between the two. `gaps` are the ones that they may have been in.
    """

    source: SourceId
    epoch: int
    after_sequence: int
    last_sequence: int | None
    is_certain: bool
    gaps: tuple[Gap, ...]


@dataclass(slots=True)
class LossFinder:
    """Follows the log in its order. `marks` is how far every source has come, by all that could be read."""

    marks: dict[SourceId, Position] = field(default_factory=dict)
    gaps: list[Gap] = field(default_factory=list)
    losses: list[Loss] = field(default_factory=list)
    _gaps_seen: dict[SourceId, int] = field(default_factory=dict)
    _gaps_settled: int = 0
    _knows_all: bool = False

    def take_head(self, marks: Mapping[SourceId, Position]) -> None:
        """Take the marks of all sources, as a segment begins with them."""
        for source, position in marks.items():
            self._take(source, position, position)
        self._gaps_settled = len(self.gaps)
        self._knows_all = True

    def take_frame(self, frame: Frame) -> None:
        """Take the next frame."""
        before = Position(frame.epoch, frame.after_sequence)
        self._take(frame.source, before, Position(frame.epoch, frame.last_sequence))

    def take_gap(self, gap: Gap) -> None:
        """Take a gap that stands where the next frame was due."""
        self.gaps.append(gap)

    def unsettled(self) -> dict[SourceId, Position]:
        """Tell which known sources were not heard of again since a gap, with how far they had come before it."""
        return {source: mark for source, mark in self.marks.items() if self._gaps_unheard(source)}

    def unsettled_gaps(self) -> tuple[Gap, ...]:
        """Tell in which gaps there may have been changes of sources that nothing else tells of."""
        return tuple(self.gaps[self._gaps_settled :])

    def _take(self, source: SourceId, before: Position, after: Position) -> None:
        gaps = self._gaps_unheard(source)
        if gaps:
            self._compare(source, before, gaps)
        self.marks[source] = max(after, self.marks.get(source, after))
        self._gaps_seen[source] = len(self.gaps)

    def _gaps_unheard(self, source: SourceId) -> tuple[Gap, ...]:
        return tuple(self.gaps[max(self._gaps_settled, self._gaps_seen.get(source, 0)) :])

    def _compare(self, source: SourceId, before: Position, gaps: tuple[Gap, ...]) -> None:
        """Note what is missing between what was known of a source and what is heard of it `before` its next change."""
        known = self.marks.get(source, _BEFORE_ALL)
        is_certain = source in self.marks or self._knows_all
        if known.epoch < before.epoch:
            self.losses.append(Loss(source, known.epoch, known.sequence, None, is_certain=False, gaps=gaps))
            known = Position(before.epoch, _BEFORE_ALL.sequence)
        if before > known:
            loss = Loss(source, before.epoch, known.sequence, before.sequence, is_certain=is_certain, gaps=gaps)
            self.losses.append(loss)
