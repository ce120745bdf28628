"""One table's life from decoded changes to snapshots. Owns the table's columns, its buffer and its flushes.

    add (applier's task)  -> buffer --take--> prepare -> commit (the table's own task, one flush at a time)

A flush that fails is tried again until it is in: its rows stay in memory, their records stay in the log, and only this
table waits. Steps of a flush, and what a crash after each leaves behind:

    1. take the buffer               nothing; the log has the rows
    2. create or alter the table     a table without the rows, or with an empty column
    3. write data files              files that no snapshot names (orphans)
    4. write manifest and list       likewise
    5. commit through the catalog    the rows and the marker that says so, at once
    6. trim the log                  nothing
"""

from __future__ import annotations

import asyncio
import functools
import logging
import random
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from typing import Any

import pyarrow as pa

from writer.buffer import Chunk, FlushReason, Gathered, TableBuffer, layout_of
from writer.changes import Position, SourceId, TableName
from writer.commit_plan import Flush
from writer.committer import Committer
from writer.config import WriterConfig
from writer.data_files import write_data_file
from writer.decoding import Decoded, Expected, decode_or_fit, spans_of
from writer.errors import (
    CommitConflict,
    RowsAlreadyCommitted,
    TableMissing,
    TableReplaced,
    WriterError,
)
from writer.iceberg.manifests import DataFile
from writer.iceberg.partitions import Partition, PartitionSpec, parse_partition, split_by_partition
from writer.iceberg.table_state import TableState, data_location
from writer.merge import field_ids, merge_columns
from writer.metrics import WriterMetrics
from writer.rows.groups import Group
from writer.rows.parse_types import NO_VACANCIES
from writer.schema import Fitted, conform, initial_columns
from writer.storage import ObjectStore
from writer.types import Schema

logger = logging.getLogger(__name__)

RETRY_FIRST_S = 0.2
RETRY_MAX_S = 15.0

# Iceberg's first format that has types for nanoseconds.
FORMAT_WITH_NANOSECONDS = 3

# Newest schema changes in /status; all of them are in the log lines.
SCHEMA_CHANGES_SHOWN = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class TableContext:
    """What all table writers share."""

    node: str
    config: WriterConfig
    committer: Committer
    store: ObjectStore
    decoders: Executor
    encoders: Executor
    metrics: WriterMetrics
    clock: Callable[[], float]


@dataclass(frozen=True, slots=True)
class Flushed:
    """What a flush committed; of a table with nothing to flush, its current snapshot and no rows."""

    snapshot_id: int | None
    rows: int = 0
    bytes: int = 0
    paths: Sequence[str] = ()

    @property
    def files(self) -> int:
        """Count the data files."""
        return len(self.paths)


@dataclass(slots=True)
class _Running:
    """The flush under way and those who wait for it."""

    gathered: Gathered
    waiters: list[asyncio.Future[Flushed]]
    prepared: Flush | None = None
    attempts: int = 0


@dataclass(slots=True)
class _Totals:
    """What this process has committed of the table."""

    rows: int = 0
    commits: int = 0
    last_commit_at: float | None = None
    last_reason: FlushReason | None = None
    schema_changes: list[str] = field(default_factory=list)


