"""Tail of the log: reads durable records in order, from segment to segment.

Offsets rise by one from record to record, except after a gap that a repair left: the tail skips it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from lakefeed.contract.errors import WalCorrupt
from lakefeed.writer.wal.directory import Filesystem, read_into
from lakefeed.writer.wal.records import HEADER_BYTES, Record, Segment, claimed_bytes, records_in

if TYPE_CHECKING:
    from lakefeed.writer.wal.log import FileLog

# How much is read at once to get to the first wanted record inside a segment.
_SEEK_BYTES = 8 * 1024 * 1024


class SegmentReader:
    """Reads durable records of one segment, from its first one on. Blocks."""

    def __init__(self, segment: Segment, files: Filesystem) -> None:
        self.offset = segment.base_offset
        self._path = str(segment.path)
        self._salt = segment.salt
        self._synced = segment.base_offset
        self._position = segment.records_start
        self._files = files
        self._descriptor = files.open(segment.path, os.O_RDONLY)
        # Kept between reads: new memory would cost a page fault for every page read.
        self._buffer = bytearray()

    def close(self) -> None:
        """Close the file."""
        self._files.close(self._descriptor)

    def read(self, *, until: int, end_position: int, max_bytes: int) -> list[Record]:
        """Return records below `until`, all of them durable before `end_position`: about `max_bytes`, at least one.

        The list is empty only if nothing is left below `until`, or if the last ones are missing since a repair.

        Raises: WalCorrupt if a record is damaged.
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
        """Return the good records at the beginning of what was read; the first one that is bad or cut off ends it."""
        read = records_in(view, offset=self.offset, synced=self._synced, salt=self._salt, until=until)
        self.offset, self._synced = read.offset, read.synced
        self._position += read.position
        return read.records


class Tail:
    """Reads the records of a log in order, from any thread but one at a time.

    The log may trim what the tail has read. Trimming what it has not read yet is the caller's error, found at `read`.
    """

    def __init__(self, log: FileLog, offset: int) -> None:
        if offset > log.durable_end:
            # Reading on would skip the records that will get these offsets.
            raise WalCorrupt(f"log ends before what was read from it: offset={offset} durable_end={log.durable_end}")
        self.offset = offset
        self._log = log
        self._segment_path: Path | None = None
        self._reader: SegmentReader | None = None

    def read(self, *, until: int, max_bytes: int) -> list[Record]:
        """Return durable records below `until`; see `LogTail`."""
        until = min(until, self._log.durable_end)
        records: list[Record] = []
        while not records and self.offset < until:
            records = self._read_segment(until, max_bytes)
        return records

    def _read_segment(self, until: int, max_bytes: int) -> list[Record]:
        """Return records of the segment that has the next one; none if the rest of it is a gap."""
        segment = self._log.segment_of(self.offset)
        reader = self._reader_of(segment)
        while reader.offset < self.offset:
            reader.read(until=self.offset, end_position=segment.end_position, max_bytes=_SEEK_BYTES)
        until = min(until, segment.end_offset)
        records = reader.read(until=until, end_position=segment.end_position, max_bytes=max_bytes)
        self.offset = reader.offset
        return records

    def close(self) -> None:
        """Close the file that is being read. The tail can be read again after that."""
        if self._reader is not None:
            self._reader.close()
        self._reader = None

    def _reader_of(self, segment: Segment) -> SegmentReader:
        # A path is never used twice, but its file is.
        if self._reader is None or self._segment_path != segment.path:
            self.close()
            try:
                self._reader = SegmentReader(segment, self._log.files)
            except FileNotFoundError as error:
                raise WalCorrupt("segment is gone", segment=str(segment.path), offset=self.offset) from error
            self._segment_path = segment.path
        return self._reader
