"""Iceberg on Arrow: schemas of data files, transforms of columns, rows split by partition and sorted.

The only module of the format that loads pyarrow, so that a catalog process does without it.

Transforms return what transforms.py returns for each value, as manifests store it: at the ends of a type, results wrap
around as in Java. Null stays null. Hashes of text and bytes are computed value by value in C (mmh3). For 100,000 texts
of 12 bytes that takes 10 ms and on arrays 8 ms; for texts of 300 bytes it takes 39 ms and on arrays 130.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import mmh3
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from lakefeed.contract.errors import TypeUnknown
from lakefeed.iceberg.layout import (
    Partition,
    PartitionField,
    PartitionSpec,
    SortOrder,
    partition_source,
    sort_source,
    transform_for,
)
from lakefeed.iceberg.terms import Transform
from lakefeed.iceberg.transforms import HASH_MASK, HASHED_AS_LONG, HOURS_PER_DAY, NS_PER_US, TIME_UNITS, wraps
from lakefeed.iceberg.types import (
    Field,
    ListType,
    MapType,
    Schema,
    StructType,
    Type,
    decimal_parts,
    fixed_length,
    written_fields,
)
from lakefeed.iceberg.values import UNITS_PER_DAY

# Arrow fields carry Iceberg's field ids under this key, so that files and tables agree.
FIELD_ID_KEY = b"PARQUET:field_id"

_Hashes: TypeAlias = npt.NDArray[np.uint32]
_Longs: TypeAlias = npt.NDArray[np.int64]

_ARROW_TYPES: Mapping[str, pa.DataType] = {
    "boolean": pa.bool_(),
    "int": pa.int32(),
    "long": pa.int64(),
    "float": pa.float32(),
    "double": pa.float64(),
    "date": pa.date32(),
    "time": pa.time64("us"),
    "timestamp": pa.timestamp("us"),
    "timestamptz": pa.timestamp("us", tz="UTC"),
    "timestamp_ns": pa.timestamp("ns"),
    "timestamptz_ns": pa.timestamp("ns", tz="UTC"),
    "string": pa.string(),
    "uuid": pa.binary(16),
    "binary": pa.binary(),
}
_DECIMAL_BYTES = 16  # of Arrow's decimal128
_SEVERAL = object()


def to_arrow_schema(schema: Schema) -> pa.Schema:
    """Build the Arrow schema of a table's files, field ids included."""
    return pa.schema([to_arrow_field(field) for field in written_fields(schema.columns)])


def to_arrow_field(field: Field) -> pa.Field:
    """Build an Arrow field that carries its Iceberg field id."""
    return _arrow_field(field.name, field.id, to_arrow_type(field.type), required=field.required)


def to_arrow_type(type_: Type) -> pa.DataType:
    """Return the Arrow type that Parquet files of the table use.

    Raises: TypeUnknown if this version does not know the type.
    """
    match type_:
        case StructType(fields):
            return pa.struct([to_arrow_field(field) for field in fields])
        case ListType(element_id, element, required):
            return pa.list_(_arrow_field("element", element_id, to_arrow_type(element), required=required))
        case MapType(key_id, key, value_id, value, required):
            return pa.map_(
                _arrow_field("key", key_id, to_arrow_type(key), required=True),
                _arrow_field("value", value_id, to_arrow_type(value), required=required),
            )
        case str() if type_ in _ARROW_TYPES:
            return _ARROW_TYPES[type_]
        case str():
            if decimal := decimal_parts(type_):
                return pa.decimal128(*decimal)
            if (length := fixed_length(type_)) is not None:
                return pa.binary(length)
            raise TypeUnknown(f"type is not known to this version: type={type_}")


def _arrow_field(name: str, field_id: int, type_: pa.DataType, *, required: bool) -> pa.Field:
    return pa.field(name, type_, nullable=not required, metadata={FIELD_ID_KEY: str(field_id).encode()})


def transform_column(transform: Transform, source: str, values: pa.Array) -> pa.Array:
    """Compute the partition value of each row of a column of Iceberg type `source`."""
    match transform.kind:
        case "void":
            return pa.nulls(len(values))
        case "identity":
            return _as_stored(values)
        case "bucket":
            buckets = (_hashes(source, values) & np.uint32(HASH_MASK)) % np.uint32(transform.width)
            return _with_nulls_of(values, buckets.astype(np.int32))
        case "truncate" if source in ("string", "binary"):
            cut = pc.utf8_slice_codeunits if source == "string" else pc.binary_slice
            return cut(values, 0, transform.width)
        case "truncate" if decimal_parts(source):
            return _truncated_decimals(transform.width, values)
        case "truncate":
            numbers = _integers(values)
            lower = numbers - numbers % transform.width
            return _with_nulls_of(values, lower.astype(values.type.to_pandas_dtype()))
    return _with_nulls_of(values, _units_since_1970(transform.kind, source, values).astype(np.int32))


