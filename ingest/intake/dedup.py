"""Deduplication: the high-water mark of each source, and refused batches that nothing may overtake. Pure.

A change is new if its position is above its source's mark. `decide` changes nothing: a mark moves in `record`, which
the intake calls only after the log is synced. A batch that failed to become durable is still new when it returns.

A refused batch blocks its source. Later changes would lift the mark over it, and its return would look like a
duplicate. The refused range is the span of its new changes, `first` to `last`, in one epoch. While the mark is below
`last`, an offer has to begin at or below the range's *expected* sequence:

    every number of the span is a change   the first one above the mark; the batch may return cut differently
    numbers are missing in the span        `first`: the number after the mark is unknown, so the batch has to return
                                           from where it began; only its changes above the mark are accepted

A batch that names the change before it (`previous_sequence`) is new only if that change is known: at or below the mark,
or committed in the tables, by whichever node. Its source says that nothing lies between the two, so it overtakes
nothing, and refused ranges do not block it.

A range is closed once the mark has reached `last`, and forgotten when its source connects anew, because the source then
learns where to resume. Ranges are bounded in total and per source. If a source has too many, its last two become one:
more has to return at once than was refused, but still nothing is overtaken. If there is no room for a source at all,
the intake revokes the lease of its connection until the source connects again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from lakefeed.contract.changes import Position, SourceId
from lakefeed.ingest.protocol.offers import BEFORE_ALL, Duplicate, Fresh, NackReason, Offer, Refused

# Per source: more than a connection has in flight.
REFUSED_RANGES_MAX_PER_SOURCE = 1024

# Of all sources: some MiB, and far more than there are connections.
REFUSED_RANGES_MAX = 65_536

# All marks together, as bytes at the head of a segment: a quarter of a million sources with usual names.
MARKS_MAX_BYTES = 32 * 1024 * 1024

_NAME_CHAR_MAX_BYTES = 4
_POSITION_MAX_BYTES = 64


@dataclass(frozen=True, slots=True, order=True)
class RefusedRange:
    """The changes of a refused batch; `is_dense` says that every number from first to last is one of them."""

    epoch: int
    first: int
    last: int
    is_dense: bool

    def expected(self, after_sequence: int) -> int:
        """Return the highest sequence that an offer may begin with."""
        return max(self.first, after_sequence + 1) if self.is_dense else self.first

    def merged(self, later: RefusedRange) -> RefusedRange:
        """Return one range over this one and a later one of the same epoch."""
        touches = later.first <= self.last + 1
        is_dense = self.is_dense and later.is_dense and touches
        return RefusedRange(self.epoch, self.first, max(self.last, later.last), is_dense)


@dataclass(slots=True)
class RefusedRanges:
    """The open ranges of all sources, sorted within each source."""

    max_total: int = REFUSED_RANGES_MAX
    max_per_source: int = REFUSED_RANGES_MAX_PER_SOURCE
    _count: int = 0
    _open: dict[SourceId, list[RefusedRange]] = field(default_factory=dict)

    def has(self, source: SourceId) -> bool:
        """Return whether a source has open ranges."""
        return source in self._open

    def first_overtaken(self, offer: Offer, after_sequence: int) -> RefusedRange | None:
        """Return the first range that an offer would overtake. Ranges of other epochs do not block it."""
        for each in self._open.get(offer.source, ()):
            is_open = each.epoch == offer.epoch and each.last > after_sequence
            if is_open and offer.first_sequence > each.expected(after_sequence):
                return each
        return None

    def open(self, offer: Offer, after_sequence: int) -> bool:
        """Remember the new changes of a refused offer; False if there is no room for another source."""
        first = offer.first_after(after_sequence)
        if first is None:
            return True
        known = self._open.get(offer.source, [])
        if not known and self._count >= self.max_total:
            return False
        is_dense = offer.last_sequence - first + 1 == offer.changes_after(after_sequence)
        self._keep(offer.source, sorted({*known, RefusedRange(offer.epoch, first, offer.last_sequence, is_dense)}))
        return True

    def close(self, source: SourceId, mark: Position) -> None:
        """Forget the ranges that a source's mark has reached."""
        if source in self._open:
            self._keep(source, [each for each in self._open[source] if Position(each.epoch, each.last) > mark])

    def forget(self, source: SourceId) -> bool:
        """Forget all ranges of a source; return whether there were any."""
        was_blocked = source in self._open
        self._keep(source, [])
        return was_blocked

    def _keep(self, source: SourceId, ranges: list[RefusedRange]) -> None:
        self._count -= len(self._open.pop(source, ()))
        room = max(1, min(self.max_per_source, self.max_total - self._count))
        while len(ranges) > room:
            *others, earlier, later = ranges
            # Of two epochs the earlier one is over and blocks nothing any more.
            ranges = [*others, earlier.merged(later) if earlier.epoch == later.epoch else later]
        if ranges:
            self._open[source] = ranges
            self._count += len(ranges)


@dataclass(slots=True)
class _Ahead:
    """What the marks would be if the offers decided so far were recorded, and the ranges of those refused."""

    marks_bytes: int
    marks: dict[SourceId, Position] = field(default_factory=dict)
    refused: RefusedRanges = field(default_factory=RefusedRanges)


