"""Partition transforms on Arrow columns, exact by the specification. Owns result types and values.

    identity, void      any primitive type
    bucket[N]           (murmur3(value) & 0x7FFFFFFF) % N; see _hashes for the bytes of each type
    truncate[W]         numbers down to a multiple of W (decimals in their last digit), text and binary to W characters
    year, month, day, hour   whole units since 1970, rounded down before it too

Null stays null. Nothing here looks at values one by one.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from lakefeed.iceberg.terms import PartitionRejected, Transform, parse_transform
from lakefeed.iceberg.types import Type

# --- writer.iceberg.murmur3 -------------------------------------------------------------------------------------------
#
# The hash behind Iceberg's bucket transform: Murmur3, 32 bits, x86 variant, seed 0. Owns the arithmetic on arrays.
#
#     each four bytes, little-endian:   k *= C1, rotl 15, *= C2;   h ^= k, rotl 13, * 5 + 0xE6546B64
#     the one to three that are left:   k *= C1, rotl 15, *= C2;   h ^= k
#     at the end:                       h ^= length, then shifts and products that mix all bits
#
# All rows take a step at once: the loop runs over the blocks of the longest values, not over rows. Where only a few
# rows are left, because their values are much longer than others, Python's own integers are faster.


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


# --- writer.iceberg.transforms ----------------------------------------------------------------------------------------


TIME_UNITS = {"year": "Y", "month": "M", "day": "D", "hour": "h"}
NUMPY_UNITS = {
    "date": "D",
    "timestamp": "us",
    "timestamptz": "us",
    "timestamp_ns": "ns",
    "timestamptz_ns": "ns",
}

_HASHED_AS_LONG = ("int", "long", "time", *NUMPY_UNITS)
_HASHED_AS_BYTES = ("string", "binary", "uuid")
_TRUNCATED = ("int", "long", "string", "binary")
_NS_PER_US = 1000
_US_PER_DAY = 86_400_000_000
_HOURS_PER_DAY = 24
_PER_DAY = {
    "date": 1,
    "timestamp": _US_PER_DAY,
    "timestamptz": _US_PER_DAY,
    "timestamp_ns": _US_PER_DAY * _NS_PER_US,
    "timestamptz_ns": _US_PER_DAY * _NS_PER_US,
}
_DECIMAL_BYTES = 16  # of Arrow's decimal128


def result_type(text: str, source: Type) -> str:
    """Give the type of a transform's values.

    Raises:
        PartitionRejected: the transform is not known, or not for this type.
    """
    transform = parse_transform(text)
    if isinstance(source, str) and _takes(transform.kind, source):
        if transform.kind == "day":
            return "date"
        return source if transform.kind in ("identity", "void", "truncate") else "int"
    shown = source if isinstance(source, str) else type(source).__name__.removesuffix("Type").lower()
    raise PartitionRejected(f"partition transform is not for this type: transform={text} type={shown}")


def _takes(kind: str, source: str) -> bool:
    is_decimal = source.startswith("decimal")
    match kind:
        case "identity" | "void":
            return True
        case "bucket":
            return is_decimal or source.startswith("fixed") or source in _HASHED_AS_LONG + _HASHED_AS_BYTES
        case "truncate":
            return is_decimal or source in _TRUNCATED
    return source in NUMPY_UNITS and (kind, source) != ("hour", "date")


def apply_transform(transform: Transform, source: str, values: pa.Array) -> pa.Array:
    """Compute the partition value of each row of a column of Iceberg type `source`."""
    match transform.kind:
        case "void":
            return pa.nulls(len(values))
        case "identity":
            return as_stored(values)
        case "bucket":
            buckets = (_hashes(source, values) & np.uint32(0x7FFFFFFF)) % np.uint32(transform.width)
            return _with_nulls_of(values, buckets.astype(np.int32))
        case "truncate":
            return _truncated(transform.width, source, values)
    return _with_nulls_of(values, _units_since_1970(transform.kind, source, values))


def as_stored(values: pa.Array) -> pa.Array:
    """See dates and times as the integers that they are stored as."""
    if pa.types.is_date32(values.type):
        return values.cast(pa.int32())
    if pa.types.is_timestamp(values.type) or pa.types.is_time64(values.type):
        return values.cast(pa.int64())
    return values


def _integers(values: pa.Array) -> npt.NDArray[np.int64]:
    """Give the stored integers, with anything where a value is null."""
    stored: npt.NDArray[np.int64] = pc.fill_null(as_stored(values).cast(pa.int64()), 0).to_numpy(zero_copy_only=False)
    return stored


def _units_since_1970(kind: str, source: str, values: pa.Array) -> npt.NDArray[np.int64]:
    """Count whole units. By division: numpy's own conversion overflows near the ends of the type."""
    numbers = _integers(values)
    if kind == "hour":
        return np.floor_divide(numbers, _PER_DAY[source] // _HOURS_PER_DAY)
    days = np.floor_divide(numbers, _PER_DAY[source])
    if kind == "day":
        return days
    units: npt.NDArray[np.int64] = days.view("M8[D]").astype(f"M8[{TIME_UNITS[kind]}]").astype(np.int64)
    return units


def _with_nulls_of(values: pa.Array, results: npt.NDArray[np.integer], type_: pa.DataType | None = None) -> pa.Array:
    mask = values.is_null().to_numpy(zero_copy_only=False) if values.null_count else None
    return pa.array(results, type_, mask=mask)


def _hashes(source: str, values: pa.Array) -> Words:
    """Hash each value: integers, dates and times as longs, nanoseconds as microseconds, the others as their bytes."""
    if source in _HASHED_AS_LONG:
        numbers = _integers(values)
        return hash_longs(np.floor_divide(numbers, _NS_PER_US) if source.endswith("_ns") else numbers)
    if source.startswith("decimal"):
        return _decimal_hashes(values)
    binary = values.cast(pa.large_binary())
    _, offset_buffer, data_buffer = binary.buffers()
    offsets = np.frombuffer(offset_buffer, np.int64)[binary.offset : binary.offset + len(binary) + 1]
    data: Bytes = np.frombuffer(data_buffer or b"", np.uint8)
    return hash_slices(data, offsets[:-1], np.diff(offsets))


def _decimal_hashes(values: pa.Array) -> Words:
    """Hash unscaled values as the shortest big-endian two's complement that holds them."""
    bytes_ = np.ascontiguousarray(_decimal_words(values)).view(np.uint8).reshape(-1, _DECIMAL_BYTES)[:, ::-1]
    sign = bytes_[:, 0] >> 7
    is_filler = bytes_ == (sign * np.uint8(0xFF))[:, None]
    # The last byte stays, and so does a filler whose successor would turn the sign.
    fillers = np.minimum(np.where(is_filler.all(axis=1), _DECIMAL_BYTES, is_filler.argmin(axis=1)), _DECIMAL_BYTES - 1)
    first = bytes_[np.arange(len(bytes_)), fillers]
    skipped = np.where((fillers > 0) & (first >> 7 != sign), fillers - 1, fillers).astype(np.int64)
    starts = np.arange(len(bytes_), dtype=np.int64) * _DECIMAL_BYTES + skipped
    return hash_slices(np.ascontiguousarray(bytes_).reshape(-1), starts, _DECIMAL_BYTES - skipped)


def _decimal_words(values: pa.Array) -> npt.NDArray[np.int64]:
    """Give the unscaled values as rows of (low, high) 64 bits."""
    data = values.buffers()[1]
    words: npt.NDArray[np.int64] = np.frombuffer(data or b"", "<i8").reshape(-1, 2)
    return words[values.offset : values.offset + len(values)]


def _truncated(width: int, source: str, values: pa.Array) -> pa.Array:
    if source == "string":
        return pc.utf8_slice_codeunits(values, 0, width)
    if source == "binary":
        return pc.binary_slice(values, 0, width)
    if source.startswith("decimal"):
        return _truncated_decimals(width, values)
    numbers = _integers(values)
    # At the very ends of the type this wraps around, as it does in the reference implementation.
    return _with_nulls_of(values, (numbers - numbers % width).astype(values.type.to_pandas_dtype()))


def _truncated_decimals(width: int, values: pa.Array) -> pa.Array:
    """Subtract the remainder in 128 bits: value = high * 2**64 + low, and the same holds modulo the width."""
    words = _decimal_words(values)
    low, high = words[:, 0].view(np.uint64), words[:, 1]
    remainder = (high % width * (2**64 % width) + (low % np.uint64(width)).astype(np.int64)) % width
    subtracted = remainder.astype(np.uint64)
    result = np.empty((len(values), 2), np.int64)
    result[:, 0] = (low - subtracted).view(np.int64)
    result[:, 1] = high - (low < subtracted)
    return _decimals(result, values)


def _decimals(words: npt.NDArray[np.int64], values: pa.Array) -> pa.Array:
    """Build decimals of the type and with the nulls of `values`."""
    valid = pa.array(values.is_valid()).buffers()[1] if values.null_count else None
    return pa.Array.from_buffers(values.type, len(values), [valid, pa.py_buffer(words)])
