"""Partition transforms on Arrow columns, exact by the specification. Owns result types and values.

    identity, void      any primitive type
    bucket[N]           (murmur3(value) & 0x7FFFFFFF) % N; see _hashes for the bytes of each type
    truncate[W]         numbers down to a multiple of W (decimals in their last digit), text and binary to W characters
    year, month, day, hour   whole units since 1970, rounded down before it too

Null stays null. Nothing here looks at values one by one.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from writer.iceberg.murmur3 import Bytes, Words, hash_longs, hash_slices
from writer.iceberg.terms import PartitionRejected, Transform, parse_transform
from writer.types import Type

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
