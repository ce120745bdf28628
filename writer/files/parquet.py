"""A flush as Parquet files: rows joined, split by partition, sorted, cut near the target size, encoded and stored.

    tables --join: conform--> one table --split by partition--> --sort--> --cut--> files, a few at a time

Rows stay together until their flush: however many partitions a table has, no file is open meanwhile, and the only small
files are those of partitions that got few rows. A partition's rows keep the order of the log unless the table has a
sort order. Rows of one partition without an order are never copied.

The statistics that Iceberg keeps of a file come from the footer that Parquet writes anyway, so rows are read once.
`write_files` needs a store and an executor, and nothing of the service: it may run anywhere. All else is CPU work in
plain functions, nearly all of which releases the interpreter's lock.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from lakefeed.aio import map_parallel, or_raise
from lakefeed.contract.changes import SourceId, Span
from lakefeed.contract.ledger import Ledger
from lakefeed.iceberg.arrow import apply_order, split_by_partition, to_arrow_schema
from lakefeed.iceberg.layout import UNSORTED, Partition, SortOrder, sort_source
from lakefeed.iceberg.manifests import DataFile, TableShape
from lakefeed.iceberg.terms import SortRejected
from lakefeed.iceberg.types import ListType, Schema, StructType, Type, children, written_fields
from lakefeed.iceberg.values import BOUND_MAX_UNITS, encode_single_value, upper_binary_bound, upper_text_bound
from lakefeed.storage.store import ObjectStore
from lakefeed.writer.commit.state import TableState, data_location
from lakefeed.writer.config import WriterConfig
from lakefeed.writer.files.row_hash import tally_rows
from lakefeed.writer.rows.merge import conform

# Encoded and not yet stored: enough to encode the next ones while the store takes these; each is at most about
# target_file_bytes in memory.
FILES_AT_ONCE = 4

# A dictionary costs a third of the writing time and pays off only where values repeat: decided on a sample.
DICTIONARY_SAMPLE_ROWS = 1_000
DICTIONARY_MAX_DISTINCT_RATIO = 0.1

_WITH_LEVEL = {"zstd", "gzip"}

# Iceberg's Java library compares UUIDs as signed numbers, against the specification: by true bounds, of files or of row
# groups, Spark would skip files that have the value it looks for.
_WITHOUT_STATISTICS = {"uuid"}


@dataclass(frozen=True, slots=True)
class WrittenFiles:
    """The data files of a flush, and a count of their rows made before encoding, if the ledger is on."""

    files: Sequence[DataFile]
    ledger: Ledger | None


async def write_files(  # noqa: PLR0913 - a seam: everything it needs is passed in
    store: ObjectStore,
    executor: Executor,
    tables: Sequence[pa.Table],
    state: TableState,
    *,
    config: WriterConfig,
    flush_id: str,
    files_for: Callable[[int], int],
    spans: Mapping[SourceId, Span],
    on_file: Callable[[], object] = lambda: None,
) -> WrittenFiles:
    """Write rows as files of the table's partitions and order; no snapshot names them yet. Cancelling leaves orphans.

    `files_for` returns into how many files so many Arrow bytes of one partition go; `on_file` is called after each file
    that is stored.

    Raises:
        pa.ArrowInvalid: rows do not fit the table's columns.
        PartitionRejected: the table's partition spec cannot be computed here.
        WriterError: not all are written.
    """
    loop = asyncio.get_running_loop()
    rows = await loop.run_in_executor(executor, join_rows, tables, state.shape)
    plan = functools.partial(lay_out, rows, state.shape, order=state.sort_order, files_for=files_for)
    planned = await loop.run_in_executor(executor, plan)

    async def write(number: int) -> DataFile:
        part = planned[number]
        encode = functools.partial(
            write_data_file,
            part.rows,
            schema=state.schema,
            location=data_location(state, part.partition, f"{flush_id}-{number:05}.parquet"),
            partition=part.partition,
            config=config,
            sort_order_id=part.sort_order_id,
        )
        buffer, file = await loop.run_in_executor(executor, encode)
        await store.write(file.location, buffer)
        on_file()
        return file

    async def write_all() -> list[DataFile]:
        files: list[DataFile] = []
        # A few after a few: when the store fails, thousands of others are not tried in vain.
        for start in range(0, len(planned), FILES_AT_ONCE):
            numbers = range(start, min(start + FILES_AT_ONCE, len(planned)))
            files += await map_parallel(write, numbers, at_once=FILES_AT_ONCE)
        return files

    if not config.ledger:
        return WrittenFiles(await write_all(), None)
    # Counting takes a thread of its own beside the encoder's: numpy and Arrow run without the interpreter's lock.
    counting = asyncio.to_thread(tally_rows, rows, list(to_arrow_schema(state.schema)))
    written, counted = await asyncio.gather(write_all(), counting, return_exceptions=True)
    files, facts = or_raise(written), or_raise(counted)
    ledger = Ledger(facts, {source: spans[source].last.epoch for source in facts if source in spans})
    assert sum(file.record_count for file in files) == ledger.rows, "every row is in one file"
    return WrittenFiles(files, ledger)


@dataclass(frozen=True, slots=True)
class FileRows:
    """The rows of one data file, and the id of their sort order."""

    partition: Partition
    rows: pa.Table
    sort_order_id: int


def join_rows(tables: Sequence[pa.Table], shape: TableShape) -> pa.Table:
    """Return the rows of a flush as one table in the columns of their Iceberg table.

    Raises: pa.ArrowInvalid if rows do not fit the table's columns.
    """
    parts = [conform(table, shape.schema.columns) for table in tables] or [to_arrow_schema(shape.schema).empty_table()]
    return pa.concat_tables(parts)


def lay_out(rows: pa.Table, shape: TableShape, *, order: SortOrder, files_for: Callable[[int], int]) -> list[FileRows]:
    """Decide what each file holds.

    Raises: PartitionRejected if the table's partition spec cannot be computed here.
    """
    if not rows.num_rows:
        return []
    order = usable_order(order, shape)
    row_bytes = rows.nbytes / max(1, rows.num_rows)
    return [
        FileRows(partition, piece, order.order_id)
        for partition, part in split_by_partition(rows, shape.spec, shape.schema)
        for piece in _cut(apply_order(part, order, shape.schema), files_for(int(part.num_rows * row_bytes)))
    ]


def usable_order(order: SortOrder, shape: TableShape) -> SortOrder:
    """Return the order, or none where another engine's cannot be computed here: rows must not wait for their order."""
    try:
        for field in order.fields:
            sort_source(field, shape.schema)
    except SortRejected:
        return UNSORTED
    return order


