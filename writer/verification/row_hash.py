"""One hash per row, over all its columns, the same in every engine. Owns how values become numbers or bytes.

`x64(a, b, ...)` is Spark's `xxhash64`: XXH64 of `a` with seed 42, then of `b` with that hash as its seed, and so on. A
field with id `f` adds to its row, by exclusive or:

    null                                          nothing
    boolean, int, long, date, time, timestamps    x64(f, value as a long)
    float, double                                 x64(f, bits of the double), of one NaN and one zero
    string, binary, fixed, uuid                   x64(f, bytes); above 256 bytes, for each 256 of them x64(f, i, bytes)
    decimal                                       x64(f, unscaled value, big-endian and as short as it can be)
    struct                                        x64(f, 1), and what its fields add
    list                                          x64(f, length), and for each element i x64(what it adds, i)
    map                                           x64(f, length), and for each entry x64(what key and value add)

and the row's hash is x64 of that. So it does not change when a file is rewritten, a column is added or renamed, or a
type is widened as Iceberg allows. docs/verification.md has the whole definition with examples.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from writer.types import FIELD_ID_KEY
from writer.verification.xxh64 import PADDING_WORDS, Lengths, Words, hash_long, hash_longs, hash_slices

# Rows hashed at once: few enough that the arrays of a step stay in the processor's cache, many enough for numpy.
BLOCK_ROWS = 16384
# Longer values are hashed in parts: all of a column's parts at once, where one value would be a loop of its own.
PART_BYTES = 256
# Columns that say little are hashed once per different value.
SAMPLE_ROWS = 256
SAMPLE_MAX_DISTINCT = 16

SEED = 42
# Iceberg keeps the ids above for columns that tables do not list, such as row ids in files.
LAST_FIELD_ID = 2_147_483_446

_NAN_BITS = np.int64(0x7FF8000000000000)
_WORD_BYTES = 8
_DECIMAL_BYTES = 16


def hash_rows(rows: pa.Table, fields: Sequence[pa.Field]) -> Words:
    """Hash each row; fields are those of its columns, and carry their Iceberg ids."""
    hashes = [_hash_block(batch.columns, fields) for block in _blocks(rows) for batch in block.to_batches()]
    return np.concatenate(hashes) if hashes else np.zeros(0, np.uint64)


def _blocks(rows: pa.Table) -> Iterator[pa.Table]:
    """Cut rows into blocks. Rows come in as many pieces as clients sent; hashed one by one those cost five times more."""
    for start in range(0, len(rows), BLOCK_ROWS):
        yield rows.slice(start, BLOCK_ROWS).combine_chunks()


def _hash_block(columns: Sequence[pa.Array], fields: Sequence[pa.Field]) -> Words:
    return _x64(_joined(zip(columns, fields, strict=True), len(columns[0])))


def _joined(columns: Iterable[tuple[pa.Array, pa.Field]], count: int) -> Words:
    """Put together what several fields add to their rows."""
    joined = np.zeros(count, np.uint64)
    for values, field in columns:
        field_id = _field_id(field)
        if field_id <= LAST_FIELD_ID and values.null_count < count:
            joined ^= _part_of_row(values, field.type, hash_long(field_id, SEED))
    return joined


def _field_id(field: pa.Field) -> int:
    return int((field.metadata or {})[FIELD_ID_KEY])


def _part_of_row(values: pa.Array, type_: pa.DataType, seed: int) -> Words:
    """Hash the values of one field; nulls give 0. Its parts have their ids in `type_`, the type of values may not."""
    if isinstance(values, pa.ExtensionArray):
        values = values.storage
    if pt.is_struct(values.type):
        parts = _joined(zip(values.flatten(), type_, strict=True), len(values))
        return _where_valid(parts ^ np.uint64(hash_long(1, seed)), values)
    if pt.is_list(values.type) or pt.is_large_list(values.type):
        return _where_valid(_hash_list(values, type_, seed), values)
    if pt.is_map(values.type):
        return _where_valid(_hash_map(values, type_, seed), values)
    return _hash_plain(values, seed)


def _where_valid(hashes: Words, values: pa.Array) -> Words:
    if values.null_count:
        hashes[~values.is_valid().to_numpy(zero_copy_only=False)] = 0
    return hashes


def _x64(words: Words) -> Words:
    return hash_longs(words.view(np.int64), SEED)


# -- values without parts


def _hash_plain(values: pa.Array, seed: int) -> Words:
    if pt.is_dictionary(values.type):
        values = values.dictionary_decode()
    if _is_repeating(values):
        encoded = values.dictionary_encode()
        hashes = _hash_values(encoded.dictionary, seed)[encoded.indices.fill_null(0).to_numpy(zero_copy_only=False)]
    else:
        hashes = _hash_values(values, seed)
    return _where_valid(hashes, values)


def _is_repeating(values: pa.Array) -> bool:
    if not (pt.is_string(values.type) or pt.is_binary(values.type)):
        return False
    return bool(pc.count_distinct(values.slice(0, SAMPLE_ROWS)).as_py() <= SAMPLE_MAX_DISTINCT < len(values))


def _hash_values(values: pa.Array, seed: int) -> Words:
    if pt.is_decimal(values.type):
        return hash_slices(*_decimal_bytes(values), seed)
    if pt.is_fixed_size_binary(values.type):
        return _hash_bytes(*_fixed_bytes(values), seed)
    if pt.is_string(values.type) or pt.is_binary(values.type):
        return _hash_bytes(*_text_bytes(values, np.dtype(np.int32)), seed)
    if pt.is_large_string(values.type) or pt.is_large_binary(values.type):
        return _hash_bytes(*_text_bytes(values, np.dtype(np.int64)), seed)
    return hash_longs(_longs(values), seed)


def _longs(values: pa.Array) -> npt.NDArray[np.int64]:
    """Give values as longs; what stands for a null is anything."""
    if pt.is_boolean(values.type):
        values = values.cast(pa.uint8())
    elif pt.is_temporal(values.type) and not pt.is_date32(values.type) and values.type.unit in ("s", "ms"):
        values = values.cast(_in_microseconds(values.type))
    if pt.is_floating(values.type):
        return _double_bits(_raw(values, values.type.to_pandas_dtype()).astype(np.float64))
    return _raw(values, f"i{values.type.bit_width // 8}" if not pt.is_uint8(values.type) else "u1").astype(np.int64)


def _in_microseconds(type_: pa.DataType) -> pa.DataType:
    return pa.timestamp("us", tz=type_.tz) if pt.is_timestamp(type_) else pa.time64("us")


def _raw(values: pa.Array, dtype: npt.DTypeLike) -> npt.NDArray[np.generic]:
    """See a fixed-width array's own memory."""
    count, item = len(values), np.dtype(dtype)
    return np.frombuffer(values.buffers()[1], item, count, values.offset * item.itemsize)


