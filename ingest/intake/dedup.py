"""Which changes of a source were already taken. Owns the high-water marks; durability belongs to the log.

A change is new if its position is above its source's mark. Deciding changes nothing: a mark moves in `record`, which
the intake calls only after the log is synced, so a batch that failed to become durable is still new when it returns.

A refused batch leaves a *gap* (gaps.py): changes behind it would lift the mark over it, and its return would look like
a duplicate. So the source is held at each refused batch until it has sent all of it again, or connects anew.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from lakefeed.contract.changes import Position, SourceId
from lakefeed.ingest.protocol.offers import BEFORE_ALL, Duplicate, Fresh, NackReason, Offer, Refused

# --- ingest.gaps ------------------------------------------------------------------------------------------------------
#
# What was refused of each source and has not come again. Owns the gaps and the rule that nothing passes over one.
#
# A gap is a refused batch: the span of its new changes, `first` to `last`, in one epoch. While the mark is below
# `last`,
# an offer has to begin at or below the gap's *expected* sequence:
#
#     every number of the span is a change      the first one above the mark; so the batch may return in other cuts
#     numbers are left out                      `first`: which number follows the mark is not known here, so the return
#                                               has to begin where the refused batch did; what is above the mark is
# taken
#
# A gap is closed once the mark has reached `last`, and forgotten when its source connects anew: it then knows where to
# resume. Room is bounded in all and per source. Where a source has too many, its last two become one: more has to come
# again at once than was refused, but still nothing is passed over. A source that finds no room at all is told to its
# connection (intake.py), which takes nothing more until the source connects.


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


# --- ingest.dedup -----------------------------------------------------------------------------------------------------


# All marks together, as bytes at the head of a segment: room for a quarter of a million sources with usual names.
MARKS_MAX_BYTES = 32 * 1024 * 1024

_NAME_CHAR_MAX_BYTES = 4
_POSITION_MAX_BYTES = 64


@dataclass(slots=True)
class _Ahead:
    """What the marks would be if the offers judged so far were recorded, and the gaps that those refused leave."""

    marks_bytes: int
    marks: dict[SourceId, Position] = field(default_factory=dict)
    gaps: Gaps = field(default_factory=Gaps)


@dataclass(slots=True)
class Dedup:
    """The marks of all sources, which are never forgotten and so are bounded, and the gaps of refused batches."""

    marks_max_bytes: int = MARKS_MAX_BYTES
    _marks_bytes: int = 0
    _marks: dict[SourceId, Position] = field(default_factory=dict)
    _gaps: Gaps = field(default_factory=Gaps)

    def mark(self, source: SourceId) -> Position | None:
        """Tell how far a source is durable, or None if it is not known."""
        return self._marks.get(source)

    def marks(self) -> Mapping[SourceId, Position]:
        """Show all marks."""
        return self._marks

    def decide(self, offers: Sequence[Offer]) -> list[Fresh | Duplicate | Refused]:
        """Judge offers in order, each as if those before it were already recorded. Changes no mark."""
        ahead = _Ahead(self._marks_bytes)
        return [self._judge(offer, ahead) for offer in offers]

    def _judge(self, offer: Offer, ahead: _Ahead) -> Fresh | Duplicate | Refused:
        known = ahead.marks.get(offer.source) or self._marks.get(offer.source)
        added_bytes = _mark_max_bytes(offer.source) if known is None else 0
        if added_bytes and ahead.marks_bytes + added_bytes > self.marks_max_bytes:
            return Refused(NackReason.BUFFER_FULL, f"no room for another source: known={len(self._marks)}", retry=False)
        mark = known or Position(offer.epoch, BEFORE_ALL)
        if offer.epoch < mark.epoch:
            return Refused(
                NackReason.INVALID_SEQUENCE,
                f"epoch is over: epoch={offer.epoch} known={mark.epoch}",
                retry=False,
            )
        after = mark.sequence if mark.epoch == offer.epoch else BEFORE_ALL
        if not offer.sequences:
            return Fresh(offer, after)
        if offer.last_sequence <= after:
            return Duplicate(after)
        gap = self._gaps.first_passed(offer, after) or ahead.gaps.first_passed(offer, after)
        if gap is not None:
            ahead.gaps.open(offer, after)
            return _refuse_to_pass(gap, offer, after)
        ahead.marks[offer.source] = Position(offer.epoch, offer.last_sequence)
        ahead.marks_bytes += added_bytes
        return Fresh(offer, after)

    def record(self, fresh: Iterable[Fresh]) -> None:
        """Lift the marks over offers that are now durable, and close the gaps they fill."""
        for item in fresh:
            self._set_mark(item.offer.source, item.position)
            self._gaps.close(item.offer.source, item.position)

    def hold(self, refused: Iterable[Offer], *, ahead: Position | None = None) -> list[Offer]:
        """Remember what is new of refused offers, so that nothing overtakes it; gives those there is no room for.

        `ahead` is where the mark will be once what was offered before them is durable.
        """
        return [offer for offer in refused if not self._gaps.open(offer, self._mark_ahead(offer, ahead))]

    def _mark_ahead(self, offer: Offer, ahead: Position | None) -> int:
        mark = max(filter(None, (self._marks.get(offer.source), ahead)), default=None)
        return mark.sequence if mark is not None and mark.epoch == offer.epoch else BEFORE_ALL

    def is_held(self, source: SourceId) -> bool:
        """Tell whether refused changes of a source have to come first."""
        return self._gaps.holds(source)

    def release(self, source: SourceId) -> bool:
        """Forget a source's gaps: it has connected anew and been told where to resume. Tells whether there were any."""
        return self._gaps.forget(source)

    def restore(self, source: SourceId, position: Position) -> None:
        """Take a position that was durable before; a mark never moves back."""
        known = self._marks.get(source)
        if known is None or position > known:
            self._set_mark(source, position)

    def learn_epoch(self, source: SourceId, epoch: int) -> None:
        """Refuse a source's epochs below this one from now on; for want of room, by taking no change of it at all."""
        is_room = self._marks_bytes + _mark_max_bytes(source) <= self.marks_max_bytes
        if epoch > 0 and (source in self._marks or is_room):
            self.restore(source, Position(epoch, BEFORE_ALL))

    def _set_mark(self, source: SourceId, position: Position) -> None:
        if source not in self._marks:
            self._marks_bytes += _mark_max_bytes(source)
        self._marks[source] = position


def _mark_max_bytes(source: SourceId) -> int:
    """Bound what a source's mark takes at the head of a segment, whatever its position."""
    return _NAME_CHAR_MAX_BYTES * len(source) + _POSITION_MAX_BYTES


def _refuse_to_pass(gap: Gap, offer: Offer, after_sequence: int) -> Refused:
    return Refused(
        NackReason.INVALID_SEQUENCE,
        "an earlier batch was refused and must come first: send its changes again, or connect anew:"
        f" expected_sequence={gap.expected(after_sequence)} refused_to={gap.last}"
        f" first_sequence={offer.first_sequence}",
        retry=True,
    )
