"""The hash behind Iceberg's bucket transform: Murmur3, 32 bits, x86 variant, seed 0. Owns the arithmetic on arrays.

    each four bytes, little-endian:   k *= C1, rotl 15, *= C2;   h ^= k, rotl 13, * 5 + 0xE6546B64
    the one to three that are left:   k *= C1, rotl 15, *= C2;   h ^= k
    at the end:                       h ^= length, then shifts and products that mix all bits

All rows take a step at once: the loop runs over the blocks of the longest values, not over rows. Where only a few
rows are left, because their values are much longer than others, Python's own integers are faster.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Words: TypeAlias = npt.NDArray[np.uint32]
Bytes: TypeAlias = npt.NDArray[np.uint8]
Lengths: TypeAlias = npt.NDArray[np.int64]

_C1 = np.uint32(0xCC9E2D51)
_C2 = np.uint32(0x1B873593)
_ADDED = np.uint32(0xE6546B64)
_BLOCK_BYTES = 4
_MASK = 0xFFFFFFFF

# A step of numpy costs as much as Python's steps for about so many rows.
FEW_ROWS = 32


def hash_longs(values: npt.NDArray[np.int64]) -> Words:
    """Hash integers as their eight little-endian bytes."""
    halves = np.ascontiguousarray(values, "<i8").view("<u4").reshape(-1, 2)
    hashes = np.zeros(len(values), np.uint32)
    for column in range(2):
        hashes = _with_block(hashes, halves[:, column])
    return _finish(hashes, np.full(len(values), 2 * _BLOCK_BYTES, np.int64))


def hash_slices(data: Bytes, starts: Lengths, lengths: Lengths) -> Words:
    """Hash the bytes of `data` that begin at each start and have each length."""
    hashes = np.zeros(len(starts), np.uint32)
    # Longest first, so that the rows which still have a block are always those in front.
    order = np.argsort(-lengths, kind="stable")
    starts, lengths = starts[order], lengths[order]
    blocks = lengths // _BLOCK_BYTES
    for number in range(int(blocks[0]) if len(blocks) else 0):
        active = int(np.searchsorted(-blocks, -number, side="left"))
        if active < FEW_ROWS:
            for row in range(active):
                rest = data[starts[row] + number * _BLOCK_BYTES : starts[row] + blocks[row] * _BLOCK_BYTES]
                hashes[row] = _with_blocks(int(hashes[row]), rest)
            break
        at = starts[:active] + number * _BLOCK_BYTES
        hashes[:active] = _with_block(hashes[:active], _words(data, at, _BLOCK_BYTES))
    hashes = _finish(_with_tail(hashes, data, starts, lengths), lengths)
    restored = np.empty_like(hashes)
    restored[order] = hashes
    return restored


def _with_block(hashes: Words, blocks: Words) -> Words:
    mixed = _rotated(hashes ^ _scrambled(blocks), 13)
    return mixed * np.uint32(5) + _ADDED


def _with_blocks(hash_: int, data: Bytes) -> int:
    """Take the blocks of one value, one after another."""
    for word in _scrambled(np.frombuffer(data.tobytes(), "<u4")).tolist():
        hash_ ^= word
        hash_ = (((hash_ << 13) | (hash_ >> 19)) * 5 + 0xE6546B64) & _MASK
    return hash_


def _with_tail(hashes: Words, data: Bytes, starts: Lengths, lengths: Lengths) -> Words:
    left = lengths % _BLOCK_BYTES
    for size in range(1, _BLOCK_BYTES):
        rows = np.flatnonzero(left == size)
        if len(rows):
            hashes[rows] ^= _scrambled(_words(data, starts[rows] + lengths[rows] - size, size))
    return hashes


def _finish(hashes: Words, lengths: Lengths) -> Words:
    hashes = hashes ^ lengths.astype(np.uint32)
    hashes = (hashes ^ (hashes >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    hashes = (hashes ^ (hashes >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return hashes ^ (hashes >> np.uint32(16))


def _words(data: Bytes, at: Lengths, size: int) -> Words:
    """Read `size` bytes from each place as a little-endian word."""
    words = np.zeros(len(at), np.uint32)
    for index in range(size):
        words |= data[at + index].astype(np.uint32) << np.uint32(8 * index)
    return words


def _scrambled(words: Words) -> Words:
    return _rotated(words * _C1, 15) * _C2


def _rotated(words: Words, bits: int) -> Words:
    return (words << np.uint32(bits)) | (words >> np.uint32(32 - bits))
