"""Looking at a log without opening it. Owns the report: what is there, what is damaged, what is missing.

Nothing is locked or changed, so this works beside a running service and on a log that no longer opens. What the
service does meanwhile is not taken for damage:

    a group is being written     the newest segment is read again until two readings agree: what the first one saw
                                 behind a bad record was written after that record, which the second one then sees whole
    a segment is trimmed         its name is gone, or belongs to another file, after it was read: it is left out
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeGuard

import msgspec

from lakefeed.contract.changes import Position, SourceId
from lakefeed.contract.errors import WalCorrupt, WriterError
from lakefeed.writer.wal.directory import Filesystem, load_header, read_into
from lakefeed.writer.wal.payload import Frame, decode_frame
from lakefeed.writer.wal.records import (
    HEADER_BYTES,
    SEGMENT_SUFFIX,
    SPARE_SUFFIX,
    Due,
    Header,
    aligned,
    claimed_header,
    find_record,
    good_record,
    is_whole,
    numbers_of,
    segment_name,
    spare_name,
)

# --- writer.wal.scan --------------------------------------------------------------------------------------------------
#
# Walking a segment's bytes beyond damage. Owns what is still good in it; records.py owns what good means.
#
# Reading (log.py) and opening (directory.py) stop at the first bad record. This goes on: `wal inspect` shows what is
# there, and `wal repair` keeps it.


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


# --- writer.wal.losses ------------------------------------------------------------------------------------------------
#
# Which changes of which sources are missing where the log has a gap. Owns the comparison, and no bytes.
#
# Every frame says up to where its source had come before it, and every segment begins with how far all sources had
# come.
# So the first word of a source behind a gap tells exactly what of it is missing:
#
#     shop-1 up to 40 | gap | frame of shop-1, after 40     nothing is
#     shop-1 up to 40 | gap | frame of shop-1, after 55     41 to 55
#     shop-1 up to 40 | gap | segment, shop-1 up to 55      41 to 55
#     shop-1 up to 40 | gap | end of the log                unsettled: whatever came after 40, if anything


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


# --- writer.wal.report ------------------------------------------------------------------------------------------------
#
# What is known of a log that was looked at: values for `wal inspect` and `wal repair`. Owns no reading.


@dataclass(frozen=True, slots=True)
class HeadCodec:
    """What stands in a segment's head, which only the one who wrote it knows.

    `marks` reads from it how far all sources had come; it raises ValueError for bytes that are no head. `advance` makes
    the head of the next segment from that of a segment, None if nobody knows it, and from the frames in it.
    """

    marks: Callable[[bytes], Mapping[SourceId, Position]]
    advance: Callable[[bytes | None, Iterable[Frame]], bytes]


@dataclass(frozen=True, slots=True)
class RecordReport:
    """One good record; `frame` is None if its payload is none."""

    segment: str
    position: int
    offset: int
    payload_bytes: int
    frame: Frame | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentReport:
    """One segment. `problem` is what keeps it from being opened, beside damaged records; `header` is None if lost.

    `head` is then made from the segments before it. `sources` is how many it knows. `gap_count` is how many gaps need a
    mark: those of `damages` and of earlier repairs.
    """

    path: Path
    number: int
    exists: bool
    size_bytes: int
    problem: str | None
    header: Header | None
    bounds: Bounds
    base_offset: int
    end_offset: int
    end_position: int
    records: int
    records_bytes: int
    gap_count: int
    damages: tuple[Damage, ...]
    torn: Torn | None
    head: bytes
    sources: int

    @property
    def needs_repair(self) -> bool:
        """Tell whether the log does not open or cannot be read because of this segment."""
        return self.problem is not None or bool(self.damages)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogReport:
    """A whole log. The last three are losses.py's: what is missing for sure, and of whom or where that is not known."""

    directory: Path
    segments: tuple[SegmentReport, ...]
    spares: int
    spare_bytes: int
    gaps: tuple[Gap, ...]
    losses: tuple[Loss, ...]
    unsettled: Mapping[SourceId, Position]
    unsettled_gaps: tuple[Gap, ...]

    @property
    def needs_repair(self) -> bool:
        """Tell whether there is damage that `lakefeed wal repair` would work around."""
        return any(segment.needs_repair for segment in self.segments)


# --- writer.wal.inspect -----------------------------------------------------------------------------------------------


# Readings of the newest segment while it is being written to; two are enough unless the service is very busy.
_READINGS_MAX = 10


@dataclass(frozen=True, slots=True)
class _Segment:
    """A segment by its header, before its records are read."""

    number: int
    path: Path
    header: Header | None
    problem: str | None
    exists: bool


@dataclass(frozen=True, slots=True)
class _Scanned:
    view: memoryview
    items: list[Found | Damage | Torn]


