"""The column `_cdc_partition`, filled from each event as DoLake chose its buffers. Owns the rule and its values.

With route = "dolake" the first of these that a change has is its value; a change that has none has null:

    1. metadata.partition             its text; a number or other JSON as it is written
    2. the row's column partition_key its text
    3. the row's column created_at    dt=YYYY-MM-DD, in UTC: of a date or time, of text that begins with a date, or of a
                                      whole number of milliseconds since 1970

Columns are looked at as a whole: JSON is parsed once per different text, and never for a table without the column.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from lakefeed.aio import map_parallel, or_raise
from lakefeed.contract import changes as names
from lakefeed.contract.changes import SourceId, Span
from lakefeed.contract.ledger import Ledger
from lakefeed.iceberg.layout import UNSORTED, Partition, SortOrder, apply_order, check_order, split_by_partition
from lakefeed.iceberg.manifests import DataFile, TableShape
from lakefeed.iceberg.terms import SortRejected, Transform
from lakefeed.iceberg.transform_arrays import apply_transform
from lakefeed.iceberg.types import to_arrow_schema
from lakefeed.writer.commit.state import TableState, data_location
from lakefeed.writer.config import WriterConfig
from lakefeed.writer.files.parquet import write_data_file
from lakefeed.writer.files.row_hash import tally_rows
from lakefeed.writer.rows.merge import conform

if TYPE_CHECKING:
    from lakefeed.writer.tables.columns import TableContext


# --- writer.routing ---------------------------------------------------------------------------------------------------


KEY_COLUMN = "partition_key"
TIME_COLUMN = "created_at"

_DATE = r"^(?P<date>\d{4}-\d{2}-\d{2})(?:$|[T ])"
_DAY_PREFIX = "dt="
_MS_PER_DAY = 86_400_000
# Days that have four digits of year: 0001-01-01 to 9999-12-31.
_FIRST_DAY = -719_162
_LAST_DAY = 2_932_896


class _Routed(msgspec.Struct):
    """What of an event's metadata is looked at."""

    partition: msgspec.Raw = msgspec.Raw(b"null")


_ROUTED = msgspec.json.Decoder(_Routed)
_DAY = Transform("day")


def fill_route(table: pa.Table) -> pa.Table:
    """Fill `_cdc_partition` where the table has it."""
    position = table.schema.get_field_index(names.PARTITION)
    if position < 0:
        return table
    found = (_from_metadata(table), _from_key(table), _from_time(table))
    values = pc.coalesce(*(pa.nulls(table.num_rows, pa.string()) if each is None else each for each in found))
    return table.set_column(position, table.schema.field(position), values)


def _column(table: pa.Table, name: str) -> pa.Array | None:
    return table.column(name).combine_chunks() if name in table.column_names else None


def _from_metadata(table: pa.Table) -> pa.Array | None:
    column = _column(table, names.METADATA)
    if column is None or column.null_count == len(column):
        return None
    encoded = column.dictionary_encode()
    texts = pa.array([_routed_text(text) for text in encoded.dictionary.to_pylist()], pa.string())
    return texts.take(encoded.indices)


def _routed_text(metadata: str) -> str | None:
    try:
        value = bytes(_ROUTED.decode(metadata).partition)
        return msgspec.json.decode(value, type=str) if value.startswith(b'"') else _plain_text(value)
    except msgspec.MsgspecError:  # metadata is an object by the protocol; what is not, routes nothing
        return None


def _plain_text(value: bytes) -> str | None:
    return None if value == b"null" else value.decode()


def _from_key(table: pa.Table) -> pa.Array | None:
    column = _column(table, KEY_COLUMN)
    if column is None or pt.is_nested(column.type) or pt.is_fixed_size_binary(column.type) or pt.is_binary(column.type):
        return None
    return column.cast(pa.string())


def _from_time(table: pa.Table) -> pa.Array | None:
    column = _column(table, TIME_COLUMN)
    dates = None if column is None else _dates(column)
    return None if dates is None else pc.binary_join_element_wise(_DAY_PREFIX, dates, "")


def _dates(values: pa.Array) -> pa.Array | None:
    """Give dates as text, null where there is none."""
    if pt.is_string(values.type):
        return pc.struct_field(pc.extract_regex(values, _DATE), "date")
    days = _days(values)
    if days is None:
        return None
    is_known = pc.and_(pc.greater_equal(days, _FIRST_DAY), pc.less_equal(days, _LAST_DAY))
    known = pc.if_else(is_known, days, pa.scalar(None, pa.int64()))
    return known.cast(pa.int32()).cast(pa.date32()).cast(pa.string())


def _days(values: pa.Array) -> pa.Array | None:
    """Give days since 1970, of columns that hold times."""
    if pt.is_integer(values.type):
        # Days of four-digit years are exact as doubles, and what is beyond is left out.
        milliseconds = values.cast(pa.float64(), safe=False)
        return pc.floor(pc.divide(milliseconds, float(_MS_PER_DAY))).cast(pa.int64())
    if pt.is_timestamp(values.type):
        return apply_transform(_DAY, "timestamp_ns" if values.type.unit == "ns" else "timestamp", values)
    return apply_transform(_DAY, "date", values) if pt.is_date32(values.type) else None


