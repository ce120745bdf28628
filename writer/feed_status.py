"""What others may know of the feed: what is committed, what waits and why, for receipts, /status, /health and metrics.

Owns these answers and what they are made of; the feed (feed.py) moves it on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from writer.buffer_facts import BufferFacts, gather_facts
from writer.changes import Position, SourceId, table_name_of
from writer.completeness import complete_positions
from writer.relief import Relief
from writer.table_context import TableContext
from writer.table_flush import TableFlush
from writer.table_status import describe_table, set_gauges
from writer.table_writer import TableWriter
from writer.wal.log import Log


class FeedStatus:
    """The tables of a feed and how far it has come."""

    def __init__(
        self,
        log: Log,
        context: TableContext,
        *,
        marks_at_start: Mapping[SourceId, Position],
        held_bytes: Callable[[], int],
        table_max_share: float,
    ) -> None:
        self.tables: dict[str, TableWriter] = {}
        self.applied_offset = log.first_offset
        self._log = log
        self._context = context
        self._config = context.config
        self._clock = context.clock
        self._relief = Relief(log, context, self, held_bytes=held_bytes, table_max_share=table_max_share)
        self._applied_at = self._clock()
        self._applied_positions: dict[SourceId, Position] = {}
        self._marks_at_start = marks_at_start
        self._start_end = log.durable_end

    # -- single tables

    def knows(self, table: str) -> bool:
        """Tell whether a table, by its own or its source's name, has been seen."""
        return self._find(table) is not None

    def explain_flush(self, table: str, *, now: float) -> dict[str, Any] | None:
        """Say why a table was last flushed and when it will be; None if it has not been seen."""
        writer = self._find(table)
        return writer.explain_flush(now=now) if writer else None

    def _find(self, name: str) -> TableWriter | None:
        return self.tables.get(self._name_of(name))

    def _name_of(self, source_table: str) -> str:
        """Name the table of a source's table: two source names can mean one (`users` and `default.users`)."""
        return str(table_name_of(source_table, self._config.default_namespace))

    # -- what is committed

    def committed_position(self, source: SourceId) -> Position | None:
        """Tell how far a source is committed; None while the log's old records are still being read."""
        if self.applied_offset < self._start_end:
            return None
        waiting = [first for table in self.tables.values() if (first := table.first_waiting(source)) is not None]
        if waiting:
            first = min(waiting)
            return Position(first.epoch, first.sequence - 1)
        return self._applied_positions.get(source) or self._marks_at_start.get(source)

    def complete_with(self, flushes: Sequence[TableFlush]) -> dict[SourceId, Position]:
        """Tell of the sources in these flushes up to where they are in all of their tables, once the flushes are."""
        landing = frozenset(flushes)
        return complete_positions(
            {source for flush in flushes for source in flush.gathered.spans},
            waiting=(spans for table in self.tables.values() for spans in table.waiting_spans(landing=landing)),
            applied=self._applied_positions,
        )

    def snapshots_of(self, source: SourceId) -> dict[str, int]:
        """Name the tables that hold changes of a source, each with its newest snapshot of ours."""
        found = {name: table.snapshot_with(source) for name, table in self.tables.items()}
        return {name: snapshot for name, snapshot in found.items() if snapshot is not None}

    # -- what waits

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
            "appliedEnd": self.applied_offset,
            "uncommittedRecords": self._log.durable_end - self._relief.trim_point,
            "failed": self._log.failed,
        }

    def buffer_facts(self, *, now: float) -> BufferFacts:
        """Tell in a few numbers what is durable and not committed."""
        return gather_facts(
            self.tables.values(), uncommitted_records=self._log.durable_end - self._relief.trim_point, now=now
        )

    def flush_max_age_s(self) -> float:
        """Tell how old a buffered change gets at most, where its table has no setting of its own."""
        return self._config.flush_max_age_s

    def buffer_status(self) -> dict[str, Any]:
        """Describe the buffers for /status, in the wire protocol's words."""
        buffered = self._relief.buffered_bytes
        return {
            "eventCount": sum(table.buffered_rows for table in self.tables.values()),
            "totalSizeBytes": buffered,
            "maxSizeBytes": self._config.buffer_max_bytes,
            "utilization": round(buffered / self._config.buffer_max_bytes, 4),
            "pausedTables": sum(table.trouble.is_paused for table in self.tables.values()),
            "tablesBehind": sum(table.standing.is_behind for table in self.tables.values()),
        }

    def table_status(self, *, now: float) -> list[dict[str, Any]]:
        """Describe every table for /status."""
        return [
            {**describe_table(table, now=now), "logBytes": self._relief.log_bytes_of(table)}
            for table in sorted(self.tables.values(), key=lambda each: each.name)
        ]

    # -- what is wrong

    def problems(self, *, now: float, stalled_after_s: float) -> list[str]:
        """List what is wrong, with the log or with single tables; empty when all is well."""
        return self._log_problems(now=now, stalled_after_s=stalled_after_s) + [
            text for _, text in self._table_problems(now=now, stalled_after_s=stalled_after_s)
        ]

    def stands_still(self, *, now: float, stalled_after_s: float) -> bool:
        """Tell whether the service as a whole does not get on; a bad table beside others that commit is no reason."""
        bad = self._table_problems(now=now, stalled_after_s=stalled_after_s)
        return bool(self._log_problems(now=now, stalled_after_s=stalled_after_s)) or any(
            not table.trouble.is_its_own for table, _ in bad
        )

    def _log_problems(self, *, now: float, stalled_after_s: float) -> list[str]:
        found = [f"log has failed: {self._log.failed}"] if self._log.failed else []
        behind = self._log.durable_end - self.applied_offset
        if behind and now - self._applied_at > stalled_after_s:
            found.append(f"reading the log stands still: records_behind={behind} seconds={now - self._applied_at:.0f}")
        return found

    def _table_problems(self, *, now: float, stalled_after_s: float) -> list[tuple[TableWriter, str]]:
        found = []
        for table in self.tables.values():
            age_s, late_s = table.oldest_age_s(now=now), table.late_s(now=now)
            if late_s is not None and late_s > stalled_after_s:
                text = f"table is not committed: table={table.name} seconds={age_s:.0f} reason={table.problem}"
                found.append((table, text))
            elif table.trouble.is_paused:
                found.append((table, f"table is paused: table={table.name} reason={table.problem}"))
        return found

    def _set_gauges(self) -> None:
        metrics = self._context.metrics
        metrics.log_bytes.set(self._log.size_bytes)
        metrics.log_uncommitted_records.set(self._log.durable_end - self._relief.trim_point)
        metrics.buffered_bytes.set(self._relief.buffered_bytes)
        now = self._clock()
        for table in self.tables.values():
            set_gauges(table, metrics, now=now)
