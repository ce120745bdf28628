"""Status of a feed: what is committed, what is pending and why. For receipts, /status, /health and metrics.

Changes nothing. FlushReport is what /flush and `flush_response` send.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lakefeed.contract.changes import Position, SourceId
from lakefeed.writer.tables.context import Flushed
from lakefeed.writer.tables.feed_state import FeedState
from lakefeed.writer.tables.memory import MemoryPressure
from lakefeed.writer.tables.state import Health
from lakefeed.writer.tables.table import TableWriter


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingTotals:
    """What is durable and not committed: log records, rows of them in memory, the oldest's age, the next flush.

    Commits to the paused tables have failed several times in a row.
    """

    batches: int
    changes: int
    oldest_age_s: float | None
    next_flush_in_s: float | None
    paused_tables: int


@dataclass(frozen=True, slots=True)
class FlushReport:
    """What one flush of several tables committed."""

    tables: Mapping[str, Flushed]
    duration_s: float

    @property
    def problems(self) -> dict[str, str]:
        """The tables that did not commit everything, and why."""
        return {name: item.problem for name, item in self.tables.items() if item.problem is not None}

    def to_json(self) -> dict[str, Any]:
        """Render as /flush and flush_response send it."""
        flushed, problems = self.tables.values(), self.problems
        failure = {"error": "; ".join(f"{name}: {problem}" for name, problem in problems.items())} if problems else {}
        return {
            "success": not problems,
            **failure,
            "batchesFlushed": sum(item.files for item in flushed),
            "eventsFlushed": sum(item.rows for item in flushed),
            "bytesWritten": sum(item.bytes for item in flushed),
            "paths": [path for item in flushed for path in item.paths],
            "durationMs": round(self.duration_s * 1_000, 3),
            "usedFallback": False,
            "tables": {name: _table_json(item) for name, item in self.tables.items()},
        }


def _table_json(item: Flushed) -> dict[str, Any]:
    committed = {"snapshotId": item.snapshot_id, "rows": item.rows, "files": item.files}
    return committed if item.problem is None else {**committed, "success": False, "error": item.problem}


class FeedStatus:
    """The status of one feed."""

    def __init__(self, feed: FeedState, memory: MemoryPressure) -> None:
        self._log = feed.log
        self._config = feed.context.config
        self._context = feed.context
        self._tables = feed.tables
        self._applier = feed.applier
        self._feed = feed
        self._memory = memory
        # Not the log's failure: changes are still accepted and committed, as long as the log has space.
        self.trim_problem: str | None = None
        self._start_end = feed.log.durable_end

    # -- single tables

    def knows(self, table: str) -> bool:
        """Return whether a table, by its own or its source's name, has been seen."""
        return self._find(table) is not None

    def explain_flush(self, table: str, *, now: float) -> dict[str, Any] | None:
        """Explain why a table was last flushed and when it will be; None if it has not been seen."""
        writer = self._find(table)
        if writer is None:
            return None
        explained = writer.policy.explain(writer.pending.buffer, now=now)
        return {"table": str(writer.name), "flushing": writer.is_flushing, **explained}

    def _find(self, name: str) -> TableWriter | None:
        return self._tables.get(self._context.name_of(name))

    # -- what is committed

    def committed_position(self, source: SourceId) -> Position | None:
        """Return how far a source is committed; None while the log's old records are still being read."""
        if self._applier.offset < self._start_end:
            return None
        return self._feed.committed(source)

    def snapshots_of(self, source: SourceId) -> dict[str, int]:
        """Return the tables that hold changes of a source, each with its newest snapshot of ours."""
        found = {name: table.columns for name, table in self._tables.items() if source in table.columns.marks}
        return {name: each.snapshot_id for name, each in found.items() if each.snapshot_id is not None}

    # -- what is pending

    @property
    def _uncommitted_records(self) -> int:
        return self._log.durable_end - self._memory.trim_point

    def log_bytes(self) -> int:
        """Return the log's size on disk."""
        return self._log.size_bytes

    def log_max_bytes(self) -> int:
        """Return the log's budget."""
        return self._log.max_bytes

    def log_status(self) -> dict[str, Any]:
        """Describe the log for /status."""
        return {
            "bytes": self._log.size_bytes,
            "maxBytes": self._log.max_bytes,
            "firstOffset": self._log.first_offset,
            "durableEnd": self._log.durable_end,
            "appliedEnd": self._applier.offset,
            "uncommittedRecords": self._uncommitted_records,
            "failed": self._log.failed,
        }

    def pending_totals(self, *, now: float) -> PendingTotals:
        """Sum up what is durable and not committed."""
        tables = self._tables.values()
        ages = (table.oldest_age_s(now=now) for table in tables)
        flushes = (table.policy.next_flush(table.pending.buffer, now=now) for table in tables)
        return PendingTotals(
            batches=self._uncommitted_records,
            changes=sum(table.pending.rows for table in tables),
            oldest_age_s=max((age for age in ages if age is not None), default=None),
            next_flush_in_s=min((max(0.0, flush.in_s) for flush in flushes if flush is not None), default=None),
            paused_tables=sum(table.state.is_paused for table in tables),
        )

    def flush_max_age_s(self) -> float:
        """Return how old a buffered change gets at most, where its table has no setting of its own."""
        return self._config.flush_max_age_s

    def buffer_status(self) -> dict[str, Any]:
        """Describe the buffers for /status, in the wire protocol's words."""
        buffered_bytes = self._memory.buffered_bytes
        return {
            "eventCount": sum(table.pending.rows for table in self._tables.values()),
            "totalSizeBytes": buffered_bytes,
            "maxSizeBytes": self._config.buffer_max_bytes,
            "utilization": round(buffered_bytes / self._config.buffer_max_bytes, 4),
            "pausedTables": sum(table.state.is_paused for table in self._tables.values()),
            "tablesBehind": sum(table.state.is_behind for table in self._tables.values()),
        }

    def table_status(self, *, now: float) -> list[dict[str, Any]]:
        """Describe every table for /status."""
        return [
            {**_describe(table, now=now), "logBytes": self._memory.log_bytes_of(table)}
            for table in sorted(self._tables.values(), key=lambda each: each.name)
        ]

    # -- what is wrong

    def problems(self, *, now: float, stalled_after_s: float) -> list[str]:
        """List what is wrong with the log or with single tables."""
        trim = [self.trim_problem] if self.trim_problem is not None and not self._log.failed else []
        tables = [text for _, text in self._table_problems(now=now, stalled_after_s=stalled_after_s)]
        return self._log_problems(now=now, stalled_after_s=stalled_after_s) + trim + tables

    def is_stalled(self, *, now: float, stalled_after_s: float) -> bool:
        """Return whether the service as a whole makes no progress; a bad table beside others that commit is not it."""
        bad = self._table_problems(now=now, stalled_after_s=stalled_after_s)
        return bool(self._log_problems(now=now, stalled_after_s=stalled_after_s)) or any(
            not table.retry.is_local for table, _ in bad
        )

    def _log_problems(self, *, now: float, stalled_after_s: float) -> list[str]:
        found = [f"log has failed: {self._log.failed}"] if self._log.failed else []
        behind = self._log.durable_end - self._applier.offset
        still_s = now - self._applier.moved_at
        if behind and still_s > stalled_after_s:
            found.append(f"reading the log stands still: records_behind={behind} seconds={still_s:.0f}")
        return found

    def _table_problems(self, *, now: float, stalled_after_s: float) -> list[tuple[TableWriter, str]]:
        found = []
        for table in self._tables.values():
            due_at = table.pending.due_at(flush_max_age_s=table.columns.settings.config.flush_max_age_s)
            if due_at is not None and now - due_at > stalled_after_s:
                age_s = table.oldest_age_s(now=now)
                text = f"table is not committed: table={table.name} seconds={age_s:.0f} reason={table.problem}"
                found.append((table, text))
            elif table.state.is_paused:
                found.append((table, f"table is paused: table={table.name} reason={table.problem}"))
        return found

    def set_gauges(self) -> None:
        """Refresh the gauges that time moves."""
        metrics, now = self._context.metrics, self._context.clock()
        metrics.log_bytes.set(self._log.size_bytes)
        metrics.log_uncommitted_records.set(self._uncommitted_records)
        metrics.buffered_bytes.set(self._memory.buffered_bytes)
        for table in self._tables.values():
            name = str(table.name)
            metrics.oldest_change_s.labels(name).set(table.oldest_age_s(now=now) or 0.0)
            metrics.paused_tables.labels(name).set(table.state.is_paused)
            metrics.tables_behind.labels(name).set(table.state.is_behind)
            if table.policy.last is not None:
                metrics.since_commit_s.labels(name).set(now - table.policy.last.finished_at)


