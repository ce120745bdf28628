"""XXH64, the 64-bit hash of the xxHash family, on arrays. Owns the arithmetic; what is hashed is row_hash.py's.

Spark has the same function built in (`xxhash64`), so that what is computed here can be computed there.

    from 32 bytes on:  four lanes over 32 bytes at a time, joined at the end (text_hash.py)
    what is left:      words of eight bytes, one of four, single bytes; then shifts and products that mix all bits

All values take a step at once. Every call on an array gives the interpreter's lock away and takes it again, so calls
are few and long, and they change arrays in place.
"""

from __future__ import annotations

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
    """Hash words of eight bytes, with one seed or one for each; changes `words` to the hashes."""
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
    """Read words from any bytes; behind the last one they are anything."""
    low_bits = ((at & 7) << 3).view(np.uint64)
    high = np.take(data, (at >> 3) + 1, mode="clip")
    return (np.take(data, at >> 3, mode="clip") >> low_bits) | (high << (64 - low_bits))  # by 64 bits it is nothing


def _with_tail(hashes: Words, last: Words, left: Lengths, temporary: Words) -> Words:
    """Take the last bytes, seven at most, that words begin with; changes `hashes`."""
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
    """Give seeds with a constant added to them."""
    if isinstance(seeds, int):
        out.fill((seeds + added) & MASK)
        return out
    return np.add(seeds, added & MASK, out=out)


def take_words(hashes: Words, words: Words, temporary: Words) -> None:
    """Take one word of eight bytes into each hash; changes `hashes` and `words`."""
    mix(words, temporary)
    hashes ^= words
    _turn_and_add(hashes, temporary)


def mix(words: Words, temporary: Words, lanes: Words | None = None) -> None:
    """Put words through the round that every one goes through, into lanes or alone; changes `words`."""
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
    """Mix all bits at the end; changes `hashes`."""
    for bits, factor in ((33, P2), (29, P3), (32, 1)):
        np.right_shift(hashes, bits, out=temporary)
        hashes ^= temporary
        if factor != 1:
            hashes *= factor
    return hashes


def turn(words: Words, bits: int, temporary: Words) -> None:
    """Rotate to the left; changes `words`."""
    np.left_shift(words, bits, out=temporary)
    words >>= 64 - bits
    words |= temporary


def replace(words: Words, others: Words, *, where: npt.NDArray[np.bool_]) -> None:
    """Take the others where told to; changes both. Random choices cost a multiple as branches, so masks make them."""
    others ^= words
    others &= to_mask(where)
    words ^= others


def to_mask(chosen: npt.NDArray[np.bool_]) -> Words:
    """Give words of all bits where chosen, and of none elsewhere."""
    return np.negative(chosen.view(np.int8)).astype(np.int64).view(np.uint64)
