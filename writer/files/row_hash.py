"""Row hash: one hash per row over all its columns, the same in every engine, and the ledger's counts of rows.

`x64(a, b, ...)` is Spark's `xxhash64`: XXH64 of `a` with seed 42, then of `b` with that hash as its seed, and so on. A
field with id `f` adds to its row, by exclusive or:

    null                                          nothing
    boolean, int, long, date, time, timestamps    x64(f, value as a long)
    float, double                                 x64(f, bits of the double), of one NaN and one zero
    string, binary, fixed, uuid                   x64(f, bytes made up to whole words, as xxh64.py does);
                                                  above 256 bytes, for each 256 of them x64(f, i, the same)
    decimal                                       x64(f, unscaled value as a long) up to 18 digits; beyond, and for any
                                                  scale above 18, x64(f, its shortest big-endian bytes)
    struct                                        x64(f, 1), and what its fields add
    list                                          x64(f, length), and for each element i x64(what it adds, i)
    map                                           x64(f, length), and for each entry x64(what key and value add)

and the row's hash is x64 of that. It does not change when a file is rewritten, a column is added or renamed, or a type
is widened as Iceberg allows. docs/verification.md has the whole definition with examples.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.types as pt

from lakefeed.contract import changes as cdc
from lakefeed.contract.changes import SourceId
from lakefeed.contract.ledger import RowFacts, join_facts
from lakefeed.iceberg.arrow import FIELD_ID_KEY
from lakefeed.writer.files.xxh64 import (
    LEAD_BYTES,
    TRAIL_BYTES,
    WORD_BYTES,
    Lengths,
    Scratch,
    Words,
    hash_long,
    hash_longs,
    hash_short_slices,
    hash_texts,
    hash_words,
    replace,
    to_mask,
)

# Rows hashed at once: few enough that the arrays of a step stay in a core's own cache, and as many as that allows,
# because other threads run between the calls and each call then waits for them.
BLOCK_ROWS = 32768

SEED = 42
# Iceberg keeps the ids above for columns that tables do not list, such as row ids in files.
LAST_FIELD_ID = 2_147_483_446

# Decimals of so many digits are one long, in Spark too.
LONG_DIGITS = 18

_NAN_BITS = np.int64(0x7FF8000000000000)
_DECIMAL_BYTES = 16
_BYTE_BITS = 8


def is_text(type_: pa.DataType) -> bool:
    """Return whether values are hashed as bytes of any length."""
    return any(is_one(type_) for is_one in (pt.is_string, pt.is_binary, _is_large, pt.is_fixed_size_binary))


def _is_large(type_: pa.DataType) -> bool:
    return bool(pt.is_large_string(type_) or pt.is_large_binary(type_))


# -- values without parts, as longs or bytes


def to_longs(values: pa.Array) -> npt.NDArray[np.generic]:
    """Return values as integers, undefined for nulls."""
    if pt.is_boolean(values.type):
        values = values.cast(pa.uint8())
    elif pt.is_temporal(values.type) and not pt.is_date32(values.type) and values.type.unit in ("s", "ms"):
        values = values.cast(pa.timestamp("us", values.type.tz) if pt.is_timestamp(values.type) else pa.time64("us"))
    if pt.is_floating(values.type):
        doubles = _raw(values, values.type.to_pandas_dtype()).astype(np.float64)
        doubles += 0.0  # -0.0 becomes 0.0
        bits = doubles.view(np.int64)
        bits[np.isnan(doubles)] = _NAN_BITS
        return bits
    return _raw(values, f"i{values.type.bit_width // _BYTE_BITS}" if not pt.is_uint8(values.type) else "u1")


def _raw(values: pa.Array, dtype: npt.DTypeLike) -> npt.NDArray[np.generic]:
    """Return a fixed-width array's own memory."""
    count, item = len(values), np.dtype(dtype)
    return np.frombuffer(values.buffers()[1], item, count, values.offset * item.itemsize)


def to_texts(values: pa.Array, scratch: Scratch) -> tuple[Words, Lengths, Lengths]:
    """Return a column's bytes as `hash_texts` needs them, and where each value begins and how long it is."""
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


def _shortest_bytes(pairs: Words) -> tuple[Words, Lengths, Lengths]:
    """Return unscaled values as the shortest big-endian bytes that still show the sign."""
    sign = (pairs[:, 1].view(np.int64) >> 63).view(np.uint64)
    low, high = pairs[:, 0] ^ sign, pairs[:, 1] ^ sign
    thresholds = np.uint64(1) << np.arange(7, 64, 8, dtype=np.uint64)  # values from here on need one byte more
    in_low, in_high = (1 + np.searchsorted(thresholds, word, side="right") for word in (low, high))
    lengths = np.where(high == 0, in_low, WORD_BYTES + in_high).astype(np.int64)
    data = np.append(pairs[:, ::-1].byteswap(), np.uint64(0))
    ends = np.arange(1, len(pairs) + 1, dtype=np.int64) * _DECIMAL_BYTES
    return data, ends - lengths, lengths


def hash_rows(rows: pa.Table, fields: Sequence[pa.Field]) -> Words:
    """Hash each row; fields are those of its columns, and carry their Iceberg ids."""
    hashes = np.empty(len(rows), np.uint64)
    scratch, done = Scratch(), 0
    # Rows come in as many chunks as clients sent, and chunk by chunk costs five times more.
    for start in range(0, len(rows), BLOCK_ROWS):
        for batch in rows.slice(start, BLOCK_ROWS).combine_chunks().to_batches():
            hashes[done : done + len(batch)] = hash_words(_joined(batch.columns, fields, scratch), SEED)
            done += len(batch)
    return hashes


