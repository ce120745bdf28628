"""Reading the records of one segment, in order. Owns the checks and the position; which segment is tail.py's matter."""

from __future__ import annotations

import os

from writer.errors import WalCorrupt
from writer.wal.files import Filesystem, read_into
from writer.wal.record import HEADER_BYTES, Record, aligned, claimed_bytes, good_record
from writer.wal.segment import Segment


class SegmentReader:
    """Reads durable records of one segment from its first one on. Blocks."""

    def __init__(self, segment: Segment, files: Filesystem) -> None:
        self.offset = segment.base_offset
        self._name = segment.path.name
        self._salt = segment.salt
        self._group = segment.base_offset
        self._position = segment.records_start
        self._files = files
        self._descriptor = files.open(segment.path, os.O_RDONLY)
        # Kept between reads: fresh memory would cost a page fault for every page read.
        self._buffer = bytearray()

    def close(self) -> None:
        """Close the file."""
        self._files.close(self._descriptor)

    def read(self, *, until: int, end_position: int, max_bytes: int) -> list[Record]:
        """Read records below `until`, all of them durable before `end_position`: about `max_bytes`, at least one.

        Raises:
            WalCorrupt: a record is damaged.

        """
        if self.offset >= until:
            return []
        rest_bytes = end_position - self._position
        view = self._load(min(max(max_bytes, HEADER_BYTES), rest_bytes))
        records = self._slice(view, until)
        if not records and len(view) < (needed_bytes := claimed_bytes(view, 0)) <= rest_bytes:
            records = self._slice(self._load(needed_bytes), until)
        if not records:
            raise WalCorrupt(
                f"damaged record: segment={self._name} position={self._position} expected_offset={self.offset}"
            )
        return records

    def _load(self, size_bytes: int) -> memoryview:
        if len(self._buffer) < size_bytes:
            self._buffer = bytearray(size_bytes)
        view = memoryview(self._buffer)[:size_bytes]
        return view[: read_into(self._files, self._descriptor, view, self._position)]

    def _slice(self, view: memoryview, until: int) -> list[Record]:
        """Take good records from the beginning of what was read; the first one that is bad or cut off ends it."""
        records: list[Record] = []
        position, offset, group = 0, self.offset, self._group
        while offset < until and (found := good_record(view, position, offset=offset, group=group, salt=self._salt)):
            length, group = found
            start = position + HEADER_BYTES
            records.append(Record(offset, bytes(view[start : start + length])))
            position += aligned(HEADER_BYTES + length)
            offset += 1
        self.offset, self._group = offset, group
        self._position += position
        return records
