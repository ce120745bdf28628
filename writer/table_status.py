"""What a table's writer tells of itself: totals, the line per flush, metrics. Owns their words, not the numbers."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from writer.buffer import FlushReason
from writer.changes import TableName
from writer.metrics import WriterMetrics
from writer.table_flush import Flushed

if TYPE_CHECKING:
    from writer.table_writer import TableWriter

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Totals:
    """What this process has committed of the table."""

    rows: int = 0
    commits: int = 0
    last_commit_at: float | None = None
    last_reason: FlushReason | None = None

    def add(self, flushed: Flushed, *, reason: FlushReason, now: float) -> None:
        """Count a flush."""
        self.rows += flushed.rows
        self.commits += 1
        self.last_commit_at = now
        self.last_reason = reason


def report_flush(
    name: TableName, flushed: Flushed, *, reason: FlushReason, seconds: float, metrics: WriterMetrics
) -> None:
    """Count a flush that is committed and log its line."""
    table = str(name)
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


def describe_table(table: TableWriter, *, now: float) -> dict[str, Any]:
    """Describe a table for /status."""
    age_s, totals, trouble = table.oldest_age_s(now=now), table.totals, table.trouble
    return {
        "table": str(table.name),
        "state": _state_of(table),
        "bufferedRows": table.buffered_rows,
        "pendingRows": table.pending_rows,
        "bufferedBytes": table.buffered_bytes,
        "partitions": table.control.last.partitions if table.control.last else None,
        "oldestUncommittedSeconds": None if age_s is None else round(age_s, 3),
        "committedRows": totals.rows,
        "commits": totals.commits,
        "quarantinedRows": table.quarantined_rows,
        "snapshotId": table.columns.snapshot_id,
        "secondsSinceCommit": None if totals.last_commit_at is None else round(now - totals.last_commit_at, 3),
        "lastFlushReason": totals.last_reason.value if totals.last_reason else None,
        **_next_flush(table, now=now),
        "layoutProblem": table.columns.layout_problem,
        "columns": len(table.expected.columns.fields),
        "schemaChanges": list(table.columns.changes),
        "declarationsNotFollowed": list(table.columns.refusals),
        "neededOffset": table.needed_offset,
        "resumeOffset": table.standing.resume_offset,
        "problem": table.problem,
        "problemSeconds": None if trouble.since is None else round(now - trouble.since, 3),
        "failedAttempts": trouble.attempts,
    }


def _next_flush(table: TableWriter, *, now: float) -> dict[str, Any]:
    coming = table.next_flush(now=now)
    return {
        "nextFlushReason": coming.reason.value if coming else None,
        "nextFlushInSeconds": round(coming.in_s, 3) if coming else None,
    }


def _state_of(table: TableWriter) -> str:
    """Name what a table does: writing, catching up from the log, paused, or paused with its rows in the log only."""
    if table.moves_away:
        return "moving_to_quarantine"
    if table.trouble.is_paused:
        return "parked" if table.standing.is_behind else "paused"
    return "catching_up" if table.standing.is_behind else "writing"


def set_gauges(table: TableWriter, metrics: WriterMetrics, *, now: float) -> None:
    """Refresh a table's gauges that time moves."""
    name = str(table.name)
    metrics.oldest_change_s.labels(name).set(table.oldest_age_s(now=now) or 0.0)
    metrics.paused_tables.labels(name).set(table.trouble.is_paused)
    metrics.tables_behind.labels(name).set(table.standing.is_behind)
    if table.totals.last_commit_at is not None:
        metrics.since_commit_s.labels(name).set(now - table.totals.last_commit_at)
