"""Rows of a flush as data files in the store. Owns how many are written at once; file_layout.py has what each holds."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa

from writer.changes import SourceId, Span
from writer.config import WriterConfig
from writer.data_files import write_data_file
from writer.file_layout import FileRows, join_rows, lay_out
from writer.iceberg.manifests import DataFile
from writer.iceberg.table_state import TableState, data_location
from writer.parallel import map_parallel, or_raise
from writer.table_context import TableContext
from writer.types import to_arrow_schema
from writer.verification.ledger import Ledger
from writer.verification.tally import tally_rows

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
