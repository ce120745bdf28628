"""Parquet data files: Arrow rows encoded, with the statistics that Iceberg keeps of a file.

Statistics come from the footer that Parquet writes anyway, so rows are read once. All of this is CPU work in plain
functions: callers run them in an executor (pyarrow releases the interpreter lock for nearly all of it).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from lakefeed.iceberg.arrow import to_arrow_schema
from lakefeed.iceberg.layout import Partition
from lakefeed.iceberg.manifests import DataFile
from lakefeed.iceberg.types import ListType, MapType, Schema, StructType, Type, written_fields
from lakefeed.iceberg.values import BOUND_MAX_UNITS, encode_single_value, upper_binary_bound, upper_text_bound
from lakefeed.writer.config import WriterConfig

# A dictionary costs a third of the writing time and pays off only where values repeat: decided on a sample.
DICTIONARY_SAMPLE_ROWS = 1_000
DICTIONARY_MAX_DISTINCT_RATIO = 0.1

_WITH_LEVEL = {"zstd", "gzip"}

# Iceberg's Java library compares UUIDs as signed numbers, against the specification: by true bounds, of files or of row
# groups, Spark would skip files that have the value it looks for.
_WITHOUT_STATISTICS = {"uuid"}


def write_data_file(
    table: pa.Table,
    *,
    schema: Schema,
    location: str,
    partition: Partition,
    config: WriterConfig,
    sort_order_id: int | None = None,
) -> tuple[pa.Buffer, DataFile]:
    """Encode rows of one partition as a Parquet file, and describe it for the manifest.

    The table's columns are those of `schema`, in its order; field ids come from `schema`. `sort_order_id` is the
    order of the rows.
    """
    arrow_schema = to_arrow_schema(schema)
    if not table.schema.equals(arrow_schema, check_metadata=True):
        table = table.cast(arrow_schema)
    sink = pa.BufferOutputStream()
    compression = config.parquet_compression
    pq.write_table(
        table,
        sink,
        row_group_size=config.parquet_row_group_rows,
        compression=compression,
        compression_level=config.parquet_compression_level if compression in _WITH_LEVEL else None,
        use_dictionary=repeating_columns(table) or False,
        write_statistics=_columns_with_statistics(schema),
        store_decimal_as_integer=True,  # the specification's form for decimals of up to 18 digits
        store_schema=False,  # readers go by field ids; the Arrow schema would only add bytes
    )
    buffer = sink.getvalue()
    footer = pq.read_metadata(pa.BufferReader(buffer))
    file = describe_file(footer, schema=schema, location=location, size_bytes=buffer.size, partition=partition)
    return buffer, replace(file, sort_order_id=sort_order_id)


def _columns_with_statistics(schema: Schema) -> bool | list[str]:
    """Return the Parquet columns that get statistics; True for all."""
    leaves = list(_leaf_columns(StructType(written_fields(schema.columns))))
    wanted = [leaf.path for leaf in leaves if leaf.type not in _WITHOUT_STATISTICS]
    return True if len(wanted) == len(leaves) else wanted


def repeating_columns(table: pa.Table) -> list[str]:
    """Return the Parquet columns whose values repeat so often that a dictionary pays off."""
    sample = table.slice(0, DICTIONARY_SAMPLE_ROWS).combine_chunks()
    leaves = (leaf for name in sample.column_names for leaf in _leaves(name, _one_chunk(sample.column(name))))
    return [path for path, values in leaves if _repeats(values)]


def _one_chunk(column: pa.ChunkedArray) -> pa.Array:
    return column.chunk(0) if column.num_chunks else pa.array([], column.type)


def _leaves(path: str, values: pa.Array) -> Iterator[tuple[str, pa.Array]]:
    type_ = values.type
    if pa.types.is_struct(type_):
        for field, child in zip(type_, values.flatten(), strict=True):
            yield from _leaves(f"{path}.{field.name}", child)
    elif pa.types.is_map(type_):
        yield from _leaves(f"{path}.key_value.key", values.keys)
        yield from _leaves(f"{path}.key_value.value", values.items)
    elif pa.types.is_list(type_):
        yield from _leaves(f"{path}.list.element", values.flatten())
    else:
        yield path, values


def _repeats(values: pa.Array) -> bool:
    if pa.types.is_boolean(values.type):  # a bit each already
        return False
    return bool(pc.count_distinct(values).as_py() <= DICTIONARY_MAX_DISTINCT_RATIO * len(values))


def describe_file(
    footer: pq.FileMetaData, *, schema: Schema, location: str, size_bytes: int, partition: Partition
) -> DataFile:
    """Describe a file from its footer alone."""
    groups = [footer.row_group(number) for number in range(footer.num_row_groups)]
    leaves = list(_leaf_columns(StructType(written_fields(schema.columns))))
    assert len(leaves) == footer.num_columns, "the file was written with this schema"
    columns = [_describe_column(leaf, [group.column(i) for group in groups]) for i, leaf in enumerate(leaves)]
    return DataFile(
        location=location,
        partition=partition,
        record_count=footer.num_rows,
        size_bytes=size_bytes,
        column_sizes={c.field_id: c.size_bytes for c in columns},
        value_counts={c.field_id: c.value_count for c in columns},
        null_counts={c.field_id: c.null_count for c in columns if c.null_count is not None},
        lower_bounds={c.field_id: c.lower for c in columns if c.lower is not None},
        upper_bounds={c.field_id: c.upper for c in columns if c.upper is not None},
        split_offsets=tuple(_first_offset(group) for group in groups),
    )


@dataclass(frozen=True, slots=True)
class _Leaf:
    """A column of the Parquet file; `repeated` inside a list or a map, where bounds have no meaning."""

    field_id: int
    path: str
    type: str
    repeated: bool


@dataclass(frozen=True, slots=True)
class _ColumnStatistics:
    """What the manifest records of one column."""

    field_id: int
    size_bytes: int
    value_count: int
    null_count: int | None
    lower: bytes | None
    upper: bytes | None


def _leaf_columns(struct: StructType, *, prefix: str = "", repeated: bool = False) -> Iterator[_Leaf]:
    for field in struct.fields:
        yield from _type_leaves(field.id, f"{prefix}{field.name}", field.type, repeated=repeated)


def _type_leaves(field_id: int, path: str, type_: Type, *, repeated: bool) -> Iterator[_Leaf]:
    """Yield the leaves of a type in Parquet's order and with Parquet's names."""
    match type_:
        case str():
            yield _Leaf(field_id, path, type_, repeated)
        case StructType():
            yield from _leaf_columns(type_, prefix=f"{path}.", repeated=repeated)
        case ListType(element_id, element):
            yield from _type_leaves(element_id, f"{path}.list.element", element, repeated=True)
        case MapType(key_id, key, value_id, value):
            yield from _type_leaves(key_id, f"{path}.key_value.key", key, repeated=True)
            yield from _type_leaves(value_id, f"{path}.key_value.value", value, repeated=True)


def _describe_column(leaf: _Leaf, chunks: list[Any]) -> _ColumnStatistics:
    statistics = [chunk.statistics for chunk in chunks]
    counted = all(one is not None and one.has_null_count for one in statistics)
    lower, upper = (None, None) if leaf.repeated or not counted else _bounds(leaf.type, chunks, statistics)
    return _ColumnStatistics(
        field_id=leaf.field_id,
        size_bytes=sum(chunk.total_compressed_size for chunk in chunks),
        value_count=sum(chunk.num_values for chunk in chunks),
        null_count=sum(one.null_count for one in statistics) if counted else None,
        lower=lower,
        upper=upper,
    )


def _bounds(type_: str, chunks: list[Any], statistics: list[Any]) -> tuple[bytes | None, bytes | None]:
    """Join the bounds of all row groups; none if one has values but no bounds, because they are too long."""
    filled = [one for one, chunk in zip(statistics, chunks, strict=True) if one.null_count < chunk.num_values]
    if not filled or not all(one.has_min_max for one in filled):
        return None, None
    low = min(_value(type_, one.min_raw) for one in filled)
    high = max(_value(type_, one.max_raw) for one in filled)
    return _lower_bound(type_, low), _upper_bound(type_, high)


def _value(type_: str, raw: Any) -> Any:
    """Return Parquet's stored value in a form that compares and encodes as Iceberg's."""
    if type_.startswith("decimal") and isinstance(raw, bytes):
        return int.from_bytes(raw, "big", signed=True)
    return raw


def _lower_bound(type_: str, value: Any) -> bytes:
    if type_ == "string":
        value = value.decode()[:BOUND_MAX_UNITS]
    elif type_ == "binary":
        value = value[:BOUND_MAX_UNITS]
    return encode_single_value(type_, value)


def _upper_bound(type_: str, value: Any) -> bytes | None:
    if type_ == "string":
        text = upper_text_bound(value.decode())
        return None if text is None else text.encode()
    return upper_binary_bound(value) if type_ == "binary" else encode_single_value(type_, value)


def _first_offset(group: Any) -> int:
    column = group.column(0)
    offset: int = column.dictionary_page_offset or column.data_page_offset
    return offset
