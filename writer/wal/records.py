"""Records and segment headers of the write-ahead log: byte layout and checks, torn tail or corruption.

A record:

    crc32: u32 (of all that follows) | length: u32 | offset: u64 | synced: u64 | payload: bytes[length] | zeros to 8

All numbers are little-endian. Every record starts at a multiple of 8, so that a search after damaged bytes finds the
next record. `offset` numbers the records of the whole log. `synced` is the offset below which all records were synced
when this one was written. It is stored xor the salt of its segment, a random number that never leaves the machine. So
neither old records of a recycled file nor bytes that a client made look like a record are taken for records.

A *mark* has `length` 2^31, no payload, and no offset of its own. It is written when everything before it is synced, and
gives the next offset: `offset` is the one that was due, `synced` the one that follows. After a clean close they are the
same; after a repair that left a gap, the records between them are missing for good.

If the record at `offset` is bad, the next good one shows what happened, in every sync mode:

    its synced > offset     the bad record had been durable: this is corruption
    its synced <= offset    it was written before the bad record was known to be on disk: the tail is torn
    there is none           the tail is torn, or the log ends here

A write that a power loss interrupts is assumed to damage no byte outside of it, as database journals assume.

A segment header, before the first record:

    magic: 8 bytes | crc32: u32 (of all that follows) | version: u32 | header_bytes: u64
    number: u64 | base_offset: u64 | file_bytes: u64 | salt: u64 | head_length: u64
    head: bytes[head_length] | zeros to a multiple of 8

The head is the caller's: what must still be known about the records before this segment once they are trimmed.
`file_bytes` is fixed when the file is made, so a shorter file is damaged. The first line is the same in every version,
so that a log of another version is not taken for a damaged one.
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

from lakefeed.contract.errors import WalCorrupt, WalVersionUnknown
from lakefeed.writer.wal.payload import Payload

ALIGNMENT = 8
HEADER_BYTES = 24
MARK_BYTES = HEADER_BYTES
GROUP_MAX_BYTES = 2**31 - 1  # the highest `length` of a record

_MARK_LENGTH = 2**31
_CRC = struct.Struct("<I")
_CHECKED = struct.Struct("<IQQ")
_HEADER = struct.Struct("<IIQQ")

_PADDINGS = tuple(bytes(count) for count in range(ALIGNMENT))

# Positions that the search checks at once: 1 MiB of log, so that its arrays stay in the processor's cache.
_SEARCH_WORDS = 128 * 1024

# No gap is wider than this, so that the search does not compute checksums for arbitrary numbers.
_OFFSETS_AHEAD_MAX = 2**40


@dataclass(frozen=True, slots=True)
class Record:
    """One record as read back: its offset and what was appended."""

    offset: int
    payload: bytes


@dataclass(frozen=True, slots=True)
class End:
    """Where the good records of a segment end; those from `unsynced_position` on may not be on disk.

    `marked` is whether a mark is the last of them.
    """

    position: int
    offset: int
    unsynced_position: int
    marked: bool


def aligned(size_bytes: int) -> int:
    """Round up to the next position at which a record may start."""
    return (size_bytes + ALIGNMENT - 1) & -ALIGNMENT


def record_bytes(payload: Payload) -> int:
    """Return how many bytes of a segment the payload takes."""
    return aligned(HEADER_BYTES + sum(map(len, payload)))


def encode_group(payloads: Sequence[Payload], *, first_offset: int, synced: int, salt: int) -> list[bytes]:
    """Encode one group as parts to be written one after the other; payloads are not copied."""
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
    """Encode a mark: everything below `offset` is synced, and `next_offset` follows."""
    checked = _CHECKED.pack(_MARK_LENGTH, offset, next_offset ^ salt)
    return _CRC.pack(zlib.crc32(checked)) + checked


def claimed_bytes(view: memoryview, position: int) -> int:
    """Return how long the record at `position` claims to be, unchecked."""
    if position + HEADER_BYTES > len(view):
        return HEADER_BYTES
    length: int = _HEADER.unpack_from(view, position)[1]
    return HEADER_BYTES if length == _MARK_LENGTH else aligned(HEADER_BYTES + length)


def good_record(view: memoryview, position: int, *, offset: int, synced: int, salt: int) -> tuple[int, int, int] | None:
    """Return the length of the record at `position`, and the offset and `synced` due after it; None if it is bad.

    It is good if it is whole, has the `offset` that is due, and a `synced` no lower than that of the one before it. The
    length of a mark is 0. The first record of a segment follows a synced one: pass its offset as `synced`.
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
    # No payload is empty, so zeros are never a record.
    if length == 0 or not synced <= found_synced <= offset:
        return None
    end = position + aligned(HEADER_BYTES + length)
    if end > len(view) or zlib.crc32(view[position + _CRC.size : end]) != crc:
        return None
    return length, offset + 1, found_synced