@dataclass(slots=True)
class Dedup:
    """The marks of all sources and the ranges of refused batches. Marks are never forgotten, so they are bounded."""

    marks_max_bytes: int = MARKS_MAX_BYTES
    _marks_bytes: int = 0
    _marks: dict[SourceId, Position] = field(default_factory=dict)
    _refused: RefusedRanges = field(default_factory=RefusedRanges)

    def mark(self, source: SourceId) -> Position | None:
        """Return a source's mark, None if the source is unknown."""
        return self._marks.get(source)

    def marks(self) -> Mapping[SourceId, Position]:
        """Return all marks."""
        return self._marks

    def decide(self, offers: Sequence[Offer]) -> list[Fresh | Duplicate | Refused]:
        """Decide on offers in order, each as if those before it were recorded. Changes no mark."""
        ahead = _Ahead(self._marks_bytes)
        return [self._decide(offer, ahead) for offer in offers]

    def _decide(self, offer: Offer, ahead: _Ahead) -> Fresh | Duplicate | Refused:
        known = ahead.marks.get(offer.source) or self._marks.get(offer.source)
        added_bytes = _mark_max_bytes(offer.source) if known is None else 0
        if added_bytes and ahead.marks_bytes + added_bytes > self.marks_max_bytes:
            return Refused(NackReason.BUFFER_FULL, f"no room for another source: known={len(self._marks)}", retry=False)
        mark = known or Position(offer.epoch, BEFORE_ALL)
        if offer.epoch < mark.epoch:
            return Refused(
                NackReason.INVALID_SEQUENCE, f"epoch is over: epoch={offer.epoch} known={mark.epoch}", retry=False
            )
        after = mark.sequence if mark.epoch == offer.epoch else BEFORE_ALL
        if not offer.sequences:
            return Fresh(offer, after)
        if offer.last_sequence <= after:
            return Duplicate(after)
        refused = self._find_gap(offer, after, ahead)
        if refused is not None:
            ahead.refused.open(offer, after)
            return refused
        ahead.marks[offer.source] = Position(offer.epoch, offer.last_sequence)
        ahead.marks_bytes += added_bytes
        return Fresh(offer, after)

    def _find_gap(self, offer: Offer, after: int, ahead: _Ahead) -> Refused | None:
        """Return a refusal if changes before an offer are missing."""
        if offer.previous_sequence is not None:
            known = max(after, offer.committed_sequence)
            return _refuse_gap(offer.previous_sequence, known) if offer.previous_sequence > known else None
        overtaken = self._refused.first_overtaken(offer, after) or ahead.refused.first_overtaken(offer, after)
        return _refuse_to_overtake(overtaken, offer, after) if overtaken is not None else None

    def record(self, fresh: Iterable[Fresh]) -> None:
        """Lift the marks to offers that are now durable, and close the ranges that they reach."""
        for item in fresh:
            self._set_mark(item.offer.source, item.position)
            self._refused.close(item.offer.source, item.position)

    def block(self, refused: Iterable[Offer], *, ahead: Position | None = None) -> list[Offer]:
        """Block the sources of refused offers until these return; return the offers for which there is no room.

        `ahead` is the mark once the offers queued before them are durable.
        """
        return [offer for offer in refused if not self._refused.open(offer, self._mark_ahead(offer, ahead))]

    def _mark_ahead(self, offer: Offer, ahead: Position | None) -> int:
        mark = max(filter(None, (self._marks.get(offer.source), ahead)), default=None)
        return mark.sequence if mark is not None and mark.epoch == offer.epoch else BEFORE_ALL

    def is_blocked(self, source: SourceId) -> bool:
        """Return whether refused changes of a source have to return first."""
        return self._refused.has(source)

    def unblock(self, source: SourceId) -> bool:
        """Forget a source's refused ranges after it connected anew; return whether there were any."""
        return self._refused.forget(source)

    def restore(self, source: SourceId, position: Position) -> None:
        """Set a mark that was durable before; a mark never moves back."""
        known = self._marks.get(source)
        if known is None or position > known:
            self._set_mark(source, position)

    def learn_epoch(self, source: SourceId, epoch: int) -> None:
        """Refuse a source's epochs below this one from now on. Without room for its mark nothing of it is accepted."""
        has_room = self._marks_bytes + _mark_max_bytes(source) <= self.marks_max_bytes
        if epoch > 0 and (source in self._marks or has_room):
            self.restore(source, Position(epoch, BEFORE_ALL))

    def _set_mark(self, source: SourceId, position: Position) -> None:
        if source not in self._marks:
            self._marks_bytes += _mark_max_bytes(source)
        self._marks[source] = position


def _mark_max_bytes(source: SourceId) -> int:
    """Return an upper bound of a mark's bytes at the head of a segment, whatever its position."""
    return _NAME_CHAR_MAX_BYTES * len(source) + _POSITION_MAX_BYTES


def _refuse_to_overtake(overtaken: RefusedRange, offer: Offer, after_sequence: int) -> Refused:
    return Refused(
        NackReason.INVALID_SEQUENCE,
        "an earlier batch was refused and must come first: send its changes again, or connect anew:"
        f" expected_sequence={overtaken.expected(after_sequence)} refused_to={overtaken.last}"
        f" first_sequence={offer.first_sequence}",
        retry=True,
    )


def _refuse_gap(previous_sequence: int, known_sequence: int) -> Refused:
    resume_after = known_sequence if known_sequence > BEFORE_ALL else None
    resume = f"everything after {resume_after}" if resume_after is not None else "the epoch from its beginning"
    return Refused(
        NackReason.MISSING_CHANGES,
        f"changes before this batch are neither committed nor in the log of this node: send {resume} again:"
        f" previous_sequence={previous_sequence}",
        retry=True,
        last_durable_sequence=resume_after,
    )