def _describe(table: TableWriter, *, now: float) -> dict[str, Any]:
    age_s, retry, last = table.oldest_age_s(now=now), table.retry, table.policy.last
    coming = table.policy.next_flush(table.pending.buffer, now=now)
    return {
        "table": str(table.name),
        "state": _state_word(table),
        "bufferedRows": table.pending.rows,
        "pendingRows": table.pending.received.rows,
        "bufferedBytes": table.pending.bytes,
        "partitions": last.partitions if last else None,
        "oldestUncommittedSeconds": None if age_s is None else round(age_s, 3),
        "committedRows": table.committed_rows,
        "commits": table.commits,
        "quarantinedRows": table.fitter.quarantined_rows,
        "snapshotId": table.columns.snapshot_id,
        "secondsSinceCommit": round(now - last.finished_at, 3) if last else None,
        "lastFlushReason": last.reason.value if last else None,
        "nextFlushReason": coming.reason.value if coming else None,
        "nextFlushInSeconds": round(coming.in_s, 3) if coming else None,
        "layoutProblem": table.columns.layout_problem,
        "columns": len(table.columns.expected.columns.fields),
        "schemaChanges": list(table.columns.changes),
        "declarationsNotFollowed": list(table.columns.refusals),
        "neededOffset": table.pending.needed_offset,
        "resumeOffset": table.pending.backlog.resume_offset,
        "problem": table.problem,
        "problemSeconds": None if retry.since is None else round(now - retry.since, 3),
        "failedAttempts": retry.attempts,
    }


def _state_word(table: TableWriter) -> str:
    """Name what a table does. The rows of a paused or catching-up table with a `resumeOffset` are in the log only."""
    if table.state.health is Health.QUARANTINING:
        return "quarantining"
    if table.state.health is Health.PAUSED:
        return "paused"
    return "catching_up" if table.state.is_behind else "writing"