def _cut(rows: pa.Table, files: int) -> Iterator[pa.Table]:
    """Cut rows into parts of the same length, give or take one row."""
    files = min(files, rows.num_rows)
    for number in range(files):
        start, end = rows.num_rows * number // files, rows.num_rows * (number + 1) // files
        yield rows.slice(start, end - start)


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
    leaves = list(_leaf_columns(StructType(written_fields(schema.columns))))
    with_statistics = [leaf.path for leaf in leaves if leaf.type not in _WITHOUT_STATISTICS]
    sink = pa.BufferOutputStream()
    compression = config.parquet_compression
    pq.write_table(
        table,
        sink,
        row_group_size=config.parquet_row_group_rows,
        compression=compression,
        compression_level=config.parquet_compression_level if compression in _WITH_LEVEL else None,
        use_dictionary=repeating_columns(table) or False,
        write_statistics=True if len(with_statistics) == len(leaves) else with_statistics,
        store_decimal_as_integer=True,  # the specification's form for decimals of up to 18 digits
        store_schema=False,  # readers go by field ids; the Arrow schema would only add bytes
    )
    buffer = sink.getvalue()
    footer = pq.read_metadata(pa.BufferReader(buffer))
    file = describe_file(footer, schema=schema, location=location, size_bytes=buffer.size, partition=partition)
    return buffer, replace(file, sort_order_id=sort_order_id)


