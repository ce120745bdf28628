"""XXH64, the 64-bit hash of the xxHash family, on arrays. Owns the arithmetic; what is hashed is row_hash.py's.

Spark has the same function built in (`xxhash64`), so that what is computed here can be computed there.

    from 32 bytes on:  four lanes over 32 bytes at a time, joined at the end
    what is left:      words of eight bytes, one of four, single bytes; then shifts and products that mix all bits

All rows take a step at once, so a loop runs over the bytes of the longest slice: callers keep slices short.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Words: TypeAlias = npt.NDArray[np.uint64]
Lengths: TypeAlias = npt.NDArray[np.int64]

_P1 = 0x9E3779B185EBCA87
_P2 = 0xC2B2AE3D27D4EB4F
_P3 = 0x165667B19E3779F9
_P4 = 0x85EBCA77C2B2AE63
_P5 = 0x27D4EB2F165667C5
_MASK = 0xFFFFFFFFFFFFFFFF
_STRIPE_BYTES = 32
_WORD_BYTES = 8
_HALF_BYTES = 4
_HALF_MASK = 0xFFFFFFFF

# Slices are read a stripe far in whole words, and one word ahead.
PADDING_WORDS = 5


def hash_longs(values: npt.NDArray[np.int64], seeds: int | Words) -> Words:
    """Hash integers as their eight little-endian bytes, with one seed or one for each."""
    hashes = _seeded(seeds, len(values), _P5 + _WORD_BYTES)
    return _avalanche(_with_word(hashes, np.ascontiguousarray(values, "<i8").view("<u8")))


def hash_long(value: int, seed: int) -> int:
    """Hash one integer."""
    return int(hash_longs(np.array([value], np.int64), seed)[0])


def hash_slices(data: Words, starts: Lengths, lengths: Lengths, seeds: int | Words) -> Words:
    """Hash the bytes that begin at each start and have each length, with one seed or one for each.

    `data` holds the bytes in order, eight to a word, and goes on for `PADDING_WORDS` beyond the last slice.
    """
    hashes = _seeded(seeds, len(starts), _P5)
    is_striped = lengths >= _STRIPE_BYTES
    if is_striped.any():
        striped = _rows_where(is_striped)
        own_seeds = seeds if isinstance(seeds, int) else seeds[striped]
        hashes[striped] = _stripes(data, starts[striped], lengths[striped] >> 5, own_seeds)
    hashes += lengths.view(np.uint64)
    left = lengths & (_STRIPE_BYTES - 1)
    words_left = left >> 3
    reader = _Reader(data, starts + (lengths - left))
    last = reader.next_words()
    for number in range(int(words_left.max(initial=0))):
        has_word = words_left > number
        _replace(hashes, _with_word(hashes.copy(), last), where=has_word)
        _replace(last, reader.next_words(), where=has_word)
    return _avalanche(_with_tail(hashes, last, left & (_WORD_BYTES - 1)))


def _rows_where(chosen: npt.NDArray[np.bool_]) -> slice | npt.NDArray[np.intp]:
    """Index the chosen rows; if all are, without copying them."""
    return slice(None) if chosen.all() else np.flatnonzero(chosen)


class _Reader:
    """Reads on from many places at once, a word at a time. Places are at any byte, memory is read by whole words."""

    def __init__(self, data: Words, at: Lengths) -> None:
        self._data = data
        self._index = at >> 3
        self._low_bits = ((at & 7) << 3).view(np.uint64)
        self._high_bits = np.uint64(64) - self._low_bits
        self._read = data[self._index]

    def next_words(self) -> Words:
        words: Words = self._read >> self._low_bits
        self._index += 1
        self._read = self._data[self._index]
        words |= self._read << self._high_bits  # by 64 bits it is nothing
        return words


def _replace(words: Words, others: Words, *, where: npt.NDArray[np.bool_]) -> None:
    """Take the others where told to. Random choices cost a multiple as branches, so it is done by masks."""
    if where.all():
        words[:] = others
        return
    others ^= words
    others &= np.negative(where.view(np.int8)).astype(np.int64).view(np.uint64)
    words ^= others


def _seeded(seeds: int | Words, count: int, added: int) -> Words:
    if isinstance(seeds, int):
        return np.full(count, (seeds + added) & _MASK, np.uint64)
    return seeds + np.uint64(added)


def _with_word(hashes: Words, words: Words) -> Words:
    """Take one word of eight bytes; changes `hashes`."""
    hashes ^= _round(0, words)
    hashes = _rotated(hashes, 27)
    hashes *= np.uint64(_P1)
    hashes += np.uint64(_P4)
    return hashes


def _with_tail(hashes: Words, last: Words, left: Lengths) -> Words:
    """Take the last bytes, seven at most, that words begin with; changes `hashes`."""
    if left.max(initial=0) >= _HALF_BYTES:
        has_half = left >= _HALF_BYTES
        mixed = _rotated(hashes ^ ((last & np.uint64(_HALF_MASK)) * np.uint64(_P1)), 23)
        mixed *= np.uint64(_P2)
        mixed += np.uint64(_P3)
        _replace(hashes, mixed, where=has_half)
        last = last >> (has_half.astype(np.uint64) << np.uint64(5))
        left = left & (_HALF_BYTES - 1)
    for number in range(int(left.max(initial=0))):
        singles = (last >> np.uint64(8 * number)) & np.uint64(0xFF)
        singles *= np.uint64(_P5)
        mixed = _rotated(hashes ^ singles, 11)
        mixed *= np.uint64(_P1)
        _replace(hashes, mixed, where=left > number)
    return hashes


def _stripes(data: Words, starts: Lengths, counts: Lengths, seeds: int | Words) -> Words:
    """Take the whole stripes of slices that have one at least."""
    lanes = [_seeded(seeds, len(starts), added & _MASK) for added in (_P1 + _P2, _P2, 0, -_P1)]
    for number in range(int(counts.max())):
        rows = _rows_where(counts > number)
        reader = _Reader(data, starts[rows] + number * _STRIPE_BYTES)
        for lane in lanes:
            lane[rows] = _round(lane[rows], reader.next_words())
    hashes = _rotated(lanes[0].copy(), 1)
    for lane, bits in zip(lanes[1:], (7, 12, 18), strict=True):
        hashes += _rotated(lane.copy(), bits)
    for lane in lanes:
        hashes ^= _round(0, lane)
        hashes *= np.uint64(_P1)
        hashes += np.uint64(_P4)
    return hashes


def _round(lane: int | Words, words: Words) -> Words:
    mixed = words * np.uint64(_P2)
    if not isinstance(lane, int):
        mixed += lane
    mixed = _rotated(mixed, 31)
    mixed *= np.uint64(_P1)
    return mixed


def _avalanche(hashes: Words) -> Words:
    hashes ^= hashes >> np.uint64(33)
    hashes *= np.uint64(_P2)
    hashes ^= hashes >> np.uint64(29)
    hashes *= np.uint64(_P3)
    hashes ^= hashes >> np.uint64(32)
    return hashes


def _rotated(words: Words, bits: int) -> Words:
    """Rotate to the left; changes `words`."""
    high = words << np.uint64(bits)
    words >>= np.uint64(64 - bits)
    words |= high
    return words
