"""XXH64, the 64-bit hash of the xxHash family, on arrays of words and texts.

Spark has the same function built in (`xxhash64`), so that both compute the same hashes. What a row's hash covers is
defined in row_hash.py.

    from 32 bytes on:  four lanes over stripes of 32 bytes, joined at the end
    the rest:          words of eight bytes, one of four, single bytes; then shifts and products that mix all bits

A text of n bytes is padded to whole words: the byte n mod 8, zeros, and the text.

    word 0                                         words 1, 2, ...
    n mod 8 | zeros | the first n mod 8 bytes      the other bytes, eight each

No text then ends in half words and single bytes, which would take longer than all the rest of a short one; and no two
texts become the same. Fewer than four words are hashed one after the other, more in stripes of four, one to a lane.

All values take a step at once. Every call on an array releases the interpreter's lock and takes it again, so calls are
few and long, and they change arrays in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Words: TypeAlias = npt.NDArray[np.uint64]
Lengths: TypeAlias = npt.NDArray[np.int64]

P1 = 0x9E3779B185EBCA87
P2 = 0xC2B2AE3D27D4EB4F
P3 = 0x165667B19E3779F9
P4 = 0x85EBCA77C2B2AE63
P5 = 0x27D4EB2F165667C5
MASK = 0xFFFFFFFFFFFFFFFF
WORD_BYTES = 8
_HALF_BYTES = 4
_HALF_MASK = 0xFFFFFFFF


def hash_words(words: Words, seeds: int | Words, temporary: Words | None = None) -> Words:
    """Hash words of eight bytes, with one seed or one for each. Changes `words` to the hashes."""
    temporary = np.empty_like(words) if temporary is None else temporary
    mix(words, temporary)
    words ^= seeded(seeds, P5 + WORD_BYTES, out=temporary)
    _turn_and_add(words, temporary)
    return avalanche(words, temporary)


def hash_longs(values: npt.NDArray[np.int64], seeds: int | Words) -> Words:
    """Hash integers as their eight little-endian bytes, with one seed or one for each."""
    return hash_words(values.astype(np.int64).view(np.uint64), seeds)


def hash_long(value: int, seed: int) -> int:
    """Hash one integer."""
    return int(hash_longs(np.array([value], np.int64), seed)[0])


def hash_short_slices(data: Words, starts: Lengths, lengths: Lengths, seed: int) -> Words:
    """Hash the bytes that begin at each start and have each length, less than 32.

    `data` holds the bytes in order, eight to a word, and has one word more than them.
    """
    hashes = lengths.view(np.uint64) + ((seed + P5) & MASK)
    temporary = np.empty_like(hashes)
    for number in range(int(lengths.max(initial=0)) // WORD_BYTES):
        mixed = hashes.copy()
        take_words(mixed, _words_at(data, starts + number * WORD_BYTES), temporary)
        replace(hashes, mixed, where=lengths >= (number + 1) * WORD_BYTES)
    left = lengths & (WORD_BYTES - 1)
    return avalanche(_with_tail(hashes, _words_at(data, starts + (lengths - left)), left, temporary), temporary)


def _words_at(data: Words, at: Lengths) -> Words:
    """Read words at any byte; beyond the last one their value is undefined."""
    low_bits = ((at & 7) << 3).view(np.uint64)
    high = np.take(data, (at >> 3) + 1, mode="clip")
    return (np.take(data, at >> 3, mode="clip") >> low_bits) | (high << (64 - low_bits))  # a shift by 64 bits gives 0


def _with_tail(hashes: Words, last: Words, left: Lengths, temporary: Words) -> Words:
    """Add the last bytes, seven at most, which are the first of `last`. Changes `hashes`."""
    has_half = left >= _HALF_BYTES
    mixed = last & np.uint64(_HALF_MASK)
    mixed *= P1
    mixed ^= hashes
    turn(mixed, 23, temporary)
    mixed *= P2
    mixed += P3
    replace(hashes, mixed, where=has_half)
    last = last >> (has_half.astype(np.uint64) << np.uint64(5))
    left = left & (_HALF_BYTES - 1)
    for number in range(int(left.max(initial=0))):
        mixed = (last >> np.uint64(8 * number)) & np.uint64(0xFF)
        mixed *= P5
        mixed ^= hashes
        turn(mixed, 11, temporary)
        mixed *= P1
        replace(hashes, mixed, where=left > number)
    return hashes


# -- steps; `temporary` is an array of the same size


def seeded(seeds: int | Words, added: int, *, out: Words) -> Words:
    """Return seeds plus a constant."""
    if isinstance(seeds, int):
        out.fill((seeds + added) & MASK)
        return out
    return np.add(seeds, added & MASK, out=out)


def take_words(hashes: Words, words: Words, temporary: Words) -> None:
    """Add one word of eight bytes to each hash. Changes `hashes` and `words`."""
    mix(words, temporary)
    hashes ^= words
    _turn_and_add(hashes, temporary)


def mix(words: Words, temporary: Words, lanes: Words | None = None) -> None:
    """Apply one round of the algorithm to words, into lanes or alone. Changes `words`."""
    words *= P2
    if lanes is not None:
        words += lanes
    turn(words, 31, temporary)
    words *= P1


def _turn_and_add(hashes: Words, temporary: Words) -> None:
    turn(hashes, 27, temporary)
    hashes *= P1
    hashes += P4


def avalanche(hashes: Words, temporary: Words) -> Words:
    """Mix all bits at the end. Changes `hashes`."""
    for bits, factor in ((33, P2), (29, P3), (32, 1)):
        np.right_shift(hashes, bits, out=temporary)
        hashes ^= temporary
        if factor != 1:
            hashes *= factor
    return hashes


def turn(words: Words, bits: int, temporary: Words) -> None:
    """Rotate to the left. Changes `words`."""
    np.left_shift(words, bits, out=temporary)
    words >>= 64 - bits
    words |= temporary


def replace(words: Words, others: Words, *, where: npt.NDArray[np.bool_]) -> None:
    """Replace words by the others where chosen. Changes both. Masks, because branches cost a multiple of them."""
    others ^= words
    others &= to_mask(where)
    words ^= others


def to_mask(chosen: npt.NDArray[np.bool_]) -> Words:
    """Return words with all bits set where chosen, and none elsewhere."""
    return np.negative(chosen.view(np.int8)).astype(np.int64).view(np.uint64)


class Scratch:
    """Reusable arrays by name, for one thread: fresh pages for a step would cost as much as the step.

    The content of an array is lost when its name is requested again.
    """

    def __init__(self) -> None:
        self._arrays: dict[str, npt.NDArray[np.uint64]] = {}

    def words(self, name: str, count: int) -> npt.NDArray[np.uint64]:
        """Return the array of that name; its content is undefined."""
        array = self._arrays.get(name)
        if array is None or len(array) < count:
            array = self._arrays[name] = np.empty(count, np.uint64)
        return array[:count]

    def longs(self, name: str, count: int) -> npt.NDArray[np.int64]:
        """Return the array of that name as signed numbers."""
        return self.words(name, count).view(np.int64)


# Padding of the words that hold texts, before the first and behind the last: reads of whole words may reach into it.
LEAD_BYTES = 8
TRAIL_BYTES = 8
# Longer texts are hashed in parts: all parts of a column at once, instead of one loop per text.
PART_BYTES = 256

_STRIPE_WORDS = 4
_STRIPE_BYTES = 32
# For a word that ends with the first 0 to 7 bytes of a text, the mask of the text's bits.
_ODD_BITS = np.array([0] + [2**64 - 2 ** (64 - 8 * odd) for odd in range(1, WORD_BYTES)], np.uint64)


def hash_texts(data: Words, starts: Lengths, lengths: Lengths, seed: int, scratch: Scratch) -> Words:
    """Hash the texts of each length at each start, counted in bytes after the lead; long ones in parts."""
    if lengths.max(initial=0) <= PART_BYTES:
        return _hash_parts(data, starts, lengths, seed, scratch)
    parts = np.maximum(1, -(-lengths // PART_BYTES))
    firsts = np.cumsum(parts) - parts
    number = np.arange(int(parts.sum()), dtype=np.int64) - np.repeat(firsts, parts)
    at = number * PART_BYTES
    seeds = np.where(np.repeat(parts, parts) == 1, np.uint64(seed), hash_longs(number, seed))
    part_lengths = np.minimum(np.repeat(lengths, parts) - at, PART_BYTES)
    hashes = _hash_parts(data, np.repeat(starts, parts) + at, part_lengths, seeds, scratch)
    return np.bitwise_xor.reduceat(hashes, firsts)


def _hash_parts(data: Words, starts: Lengths, lengths: Lengths, seeds: int | Words, scratch: Scratch) -> Words:
    is_striped = lengths >= (_STRIPE_WORDS - 1) * WORD_BYTES
    striped_count = np.count_nonzero(is_striped)
    if striped_count in (0, len(lengths)):
        hash_them = _hash_striped if striped_count else _hash_short
        return hash_them(data, starts, lengths, seeds, scratch)
    hashes = np.empty(len(lengths), np.uint64)
    for is_chosen, hash_them in ((~is_striped, _hash_short), (is_striped, _hash_striped)):
        chosen = np.flatnonzero(is_chosen)
        own_seeds = seeds if isinstance(seeds, int) else seeds[chosen]
        hashes[chosen] = hash_them(data, starts[chosen], lengths[chosen], own_seeds, scratch)
    return hashes


def _hash_short(data: Words, starts: Lengths, lengths: Lengths, seeds: int | Words, scratch: Scratch) -> Words:
    count = len(lengths)
    words, temporary = scratch.words("words", count), scratch.words("temporary", count)
    odd = np.bitwise_and(lengths, WORD_BYTES - 1, out=scratch.longs("odd", count))
    reader = _Reader(data, np.add(starts, odd, out=scratch.longs("at", count)), scratch)
    reader.read_first(odd, out=words)
    if lengths.max(initial=0) < WORD_BYTES:
        return hash_words(words, seeds, temporary)
    hashes = seeded(seeds, P5 + WORD_BYTES, out=scratch.words("hashes", count))
    hashes += np.subtract(lengths, odd, out=odd).view(np.uint64)
    take_words(hashes, words, temporary)
    return _finished(hashes, reader, np.right_shift(odd, 3, out=odd), scratch)


def _hash_striped(data: Words, starts: Lengths, lengths: Lengths, seeds: int | Words, scratch: Scratch) -> Words:
    count = len(lengths)
    odd = np.bitwise_and(lengths, WORD_BYTES - 1, out=scratch.longs("odd", count))
    at = np.add(starts, odd, out=scratch.longs("at", count))
    counts = (lengths >> 3) + 1
    stripes = counts >> 2
    lanes = _first_stripe(_Reader(data, at, scratch), odd, seeds, scratch)
    for number in range(1, int(stripes.max())):
        _take_stripe(lanes, data, at + number * _STRIPE_BYTES, np.flatnonzero(stripes > number), scratch)
    hashes = _joined(lanes, scratch)
    hashes += np.left_shift(counts, 3, out=odd).view(np.uint64)
    at += np.left_shift(stripes, 5, out=stripes)
    return _finished(hashes, _Reader(data, at, scratch), np.bitwise_and(counts, _STRIPE_WORDS - 1, out=counts), scratch)


def _finished(hashes: Words, reader: _Reader, counts: Lengths, scratch: Scratch) -> Words:
    """Add the remaining words, at most three of each text."""
    words, temporary = scratch.words("words", len(hashes)), scratch.words("temporary", len(hashes))
    for number in range(int(counts.max(initial=0))):
        reader.read(out=words)
        has_word = counts > number
        if has_word.all():
            take_words(hashes, words, temporary)
        else:
            mixed = scratch.words("mixed", len(hashes))
            mixed[:] = hashes
            take_words(mixed, words, temporary)
            replace(hashes, mixed, where=has_word)
    return avalanche(hashes, temporary)


def _first_stripe(reader: _Reader, odd: Lengths, seeds: int | Words, scratch: Scratch) -> Sequence[Words]:
    count = len(odd)
    lanes = [scratch.words(f"lane {number}", count) for number in range(_STRIPE_WORDS)]
    reader.read_first(odd, out=lanes[0])
    for lane in lanes[1:]:
        reader.read(out=lane)
    for lane, added in zip(lanes, (P1 + P2, P2, 0, -P1), strict=True):
        mix(lane, scratch.words("temporary", count), seeded(seeds, added, out=scratch.words("words", count)))
    return lanes


def _take_stripe(lanes: Sequence[Words], data: Words, at: Lengths, rows: Lengths, scratch: Scratch) -> None:
    """Add the next stripe of the texts that have one."""
    count, is_all = len(rows), len(rows) == len(at)
    reader = _Reader(data, at if is_all else at[rows], scratch)
    words, temporary = scratch.words("words", count), scratch.words("temporary", count)
    for lane in lanes:
        reader.read(out=words)
        mix(words, temporary, lane if is_all else lane[rows])
        lane[slice(None) if is_all else rows] = words


def _joined(lanes: Sequence[Words], scratch: Scratch) -> Words:
    count = len(lanes[0])
    words, temporary = scratch.words("words", count), scratch.words("temporary", count)
    hashes = scratch.words("hashes", count)
    hashes.fill(0)
    for lane, bits in zip(lanes, (1, 7, 12, 18), strict=True):
        words[:] = lane
        turn(words, bits, temporary)
        hashes += words
    for lane in lanes:
        mix(lane, temporary)
        hashes ^= lane
        hashes *= P1
        hashes += P4
    return hashes


class _Reader:
    """Reads from many byte positions at once, a word at a time; memory is read in whole words."""

    def __init__(self, data: Words, at: Lengths, scratch: Scratch) -> None:
        count = len(at)
        self._data = data
        self._index = np.right_shift(at, 3, out=scratch.longs("index", count))
        low_bits = np.bitwise_and(at, WORD_BYTES - 1, out=scratch.longs("low bits", count))
        low_bits <<= 3
        self._low_bits = low_bits.view(np.uint64)
        self._high_bits = np.subtract(64, self._low_bits, out=scratch.words("high bits", count))
        self._read = np.take(data, self._index, out=scratch.words("read", count), mode="clip")
        self._shifted = scratch.words("shifted", count)

    def read(self, *, out: Words) -> None:
        """Read the next words; beyond a text's end their value is undefined."""
        np.right_shift(self._read, self._low_bits, out=out)
        self._index += 1
        np.take(self._data, self._index, out=self._read, mode="clip")
        out |= np.left_shift(self._read, self._high_bits, out=self._shifted)  # a shift by 64 bits gives 0

    def read_first(self, odd: Lengths, *, out: Words) -> None:
        """Read the first words of texts."""
        self.read(out=out)
        out &= np.take(_ODD_BITS, odd, out=self._shifted, mode="clip")
        out |= odd.view(np.uint64)