def _joined(columns: Sequence[pa.Array], fields: Sequence[pa.Field], scratch: Scratch) -> Words:
    """Return what several fields add to their rows."""
    joined = np.zeros(len(columns[0]), np.uint64)
    _add_fields(joined, columns, fields, scratch)
    return joined


def _add_fields(joined: Words, columns: Sequence[pa.Array], fields: Sequence[pa.Field], scratch: Scratch) -> None:
    for values, field in zip(columns, fields, strict=True):
        field_id = int((field.metadata or {})[FIELD_ID_KEY])
        if field_id <= LAST_FIELD_ID and values.null_count < len(values):
            _add_field(joined, values, field.type, _field_seed(field_id), scratch)


@functools.lru_cache(maxsize=4096)
def _field_seed(field_id: int) -> int:
    return hash_long(field_id, SEED)


def _add_field(joined: Words, values: pa.Array, type_: pa.DataType, seed: int, scratch: Scratch) -> None:
    """Add the values of one field. `type_` has the ids of its parts, the type of `values` may not."""
    if isinstance(values, pa.ExtensionArray):
        values = values.storage
    if pt.is_dictionary(values.type):
        values = values.dictionary_decode()
    if pt.is_struct(values.type):
        _add_fields(joined, values.flatten(), list(type_), scratch)
        hashes = np.full(len(values), hash_long(1, seed), np.uint64)
    elif pt.is_map(values.type) or pt.is_list(values.type) or pt.is_large_list(values.type):
        hashes = _hash_repeated(values, type_, seed, scratch)
    else:
        hashes = _hash_plain(values, seed, scratch)
    if values.null_count:
        hashes &= to_mask(values.is_valid().to_numpy(zero_copy_only=False))
    joined ^= hashes


# -- hashes


def _hash_plain(values: pa.Array, seed: int, scratch: Scratch) -> Words:
    """Hash values without parts; the result may be scratch memory."""
    if is_text(values.type):
        return hash_texts(*to_texts(values, scratch), seed, scratch)
    if pt.is_decimal(values.type):
        return _hash_decimals(values, seed, scratch)
    words = scratch.words("words", len(values))
    words.view(np.int64)[:] = to_longs(values)
    return hash_words(words, seed, scratch.words("temporary", len(values)))


def _hash_decimals(values: pa.Array, seed: int, scratch: Scratch) -> Words:
    precision, scale = values.type.precision, values.type.scale
    if not pt.is_decimal128(values.type):
        values = values.cast(pa.decimal128(precision, scale))
    # Unscaled values as pairs of words, the low one first.
    words = np.frombuffer(values.buffers()[1], np.uint64, 2 * len(values), values.offset * _DECIMAL_BYTES)
    pairs = words.reshape(-1, 2)
    longs = scratch.words("words", len(values))
    longs[:] = pairs[:, 0]
    hashes = hash_words(longs, seed, scratch.words("temporary", len(values)))
    if precision <= LONG_DIGITS:
        return hashes
    is_long = np.zeros(len(values), bool)
    if scale <= LONG_DIGITS:
        low, high = pairs[:, 0].view(np.int64), pairs[:, 1].view(np.int64)
        limit = 10**LONG_DIGITS
        is_long = (low >> 63 == high) & (low < limit) & (low > -limit)
    if not is_long.all():
        replace(hashes, hash_short_slices(*_shortest_bytes(pairs), seed), where=~is_long)
    return hashes


def _hash_repeated(values: pa.Array, type_: pa.DataType, seed: int, scratch: Scratch) -> Words:
    """Hash lists and maps: their length, and what their elements or entries add."""
    offsets = values.offsets.to_numpy().astype(np.int64)
    first, lengths = offsets[0], np.diff(offsets)
    count = int(offsets[-1] - first)
    if pt.is_map(values.type):
        parts, fields = [values.keys, values.items], [type_.key_field, type_.item_field]
    else:
        parts, fields = [values.values], [type_.value_field]
    added = hash_words(_joined([part.slice(first, count) for part in parts], fields, scratch), SEED)
    if not pt.is_map(values.type):  # elements have an order, entries have none
        added = hash_longs(np.arange(count, dtype=np.int64) - np.repeat(offsets[:-1] - first, lengths), added)
    hashes = hash_longs(lengths, seed)
    if count:
        filled = lengths > 0
        hashes[filled] ^= np.bitwise_xor.reduceat(added, (offsets[:-1] - first)[filled])
    return hashes


_HASH = "hash"


def tally_rows(rows: pa.Table, fields: Sequence[pa.Field]) -> dict[SourceId, RowFacts]:
    """Count rows by their source for the ledger; fields are those of the columns, with their Iceberg ids."""
    slim = rows.select([cdc.SOURCE, cdc.OPERATION, cdc.SEQUENCE]).append_column(
        _HASH, pa.array(hash_rows(rows, fields))
    )
    counted = slim.group_by([cdc.SOURCE, cdc.OPERATION], use_threads=False).aggregate(
        [(_HASH, "sum"), (_HASH, "count"), (cdc.SEQUENCE, "min"), (cdc.SEQUENCE, "max")]
    )
    return join_facts(
        {
            SourceId(group[cdc.SOURCE]): RowFacts(
                rows=group[f"{_HASH}_count"],
                first=group[f"{cdc.SEQUENCE}_min"],
                last=group[f"{cdc.SEQUENCE}_max"],
                operations={group[cdc.OPERATION]: group[f"{_HASH}_count"]},
                checksum=group[f"{_HASH}_sum"],
            )
        }
        for group in counted.to_pylist()
    )