class TableWriter:
    """Buffers and commits the changes of one table."""

    def __init__(
        self,
        name: TableName,
        context: TableContext,
        *,
        on_change: Callable[[], None],
        on_commit: Callable[[], None],
    ) -> None:
        self.name = name
        self.problem: str | None = None
        self._context = context
        self._config = context.config
        self._on_change = on_change
        self._on_commit = on_commit
        self._state: TableState | None = None
        self._opened = False
        self.expected = Expected(
            initial_columns(keep_before=context.config.keep_before),
            NO_VACANCIES,
            nanoseconds=context.config.format_version >= FORMAT_WITH_NANOSECONDS,
        )
        self._last_field_id = max(field_ids(self.expected.columns))
        self._columns_lock = asyncio.Lock()
        self._buffer = TableBuffer()
        self._waiters: list[asyncio.Future[Flushed]] = []
        self._running: _Running | None = None
        self._wanted = asyncio.Event()
        self._reason = FlushReason.REQUEST
        self._totals = _Totals()

    # -- taking changes

    async def add(self, decoded: Decoded) -> None:
        """Buffer the changes that the table does not have yet. Called by one task only, in log order."""
        if not self._opened:
            await self._open()
        group = decoded.group.after(self._state.progress.sources) if self._state else decoded.group
        dropped = len(decoded.group) - len(group)
        if dropped:
            self._context.metrics.duplicate_changes.labels(str(self.name)).inc(dropped)
        if not len(group):
            return
        rows = decoded.rows if group is decoded.group else None
        chunk = self._chunk(group, rows if rows is not None else await self._decode_exactly(group))
        if self._buffer.begins_epoch(chunk):
            await self.flush(FlushReason.EPOCH)
        self._buffer.add(chunk, now=self._context.clock())
        self._on_change()
        self.maybe_flush()

    def _chunk(self, group: Group, rows: pa.Table) -> Chunk:
        spec = self._spec()
        schema = Schema(0, self.expected.columns)
        return Chunk(
            parts=split_by_partition(rows, spec, schema),
            log_from=group.first_offset,
            log_to=group.last_offset + 1,
            spans=spans_of(group),
            layout=layout_of(spec),
        )

    def _spec(self) -> PartitionSpec:
        if self._state is not None:
            return self._state.spec
        return parse_partition(self._config.partition, Schema(0, self.expected.columns))

    async def _decode_exactly(self, group: Group) -> pa.Table:
        async with self._columns_lock:
            decode = functools.partial(decode_or_fit, group, self.expected, last_field_id=self._last_field_id)
            fitted = await asyncio.get_running_loop().run_in_executor(self._context.decoders, decode)
            if fitted.added:
                self._note_schema_change(fitted)
            self.expected = replace(self.expected, columns=fitted.columns, vacant=fitted.vacant)
            self._last_field_id = fitted.last_field_id
        return fitted.table

    def _note_schema_change(self, fitted: Fitted) -> None:
        logger.info("columns_changed", extra={"table": str(self.name), "changes": list(fitted.added)})
        self._context.metrics.schema_changes.labels(str(self.name)).inc(len(fitted.added))
        self._totals.schema_changes.extend(fitted.added)

    async def _open(self) -> None:
        """Look the table up once before the first row: its own marks tell what it already has."""
        attempts = 0
        while not self._opened:
            try:
                self._adopt(await self._context.committer.load(self.name))
            except TableMissing:
                logger.info("table_is_new", extra={"table": str(self.name)})
                self._opened = True
            except WriterError as error:
                attempts += 1
                await self._back_off(error, attempts)
        self.problem = None

    def _adopt(self, state: TableState) -> None:
        """Go on from a table's state, with its columns and those that only we know."""
        merged = merge_columns(state.schema.columns, self.expected.columns, last_field_id=state.last_column_id)
        self._state = state
        self.expected = replace(
            self.expected, columns=merged.columns, nanoseconds=state.format_version >= FORMAT_WITH_NANOSECONDS
        )
        self._last_field_id = merged.last_field_id
        self._opened = True

    # -- when to flush

    def maybe_flush(self) -> None:
        """Start a flush if the buffer is due."""
        reason = self._buffer.due(self._config, now=self._context.clock())
        if reason is not None:
            self.request_flush(reason)

    def request_flush(self, reason: FlushReason) -> None:
        """Start a flush of what is buffered; does nothing while one is wanted already."""
        if not self._wanted.is_set():
            self._reason = reason
            self._wanted.set()

    def flush(self, reason: FlushReason) -> asyncio.Future[Flushed]:
        """Start a flush; the future is done when everything buffered until now is committed."""
        waiter: asyncio.Future[Flushed] = asyncio.get_running_loop().create_future()
        if self._buffer.rows:
            self._waiters.append(waiter)
            self.request_flush(reason)
        elif self._running is not None:
            self._running.waiters.append(waiter)
        else:
            waiter.set_result(Flushed(self._state.snapshot_id if self._state else None))
        return waiter

    async def run(self) -> None:
        """Flush whenever asked to. Cancelling it leaves the rows in the log."""
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            if self._buffer.rows:
                await self._flush_buffer(self._reason)

    async def _flush_buffer(self, reason: FlushReason) -> None:
        started = self._context.clock()
        self._running = _Running(self._buffer.take(), self._waiters)
        self._waiters = []
        flushed = await self._commit_until_done(self._running)
        waiters, self._running = self._running.waiters, None
        self._totals.rows += flushed.rows
        self._totals.commits += 1
        self._totals.last_commit_at = self._context.clock()
        self._totals.last_reason = reason
        self._report(flushed, reason=reason, seconds=self._context.clock() - started)
        for waiter in waiters:
            if not waiter.done():  # whoever waited may have given up
                waiter.set_result(flushed)
        self._on_change()
        self._on_commit()

    def _report(self, flushed: Flushed, *, reason: FlushReason, seconds: float) -> None:
        metrics, table = self._context.metrics, str(self.name)
        metrics.flushes.labels(reason.value).inc()
        metrics.flush_s.observe(seconds)
        metrics.committed_changes.labels(table).inc(flushed.rows)
        metrics.committed_bytes.labels(table).inc(flushed.bytes)
        metrics.committed_files.labels(table).inc(flushed.files)
        logger.info(
            "flush_committed",
            extra={
                "table": table,
                "rows": flushed.rows,
                "files": flushed.files,
                "bytes": flushed.bytes,
                "snapshot": flushed.snapshot_id,
                "reason": reason.value,
                "seconds": round(seconds, 3),
            },
        )

    # -- one flush

    async def _commit_until_done(self, running: _Running) -> Flushed:
        while running.gathered.rows:
            try:
                return await self._commit(running)
            except RowsAlreadyCommitted as error:
                running.gathered = running.gathered.after(error.marks)
                running.prepared = None
                self._state = None
            except (TableMissing, TableReplaced) as error:
                running.attempts += 1
                running.prepared = None
                self._state = None
                await self._back_off(error, running.attempts)
            except pa.ArrowInvalid:
                # The table's columns are others now. What Arrow says of it would show a row's value.
                running.attempts += 1
                running.prepared = None
                self._state = None
                await self._back_off("buffered rows do not fit the table's columns any more", running.attempts)
            except WriterError as error:
                running.attempts += 1
                await self._back_off(error, running.attempts)
        return Flushed(self._state.snapshot_id if self._state else None)

    async def _commit(self, running: _Running) -> Flushed:
        if running.prepared is None:
            state = await self._agree_on_columns()
            running.prepared = await self._write_files(running.gathered, state)
        assert self._state is not None
        flush = running.prepared
        started = self._context.clock()
        result = await self._context.committer.commit(self._state, flush)
        self._context.metrics.commit_s.observe(self._context.clock() - started)
        self._state = result.state
        self.problem = None
        return Flushed(
            snapshot_id=result.snapshot_id,
            rows=sum(file.record_count for file in flush.files),
            bytes=sum(file.size_bytes for file in flush.files),
            paths=[file.location for file in flush.files],
        )

    async def _agree_on_columns(self) -> TableState:
        """Make the table exist with at least our columns, under its own field ids."""
        committer = self._context.committer
        async with self._columns_lock:
            if self._state is None:
                self._adopt(await committer.load_or_create(self.name, Schema(0, self.expected.columns), self._config))
            assert self._state is not None
            if self.expected.columns != self._state.schema.columns:
                schema = Schema(self._state.schema.schema_id + 1, self.expected.columns)
                try:
                    self._adopt(await committer.commit_schema(self._state, schema))
                except CommitConflict:
                    self._state = None  # its columns changed meanwhile: the next attempt starts from those
                    raise
            return self._state

    async def _write_files(self, gathered: Gathered, state: TableState) -> Flush:
        flush_id = str(uuid.uuid4())
        partitions = self._partitions_for(state, gathered)
        files = [
            await self._write_file(partition, tables, state=state, name=f"{flush_id}-{number:05}.parquet")
            for number, (partition, tables) in enumerate(partitions.items())
        ]
        return Flush(
            id=flush_id,
            node=self._context.node,
            log_from=gathered.log_from,
            log_to=gathered.log_to,
            spans=gathered.spans,
            files=files,
        )

    def _partitions_for(self, state: TableState, gathered: Gathered) -> Mapping[Partition, Sequence[pa.Table]]:
        """Split the rows anew if the table's partitioning changed while they were buffered."""
        if gathered.layouts == {layout_of(state.spec)}:
            return gathered.partitions
        split: dict[Partition, list[pa.Table]] = {}
        for tables in gathered.partitions.values():
            for table in tables:
                rows = conform(table, state.schema.columns)
                for partition, part in split_by_partition(rows, state.spec, state.schema):
                    split.setdefault(partition, []).append(part)
        return split

    async def _write_file(
        self, partition: Partition, tables: Sequence[pa.Table], *, state: TableState, name: str
    ) -> DataFile:
        location = data_location(state, partition, name)

        def encode() -> tuple[pa.Buffer, DataFile]:
            rows = pa.concat_tables(conform(table, state.schema.columns) for table in tables)
            return write_data_file(
                rows, schema=state.schema, location=location, partition=partition, config=self._config
            )

        buffer, file = await asyncio.get_running_loop().run_in_executor(self._context.encoders, encode)
        await self._context.store.write(location, buffer)
        return file

    async def _back_off(self, error: WriterError | str, attempts: int) -> None:
        self.problem = str(error)
        self._context.metrics.flush_failures.labels(str(self.name)).inc()
        delay_s = min(RETRY_MAX_S, RETRY_FIRST_S * 2 ** (attempts - 1)) * random.uniform(0.5, 1.0)  # noqa: S311
        logger.warning(
            "flush_failed",
            extra={"table": str(self.name), "error": self.problem, "attempts": attempts, "retry_s": round(delay_s, 3)},
        )
        await asyncio.sleep(delay_s)

    # -- what others may know

    @property
    def open_bytes(self) -> int:
        """Arrow data that no flush has taken yet."""
        return self._buffer.bytes

    @property
    def buffered_bytes(self) -> int:
        """Arrow data in memory, flushing or not."""
        return self._buffer.bytes + (self._running.gathered.bytes if self._running else 0)

    @property
    def buffered_rows(self) -> int:
        """Rows in memory, flushing or not."""
        return self._buffer.rows + (self._running.gathered.rows if self._running else 0)

    @property
    def needed_offset(self) -> int | None:
        """The oldest log offset that is not committed, or None."""
        if self._running is not None:
            return self._running.gathered.log_from
        return self._buffer.log_from if self._buffer.rows else None

    def first_waiting(self, source: SourceId) -> Position | None:
        """Find a source's first position that is not committed, or None."""
        running = self._running.gathered.spans if self._running else {}
        span = running.get(source) or self._buffer.spans.get(source)
        return span.first if span else None

    def snapshot_with(self, source: SourceId) -> int | None:
        """Give the table's snapshot if it holds changes of a source."""
        if self._state is None or self._state.progress.position_of(source) is None:
            return None
        return self._state.snapshot_id

    def oldest_age_s(self, *, now: float) -> float | None:
        """Tell how long the oldest change that is not committed has been here, or None."""
        if self._running is not None:
            return now - self._running.gathered.oldest_at
        return now - self._buffer.oldest_at if self._buffer.rows else None

    def status(self, *, now: float) -> dict[str, Any]:
        """Describe the table for /status."""
        age = self.oldest_age_s(now=now)
        totals = self._totals
        return {
            "table": str(self.name),
            "bufferedRows": self.buffered_rows,
            "bufferedBytes": self.buffered_bytes,
            "partitions": self._buffer.partition_count,
            "oldestUncommittedSeconds": None if age is None else round(age, 3),
            "committedRows": totals.rows,
            "commits": totals.commits,
            "snapshotId": self._state.snapshot_id if self._state else None,
            "secondsSinceCommit": None if totals.last_commit_at is None else round(now - totals.last_commit_at, 3),
            "lastFlushReason": totals.last_reason.value if totals.last_reason else None,
            "columns": len(self.expected.columns.fields),
            "schemaChanges": totals.schema_changes[-SCHEMA_CHANGES_SHOWN:],
            "problem": self.problem,
        }

    def set_gauges(self, *, now: float) -> None:
        """Refresh the gauges that time moves."""
        age = self.oldest_age_s(now=now)
        self._context.metrics.oldest_change_s.labels(str(self.name)).set(age or 0.0)
        if self._totals.last_commit_at is not None:
            self._context.metrics.since_commit_s.labels(str(self.name)).set(now - self._totals.last_commit_at)