def repeating_columns(table: pa.Table) -> list[str]:
    """Return the Parquet columns whose values repeat so often that a dictionary pays off."""
    sample = table.slice(0, DICTIONARY_SAMPLE_ROWS).combine_chunks()
    columns = zip(sample.column_names, sample.columns, strict=True)
    leaves = (leaf for name, column in columns for chunk in column.chunks for leaf in _leaves(name, chunk))
    return [
        path
        for path, values in leaves
        # A boolean is a bit already.
        if not pa.types.is_boolean(values.type)
        and pc.count_distinct(values).as_py() <= DICTIONARY_MAX_DISTINCT_RATIO * len(values)
    ]


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


def describe_file(
    footer: pq.FileMetaData, *, schema: Schema, location: str, size_bytes: int, partition: Partition
) -> DataFile:
    """Describe a file from its footer alone."""
    groups = [footer.row_group(number) for number in range(footer.num_row_groups)]
    first_columns = [group.column(0) for group in groups]
    leaves = list(_leaf_columns(StructType(written_fields(schema.columns))))
    assert len(leaves) == footer.num_columns, "the file was written with this schema"
    column_sizes, value_counts, null_counts = {}, {}, {}
    lower_bounds, upper_bounds = {}, {}
    for index, leaf in enumerate(leaves):
        chunks = [group.column(index) for group in groups]
        statistics = [chunk.statistics for chunk in chunks]
        column_sizes[leaf.field_id] = sum(chunk.total_compressed_size for chunk in chunks)
        value_counts[leaf.field_id] = sum(chunk.num_values for chunk in chunks)
        if not all(one is not None and one.has_null_count for one in statistics):
            continue
        null_counts[leaf.field_id] = sum(one.null_count for one in statistics)
        lower, upper = (None, None) if leaf.repeated else _bounds(leaf.type, chunks, statistics)
        if lower is not None:
            lower_bounds[leaf.field_id] = lower
        if upper is not None:
            upper_bounds[leaf.field_id] = upper
    return DataFile(
        location=location,
        partition=partition,
        record_count=footer.num_rows,
        size_bytes=size_bytes,
        column_sizes=column_sizes,
        value_counts=value_counts,
        null_counts=null_counts,
        lower_bounds=lower_bounds,
        upper_bounds=upper_bounds,
        split_offsets=tuple(first.dictionary_page_offset or first.data_page_offset for first in first_columns),
    )


@dataclass(frozen=True, slots=True)
class _Leaf:
    """A column of the Parquet file; `repeated` inside a list or a map, where bounds have no meaning."""

    field_id: int
    path: str
    type: str
    repeated: bool


def _leaf_columns(type_: Type, *, prefix: str = "", repeated: bool = False) -> Iterator[_Leaf]:
    """Yield the leaves below a type in Parquet's order and with Parquet's names."""
    if not isinstance(type_, StructType):
        prefix, repeated = f"{prefix}{'list' if isinstance(type_, ListType) else 'key_value'}.", True
    for child in children(type_):
        path = f"{prefix}{child.name}"
        if isinstance(child.type, str):
            yield _Leaf(child.id, path, child.type, repeated)
        else:
            yield from _leaf_columns(child.type, prefix=f"{path}.", repeated=repeated)


def _bounds(type_: str, chunks: list[Any], statistics: list[Any]) -> tuple[bytes | None, bytes | None]:
    """Join the bounds of all row groups; none if one has values but no bounds, because they are too long."""
    filled = [one for one, chunk in zip(statistics, chunks, strict=True) if one.null_count < chunk.num_values]
    if not filled or not all(one.has_min_max for one in filled):
        return None, None
    low = min(_value(type_, one.min_raw) for one in filled)
    high = max(_value(type_, one.max_raw) for one in filled)
    match type_:
        case "string":
            upper = upper_text_bound(high.decode())
            return low.decode()[:BOUND_MAX_UNITS].encode(), None if upper is None else upper.encode()
        case "binary":
            return low[:BOUND_MAX_UNITS], upper_binary_bound(high)
    return encode_single_value(type_, low), encode_single_value(type_, high)


def _value(type_: str, raw: Any) -> Any:
    """Return Parquet's stored value in a form that compares and encodes as Iceberg's."""
    if type_.startswith("decimal") and isinstance(raw, bytes):
        return int.from_bytes(raw, "big", signed=True)
    return raw