@dataclass(frozen=True, slots=True)
class ReadRecords:
    """Records that were read, the position after them, and the offset and `synced` due there."""

    records: list[Record]
    position: int
    offset: int
    synced: int


def records_in(view: memoryview, *, offset: int, synced: int, salt: int, until: int) -> ReadRecords:
    """Read the good records below `until` from the beginning of a chunk; a bad or incomplete one ends it.

    The chunk is any part of a segment that begins with the record `offset`. Pure, so that chunks can be read anywhere.
    """
    records: list[Record] = []
    position = 0
    while offset < until and (found := good_record(view, position, offset=offset, synced=synced, salt=salt)):
        length, next_offset, synced = found
        if length:  # a mark has none
            start = position + HEADER_BYTES
            records.append(Record(offset, bytes(view[start : start + length])))
        position += aligned(HEADER_BYTES + length)
        offset = next_offset
    return ReadRecords(records, position, offset, synced)


def claimed_header(view: memoryview, position: int, *, salt: int) -> tuple[int, int, int]:
    """Return length (0 for a mark), offset and `synced` of the bytes at `position`, unchecked; zeros at the end."""
    if position + HEADER_BYTES > len(view):
        return 0, 0, 0
    _, length, offset, stored = _HEADER.unpack_from(view, position)
    return 0 if length == _MARK_LENGTH else length, offset, stored ^ salt


def find_end(view: memoryview, *, start: int, base_offset: int, salt: int, path: str) -> End:
    """Return where the records of the newest segment end.

    Raises: WalCorrupt if a bad record is followed by a good one that was written after the bad one was synced.
    """
    position, offset, synced, marked = start, base_offset, base_offset, True
    unsynced: deque[tuple[int, int]] = deque()  # the last offset that each record covers, and its position
    while found := good_record(view, position, offset=offset, synced=synced, salt=salt):
        length, offset, synced = found
        while unsynced and unsynced[0][0] < synced:
            unsynced.popleft()
        unsynced.append((offset - 1, position))
        position += aligned(HEADER_BYTES + length)
        marked = length == 0
    later = find_record(view, position, offset=offset, synced=offset + 1, salt=salt)
    if later is not None:
        facts = {"position": position, "offset": offset, "next_good_position": later}
        raise WalCorrupt("damaged record before a durable one", segment=path, **facts)
    return End(position, offset, unsynced[0][1] if unsynced else position, marked)


def find_record(
    view: memoryview, position: int, *, offset: int, synced: int, salt: int | None, until: int | None = None
) -> int | None:
    """Return the first record or mark at or after `position` with at least this offset and `synced`, below `until`.

    Without the salt, which is lost with a damaged header, `synced` cannot be read.
    """
    if until is None:
        until = offset + _OFFSETS_AHEAD_MAX
    count = max(0, len(view) - position) // ALIGNMENT
    words = np.frombuffer(view, dtype="<u8", offset=position, count=count) if count else np.empty(0, dtype="<u8")
    for start in range(0, len(words), _SEARCH_WORDS):
        block = words[start : start + _SEARCH_WORDS + 2]
        # At which words a record could begin, judging by its header.
        lengths, offsets = block[:-2] >> 32, block[1:-1]
        plausible = (lengths > 0) & (lengths <= _MARK_LENGTH) & (offsets >= offset) & (offsets < until)
        if salt is not None and plausible.any():
            found = block[2:] ^ np.uint64(salt)
            of_mark = (found >= offsets) & (found <= until)
            plausible &= (found >= synced) & np.where(lengths == _MARK_LENGTH, of_mark, found <= offsets)
        for index in np.flatnonzero(plausible):
            candidate = position + (start + int(index)) * ALIGNMENT
            if is_whole(view, candidate):
                return candidate
    return None


