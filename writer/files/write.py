"""A flush as data files: rows joined, split by partition, sorted, cut near the target size, encoded and stored.

    tables --join: conform--> one table --split by partition--> --sort--> --cut--> files, a few at a time

Rows stay together until their flush: however many partitions a table has, no file is open meanwhile, and the only small
files are those of partitions that got few rows. A partition's rows keep the order of the log unless the table has a
sort order. Rows of one partition without an order are never copied.

Needs a store and an executor, and nothing of the service: `write_files` may run anywhere.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass

import pyarrow as pa

from lakefeed.aio import map_parallel, or_raise
from lakefeed.contract.changes import SourceId, Span
from lakefeed.contract.ledger import Ledger
from lakefeed.iceberg.arrow import apply_order, split_by_partition, to_arrow_schema
from lakefeed.iceberg.layout import UNSORTED, Partition, SortOrder, check_order
from lakefeed.iceberg.manifests import DataFile, TableShape
from lakefeed.iceberg.terms import SortRejected
from lakefeed.storage.store import ObjectStore
from lakefeed.writer.commit.state import TableState, data_location
from lakefeed.writer.config import WriterConfig
from lakefeed.writer.files.parquet import write_data_file
from lakefeed.writer.files.row_hash import tally_rows
from lakefeed.writer.rows.merge import conform

# Encoded and not yet stored: enough to encode the next ones while the store takes these; each is at most about
# target_file_bytes in memory.
FILES_AT_ONCE = 4


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

    Raises:
        pa.ArrowInvalid: rows do not fit the table's columns.
    """
    parts = [conform(table, shape.schema.columns) for table in tables] or [to_arrow_schema(shape.schema).empty_table()]
    return pa.concat_tables(parts)


def lay_out(rows: pa.Table, shape: TableShape, *, order: SortOrder, files_for: Callable[[int], int]) -> list[FileRows]:
    """Decide what each file holds.

    Raises:
        PartitionRejected: the table's partition spec cannot be computed here.
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
