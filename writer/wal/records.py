"""Records of the write-ahead log. Owns their bytes and checks, and tells a torn tail from corruption.

    crc32: u32 (of all that follows) | length: u32 | offset: u64 | synced: u64 | payload: bytes[length] | zeros to 8

All numbers are little-endian and every record starts at a multiple of 8, so that a search behind damaged bytes finds
the next record. `offset` numbers the records of the whole log. `synced` says that all records below it were synced
when this one was written; it is stored xor the salt of its segment, a random number that never leaves the machine, so
neither what a recycled file still holds from its former life nor bytes that a client dressed up as a record can pass.

A *mark* has `length` 2^31 and no payload, and takes no number. It is written when everything before it is synced, and
says which number follows: `offset` is the one that was due, `synced` the next one. After a clean close these are the
same; where a repair had to leave a gap, the records between them are missing for good.

When the record at `offset` is bad, what is good behind it tells what happened, however often the log was synced:

    its synced > offset     the bad record had been durable: this is corruption
    its synced <= offset    it was written before the bad record was known to be on disk: the tail is torn
    there is none           the tail is torn, or the log simply ends here

A write that power loss interrupts is taken to harm no byte outside of it, as every journal of a database does.
"""

from __future__ import annotations

import re
import struct
import zlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from lakefeed.contract.errors import WalCorrupt, WalVersionUnknown
from lakefeed.writer.wal.payload import Payload

# --- writer.wal.record ------------------------------------------------------------------------------------------------


ALIGNMENT = 8
HEADER_BYTES = 24
MARK_BYTES = HEADER_BYTES
GROUP_MAX_BYTES = 2**31 - 1  # what `length` can say of a single record

_MARK_LENGTH = 2**31
_CRC = struct.Struct("<I")
_CHECKED = struct.Struct("<IQQ")
_HEADER = struct.Struct("<IIQQ")

_PADDINGS = tuple(bytes(count) for count in range(ALIGNMENT))

# The search looks at this many possible positions at once: 1 MiB of log, so that its arrays stay in the cache.
_SEARCH_WORDS = 128 * 1024

# No gap is wider than this, so that the search need not checksum whatever looks like a number.
_OFFSETS_AHEAD_MAX = 2**40


@dataclass(frozen=True, slots=True)
class Record:
    """One entry of the log as read back: its number and what was appended."""

    offset: int
    payload: bytes


@dataclass(frozen=True, slots=True)
class End:
    """Where the good records of a segment end; those from `unsynced_position` on may not be on disk.

    `marked` tells that nothing follows the last mark.
    """

    position: int
    offset: int
    unsynced_position: int
    marked: bool


@dataclass(frozen=True, slots=True)
class Due:
    """What the next record of a segment has to say: this offset, and that at least so much is synced.

    Without the salt, which only a damaged header can hide, nothing is known of `synced`.
    """

    offset: int
    synced: int
    salt: int | None


def aligned(size_bytes: int) -> int:
    """Round up to where the next record may start."""
    return (size_bytes + ALIGNMENT - 1) & -ALIGNMENT


def record_bytes(payload: Payload) -> int:
    """Tell how many bytes of a segment the payload will take."""
    return aligned(HEADER_BYTES + sum(map(len, payload)))


def encode_group(payloads: Sequence[Payload], *, first_offset: int, synced: int, salt: int) -> list[bytes]:
    """Lay out one group as parts to be written one after the other; payloads are passed on, never copied."""
    parts: list[bytes] = []
    crc32 = zlib.crc32
    stored = synced ^ salt
    for offset, payload in enumerate(payloads, first_offset):
        length = sum(map(len, payload))
        padding = _PADDINGS[-length % ALIGNMENT]
        checked = _CHECKED.pack(length, offset, stored)
        crc = crc32(checked)
        for part in (*payload, padding):
            crc = crc32(part, crc)
        parts += (_CRC.pack(crc) + checked, *payload, padding)
    return parts


def encode_mark(offset: int, next_offset: int, *, salt: int) -> bytes:
    """Lay out a mark: everything below `offset` is synced, and `next_offset` follows."""
    checked = _CHECKED.pack(_MARK_LENGTH, offset, next_offset ^ salt)
    return _CRC.pack(zlib.crc32(checked)) + checked


def claimed_bytes(view: memoryview, position: int) -> int:
    """Tell how long the record at `position` says it is; whether that is true is not known yet."""
    if position + HEADER_BYTES > len(view):
        return HEADER_BYTES
    length: int = _HEADER.unpack_from(view, position)[1]
    return HEADER_BYTES if length == _MARK_LENGTH else aligned(HEADER_BYTES + length)


