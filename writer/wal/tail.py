"""Reading the log behind its end. Owns the next offset to read and the moves from segment to segment.

Offsets rise by one from record to record, except where a repair left a gap: the tail steps over it.
"""

from __future__ import annotations

from pathlib import Path

from lakefeed.contract.errors import WalCorrupt
from lakefeed.writer.wal.log import Log, SegmentReader
from lakefeed.writer.wal.records import Record, Segment

# How much is read at once to come to the first wanted record inside a segment.
_SEEK_BYTES = 8 * 1024 * 1024


class Tail:
    """Reads the records of a log in order, from any thread but one at a time.

    The log may trim what the tail has passed; trimming what it has yet to read is the caller's error, found at read.
    """

    def __init__(self, log: Log, offset: int) -> None:
        if offset > log.durable_end:
            # Going on would skip the records that the log will yet give these numbers to.
            raise WalCorrupt(f"log ends before what was read from it: offset={offset} durable_end={log.durable_end}")
        self.offset = offset
        self._log = log
        self._segment_path: Path | None = None
        self._reader: SegmentReader | None = None

    def read(self, *, until: int, max_bytes: int) -> list[Record]:
        """Read durable records below `until`: about `max_bytes` of them, at least one if there is any. Blocks.

        Raises:
            WalCorrupt: a record is damaged, or was trimmed before it was read.

        """
        until = min(until, self._log.durable_end)
        records: list[Record] = []
        while not records and self.offset < until:
            records = self._read_segment(until, max_bytes)
        return records

    def _read_segment(self, until: int, max_bytes: int) -> list[Record]:
        """Read from the segment that the next record is in: nothing if all that it still has is a gap."""
        segment = self._log.segment_of(self.offset)
        reader = self._reader_of(segment)
        while reader.offset < self.offset:
            reader.read(until=self.offset, end_position=segment.end_position, max_bytes=_SEEK_BYTES)
        until = min(until, segment.end_offset)
        records = reader.read(until=until, end_position=segment.end_position, max_bytes=max_bytes)
        self.offset = reader.offset
        return records

    def close(self) -> None:
        """Close the file that is being read. The tail can go on reading after that."""
        if self._reader is not None:
            self._reader.close()
        self._reader = None

    def _reader_of(self, segment: Segment) -> SegmentReader:
        # A path is never used twice, unlike the file behind it.
        if self._reader is None or self._segment_path != segment.path:
            self.close()
            try:
                self._reader = SegmentReader(segment, self._log.files)
            except FileNotFoundError as error:
                raise WalCorrupt("segment is gone", segment=str(segment.path), offset=self.offset) from error
            self._segment_path = segment.path
        return self._reader