# --- writer.file_layout -----------------------------------------------------------------------------------------------
#
# How the rows of one flush lie in data files. Owns the order of the steps; each has its own module.
#
#     buffered tables --join: conform, route--> one table --split by partition--> --sort--> --cut near the target-->
# files
#
# Rows stay together until their flush: however many partitions a table has, none is open meanwhile, and the only small
# files are those of partitions that got few rows. A partition's rows keep the order of the log unless the table has a
# sort order. Rows of one partition without an order are never copied.


@dataclass(frozen=True, slots=True)
class FileRows:
    """What one data file will hold, and the order that its rows lie in."""

    partition: Partition
    rows: pa.Table
    sort_order_id: int


def join_rows(tables: Sequence[pa.Table], shape: TableShape) -> pa.Table:
    """Bring the rows of a flush to the columns of its table.

    Raises:
        pa.ArrowInvalid: rows do not fit the table's columns.
    """
    parts = [conform(table, shape.schema.columns) for table in tables] or [to_arrow_schema(shape.schema).empty_table()]
    return fill_route(pa.concat_tables(parts))


def lay_out(rows: pa.Table, shape: TableShape, *, order: SortOrder, files_for: Callable[[int], int]) -> list[FileRows]:
    """Decide what each file holds; `files_for` tells into how many files so many Arrow bytes of one partition go.

    Raises:
        PartitionRejected: the table's spec cannot be computed here.
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
    """Give the order, or none where another engine's cannot be computed here: rows are more than their order."""
    try:
        check_order(order, shape.schema)
    except SortRejected:
        return UNSORTED
    return order


def _cut(rows: pa.Table, files: int) -> Iterator[pa.Table]:
    """Cut rows into parts of the same length, give or take one row."""
    files = min(files, rows.num_rows)
    for number in range(files):
        start, end = rows.num_rows * number // files, rows.num_rows * (number + 1) // files
        yield rows.slice(start, end - start)


# --- writer.file_writing ----------------------------------------------------------------------------------------------
#
# Rows of a flush as data files in the store. Owns how many are written at once; file_layout.py has what each holds.


# Encoded and not yet stored: enough to encode the next ones while the store takes these; each is at most about
# target_file_bytes in memory.
FILES_AT_ONCE = 4


@dataclass(frozen=True, slots=True)
class Written:
    """The data files of a flush, and what rows they hold, if that is recorded: counted before they went into files."""

    files: Sequence[DataFile]
    ledger: Ledger | None


async def write_files(
    tables: Sequence[pa.Table],
    state: TableState,
    context: TableContext,
    *,
    config: WriterConfig,
    flush_id: str,
    files_for: Callable[[int], int],
    spans: Mapping[SourceId, Span],
    on_file: Callable[[], object] = lambda: None,
) -> Written:
    """Write rows as files of the table's partitions and order; nothing refers to them yet. Cancelling leaves orphans.

    `on_file` hears of each file that is stored.

    Raises:
        pa.ArrowInvalid: rows do not fit the table's columns.
        WriterError: not all are written.
    """
    loop = asyncio.get_running_loop()
    rows = await loop.run_in_executor(context.encoders, join_rows, tables, state.shape)
    plan = functools.partial(lay_out, rows, state.shape, order=state.sort_order, files_for=files_for)
    planned = await loop.run_in_executor(context.encoders, plan)

    async def write(number: int) -> DataFile:
        location = data_location(state, planned[number].partition, f"{flush_id}-{number:05}.parquet")
        file = await _write_file(planned[number], location, state, context, config=config)
        on_file()
        return file

    if not config.ledger:
        return Written(await _write_all(write, len(planned)), None)
    # Counting takes a thread of its own beside the encoder's: numpy and Arrow run without the interpreter's lock.
    counting = asyncio.to_thread(tally_rows, rows, list(to_arrow_schema(state.schema)))
    written, counted = await asyncio.gather(_write_all(write, len(planned)), counting, return_exceptions=True)
    files, facts = or_raise(written), or_raise(counted)
    ledger = Ledger(facts, {source: spans[source].last.epoch for source in facts if source in spans})
    assert sum(file.record_count for file in files) == ledger.rows, "every row is in one file"
    return Written(files, ledger)


async def _write_all(write: Callable[[int], Awaitable[DataFile]], count: int) -> list[DataFile]:
    files: list[DataFile] = []
    # A few after a few: when the store fails, thousands of others are not tried in vain.
    for start in range(0, count, FILES_AT_ONCE):
        numbers = range(start, min(start + FILES_AT_ONCE, count))
        files += await map_parallel(write, numbers, at_once=FILES_AT_ONCE)
    return files


async def _write_file(
    planned: FileRows, location: str, state: TableState, context: TableContext, *, config: WriterConfig
) -> DataFile:
    encode = functools.partial(
        write_data_file,
        planned.rows,
        schema=state.schema,
        location=location,
        partition=planned.partition,
        config=config,
        sort_order_id=planned.sort_order_id,
    )
    buffer, file = await asyncio.get_running_loop().run_in_executor(context.encoders, encode)
    await context.store.write(location, buffer)
    return file