def ignore(_: object) -> None:
    """Take no notice."""


def inspect_log(
    directory: Path,
    heads: HeadCodec,
    *,
    on_record: Callable[[RecordReport], None] = ignore,
    on_bytes: Callable[[int], None] = ignore,
    files: Filesystem | None = None,
) -> LogReport:
    """Read a whole log, good or bad. Blocks; one segment at a time is in memory.

    Raises:
        WriterError: there is no log.
        WalVersionUnknown: another version of Lakefeed has written it.

    """
    return _Inspection(directory, heads, on_record, on_bytes, files or Filesystem()).run()


def log_bytes(directory: Path) -> int:
    """Tell how much `inspect_log` will read, about."""
    return sum(path.stat().st_size for path in directory.glob(f"*{SEGMENT_SUFFIX}"))


def load_view(path: Path, size_bytes: int, files: Filesystem) -> memoryview | None:
    """Read a segment, with zeros up to `size_bytes` if it is shorter; None if its name is gone or another file's."""
    try:
        descriptor = files.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return None
    try:
        view = memoryview(bytearray(max(size_bytes, files.size(descriptor))))
        read_into(files, descriptor, view, 0)
        return view if os.fstat(descriptor).st_ino == path.stat().st_ino else None
    except FileNotFoundError:
        return None
    finally:
        files.close(descriptor)


@dataclass(slots=True)
class _Inspection:
    directory: Path
    heads: HeadCodec
    on_record: Callable[[RecordReport], None]
    on_bytes: Callable[[int], None]
    files: Filesystem
    _frames: list[Frame] = field(default_factory=list)  # of the segment that was read last

    def run(self) -> LogReport:
        if not self.directory.is_dir():
            raise WriterError(f"there is no log here: directory={self.directory}")
        names = self.files.names(self.directory)
        segments = self._load_headers(numbers_of(names, SEGMENT_SUFFIX))
        finder = LossFinder()
        reports: list[SegmentReport] = []
        for segment, following in zip(segments, [*segments[1:], None], strict=False):
            bounds = _bounds_of(segment, following, reports[-1].end_offset if reports else None)
            head = segment.header.head if segment.header else self._advance_head(reports)
            self._frames = []
            if segment.exists:
                report = self._read(segment, bounds, head, finder)
            else:
                report = self._missing(segment, bounds, head, finder)
            if report is not None:
                reports.append(report)
        spares = [self.directory / spare_name(number) for number in numbers_of(names, SPARE_SUFFIX)]
        return LogReport(
            directory=self.directory,
            segments=tuple(reports),
            spares=len(spares),
            spare_bytes=sum(path.stat().st_size for path in spares if path.exists()),
            gaps=tuple(finder.gaps),
            losses=tuple(finder.losses),
            unsettled=finder.unsettled(),
            unsettled_gaps=finder.unsettled_gaps(),
        )

    def _load_headers(self, numbers: list[int]) -> list[_Segment]:
        """Load headers from the first number to the last; one whose offset runs backwards counts as lost."""
        segments: list[_Segment] = []
        base_offset = 0
        for number in range(numbers[0], numbers[-1] + 1) if numbers else ():
            segment = self._load_header(number)
            if segment.header is not None and segment.header.base_offset < base_offset:
                problem = f"offsets run backwards: base_offset={segment.header.base_offset} before={base_offset}"
                segment = _Segment(number, segment.path, None, problem, exists=True)
            if segment.header is not None:
                base_offset = segment.header.base_offset
            if segments or segment.exists:  # the oldest ones may have been trimmed since they were listed
                segments.append(segment)
        return segments

    def _load_header(self, number: int) -> _Segment:
        path = self.directory / segment_name(number)
        try:
            descriptor = self.files.open(path, os.O_RDONLY)
        except FileNotFoundError:
            return _Segment(number, path, None, "segment is missing", exists=False)
        try:
            header = load_header(self.files, descriptor, path=str(path), number=number)
            size_bytes = self.files.size(descriptor)
        except WalCorrupt as error:
            return _Segment(number, path, None, str(error).partition(":")[0], exists=True)
        finally:
            self.files.close(descriptor)
        problem = None
        if size_bytes < header.file_bytes:
            problem = f"segment was cut short: bytes={size_bytes} of={header.file_bytes}"
        return _Segment(number, path, header, problem, exists=True)

    def _read(self, segment: _Segment, bounds: Bounds, head: bytes, finder: LossFinder) -> SegmentReport | None:
        scanned = self._scan(segment, bounds)
        if scanned is None:
            return None
        view, items = scanned.view, scanned.items
        marks = self._marks(head)
        base_offset, end_offset, end_position = _extent(items, bounds)
        if segment.header is not None:
            finder.take_head(marks)
        elif bounds.base_offset is None:
            finder.take_gap(Gap(base_offset, base_offset, repaired=False))
        for item in items:
            self._take(item, view, segment, finder)
        records = [item for item in items if isinstance(item, Found) and item.length]
        return SegmentReport(
            path=segment.path,
            number=segment.number,
            exists=True,
            size_bytes=len(view),
            problem=segment.problem,
            header=segment.header,
            bounds=bounds,
            base_offset=base_offset,
            end_offset=end_offset,
            end_position=end_position,
            records=len(records),
            records_bytes=sum(record.end_position - record.position for record in records),
            gap_count=sum(1 for item in items if _is_gap(item)),
            damages=tuple(item for item in items if isinstance(item, Damage)),
            torn=next((item for item in items if isinstance(item, Torn)), None),
            head=head,
            sources=len(marks),
        )

    def _scan(self, segment: _Segment, bounds: Bounds) -> _Scanned | None:
        """Read and walk a segment; the newest one until its damage has been seen twice."""
        size_bytes = segment.header.file_bytes if segment.header else 0
        damages_before = None
        for _ in range(_READINGS_MAX):
            view = load_view(segment.path, size_bytes, self.files)
            if view is None:
                return None
            scanned = _Scanned(view, list(scan_segment(view, bounds)))
            damages = [item for item in scanned.items if isinstance(item, Damage)]
            if not damages or not bounds.is_newest or damages == damages_before:
                break
            damages_before = damages
        self.on_bytes(len(scanned.view))
        return scanned

    def _missing(self, segment: _Segment, bounds: Bounds, head: bytes, finder: LossFinder) -> SegmentReport:
        assert bounds.base_offset is not None, "a missing segment stands between two others"
        end_offset = bounds.base_offset if bounds.until is None else bounds.until
        damages = (Damage(0, 0, bounds.base_offset, end_offset),) if end_offset > bounds.base_offset else ()
        for damage in damages:
            finder.take_gap(Gap(damage.offset, damage.next_offset, repaired=False))
        return SegmentReport(
            path=segment.path,
            number=segment.number,
            exists=False,
            size_bytes=0,
            problem=segment.problem,
            header=None,
            bounds=bounds,
            base_offset=bounds.base_offset,
            end_offset=end_offset,
            end_position=0,
            records=0,
            records_bytes=0,
            gap_count=len(damages),
            damages=damages,
            torn=None,
            head=head,
            sources=len(self._marks(head)),
        )

    def _advance_head(self, reports: list[SegmentReport]) -> bytes:
        """Make the head of the next segment from the last one and what was read in it."""
        return self.heads.advance(reports[-1].head if reports else None, self._frames)

    def _marks(self, head: bytes) -> Mapping[SourceId, Position]:
        try:
            return self.heads.marks(head)
        except ValueError:  # whole, but not in our words
            return {}

    def _take(self, item: Found | Damage | Torn, view: memoryview, segment: _Segment, finder: LossFinder) -> None:
        if _is_gap(item):
            finder.take_gap(Gap(item.offset, item.next_offset, repaired=isinstance(item, Found)))
        if not isinstance(item, Found) or not item.length:
            return
        start = item.position + HEADER_BYTES
        frame = _frame_of(bytes(view[start : start + item.length]))
        if frame is not None:
            finder.take_frame(frame)
            self._frames.append(replace(frame, body=b""))
        self.on_record(RecordReport(segment.path.name, item.position, item.offset, item.length, frame))