def _double_bits(doubles: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    bits = (doubles + 0.0).view(np.int64)  # which makes one zero of both
    bits[np.isnan(doubles)] = _NAN_BITS
    return bits


# -- bytes


def _text_bytes(values: pa.Array, offset_type: np.dtype[np.signedinteger]) -> tuple[Words, Lengths, Lengths]:
    """Give a column's bytes, and where each value begins in them and how long it is."""
    _, offsets_buffer, data = values.buffers()
    offsets = np.frombuffer(offsets_buffer, offset_type, len(values) + 1, values.offset * offset_type.itemsize).astype(
        np.int64
    )
    first, last = int(offsets[0]), int(offsets[-1])
    return _padded(data, first, last), offsets[:-1] - first, np.diff(offsets)


def _fixed_bytes(values: pa.Array) -> tuple[Words, Lengths, Lengths]:
    width, count = values.type.byte_width, len(values)
    first = values.offset * width
    starts = np.arange(count, dtype=np.int64) * width
    return _padded(values.buffers()[1], first, first + count * width), starts, np.full(count, width, np.int64)


def _padded(data: pa.Buffer | None, first: int, last: int) -> Words:
    """Copy bytes into words, and go on for as long as hash_slices needs it."""
    words = np.zeros(-(-(last - first) // _WORD_BYTES) + PADDING_WORDS, np.uint64)
    if data is not None and last > first:
        words.view(np.uint8)[: last - first] = np.frombuffer(data, np.uint8, last - first, first)
    return words


def _decimal_bytes(values: pa.Array) -> tuple[Words, Lengths, Lengths]:
    """Give unscaled values as the shortest big-endian bytes that still show the sign."""
    if not pt.is_decimal128(values.type):
        values = values.cast(pa.decimal128(values.type.precision, values.type.scale))
    data, starts, _ = _fixed_bytes(values)
    words = data[: 2 * len(values)].reshape(-1, 2)
    sign = (words[:, 1].view(np.int64) >> 63).view(np.uint64)
    low, high = words[:, 0] ^ sign, words[:, 1] ^ sign
    thresholds = np.uint64(1) << np.arange(7, 64, 8, dtype=np.uint64)  # values from here on need one byte more
    in_low, in_high = (1 + np.searchsorted(thresholds, word, side="right") for word in (low, high))
    lengths = np.where(high == 0, in_low, _WORD_BYTES + in_high).astype(np.int64)
    words[:] = words[:, ::-1].byteswap()
    return data, starts + (_DECIMAL_BYTES - lengths), lengths


def _hash_bytes(data: Words, starts: Lengths, lengths: Lengths, seed: int) -> Words:
    if lengths.max(initial=0) <= PART_BYTES:
        return hash_slices(data, starts, lengths, seed)
    parts = np.maximum(1, -(-lengths // PART_BYTES))
    firsts = np.cumsum(parts) - parts
    number = np.arange(int(parts.sum()), dtype=np.int64) - np.repeat(firsts, parts)
    at = number * PART_BYTES
    seeds = np.where(np.repeat(parts, parts) == 1, np.uint64(seed), hash_longs(number, seed))
    part_lengths = np.minimum(np.repeat(lengths, parts) - at, PART_BYTES)
    return np.bitwise_xor.reduceat(hash_slices(data, np.repeat(starts, parts) + at, part_lengths, seeds), firsts)


# -- lists and maps


def _hash_list(values: pa.Array, type_: pa.DataType, seed: int) -> Words:
    offsets, lengths = _ranges(values)
    elements = values.values.slice(offsets[0], offsets[-1] - offsets[0])
    number = np.arange(len(elements), dtype=np.int64) - np.repeat(offsets[:-1] - offsets[0], lengths)
    added = _joined([(elements, type_.value_field)], len(elements))
    return hash_longs(lengths, seed) ^ _joined_by_row(hash_longs(number, _x64(added)), lengths)


def _hash_map(values: pa.Array, type_: pa.DataType, seed: int) -> Words:
    offsets, lengths = _ranges(values)
    count = int(offsets[-1] - offsets[0])
    pairs = ((values.keys, type_.key_field), (values.items, type_.item_field))
    added = _joined([(part.slice(offsets[0], count), field) for part, field in pairs], count)
    return hash_longs(lengths, seed) ^ _joined_by_row(_x64(added), lengths)


def _ranges(values: pa.Array) -> tuple[Lengths, Lengths]:
    offsets = values.offsets.to_numpy().astype(np.int64)
    return offsets, np.diff(offsets)


def _joined_by_row(parts: Words, lengths: Lengths) -> Words:
    joined = np.zeros(len(lengths), np.uint64)
    filled = lengths > 0
    if len(parts):
        joined[filled] = np.bitwise_xor.reduceat(parts, (np.cumsum(lengths) - lengths)[filled])
    return joined
