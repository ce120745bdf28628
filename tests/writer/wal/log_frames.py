"""Logs that hold frames of several sources, as the intake writes them, and what each record takes of its file."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from lakefeed.contract.changes import Position, SourceId
from lakefeed.ingest.cli.wal import HEADS
from lakefeed.ingest.intake.sources import encode_head
from lakefeed.writer.wal.inspect import LogReport, RecordReport, inspect_log
from lakefeed.writer.wal.log import FileLog
from lakefeed.writer.wal.payload import Encoding, Frame, encode_frame
from lakefeed.writer.wal.records import Record, aligned, claimed_header
from lakefeed.writer.wal.tail import Tail


@dataclass
class Senders:
    """Sources that send frames to a log, and what is known of them afterwards."""

    rng: random.Random
    names: tuple[str, ...] = ("shop-1", "shop-2", "shop-3")
    body_max_bytes: int = 60_000
    marks: dict[SourceId, Position] = field(default_factory=dict)
    origins: dict[SourceId, str] = field(default_factory=dict)

    async def send(self, log: FileLog, *, frames: int = 1) -> None:
        """Append one group."""
        head = encode_head(self.marks, self.origins)
        group = [encode_frame(self._next()) for _ in range(frames)]
        await log.append(group, head=lambda: head)

    def _next(self) -> Frame:
        source = SourceId(self.rng.choice(self.names))
        mark = self.marks.get(source, Position(0, -1))
        if self.rng.random() < 0.05:
            mark = Position(mark.epoch + 1, -1)
        last = mark.sequence + self.rng.randint(1, 20)
        origin = self.rng.choice(["", f"lsn {last}"])
        body = self.rng.randbytes(self.rng.randint(1, self.body_max_bytes))
        self.marks[source] = Position(mark.epoch, last)
        if origin:
            self.origins[source] = origin
        return Frame(source, mark.epoch, mark.sequence, last, 0, Encoding.JSON_BATCH, body, origin)


@dataclass(frozen=True)
class Placed:
    """A record and where it stands."""

    path: Path
    start: int
    end: int
    offset: int
    synced: int
    frame: Frame


def place(directory: Path) -> tuple[LogReport, list[Placed]]:
    """Find out where each record of a good log stands."""
    seen: list[RecordReport] = []
    report = inspect_log(directory, HEADS, on_record=seen.append)
    salts = {segment.path.name: segment.header.salt for segment in report.segments}
    data = {segment.path.name: memoryview(segment.path.read_bytes()) for segment in report.segments}
    return report, [
        Placed(
            path=directory / record.segment,
            start=record.position,
            end=record.position + aligned(24 + record.payload_bytes),
            offset=record.offset,
            synced=claimed_header(data[record.segment], record.position, salt=salts[record.segment])[2],
            frame=record.frame,
        )
        for record in seen
    ]


def read_records(log: FileLog) -> list[Record]:
    """Read all records, whatever gaps there are between them."""
    tail = Tail(log, log.first_offset)
    found: list[Record] = []
    try:
        while records := tail.read(until=log.durable_end, max_bytes=100_000):
            found += records
        assert tail.offset == log.durable_end
    finally:
        tail.close()
    return found


def changes_of(items: Iterable[Placed]) -> set[tuple[str, Position]]:
    """List the changes of frames, one by one."""
    return {
        (item.frame.source, Position(item.frame.epoch, sequence))
        for item in items
        for sequence in range(item.frame.after_sequence + 1, item.frame.last_sequence + 1)
    }
