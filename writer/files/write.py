"""A flush as data files: rows joined, split by partition, sorted, cut near the target size and stored."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa

from lakefeed.aio import map_parallel, or_raise
from lakefeed.contract.changes import SourceId, Span
from lakefeed.contract.ledger import Ledger
from lakefeed.iceberg.arrow import apply_order, split_by_partition, to_arrow_schema
from lakefeed.iceberg.layout import UNSORTED, Partition, SortOrder, check_order
from lakefeed.iceberg.manifests import DataFile, TableShape
from lakefeed.iceberg.terms import SortRejected
from lakefeed.writer.commit.state import TableState, data_location
from lakefeed.writer.config import WriterConfig
from lakefeed.writer.files.parquet import write_data_file
from lakefeed.writer.files.row_hash import tally_rows
from lakefeed.writer.rows.merge import conform

if TYPE_CHECKING:
    from lakefeed.writer.tables.columns import TableContext


# --- writer.file_layout -----------------------------------------------------------------------------------------------
#
# How the rows of one flush lie in data files. Owns the order of the steps; each has its own module.
#
#     buffered tables --join: conform--> one table --split by partition--> --sort--> --cut near the target-->
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
    return pa.concat_tables(parts)


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
