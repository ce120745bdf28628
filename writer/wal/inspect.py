"""Inspection of a log without opening it: what is there, what is damaged, and which changes are missing.

Reading (tail.py) and opening (directory.py) stop at the first bad record. An inspection continues after it, so that
`wal inspect` shows all good records and `wal repair` keeps them. Nothing is locked or changed, so it works beside a
running service and on a log that no longer opens. Work of the service at the same time is not damage:

    a group is being written     the newest segment is read again until two readings agree: records that the first one
                                 saw after a bad record were written later, and the second one sees that record whole
    a segment is trimmed         its name is gone, or belongs to another file, after it was read: it is left out

Missing changes. Every frame has the position of its source before it, and every segment head has the positions of all
sources. So the first position of a source after a gap shows exactly which of its changes are missing:

    shop-1 up to 40 | gap | frame of shop-1, after 40     none
    shop-1 up to 40 | gap | frame of shop-1, after 55     41 to 55
    shop-1 up to 40 | gap | segment, shop-1 up to 55      41 to 55
    shop-1 up to 40 | gap | end of the log                unsettled: whatever came after 40, if anything
"""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeAlias, TypeGuard

import msgspec

from lakefeed.contract.changes import Position, SourceId
from lakefeed.contract.errors import WalCorrupt, WriterError
from lakefeed.writer.wal.directory import Filesystem, load_header, read_into
from lakefeed.writer.wal.payload import Frame, decode_frame
from lakefeed.writer.wal.records import (
    HEADER_BYTES,
    SEGMENT_SUFFIX,
    SPARE_SUFFIX,
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


@dataclass(frozen=True, slots=True)
class FoundRecord:
    """A good record, or a mark. A mark has length 0, and any offset may follow it."""

    position: int
    length: int
    offset: int
    next_offset: int

    @property
    def end_position(self) -> int:
        """Return the position after it."""
        return self.position + aligned(HEADER_BYTES + self.length)


@dataclass(frozen=True, slots=True)
class Damage:
    """Bytes that should hold good records and do not, and the offsets that are missing there."""

    position: int
    end_position: int
    offset: int
    next_offset: int


@dataclass(frozen=True, slots=True)
class TornTail:
    """The start of a group that was never finished, or that is being written."""

    position: int
    offset: int


ScanItem: TypeAlias = FoundRecord | Damage | TornTail


@dataclass(frozen=True, slots=True)
class SegmentBounds:
    """What is known about a segment before its records are read.

    `until` is the base offset of the next segment, None if unknown. `salt` is None if the header is lost: then bytes
    that a client made look like records could pass, and a torn tail of the newest segment looks like damage.
    `base_offset` is None if it is unknown.
    """

    start: int
    base_offset: int | None
    until: int | None
    salt: int | None
    is_newest: bool


def scan_segment(view: memoryview, bounds: SegmentBounds) -> Iterator[ScanItem]:
    """Yield every good record and mark, and what is between them, in order."""
    salt = bounds.salt
    if salt is None:
        yield from _scan_unsalted(view, bounds)
        return
    assert bounds.base_offset is not None, "the header has both"
    position, offset, synced = bounds.start, bounds.base_offset, bounds.base_offset
    while bounds.until is None or offset < bounds.until:
        if found := good_record(view, position, offset=offset, synced=synced, salt=salt):
            length, next_offset, synced = found
            yield FoundRecord(position, length, offset, next_offset)
            position += aligned(HEADER_BYTES + length)
            offset = next_offset
            continue
        following = find_record(view, position, offset=offset, synced=synced, salt=salt, until=bounds.until)
        if following is None:
            length, found_offset, found_synced = claimed_header(view, position, salt=salt)
            if bounds.until is not None:
                yield Damage(position, len(view), offset, bounds.until)
            elif bounds.is_newest and length > 0 and found_offset == offset and synced <= found_synced <= offset:
                yield TornTail(position, offset)  # the header is too plausible for chance: a record was begun
            return
        due = claimed_header(view, following, salt=salt)[1]
        if bounds.is_newest and find_record(view, following, offset=due, synced=due, salt=salt) is None:
            yield from _torn_rest(view, position, offset=offset, salt=salt)
            return
        yield Damage(position, following, offset, due)
        position, offset = following, due


def _torn_rest(view: memoryview, position: int, *, offset: int, salt: int) -> Iterator[Damage | TornTail]:
    """Yield the torn tail of the newest segment, if it has good records: it begins after everything that was synced.

    None of these records claims that everything before it was synced, so the log ends before them. A part of the bad
    bytes before the first of them may have been synced, and is damaged.
    """
    synced = offset
    while (later := find_record(view, position, offset=offset, synced=synced + 1, salt=salt)) is not None:
        synced = claimed_header(view, later, salt=salt)[2]
    if synced > offset:
        yield Damage(position, len(view), offset, synced)
    yield TornTail(position, synced)


def _scan_unsalted(view: memoryview, bounds: SegmentBounds) -> Iterator[FoundRecord | Damage]:
    """Find records by their checksums and rising offsets only."""
    position, offset = bounds.start, bounds.base_offset
    while bounds.until is None or offset is None or offset < bounds.until:
        following: int | None = position
        length, found_offset, _ = claimed_header(view, position, salt=0)
        if not length or found_offset != (offset or 0) or not is_whole(view, position):
            following = find_record(view, position, offset=offset or 0, synced=0, salt=None, until=bounds.until)
        if following is None:
            if bounds.until is not None and offset is not None:
                yield Damage(position, len(view), offset, bounds.until)
            return
        length, found_offset, _ = claimed_header(view, following, salt=0)
        if offset is not None and found_offset > offset:
            yield Damage(position, following, offset, found_offset)
        offset = found_offset + (length > 0)  # the salt hides what follows a mark, but the next record shows it
        found = FoundRecord(following, length, found_offset, offset)
        yield found
        position = found.end_position


# The position of a source before its first change. In every epoch its first frame comes after this sequence.
_BEFORE_ALL = Position(0, -1)


@dataclass(frozen=True, slots=True)
class MissingOffsets:
    """Offsets without a record: damaged now, or missing since an earlier repair.

    The range is empty if the log's first header is lost: how many records came before the first good one is unknown.
    """

    offset: int
    next_offset: int
    repaired: bool


@dataclass(frozen=True, slots=True)
class Loss:
    """Changes of a source that are missing: those above `after_sequence`, up to `last_sequence`.

    A loss is uncertain if the source's position before the gap is unknown because its head is lost, or if the source
    began a new epoch. Then `last_sequence` is None: where the old epoch ended, and whether there were others in
    between, is unknown. `gaps` are those that the changes may have been in.
    """

    source: SourceId
    epoch: int
    after_sequence: int
    last_sequence: int | None
    is_certain: bool
    gaps: tuple[MissingOffsets, ...]


@dataclass(slots=True)
class LossFinder:
    """Follows the log in order. `marks` is the last known position of every source; callers append `gaps`."""

    marks: dict[SourceId, Position] = field(default_factory=dict)
    gaps: list[MissingOffsets] = field(default_factory=list)
    losses: list[Loss] = field(default_factory=list)
    _gaps_seen: dict[SourceId, int] = field(default_factory=dict)
    _gaps_settled: int = 0
    _knows_all: bool = False

    def take_head(self, marks: Mapping[SourceId, Position]) -> None:
        """Take the positions of all sources from a segment's head."""
        for source, position in marks.items():
            self._take(source, position, position)
        self._gaps_settled = len(self.gaps)
        self._knows_all = True

    def take_frame(self, frame: Frame) -> None:
        """Take the next frame."""
        before = Position(frame.epoch, frame.after_sequence)
        self._take(frame.source, before, Position(frame.epoch, frame.last_sequence))

    def unsettled(self) -> dict[SourceId, Position]:
        """Return the known sources without a record since a gap, with their positions before it."""
        return {source: mark for source, mark in self.marks.items() if self._open_gaps(source)}

    def unsettled_gaps(self) -> tuple[MissingOffsets, ...]:
        """Return the gaps that may have had changes of unknown sources."""
        return tuple(self.gaps[self._gaps_settled :])

    def _take(self, source: SourceId, before: Position, after: Position) -> None:
        """Record what is missing between a source's known position and the one `before` its next change."""
        known = self.marks.get(source, _BEFORE_ALL)
        is_certain = source in self.marks or self._knows_all
        gaps = self._open_gaps(source)
        if gaps and known.epoch < before.epoch:
            self.losses.append(Loss(source, known.epoch, known.sequence, None, is_certain=False, gaps=gaps))
            known = Position(before.epoch, _BEFORE_ALL.sequence)
        if gaps and before > known:
            loss = Loss(source, before.epoch, known.sequence, before.sequence, is_certain=is_certain, gaps=gaps)
            self.losses.append(loss)
        self.marks[source] = max(after, self.marks.get(source, after))
        self._gaps_seen[source] = len(self.gaps)

    def _open_gaps(self, source: SourceId) -> tuple[MissingOffsets, ...]:
        return tuple(self.gaps[max(self._gaps_settled, self._gaps_seen.get(source, 0)) :])


@dataclass(frozen=True, slots=True)
class HeadCodec:
    """How the log's owner encodes segment heads.

    `marks` returns the positions of all sources; it raises ValueError for bytes that are not a head. `advance` returns
    the head of the next segment, from that of a segment (None if unknown) and the frames in it.
    """

    marks: Callable[[bytes], Mapping[SourceId, Position]]
    advance: Callable[[bytes | None, Iterable[Frame]], bytes]


@dataclass(frozen=True, slots=True)
class RecordReport:
    """One good record; `frame` is None if its payload is not a frame."""

    segment: str
    position: int
    offset: int
    payload_bytes: int
    frame: Frame | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentReport:
    """One segment. `problem` is why it cannot be opened, apart from damaged records; `header` is None if lost.

    A lost `head` is rebuilt from the segments before. `sources` is how many sources it has. `gap_count` is how many
    gaps need a mark: those of `damages` and of earlier repairs.
    """

    path: Path
    number: int
    exists: bool
    size_bytes: int
    problem: str | None
    header: Header | None
    bounds: SegmentBounds
    base_offset: int
    end_offset: int
    end_position: int
    records: int
    records_bytes: int
    gap_count: int
    damages: tuple[Damage, ...]
    torn: TornTail | None
    head: bytes
    sources: int

    @property
    def needs_repair(self) -> bool:
        """Return whether the log cannot be opened or read because of this segment."""
        return self.problem is not None or bool(self.damages)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogReport:
    """A whole log: its segments, what is missing, and where it is unknown what is missing."""

    directory: Path
    segments: tuple[SegmentReport, ...]
    spares: int
    spare_bytes: int
    gaps: tuple[MissingOffsets, ...]
    losses: tuple[Loss, ...]
    unsettled: Mapping[SourceId, Position]
    unsettled_gaps: tuple[MissingOffsets, ...]

    @property
    def needs_repair(self) -> bool:
        """Return whether there is damage that `lakefeed wal repair` would repair."""
        return any(segment.needs_repair for segment in self.segments)


# Readings of the newest segment while it is being written; two are enough unless the service is very busy.
_READINGS_MAX = 10


@dataclass(frozen=True, slots=True)
class _Segment:
    """A segment by its header, before its records are read."""

    number: int
    path: Path
    header: Header | None
    problem: str | None
    exists: bool


def ignore(_: object) -> None:
    """Do nothing with a value."""


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
    """Return about how many bytes `inspect_log` will read."""
    return sum(path.stat().st_size for path in directory.glob(f"*{SEGMENT_SUFFIX}"))


def load_view(path: Path, size_bytes: int, files: Filesystem) -> memoryview | None:
    """Return a segment, with zeros up to `size_bytes` if it is shorter; None if the file was removed or replaced."""
    try:
        with files.opened(path, os.O_RDONLY) as descriptor:
            view = memoryview(bytearray(max(size_bytes, files.size(descriptor))))
            read_into(files, descriptor, view, 0)
            return view if os.fstat(descriptor).st_ino == path.stat().st_ino else None
    except FileNotFoundError:
        return None


@dataclass(slots=True)
class _Inspection:
    directory: Path
    heads: HeadCodec
    on_record: Callable[[RecordReport], None]
    on_bytes: Callable[[int], None]
    files: Filesystem
    finder: LossFinder = field(default_factory=LossFinder)
    _frames: list[Frame] = field(default_factory=list)  # of the segment that was read last

    def run(self) -> LogReport:
        if not self.directory.is_dir():
            raise WriterError(f"there is no log here: directory={self.directory}")
        names = self.files.names(self.directory)
        segments = self._load_headers(numbers_of(names, SEGMENT_SUFFIX))
        reports: list[SegmentReport] = []
        for segment, following in zip(segments, [*segments[1:], None], strict=False):
            before, header = reports[-1] if reports else None, segment.header
            bounds = SegmentBounds(
                start=header.records_start if header else 0,
                base_offset=header.base_offset if header else (before.end_offset if before else None),
                until=following.header.base_offset if following and following.header else None,
                salt=header.salt if header else None,
                is_newest=following is None,
            )
            # A lost head follows from the head of the segment before and the frames in it.
            head = header.head if header else self.heads.advance(before.head if before else None, self._frames)
            self._frames = []
            if (report := self._report(segment, bounds, head)) is not None:
                reports.append(report)
        spares = [self.directory / spare_name(number) for number in numbers_of(names, SPARE_SUFFIX)]
        return LogReport(
            directory=self.directory,
            segments=tuple(reports),
            spares=len(spares),
            spare_bytes=sum(path.stat().st_size for path in spares if path.exists()),
            gaps=tuple(self.finder.gaps),
            losses=tuple(self.finder.losses),
            unsettled=self.finder.unsettled(),
            unsettled_gaps=self.finder.unsettled_gaps(),
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
            with self.files.opened(path, os.O_RDONLY) as descriptor:
                header = load_header(self.files, descriptor, path=str(path), number=number)
                size_bytes = self.files.size(descriptor)
        except FileNotFoundError:
            return _Segment(number, path, None, "segment is missing", exists=False)
        except WalCorrupt as error:
            return _Segment(number, path, None, str(error).partition(":")[0], exists=True)
        problem = None
        if size_bytes < header.file_bytes:
            problem = f"segment was cut short: bytes={size_bytes} of={header.file_bytes}"
        return _Segment(number, path, header, problem, exists=True)

    def _report(self, segment: _Segment, bounds: SegmentBounds, head: bytes) -> SegmentReport | None:
        """Read a segment, None if it was trimmed meanwhile. A missing one has one damage: all of its offsets."""
        view, items = memoryview(b""), list[ScanItem]()
        if segment.exists:
            if (scanned := self._scan(segment, bounds)) is None:
                return None
            view, items = scanned
        elif bounds.until is not None and bounds.until != bounds.base_offset:
            assert bounds.base_offset is not None, "a missing segment is between two others"
            items = [Damage(0, 0, bounds.base_offset, bounds.until)]
        try:
            marks = self.heads.marks(head)
        except ValueError:  # whole, but in another encoding
            marks = {}
        found = [item for item in items if isinstance(item, FoundRecord)]
        base_offset = bounds.base_offset
        if base_offset is None:
            base_offset = found[0].offset if found else bounds.until or 0
        ends = [item.next_offset for item in items if not isinstance(item, TornTail)]
        if segment.header is not None:
            self.finder.take_head(marks)
        elif bounds.base_offset is None:
            self.finder.gaps.append(MissingOffsets(base_offset, base_offset, repaired=False))
        for item in items:
            self._take(item, view, segment)
        records = [record for record in found if record.length]
        return SegmentReport(
            path=segment.path,
            number=segment.number,
            exists=segment.exists,
            size_bytes=len(view),
            problem=segment.problem,
            header=segment.header,
            bounds=bounds,
            base_offset=base_offset,
            end_offset=bounds.until if bounds.until is not None else max([base_offset, *ends]),
            end_position=found[-1].end_position if found else bounds.start,
            records=len(records),
            records_bytes=sum(record.end_position - record.position for record in records),
            gap_count=sum(1 for item in items if _is_gap(item)),
            damages=tuple(item for item in items if isinstance(item, Damage)),
            torn=next((item for item in items if isinstance(item, TornTail)), None),
            head=head,
            sources=len(marks),
        )

    def _scan(self, segment: _Segment, bounds: SegmentBounds) -> tuple[memoryview, list[ScanItem]] | None:
        """Read and scan a segment; the newest one until two readings have the same damage."""
        size_bytes = segment.header.file_bytes if segment.header else 0
        damages_before = None
        for _ in range(_READINGS_MAX):
            view = load_view(segment.path, size_bytes, self.files)
            if view is None:
                return None
            items = list(scan_segment(view, bounds))
            scanned = view, items
            damages = [item for item in items if isinstance(item, Damage)]
            if not damages or not bounds.is_newest or damages == damages_before:
                break
            damages_before = damages
        self.on_bytes(len(scanned[0]))
        return scanned

    def _take(self, item: ScanItem, view: memoryview, segment: _Segment) -> None:
        if _is_gap(item):
            gap = MissingOffsets(item.offset, item.next_offset, repaired=isinstance(item, FoundRecord))
            self.finder.gaps.append(gap)
        if not isinstance(item, FoundRecord) or not item.length:
            return
        start = item.position + HEADER_BYTES
        frame = None
        with contextlib.suppress(ValueError, struct.error, msgspec.MsgspecError):
            frame = decode_frame(bytes(view[start : start + item.length]))
        if frame is not None:
            self.finder.take_frame(frame)
            self._frames.append(replace(frame, body=b""))
        self.on_record(RecordReport(segment.path.name, item.position, item.offset, item.length, frame))


def _is_gap(item: ScanItem) -> TypeGuard[FoundRecord | Damage]:
    """Return whether an item is damage or a mark of an earlier repair, not a record or a mark of a clean close."""
    if isinstance(item, TornTail):
        return False
    return item.next_offset > item.offset and (isinstance(item, Damage) or not item.length)