def good_record(view: memoryview, position: int, *, offset: int, synced: int, salt: int) -> tuple[int, int, int] | None:
    """Return the length of the record at `position`, the offset and `synced` that are due behind it; None if it is bad.

    It is good if it is whole, has the `offset` that is due, and says no less to be `synced` than the one before it.
    The length of a mark is 0. The first record of a segment follows a synced one: pass its offset as `synced`.
    """
    if position + HEADER_BYTES > len(view):
        return None
    crc, length, found_offset, stored = _HEADER.unpack_from(view, position)
    found_synced = stored ^ salt
    if found_offset != offset:
        return None
    if length == _MARK_LENGTH:
        if found_synced < offset or zlib.crc32(view[position + _CRC.size : position + MARK_BYTES]) != crc:
            return None
        return 0, found_synced, found_synced
    # No payload is empty, so that zeros are never a record.
    if length == 0 or not synced <= found_synced <= offset:
        return None
    end = position + aligned(HEADER_BYTES + length)
    if end > len(view) or zlib.crc32(view[position + _CRC.size : end]) != crc:
        return None
    return length, offset + 1, found_synced


def claimed_header(view: memoryview, position: int, *, salt: int) -> tuple[int, int, int]:
    """Return length (0 of a mark), offset and `synced` of what stands at `position`, true or not; zeros at the end."""
    if position + HEADER_BYTES > len(view):
        return 0, 0, 0
    _, length, offset, stored = _HEADER.unpack_from(view, position)
    return 0 if length == _MARK_LENGTH else length, offset, stored ^ salt


def find_end(view: memoryview, *, start: int, base_offset: int, salt: int, path: str) -> End:
    """Find where the records of the newest segment end.

    Raises:
        WalCorrupt: a bad record has a good one behind it that was written after the bad one was synced.

    """
    position, offset, synced, marked = start, base_offset, base_offset, True
    unsynced: deque[tuple[int, int]] = deque()  # the last offset that each record accounts for, and its position
    while found := good_record(view, position, offset=offset, synced=synced, salt=salt):
        length, offset, synced = found
        while unsynced and unsynced[0][0] < synced:
            unsynced.popleft()
        unsynced.append((offset - 1, position))
        position += aligned(HEADER_BYTES + length)
        marked = length == 0
    later = find_record(view, position, due=Due(offset, offset + 1, salt))
    if later is not None:
        raise WalCorrupt(
            "damaged record before a durable one",
            segment=path,
            position=position,
            offset=offset,
            next_good_position=later,
        )
    return End(position, offset, unsynced[0][1] if unsynced else position, marked)


def find_record(view: memoryview, position: int, *, due: Due, until: int | None = None) -> int | None:
    """Find the first record or mark at or behind `position` that is due or comes later, and is below `until`."""
    if until is None:
        until = due.offset + _OFFSETS_AHEAD_MAX
    count = max(0, len(view) - position) // ALIGNMENT
    words = np.frombuffer(view, dtype="<u8", offset=position, count=count) if count else np.empty(0, dtype="<u8")
    for start in range(0, len(words), _SEARCH_WORDS):
        block = words[start : start + _SEARCH_WORDS + 2]
        for index in np.flatnonzero(_plausible(block, due, until)):
            candidate = position + (start + int(index)) * ALIGNMENT
            if is_whole(view, candidate):
                return candidate
    return None


def _plausible(words: npt.NDArray[np.uint64], due: Due, until: int) -> npt.NDArray[np.bool_]:
    """Tell at which words a record could begin, by its header alone."""
    lengths, offsets = words[:-2] >> 32, words[1:-1]
    plausible = (lengths > 0) & (lengths <= _MARK_LENGTH) & (offsets >= due.offset) & (offsets < until)
    if due.salt is not None and plausible.any():
        synced = words[2:] ^ np.uint64(due.salt)
        of_mark = (synced >= offsets) & (synced <= until)
        plausible &= (synced >= due.synced) & np.where(lengths == _MARK_LENGTH, of_mark, synced <= offsets)
    return plausible


def is_whole(view: memoryview, position: int) -> bool:
    """Tell whether the checksum of what stands at `position` is right."""
    if position + HEADER_BYTES > len(view):
        return False
    (crc,) = _CRC.unpack_from(view, position)
    end = position + claimed_bytes(view, position)
    return end <= len(view) and zlib.crc32(view[position + _CRC.size : end]) == crc


# --- writer.wal.segment -----------------------------------------------------------------------------------------------
#
# Segments of the log as values. Owns their names and the bytes of their header; records belong to record.py.
#
#     magic: 8 bytes | crc32: u32 (of all that follows) | version: u32 | header_bytes: u64
#     number: u64 | base_offset: u64 | file_bytes: u64 | salt: u64 | head_length: u64
#     head: bytes[head_length] | zeros to a multiple of 8 | records ...
#
# The head is the caller's: whatever it must still know of the records before this segment once they are trimmed.
# `file_bytes` is fixed when the file is made, so a file that is shorter than that was damaged. The first line stays as
# it is in every version, so that a log of another version is told from a damaged one.


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
