"""From the log to the tables: reads behind the log's end and hands each table its changes, in log order.

Owns the tail's position, the tables' writers, the memory bound and the trim point. Two tasks keep cores busy:

    reader:  tail -> decode threads (several runs at once) -> queue of futures, in log order
    applier: awaits them in that order -> table writers (slow path, buffers) -> flushes when due

A record is needed until every table has committed what it holds; the log is trimmed below the oldest one needed.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from writer.buffer import FlushReason
from writer.changes import Position, SourceId, TableName, table_name_of
from writer.decoding import DecodedRun, cut_run, decode_run
from writer.table_writer import Flushed, TableContext, TableWriter
from writer.wal.log import Log
from writer.wal.tail import Tail

logger = logging.getLogger(__name__)

# One decode job. Smaller jobs cost more per change, larger ones make the first row wait and hold more memory.
RUN_MAX_BYTES = 4 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class FlushReport:
    """What one flush of several tables committed."""

    tables: Mapping[str, Flushed]
    duration_s: float

    def to_json(self) -> dict[str, Any]:
        """Render as /flush and flush_response send it."""
        flushed = self.tables.values()
        return {
            "success": True,
            "batchesFlushed": sum(item.files for item in flushed),
            "eventsFlushed": sum(item.rows for item in flushed),
            "bytesWritten": sum(item.bytes for item in flushed),
            "paths": [path for item in flushed for path in item.paths],
            "durationMs": round(self.duration_s * 1_000, 3),
            "usedFallback": False,
            "tables": {
                name: {"snapshotId": item.snapshot_id, "rows": item.rows, "files": item.files}
                for name, item in self.tables.items()
            },
        }


class Feed:
    """The writer as the rest of the service sees it."""

    def __init__(
        self,
        log: Log,
        context: TableContext,
        *,
        tasks: asyncio.TaskGroup,
        marks_at_start: Mapping[SourceId, Position],
    ) -> None:
        self._log = log
        self._context = context
        self._config = context.config
        self._clock = context.clock
        self._tasks = tasks
        self._tail = Tail(log, log.first_offset)
        self._tables: dict[str, TableWriter] = {}
        self._table_tasks: list[asyncio.Task[None]] = []
        self._decoders = context.decoders
        self._runs: asyncio.Queue[asyncio.Future[DecodedRun]] = asyncio.Queue(self._config.decode_threads)
        self._applied_offset = log.first_offset
        self._applied = asyncio.Condition()
        self._applied_at = self._clock()
        self._marks_at_start = marks_at_start
        self._start_end = log.durable_end
        self._applied_positions: dict[SourceId, Position] = {}
        self._buffers_changed = asyncio.Event()
        self._commits = 0
        self._committed = asyncio.Event()

    # -- the three tasks

    async def run_reader(self) -> None:
        """Read runs behind the log's end and start decoding them. Cancelling it loses nothing: the log has it all."""
        loop = asyncio.get_running_loop()
        while True:
            await self._log.wait_beyond(self._tail.offset)
            await self._wait_for_memory()
            read = functools.partial(self._tail.read, until=self._log.durable_end, max_bytes=RUN_MAX_BYTES)
            records = await loop.run_in_executor(self._decoders, read)
            for part, next_offset in cut_run(records, max_bytes=RUN_MAX_BYTES, next_offset=self._tail.offset):
                await self._wait_for_memory()
                expected = {name: table.expected for name, table in self._tables.items()}
                decode = functools.partial(
                    decode_run, part, expected, next_offset=next_offset, keep_before=self._config.keep_before
                )
                await self._runs.put(loop.run_in_executor(self._decoders, decode))

    async def run_applier(self) -> None:
        """Give decoded runs to their tables, in log order. Cancelling it loses nothing."""
        while True:
            run = await (await self._runs.get())
            for decoded in run.tables:
                table = self._table(decoded.group.table)
                await table.add(decoded)
            # Not before: a source's change in a table to come may lie below its last one in this table.
            self._note_positions(run)
            self._applied_at = self._clock()
            async with self._applied:
                self._applied_offset = run.next_offset
                self._applied.notify_all()

    def _note_positions(self, run: DecodedRun) -> None:
        for decoded in run.tables:
            for source, (_, last) in decoded.group.positions().items():
                self._applied_positions[source] = max(last, self._applied_positions.get(source, last))

    async def run_timer(self) -> None:
        """Flush tables by age, trim the log, and keep the gauges true."""
        while True:
            await asyncio.sleep(self._config.flush_check_interval_s)
            for table in self._tables.values():
                table.maybe_flush()
            await self._log.trim(self._trim_point())
            self._set_gauges()

    def stop(self) -> None:
        """End the tables' tasks; what they have not committed stays in the log."""
        for task in self._table_tasks:
            task.cancel()
        self._tail.close()

    # -- flushing

    async def flush(self, table: str | None = None, *, reason: FlushReason = FlushReason.REQUEST) -> FlushReport:
        """Commit everything that is durable now, of one table or all; returns after the commits.

        Cancelling stops the waiting only.
        """
        started = self._clock()
        target = self._log.durable_end
        async with self._applied:
            await self._applied.wait_for(lambda: self._applied_offset >= target)
        chosen = [self._find(table)] if table is not None else list(self._tables.values())
        waits = {str(each.name): each.flush(reason) for each in chosen if each is not None}
        results = dict(zip(waits, await asyncio.gather(*waits.values()), strict=True))
        await self._log.trim(self._trim_point())
        done = {name: result for name, result in results.items() if result is not None}
        return FlushReport(done, self._clock() - started)

    def knows(self, table: str) -> bool:
        """Tell whether a table, by its own or its source's name, has been seen."""
        return self._find(table) is not None

    def _find(self, name: str) -> TableWriter | None:
        return self._tables.get(name) or next((t for t in self._tables.values() if str(t.name) == name), None)

    def _table(self, source_table: str) -> TableWriter:
        if source_table not in self._tables:
            name = table_name_of(source_table, self._config.default_namespace)
            # Two source names can mean one table (`users` and `default.users`): it has one writer.
            writer = self._find(str(name)) or self._start_table(name)
            self._tables[source_table] = writer
        return self._tables[source_table]

    def _start_table(self, name: TableName) -> TableWriter:
        writer = TableWriter(name, self._context, on_change=self._buffers_changed.set, on_commit=self._note_commit)
        self._table_tasks.append(self._tasks.create_task(writer.run(), name=f"table-{name}"))
        return writer

    def _note_commit(self) -> None:
        self._commits += 1
        self._committed.set()  # wakes those who wait now; the next commit is another event
        self._committed = asyncio.Event()

    async def wait_for_commit(self, seen: int) -> int:
        """Wait for a commit after the first `seen` ones; how many there are now. Cancelling it changes nothing."""
        while self._commits <= seen:
            await self._committed.wait()
        return self._commits

    def snapshots_of(self, source: SourceId) -> dict[str, int]:
        """Name the tables that hold changes of a source, each with its newest snapshot of ours."""
        found = {str(table.name): table.snapshot_with(source) for table in self._writers()}
        return {name: snapshot for name, snapshot in found.items() if snapshot is not None}

    async def _wait_for_memory(self) -> None:
        while self._buffered_bytes() >= self._config.buffer_max_bytes:
            self._buffers_changed.clear()
            largest = max(self._tables.values(), key=lambda table: table.open_bytes)
            if largest.open_bytes:
                largest.request_flush(FlushReason.MEMORY)
            await self._buffers_changed.wait()

    def _buffered_bytes(self) -> int:
        return sum(table.buffered_bytes for table in self._writers())

    def _writers(self) -> list[TableWriter]:
        return list({id(table): table for table in self._tables.values()}.values())

    def _trim_point(self) -> int:
        """Tell which records are no longer needed; those of a run that is only partly applied still are."""
        needed = (table.needed_offset for table in self._writers())
        return min([self._applied_offset, *(offset for offset in needed if offset is not None)])

    # -- what others may know

    def committed_position(self, source: SourceId) -> Position | None:
        """Tell how far a source is committed; None while the log's old records are still being read."""
        if self._applied_offset < self._start_end:
            return None
        waiting = [first for table in self._writers() if (first := table.first_waiting(source)) is not None]
        if waiting:
            first = min(waiting)
            return Position(first.epoch, first.sequence - 1)
        return self._applied_positions.get(source) or self._marks_at_start.get(source)

    def log_bytes(self) -> int:
        """Tell the log's size on disk."""
        return self._log.size_bytes

    def log_max_bytes(self) -> int:
        """Tell the log's budget."""
        return self._log.max_bytes

    def log_status(self) -> dict[str, Any]:
        """Describe the log for /status."""
        return {
            "bytes": self._log.size_bytes,
            "maxBytes": self._log.max_bytes,
            "firstOffset": self._log.first_offset,
            "durableEnd": self._log.durable_end,
            "appliedEnd": self._applied_offset,
            "uncommittedRecords": self._log.durable_end - self._trim_point(),
            "failed": self._log.failed,
        }

    def buffer_status(self) -> dict[str, Any]:
        """Describe the buffers for /status, in the wire protocol's words."""
        buffered = self._buffered_bytes()
        return {
            "eventCount": sum(table.buffered_rows for table in self._writers()),
            "totalSizeBytes": buffered,
            "maxSizeBytes": self._config.buffer_max_bytes,
            "utilization": round(buffered / self._config.buffer_max_bytes, 4),
        }

    def table_status(self, *, now: float) -> list[dict[str, Any]]:
        """Describe every table for /status."""
        return [table.status(now=now) for table in sorted(self._writers(), key=lambda each: each.name)]

    def problems(self, *, now: float, stalled_after_s: float) -> list[str]:
        """List what keeps the service from being ready; empty when all is well."""
        found = [f"log has failed: {self._log.failed}"] if self._log.failed else []
        behind = self._log.durable_end - self._applied_offset
        if behind and now - self._applied_at > stalled_after_s:
            found.append(f"reading the log stands still: records_behind={behind} seconds={now - self._applied_at:.0f}")
        for table in self._writers():
            age = table.oldest_age_s(now=now)
            if age is not None and age > stalled_after_s:
                found.append(f"table is not committed: table={table.name} seconds={age:.0f} reason={table.problem}")
        return found

    def _set_gauges(self) -> None:
        metrics = self._context.metrics
        metrics.log_bytes.set(self._log.size_bytes)
        metrics.log_uncommitted_records.set(self._log.durable_end - self._trim_point())
        metrics.buffered_bytes.set(self._buffered_bytes())
        now = self._clock()
        for table in self._writers():
            table.set_gauges(now=now)
