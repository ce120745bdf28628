"""What is known of a log that was looked at: values for `wal inspect` and `wal repair`. Owns no reading."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from writer.changes import Position, SourceId
from writer.frames import Frame
from writer.wal.losses import Gap, Loss
from writer.wal.scan import Bounds, Damage, Torn
from writer.wal.segment import Header


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
