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
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeGuard

import msgspec

from writer.changes import Position, SourceId
from writer.errors import WalCorrupt, WriterError
from writer.frames import Frame, decode_frame
from writer.wal.directory import load_header
from writer.wal.files import Filesystem, read_into
from writer.wal.losses import Gap, LossFinder
from writer.wal.record import HEADER_BYTES
from writer.wal.report import HeadCodec, LogReport, RecordReport, SegmentReport
from writer.wal.scan import Bounds, Damage, Found, Torn, scan_segment
from writer.wal.segment import SEGMENT_SUFFIX, SPARE_SUFFIX, Header, numbers_of, segment_name, spare_name

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
