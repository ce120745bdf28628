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
        self._path = str(segment.path)
        self._salt = segment.salt
        self._synced = segment.base_offset
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

        None only when nothing is left below `until`, be it that the last ones are missing since a repair.

        Raises:
            WalCorrupt: a record is damaged.

        """
        records: list[Record] = []
        while not records and self.offset < until:
            records = self._read_some(until, end_position - self._position, max_bytes)
        return records

    def _read_some(self, until: int, rest_bytes: int, max_bytes: int) -> list[Record]:
        """Read at least one record or mark."""
        start = self._position
        view = self._load(min(max(max_bytes, HEADER_BYTES), rest_bytes))
        records = self._slice(view, until)
        if self._position == start and len(view) < (needed_bytes := claimed_bytes(view, 0)) <= rest_bytes:
            records = self._slice(self._load(needed_bytes), until)
        if self._position == start:
            raise WalCorrupt("damaged record", segment=self._path, position=start, offset=self.offset)
        return records

    def _load(self, size_bytes: int) -> memoryview:
        if len(self._buffer) < size_bytes:
            self._buffer = bytearray(size_bytes)
        view = memoryview(self._buffer)[:size_bytes]
        return view[: read_into(self._files, self._descriptor, view, self._position)]

    def _slice(self, view: memoryview, until: int) -> list[Record]:
        """Take good records from the beginning of what was read; the first one that is bad or cut off ends it."""
        records: list[Record] = []
        position, offset, synced = 0, self.offset, self._synced
        while offset < until and (found := good_record(view, position, offset=offset, synced=synced, salt=self._salt)):
            length, next_offset, synced = found
            if length:  # a mark has none
                start = position + HEADER_BYTES
                records.append(Record(offset, bytes(view[start : start + length])))
            position += aligned(HEADER_BYTES + length)
            offset = next_offset
        self.offset, self._synced = offset, synced
        self._position += position
        return records
