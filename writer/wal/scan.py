"""Walking a segment's bytes beyond damage. Owns what is still good in it; record.py owns what good means.

Reading (reader.py) and opening (directory.py) stop at the first bad record. This goes on: `wal inspect` shows what is
there, and `wal repair` keeps it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from writer.wal.record import HEADER_BYTES, Due, aligned, claimed_header, find_record, good_record, is_whole


@dataclass(frozen=True, slots=True)
class Found:
    """A good record, or a mark, whose length is 0 and behind which `next_offset` may be any number."""

    position: int
    length: int
    offset: int
    next_offset: int

    @property
    def end_position(self) -> int:
        """Where it ends."""
        return self.position + aligned(HEADER_BYTES + self.length)


@dataclass(frozen=True, slots=True)
class Damage:
    """Bytes that hold no good record although they should, and the numbers of the records that are missing there."""

    position: int
    end_position: int
    offset: int
    next_offset: int


@dataclass(frozen=True, slots=True)
class Torn:
    """Where a group begins that was never finished, or is being written right now."""

    position: int
    offset: int


@dataclass(frozen=True, slots=True)
class Bounds:
    """What is known of a segment before its records are read.

    `until` is the base offset of the next segment, None if that is not known. `salt` is None if the header is lost:
    then bytes in a damaged record that a client had dressed up as records could pass, and the torn tail of the newest
    segment cannot be told from damage. `base_offset` is None if nothing at all tells it.
    """

    start: int
    base_offset: int | None
    until: int | None
    salt: int | None
    is_newest: bool


def scan_segment(view: memoryview, bounds: Bounds) -> Iterator[Found | Damage | Torn]:
    """Yield, in order, every good record and mark, and what is between them."""
    if bounds.salt is None:
        return _scan_unsalted(view, bounds)
    assert bounds.base_offset is not None, "the header that has the salt has it too"
    return _scan_salted(view, bounds, base_offset=bounds.base_offset, salt=bounds.salt)


def _scan_salted(view: memoryview, bounds: Bounds, *, base_offset: int, salt: int) -> Iterator[Found | Damage | Torn]:
    position, offset, synced = bounds.start, base_offset, base_offset
    while bounds.until is None or offset < bounds.until:
        if found := good_record(view, position, offset=offset, synced=synced, salt=salt):
            length, next_offset, synced = found
            yield Found(position, length, offset, next_offset)
            position += aligned(HEADER_BYTES + length)
            offset = next_offset
            continue
        due = Due(offset, synced, salt)
        following = find_record(view, position, due=due, until=bounds.until)
        if following is None:
            yield from _missing_rest(view, position, due, bounds)
            return
        next_offset = claimed_header(view, following, salt=salt)[1]
        if bounds.is_newest and find_record(view, following, due=Due(next_offset, next_offset, salt)) is None:
            yield from _torn_rest(view, position, due)
            return
        yield Damage(position, following, offset, next_offset)
        position, offset = following, next_offset


def _torn_rest(view: memoryview, position: int, due: Due) -> Iterator[Damage | Torn]:
    """Tell where in the newest segment a torn tail begins that has good records in it: behind all that was synced.

    None of them says that everything before it was synced, so they end the log. Of what is bad before the first of
    them, a part may have been synced nevertheless, and is damaged.
    """
    assert due.salt is not None
    synced = due.offset
    while (later := find_record(view, position, due=Due(due.offset, synced + 1, due.salt))) is not None:
        synced = claimed_header(view, later, salt=due.salt)[2]
    if synced > due.offset:
        yield Damage(position, len(view), due.offset, synced)
    yield Torn(position, synced)


def _missing_rest(view: memoryview, position: int, due: Due, bounds: Bounds) -> Iterator[Damage | Torn]:
    if bounds.until is not None:
        yield Damage(position, len(view), due.offset, bounds.until)
    elif bounds.is_newest and due.salt is not None and _is_begun(view, position, due):
        yield Torn(position, due.offset)


def _is_begun(view: memoryview, position: int, due: Due) -> bool:
    """Tell whether the record that is due was begun: what its header says is more than chance."""
    assert due.salt is not None
    length, offset, synced = claimed_header(view, position, salt=due.salt)
    return length > 0 and offset == due.offset and due.synced <= synced <= offset


def _scan_unsalted(view: memoryview, bounds: Bounds) -> Iterator[Found | Damage]:
    """Find records by their checksums and rising offsets alone."""
    position, offset = bounds.start, bounds.base_offset
    while bounds.until is None or offset is None or offset < bounds.until:
        due = Due(offset or 0, 0, None)
        following = _find_unsalted(view, position, due, bounds.until)
        if following is None:
            if bounds.until is not None and offset is not None:
                yield Damage(position, len(view), offset, bounds.until)
            return
        length, found_offset, _ = claimed_header(view, following, salt=0)
        if offset is not None and found_offset > offset:
            yield Damage(position, following, offset, found_offset)
        offset = found_offset + (length > 0)  # what follows a mark is hidden by the salt, but the next record tells
        found = Found(following, length, found_offset, offset)
        yield found
        position = found.end_position


def _find_unsalted(view: memoryview, position: int, due: Due, until: int | None) -> int | None:
    length, offset, _ = claimed_header(view, position, salt=0)
    if length and offset == due.offset and is_whole(view, position):
        return position
    return find_record(view, position, due=due, until=until)
