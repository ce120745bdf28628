"""Records of the write-ahead log. Owns their bytes and checks, and tells a torn tail from corruption.

    crc32: u32 (of all that follows) | length: u32 | offset: u64 | group: u64 | payload: bytes[length] | zeros to 8

All numbers are little-endian and every record starts at a multiple of 8, so that a search behind damaged bytes finds
the next record. `offset` numbers the records of the whole log. `group` is the first offset of the group that the
record was synced with; it is stored xor the salt of its segment, a random number that never leaves the machine, so
neither what a recycled file still holds from its former life nor bytes that a client dressed up as a record can pass.

Groups are written one after the other, each only after the one before it is synced. So when the record at `offset`
is bad, a good record behind it tells what happened:

    its group > offset     a later group was begun: the bad record had been durable, this is corruption
    its group <= offset    it was written together with the bad record: never synced, the tail is torn
    there is none          the tail is torn, or the log simply ends here

A write that power loss interrupts is taken to harm no byte outside of it, as every journal of a database does.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from writer.errors import WalCorrupt
from writer.frames import Payload

ALIGNMENT = 8
HEADER_BYTES = 24
GROUP_MAX_BYTES = 2**32 - 1  # what `length` can say of a single record

_CRC = struct.Struct("<I")
_CHECKED = struct.Struct("<IQQ")
_HEADER = struct.Struct("<IIQQ")

_PADDINGS = tuple(bytes(count) for count in range(ALIGNMENT))

# The search looks at this many possible positions at once: 1 MiB of log, so that its arrays stay in the cache.
_SEARCH_WORDS = 128 * 1024


@dataclass(frozen=True, slots=True)
class Record:
    """One entry of the log as read back: its number and what was appended."""

    offset: int
    payload: bytes


@dataclass(frozen=True, slots=True)
class End:
    """Where the good records of a segment end, and where the last group among them begins."""

    position: int
    offset: int
    group_position: int


def aligned(size_bytes: int) -> int:
    """Round up to where the next record may start."""
    return (size_bytes + ALIGNMENT - 1) & -ALIGNMENT


def record_bytes(payload: Payload) -> int:
    """Tell how many bytes of a segment the payload will take."""
    return aligned(HEADER_BYTES + sum(map(len, payload)))


def encode_group(payloads: Sequence[Payload], *, first_offset: int, salt: int) -> list[bytes]:
    """Lay out one group as parts to be written one after the other; payloads are passed on, never copied."""
    parts: list[bytes] = []
    crc32 = zlib.crc32
    for offset, payload in enumerate(payloads, first_offset):
        length = sum(map(len, payload))
        padding = _PADDINGS[-length % ALIGNMENT]
        checked = _CHECKED.pack(length, offset, first_offset ^ salt)
        crc = crc32(checked)
        for part in (*payload, padding):
            crc = crc32(part, crc)
        parts += (_CRC.pack(crc) + checked, *payload, padding)
    return parts


def claimed_bytes(view: memoryview, position: int) -> int:
    """Tell how long the record at `position` says it is; whether that is true is not known yet."""
    if position + HEADER_BYTES > len(view):
        return HEADER_BYTES
    length: int = _HEADER.unpack_from(view, position)[1]
    return aligned(HEADER_BYTES + length)


def good_record(view: memoryview, position: int, *, offset: int, group: int, salt: int) -> tuple[int, int] | None:
    """Return length and group of the record at `position` if it is whole and continues the log, else None.

    It continues the log if it has the `offset` that is due and belongs to the `group` of the record before it or
    begins a group itself. The first record of a segment always begins one: pass its offset as `group`.
    """
    if position + HEADER_BYTES > len(view):
        return None
    crc, length, found_offset, mark = _HEADER.unpack_from(view, position)
    found_group = mark ^ salt
    # No payload is empty, so that zeros are never a record.
    if length == 0 or found_offset != offset or (found_group not in (group, offset)):
        return None
    end = position + aligned(HEADER_BYTES + length)
    if end > len(view) or zlib.crc32(view[position + _CRC.size : end]) != crc:
        return None
    return length, found_group


def find_end(view: memoryview, *, start: int, base_offset: int, salt: int, name: str) -> End:
    """Find where the records of the newest segment end.

    Raises:
        WalCorrupt: a bad record has a good record of a later group behind it.

    """
    position, offset, group, group_position = start, base_offset, base_offset, start
    while found := good_record(view, position, offset=offset, group=group, salt=salt):
        length, group = found
        if group == offset:
            group_position = position
        position += aligned(HEADER_BYTES + length)
        offset += 1
    later = _find_later_group(view, position, offset=offset, salt=salt)
    if later is not None:
        raise WalCorrupt(
            f"damaged record before a durable one: segment={name} position={position} expected_offset={offset}"
            f" next_good_position={later}"
        )
    return End(position, offset, group_position)


def _find_later_group(view: memoryview, position: int, *, offset: int, salt: int) -> int | None:
    """Find a good record of a group above `offset`, anywhere at or behind `position`."""
    count = (len(view) - position) // ALIGNMENT
    words = np.frombuffer(view, dtype="<u8", offset=position, count=count) if count else np.empty(0, dtype="<u8")
    for start in range(0, len(words), _SEARCH_WORDS):
        block = words[start : start + _SEARCH_WORDS + 2]
        lengths, offsets, groups = block[:-2] >> 32, block[1:-1], block[2:] ^ salt
        plausible = (groups > offset) & (groups <= offsets) & (offsets < offset + len(words)) & (lengths > 0)
        for index in np.flatnonzero(plausible):
            candidate = position + (start + int(index)) * ALIGNMENT
            if _crc_is_good(view, candidate):
                return candidate
    return None


def _crc_is_good(view: memoryview, position: int) -> bool:
    (crc,) = _CRC.unpack_from(view, position)
    end = position + claimed_bytes(view, position)
    return end <= len(view) and zlib.crc32(view[position + _CRC.size : end]) == crc