def is_whole(view: memoryview, position: int) -> bool:
    """Return whether the checksum of the record at `position` is right."""
    if position + HEADER_BYTES > len(view):
        return False
    (crc,) = _CRC.unpack_from(view, position)
    end = position + claimed_bytes(view, position)
    return end <= len(view) and zlib.crc32(view[position + _CRC.size : end]) == crc


SEGMENT_SUFFIX = ".wal"
SPARE_SUFFIX = ".spare"

_MAGIC = b"LAKEWAL\n"
_VERSION = 2
_START = struct.Struct("<8sIIQ")
_CHECKED_FROM = 12  # after the crc32
_FIELDS = struct.Struct("<QQQQQ")
_NAME = re.compile(r"(\d{10,})\.(wal|spare)")

HEADER_MIN_BYTES = _START.size + _FIELDS.size


@dataclass(frozen=True, slots=True)
class Header:
    """The header of a segment."""

    number: int
    base_offset: int
    file_bytes: int
    salt: int
    head: bytes

    @property
    def records_start(self) -> int:
        """The position of the first record."""
        return aligned(HEADER_MIN_BYTES + len(self.head))


@dataclass(frozen=True, slots=True)
class Segment:
    """One file of the log and the part of it that is durable: records up to `end_offset`, before `end_position`.

    The position is exact in the newest segment; in others it is an upper bound.
    """

    path: Path
    base_offset: int
    file_bytes: int
    salt: int
    records_start: int
    end_offset: int
    end_position: int


def segment_name(number: int) -> str:
    """Return the file name of a segment."""
    return f"{number:010d}{SEGMENT_SUFFIX}"


def spare_name(number: int) -> str:
    """Return the file name of a spare. Spares are numbered apart from segments."""
    return f"{number:010d}{SPARE_SUFFIX}"


def numbers_of(names: list[str], suffix: str) -> list[int]:
    """Return the numbers of all segments or spares among the names in a directory, in order."""
    matches = (_NAME.fullmatch(name) for name in names)
    return sorted(int(match[1]) for match in matches if match and f".{match[2]}" == suffix)


def encode_header(header: Header) -> bytes:
    """Encode a header, with the zeros before the first record."""
    start = _START.pack(_MAGIC, 0, _VERSION, header.records_start)
    fields = _FIELDS.pack(header.number, header.base_offset, header.file_bytes, header.salt, len(header.head))
    checked = (start[_CHECKED_FROM:] + fields + header.head).ljust(header.records_start - _CHECKED_FROM, b"\0")
    return _START.pack(_MAGIC, zlib.crc32(checked), 0, 0)[:_CHECKED_FROM] + checked


def header_bytes(prefix: bytes) -> int:
    """Return how long the header claims to be, unchecked."""
    if len(prefix) < HEADER_MIN_BYTES:
        return HEADER_MIN_BYTES
    claimed: int = _START.unpack_from(prefix)[-1]
    return max(claimed, HEADER_MIN_BYTES)


def decode_header(data: bytes, *, path: str, number: int) -> Header:
    """Decode a header; check that it is whole and belongs to the segment of this number.

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
        what_to_do = (
            "a newer lakefeed, update lakefeed"
            if version > _VERSION
            else "an older lakefeed, commit it with that one before the update"
        )
        raise WalVersionUnknown(f"log was written by {what_to_do}: segment={path} version={version} known={_VERSION}")
    found_number, base_offset, file_bytes, salt, head_length = _FIELDS.unpack_from(data, _START.size)
    if found_number != number:
        raise WalCorrupt("header belongs to another segment", segment=path, found=segment_name(found_number))
    return Header(found_number, base_offset, file_bytes, salt, data[HEADER_MIN_BYTES : HEADER_MIN_BYTES + head_length])