def _is_gap(item: Found | Damage | Torn) -> TypeGuard[Found | Damage]:
    """Tell damage, and marks of earlier repairs, from records and from marks of a clean close."""
    if isinstance(item, Torn):
        return False
    return item.next_offset > item.offset and (isinstance(item, Damage) or not item.length)


def _bounds_of(segment: _Segment, following: _Segment | None, expected: int | None) -> Bounds:
    header = segment.header
    return Bounds(
        start=header.records_start if header else 0,
        base_offset=header.base_offset if header else expected,
        until=following.header.base_offset if following and following.header else None,
        salt=header.salt if header else None,
        is_newest=following is None,
    )


def _extent(items: list[Found | Damage | Torn], bounds: Bounds) -> tuple[int, int, int]:
    """Tell the first offset, the one behind the last, and the position behind the last record."""
    found = [item for item in items if isinstance(item, Found)]
    base_offset = bounds.base_offset
    if base_offset is None:
        base_offset = found[0].offset if found else bounds.until or 0
    ends = [item.next_offset for item in items if not isinstance(item, Torn)]
    end_offset = bounds.until if bounds.until is not None else max([base_offset, *ends])
    return base_offset, end_offset, found[-1].end_position if found else bounds.start


def _frame_of(payload: bytes) -> Frame | None:
    try:
        return decode_frame(payload)
    except (ValueError, struct.error, msgspec.MsgspecError):
        return None