def _as_stored(values: pa.Array) -> pa.Array:
    """Return dates and times as the integers that they are stored as."""
    if pa.types.is_date32(values.type):
        return values.cast(pa.int32())
    if pa.types.is_timestamp(values.type) or pa.types.is_time64(values.type):
        return values.cast(pa.int64())
    return values


def _integers(values: pa.Array) -> _Longs:
    """Return the stored integers, with 0 where a value is null."""
    stored: _Longs = pc.fill_null(_as_stored(values).cast(pa.int64()), 0).to_numpy(zero_copy_only=False)
    return stored


def _units_since_1970(kind: str, source: str, values: pa.Array) -> _Longs:
    """Count whole units. By division: numpy's own conversion overflows near the ends of the type."""
    numbers = _integers(values)
    if kind == "hour":
        return np.floor_divide(numbers, UNITS_PER_DAY[source] // HOURS_PER_DAY)
    days = np.floor_divide(numbers, UNITS_PER_DAY[source])
    if kind == "day":
        return days
    units: _Longs = days.view("M8[D]").astype(f"M8[{TIME_UNITS[kind]}]").astype(np.int64)
    return units


def _with_nulls_of(values: pa.Array, results: npt.NDArray[np.integer]) -> pa.Array:
    mask = values.is_null().to_numpy(zero_copy_only=False) if values.null_count else None
    return pa.array(results, mask=mask)


def _hashes(source: str, values: pa.Array) -> _Hashes:
    """Hash each value: integers, dates and times as longs, nanoseconds as microseconds, the others as their bytes."""
    if source in HASHED_AS_LONG:
        numbers = _integers(values)
        return _hash_longs(np.floor_divide(numbers, NS_PER_US) if source.endswith("_ns") else numbers)
    if decimal_parts(source):
        return _hash_decimals(values)
    return _hash_bytes(pc.fill_null(values.cast(pa.large_binary()), b"").to_numpy(zero_copy_only=False))


def _hash_bytes(values: npt.NDArray[Any]) -> _Hashes:
    return np.fromiter(map(mmh3.hash, values.tolist()), np.int32, len(values)).view(np.uint32)


def _hash_longs(values: _Longs) -> _Hashes:
    """Hash integers as their eight little-endian bytes: Murmur3, 32 bits, x86 variant, seed 0, all rows at a time."""
    halves = np.ascontiguousarray(values, "<i8").view("<u4").reshape(-1, 2)
    hashes = np.zeros(len(values), np.uint32)
    for column in range(2):
        scrambled = _rotated(halves[:, column] * np.uint32(0xCC9E2D51), 15) * np.uint32(0x1B873593)
        hashes = _rotated(hashes ^ scrambled, 13) * np.uint32(5) + np.uint32(0xE6546B64)
    hashes ^= np.uint32(values.itemsize)
    hashes = (hashes ^ (hashes >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    hashes = (hashes ^ (hashes >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return hashes ^ (hashes >> np.uint32(16))


def _rotated(words: _Hashes, bits: int) -> _Hashes:
    return (words << np.uint32(bits)) | (words >> np.uint32(32 - bits))


def _hash_decimals(values: pa.Array) -> _Hashes:
    """Hash unscaled values as the shortest big-endian two's complement that holds them."""
    bytes_ = np.ascontiguousarray(_decimal_words(values)).view(np.uint8).reshape(-1, _DECIMAL_BYTES)[:, ::-1]
    sign = bytes_[:, 0] >> 7
    is_filler = bytes_ == (sign * np.uint8(0xFF))[:, None]
    # The last byte stays, and so does a filler whose successor would turn the sign.
    fillers = np.minimum(np.where(is_filler.all(axis=1), _DECIMAL_BYTES, is_filler.argmin(axis=1)), _DECIMAL_BYTES - 1)
    first = bytes_[np.arange(len(bytes_)), fillers]
    skipped = np.where((fillers > 0) & (first >> 7 != sign), fillers - 1, fillers)
    hashes = np.empty(len(values), np.uint32)
    for start in np.unique(skipped).tolist():
        rows = np.flatnonzero(skipped == start)
        shortest = np.ascontiguousarray(bytes_[rows, start:]).view(f"V{_DECIMAL_BYTES - start}").reshape(-1)
        hashes[rows] = _hash_bytes(shortest)
    return hashes


def _decimal_words(values: pa.Array) -> _Longs:
    """Return the unscaled values as rows of (low, high) 64 bits."""
    data = values.buffers()[1]
    words: _Longs = np.frombuffer(data or b"", "<i8").reshape(-1, 2)
    return words[values.offset : values.offset + len(values)]


def _truncated_decimals(width: int, values: pa.Array) -> pa.Array:
    """Subtract the remainder in 128 bits: value = high * 2**64 + low, and the same holds modulo the width."""
    words = _decimal_words(values)
    low, high = words[:, 0].view(np.uint64), words[:, 1]
    remainder = (high % width * (2**64 % width) + (low % np.uint64(width)).astype(np.int64)) % width
    subtracted = remainder.astype(np.uint64)
    result = np.empty((len(values), 2), np.int64)
    result[:, 0] = (low - subtracted).view(np.int64)
    result[:, 1] = high - (low < subtracted)
    valid = pa.array(values.is_valid()).buffers()[1] if values.null_count else None
    return pa.Array.from_buffers(values.type, len(values), [valid, pa.py_buffer(result)])


def split_by_partition(table: pa.Table, spec: PartitionSpec, schema: Schema) -> list[tuple[Partition, pa.Table]]:
    """Split rows by partition, keeping their order within each.

    Raises: PartitionRejected if a transform is not supported.
    """
    if table.num_rows == 0:
        return []
    columns = [_Column.of(table, field, schema) for field in spec.fields]
    shared = [column.shared_value() for column in columns]
    if _SEVERAL not in shared:
        return [(tuple(shared), table)]
    keys = [column.transformed(column.values.combine_chunks()) for column in columns]
    codes = np.zeros(table.num_rows, dtype=np.int64)
    for key in keys:
        encoded = pc.dictionary_encode(key, null_encoding="encode")
        codes = codes * len(encoded.dictionary) + encoded.indices.to_numpy(zero_copy_only=False)
        # Renumbered at every step, so that the product stays below rows x distinct values whatever the fields.
        codes = np.unique(codes, return_inverse=True)[1]
    order = np.argsort(codes, kind="stable")
    starts = np.flatnonzero(np.diff(codes[order], prepend=-1))
    ends = np.append(starts[1:], table.num_rows)
    grouped = table.take(pa.array(order))
    return [
        (tuple(key[int(order[start])].as_py() for key in keys), grouped.slice(int(start), int(end - start)))
        for start, end in zip(starts, ends, strict=True)
    ]


@dataclass(frozen=True, slots=True)
class _Column:
    """A partition field's column and its transform."""

    transform: Transform
    source_type: str
    values: pa.ChunkedArray

    @classmethod
    def of(cls, table: pa.Table, field: PartitionField, schema: Schema) -> _Column:
        path = partition_source(field, schema)
        source_type = path[-1].type
        transform = transform_for(field.transform, source_type)
        assert isinstance(source_type, str)
        return cls(transform, source_type, _values_at(table, path))

    def shared_value(self) -> Any:
        """Find the value that all rows share, from the ends of the column; _SEVERAL if there may be several."""
        if self.transform.is_void or self.values.null_count == len(self.values):
            return None
        if self.values.null_count or self.source_type in {"float", "double"}:  # min_max passes over NaN
            return _SEVERAL
        ends = pc.min_max(self.values)
        # If both ends have one image, so has all that lies between them, unless images do not rise with their column.
        if not self.transform.keeps_order and ends["min"] != ends["max"]:
            return _SEVERAL
        # Arrow's own scalars: Python has no times in nanoseconds, nor any beyond its years 1 to 9999.
        low, high = self.transformed(pa.array([ends["min"], ends["max"]], self.values.type)).to_pylist()
        return low if low == high and not wraps(self.transform, self.source_type, low, high) else _SEVERAL

    def transformed(self, values: pa.Array) -> pa.Array:
        """Compute the partition value of each of some rows."""
        return transform_column(self.transform, self.source_type, values)


def apply_order(table: pa.Table, order: SortOrder, schema: Schema) -> pa.Table:
    """Sort rows stably. Rows that are in order already are not copied.

    Raises: SortRejected if a column or transform of the order is not known.
    """
    if not order.fields or table.num_rows <= 1:
        return table
    columns: dict[str, pa.Array] = {}
    keys = []
    for number, field in enumerate(order.fields):
        path = sort_source(field, schema)
        source = path[-1].type
        assert isinstance(source, str)
        transform = transform_for(field.transform, source)
        values = transform_column(transform, source, _values_at(table, path).combine_chunks())
        direction = "descending" if field.is_descending else "ascending"
        placement = "at_start" if field.nulls_first else "at_end"
        if pa.types.is_floating(values.type):
            # The specification puts NaN above all numbers, Arrow beside the nulls: it gets a key of its own.
            columns[f"{number}-nan"] = pc.is_nan(values)
            keys.append((f"{number}-nan", direction, placement))
        columns[str(number)] = values
        keys.append((str(number), direction, placement))
    indices = pc.sort_indices(pa.table(columns), sort_keys=keys).to_numpy()
    if np.array_equal(indices, np.arange(len(indices))):
        return table
    return table.take(pa.array(indices))


def _values_at(table: pa.Table, path: tuple[Field, ...]) -> pa.ChunkedArray:
    """Return the values of a column, or of a field inside structs."""
    values = table.column(path[0].name)
    for nested in path[1:]:
        values = pc.struct_field(values, nested.name)
    return values
