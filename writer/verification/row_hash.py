"""One hash per row, over all its columns, the same in every engine. Owns what each value adds to its row.

`x64(a, b, ...)` is Spark's `xxhash64`: XXH64 of `a` with seed 42, then of `b` with that hash as its seed, and so on. A
field with id `f` adds to its row, by exclusive or:

    null                                          nothing
    boolean, int, long, date, time, timestamps    x64(f, value as a long)
    float, double                                 x64(f, bits of the double), of one NaN and one zero
    string, binary, fixed, uuid                   x64(f, bytes made up to whole words, as text_hash.py does);
                                                  above 256 bytes, for each 256 of them x64(f, i, the same)
    decimal                                       x64(f, unscaled value as a long) up to 18 digits; beyond, and for any
                                                  scale above 18, x64(f, it as few big-endian bytes as there can be)
    struct                                        x64(f, 1), and what its fields add
    list                                          x64(f, length), and for each element i x64(what it adds, i)
    map                                           x64(f, length), and for each entry x64(what key and value add)

and the row's hash is x64 of that. So it does not change when a file is rewritten, a column is added or renamed, or a
type is widened as Iceberg allows. docs/verification.md has the whole definition with examples.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.types as pt

from writer.types import FIELD_ID_KEY
from writer.verification.plain_values import (
    are_long,
    is_text,
    shortest_bytes,
    to_longs,
    to_texts,
    unscaled_words,
    valid_mask,
)
from writer.verification.scratch import Scratch
from writer.verification.text_hash import hash_texts
from writer.verification.xxh64 import Lengths, Words, hash_long, hash_longs, hash_short_slices, hash_words, replace

# Rows hashed at once: few enough that the arrays of a step stay in a core's own cache, and as many as that allows,
# because other threads run between the calls and each call then waits for them.
BLOCK_ROWS = 32768

SEED = 42
# Iceberg keeps the ids above for columns that tables do not list, such as row ids in files.
LAST_FIELD_ID = 2_147_483_446


def hash_rows(rows: pa.Table, fields: Sequence[pa.Field]) -> Words:
    """Hash each row; fields are those of its columns, and carry their Iceberg ids."""
    hashes = np.empty(len(rows), np.uint64)
    scratch, done = Scratch(), 0
    for batch in _blocks(rows):
        hashes[done : done + len(batch)] = _hashed(_joined(batch.columns, fields, scratch))
        done += len(batch)
    return hashes


def _blocks(rows: pa.Table) -> Iterator[pa.RecordBatch]:
    """Cut rows into blocks. They come in as many pieces as clients sent, and one by one those cost five times more."""
    for start in range(0, len(rows), BLOCK_ROWS):
        yield from rows.slice(start, BLOCK_ROWS).combine_chunks().to_batches()


def _hashed(words: Words) -> Words:
    return hash_words(words, SEED)


def _joined(columns: Sequence[pa.Array], fields: Sequence[pa.Field], scratch: Scratch) -> Words:
    """Put together what several fields add to their rows."""
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
    """Add the values of one field. Its parts have their ids in `type_`, the type of values may not."""
    if isinstance(values, pa.ExtensionArray):
        values = values.storage
    if pt.is_dictionary(values.type):
        values = values.dictionary_decode()
    if pt.is_struct(values.type):
        _add_fields(joined, values.flatten(), list(type_), scratch)
        hashes = np.full(len(values), hash_long(1, seed), np.uint64)
    elif pt.is_list(values.type) or pt.is_large_list(values.type):
        hashes = _hash_list(values, type_, seed, scratch)
    elif pt.is_map(values.type):
        hashes = _hash_map(values, type_, seed, scratch)
    else:
        hashes = _hash_plain(values, seed, scratch)
    mask = valid_mask(values)
    if mask is not None:
        hashes &= mask
    joined ^= hashes


# -- values without parts


def _hash_plain(values: pa.Array, seed: int, scratch: Scratch) -> Words:
    """Hash values; what is returned may be scratch."""
    if is_text(values.type):
        return hash_texts(*to_texts(values, scratch), seed, scratch)
    if pt.is_decimal(values.type):
        return _hash_decimals(values, seed, scratch)
    words = scratch.words("words", len(values))
    words.view(np.int64)[:] = to_longs(values)
    return hash_words(words, seed, scratch.words("temporary", len(values)))


def _hash_decimals(values: pa.Array, seed: int, scratch: Scratch) -> Words:
    pairs = unscaled_words(values)
    words = scratch.words("words", len(values))
    words[:] = pairs[:, 0]
    hashes = hash_words(words, seed, scratch.words("temporary", len(values)))
    is_long = are_long(pairs, values.type)
    if not is_long.all():
        replace(hashes, hash_short_slices(*shortest_bytes(pairs), seed), where=~is_long)
    return hashes


# -- lists and maps


def _hash_list(values: pa.Array, type_: pa.DataType, seed: int, scratch: Scratch) -> Words:
    offsets, lengths = _ranges(values)
    elements = values.values.slice(offsets[0], offsets[-1] - offsets[0])
    number = np.arange(len(elements), dtype=np.int64) - np.repeat(offsets[:-1] - offsets[0], lengths)
    added = _hashed(_joined([elements], [type_.value_field], scratch))
    return hash_longs(lengths, seed) ^ _joined_by_row(hash_longs(number, added), lengths)


def _hash_map(values: pa.Array, type_: pa.DataType, seed: int, scratch: Scratch) -> Words:
    offsets, lengths = _ranges(values)
    count = int(offsets[-1] - offsets[0])
    parts = [part.slice(offsets[0], count) for part in (values.keys, values.items)]
    added = _hashed(_joined(parts, [type_.key_field, type_.item_field], scratch))
    return hash_longs(lengths, seed) ^ _joined_by_row(added, lengths)


def _ranges(values: pa.Array) -> tuple[Lengths, Lengths]:
    offsets = values.offsets.to_numpy().astype(np.int64)
    return offsets, np.diff(offsets)


def _joined_by_row(parts: Words, lengths: Lengths) -> Words:
    joined = np.zeros(len(lengths), np.uint64)
    filled = lengths > 0
    if len(parts):
        joined[filled] = np.bitwise_xor.reduceat(parts, (np.cumsum(lengths) - lengths)[filled])
    return joined
