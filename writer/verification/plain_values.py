"""Values of Arrow columns as longs or bytes, to be hashed. Owns how each type without parts is seen as one of them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.types as pt

from writer.verification.scratch import Scratch
from writer.verification.text_hash import LEAD_BYTES, TRAIL_BYTES
from writer.verification.xxh64 import WORD_BYTES, Lengths, Words, to_mask

# Decimals of so many digits are one long, in Spark too.
LONG_DIGITS = 18

_NAN_BITS = np.int64(0x7FF8000000000000)
_DECIMAL_BYTES = 16
_BYTE_BITS = 8


def valid_mask(values: pa.Array) -> Words | None:
    """Give words of all bits for values and of none for nulls; nothing where there is no null."""
    if not values.null_count:
        return None
    first, skipped = divmod(values.offset, _BYTE_BITS)
    bits = np.frombuffer(values.buffers()[0], np.uint8)[first:]
    unpacked = np.unpackbits(bits, count=skipped + len(values), bitorder="little")
    return to_mask(unpacked[skipped:].view(np.bool_))


def is_text(type_: pa.DataType) -> bool:
    """Tell whether values are hashed as bytes of any length."""
    return any(is_one(type_) for is_one in (pt.is_string, pt.is_binary, _is_large, pt.is_fixed_size_binary))


def _is_large(type_: pa.DataType) -> bool:
    return bool(pt.is_large_string(type_) or pt.is_large_binary(type_))


# -- longs


def to_longs(values: pa.Array) -> npt.NDArray[np.generic]:
    """Give values as integers; what stands for a null is anything."""
    if pt.is_boolean(values.type):
        values = values.cast(pa.uint8())
    elif pt.is_temporal(values.type) and not pt.is_date32(values.type) and values.type.unit in ("s", "ms"):
        values = values.cast(_in_microseconds(values.type))
    if pt.is_floating(values.type):
        return _double_bits(_raw(values, values.type.to_pandas_dtype()).astype(np.float64))
    return _raw(values, f"i{values.type.bit_width // _BYTE_BITS}" if not pt.is_uint8(values.type) else "u1")


def _in_microseconds(type_: pa.DataType) -> pa.DataType:
    return pa.timestamp("us", tz=type_.tz) if pt.is_timestamp(type_) else pa.time64("us")


def _raw(values: pa.Array, dtype: npt.DTypeLike) -> npt.NDArray[np.generic]:
    """See a fixed-width array's own memory."""
    count, item = len(values), np.dtype(dtype)
    return np.frombuffer(values.buffers()[1], item, count, values.offset * item.itemsize)


def _double_bits(doubles: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    """Give the bits of doubles; changes `doubles`."""
    is_nan = np.isnan(doubles)
    doubles += 0.0  # which makes one zero of both
    bits = doubles.view(np.int64)
    if is_nan.any():
        bits[is_nan] = _NAN_BITS
    return bits


# -- texts


def to_texts(values: pa.Array, scratch: Scratch) -> tuple[Words, Lengths, Lengths]:
    """Give a column's bytes as hash_texts wants them, and where each value begins in them and how long it is."""
    count = len(values)
    starts, lengths = scratch.longs("starts", count), scratch.longs("lengths", count)
    if pt.is_fixed_size_binary(values.type):
        width = values.type.byte_width
        starts[:] = np.arange(0, count * width, width) if width else 0
        lengths.fill(width)
        return _padded(values.buffers()[1], values.offset * width, count * width, scratch), starts, lengths
    item = np.dtype(np.int64 if _is_large(values.type) else np.int32)
    _, offsets_buffer, data = values.buffers()
    offsets = np.frombuffer(offsets_buffer, item, count + 1, values.offset * item.itemsize)
    first, last = int(offsets[0]), int(offsets[-1])
    starts[:] = offsets[:-1]
    lengths[:] = offsets[1:]
    lengths -= starts
    if first:
        starts -= first
    return _padded(data, first, last - first, scratch), starts, lengths


def _padded(data: pa.Buffer | None, first: int, size: int, scratch: Scratch) -> Words:
    words = scratch.words("data", -(-(LEAD_BYTES + size + TRAIL_BYTES) // WORD_BYTES))
    if data is not None and size:
        words.view(np.uint8)[LEAD_BYTES : LEAD_BYTES + size] = np.frombuffer(data, np.uint8, size, first)
    return words


# -- decimals


def unscaled_words(values: pa.Array) -> Words:
    """See unscaled values as pairs of words, the low one first."""
    if not pt.is_decimal128(values.type):
        values = values.cast(pa.decimal128(values.type.precision, values.type.scale))
    words = np.frombuffer(values.buffers()[1], np.uint64, 2 * len(values), values.offset * _DECIMAL_BYTES)
    return words.reshape(-1, 2)


def are_long(pairs: Words, type_: pa.DataType) -> npt.NDArray[np.bool_]:
    """Tell which unscaled values are hashed as one long."""
    if type_.precision <= LONG_DIGITS or type_.scale > LONG_DIGITS:
        return np.full(len(pairs), type_.precision <= LONG_DIGITS)
    low, high = pairs[:, 0].view(np.int64), pairs[:, 1].view(np.int64)
    limit = 10**LONG_DIGITS
    is_long: npt.NDArray[np.bool_] = (low >> 63 == high) & (low < limit) & (low > -limit)
    return is_long


def shortest_bytes(pairs: Words) -> tuple[Words, Lengths, Lengths]:
    """Give unscaled values as the shortest big-endian bytes that still show the sign."""
    sign = (pairs[:, 1].view(np.int64) >> 63).view(np.uint64)
    low, high = pairs[:, 0] ^ sign, pairs[:, 1] ^ sign
    thresholds = np.uint64(1) << np.arange(7, 64, 8, dtype=np.uint64)  # values from here on need one byte more
    in_low, in_high = (1 + np.searchsorted(thresholds, word, side="right") for word in (low, high))
    lengths = np.where(high == 0, in_low, WORD_BYTES + in_high).astype(np.int64)
    data = np.append(pairs[:, ::-1].byteswap(), np.uint64(0))
    ends = np.arange(1, len(pairs) + 1, dtype=np.int64) * _DECIMAL_BYTES
    return data, ends - lengths, lengths
