"""Segments of the log as values. Owns their names and the bytes of their header; records belong to record.py.

    magic: 8 bytes | crc32: u32 (of all that follows) | version: u32 | header_bytes: u64
    number: u64 | base_offset: u64 | file_bytes: u64 | salt: u64 | head_length: u64
    head: bytes[head_length] | zeros to a multiple of 8 | records ...

The head is the caller's: whatever it must still know of the records before this segment once they are trimmed.
`file_bytes` is fixed when the file is made, so a file that is shorter than that was damaged. The first line stays as
it is in every version, so that a log of another version is told from a damaged one.
"""

from __future__ import annotations

import re
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path

from writer.errors import WalCorrupt, WalVersionUnknown
from writer.wal.record import aligned

SEGMENT_SUFFIX = ".wal"
SPARE_SUFFIX = ".spare"

_MAGIC = b"LAKEWAL\n"
_VERSION = 2
_START = struct.Struct("<8sIIQ")
_CHECKED_FROM = 12  # behind the crc32
_FIELDS = struct.Struct("<QQQQQ")
_NAME = re.compile(r"(\d{10,})\.(wal|spare)")

HEADER_MIN_BYTES = _START.size + _FIELDS.size


@dataclass(frozen=True, slots=True)
class Header:
    """What a segment says of itself before its first record."""

    number: int
    base_offset: int
    file_bytes: int
    salt: int
    head: bytes

    @property
    def records_start(self) -> int:
        """Where the first record is."""
        return aligned(HEADER_MIN_BYTES + len(self.head))


@dataclass(frozen=True, slots=True)
class Segment:
    """One file of the log and the part of it that is durable: records up to `end_offset`, before `end_position`.

    The position is exact in the newest segment; in others it is only a bound.
    """

    path: Path
    base_offset: int
    file_bytes: int
    salt: int
    records_start: int
    end_offset: int
    end_position: int


def segment_name(number: int) -> str:
    """Name the segment with this number."""
    return f"{number:010d}{SEGMENT_SUFFIX}"


def spare_name(number: int) -> str:
    """Name the spare with this number. Spares count for themselves, so they never meet a segment's number."""
    return f"{number:010d}{SPARE_SUFFIX}"


def numbers_of(names: list[str], suffix: str) -> list[int]:
    """Find the numbers of all segments or spares among the names in a directory, in order."""
    matches = (_NAME.fullmatch(name) for name in names)
    return sorted(int(match[1]) for match in matches if match and f".{match[2]}" == suffix)


def encode_header(header: Header) -> bytes:
    """Lay out the header, with the zeros before the first record."""
    start = _START.pack(_MAGIC, 0, _VERSION, header.records_start)
    fields = _FIELDS.pack(header.number, header.base_offset, header.file_bytes, header.salt, len(header.head))
    checked = (start[_CHECKED_FROM:] + fields + header.head).ljust(header.records_start - _CHECKED_FROM, b"\0")
    return _START.pack(_MAGIC, zlib.crc32(checked), 0, 0)[:_CHECKED_FROM] + checked


def header_bytes(prefix: bytes) -> int:
    """Tell how long the header says it is; whether that is true is not known yet."""
    if len(prefix) < HEADER_MIN_BYTES:
        return HEADER_MIN_BYTES
    claimed: int = _START.unpack_from(prefix)[-1]
    return max(claimed, HEADER_MIN_BYTES)


def decode_header(data: bytes, *, path: str, number: int) -> Header:
    """Read a header back and check that it is whole and belongs to the segment of this number.

    Raises:
        WalCorrupt: it is not. A file gets a segment's name only after its header is synced, so this is damage.
        WalVersionUnknown: it is whole, but of another version.

    """
    if len(data) < HEADER_MIN_BYTES:
        raise WalCorrupt("segment has no header", segment=path, bytes=len(data))
    magic, crc, version, _ = _START.unpack_from(data)
    if magic != _MAGIC:
        raise WalCorrupt("not a segment of a log", segment=path, position=0)
    if zlib.crc32(memoryview(data)[_CHECKED_FROM:]) != crc:
        raise WalCorrupt("checksum mismatch in the header", segment=path, position=0)
    if version != _VERSION:
        raise WalVersionUnknown(
            f"log is of another version, start the Lakefeed that wrote it: segment={path} version={version}"
            f" known={_VERSION}"
        )
    found_number, base_offset, file_bytes, salt, head_length = _FIELDS.unpack_from(data, _START.size)
    if found_number != number:
        raise WalCorrupt("header belongs to another segment", segment=path, found=segment_name(found_number))
    return Header(found_number, base_offset, file_bytes, salt, data[HEADER_MIN_BYTES : HEADER_MIN_BYTES + head_length])
