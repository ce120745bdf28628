"""What others may know of the feed: what is committed, what waits and why, for receipts, /status, /health and metrics.

Owns these answers and what they are made of; the feed (feed.py) moves it on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from lakefeed.contract.changes import Position, SourceId, Span, table_name_of
from lakefeed.contract.properties import is_own_mark
from lakefeed.writer.metrics import WriterMetrics
from lakefeed.writer.tables.columns import TableContext
from lakefeed.writer.tables.flush import Flushed, TableFlush
from lakefeed.writer.tables.flush_policy import Threshold
from lakefeed.writer.tables.memory import Relief
from lakefeed.writer.tables.state import Trouble
from lakefeed.writer.tables.table import TableWriter
from lakefeed.writer.wal.protocol import Log

# --- writer.table_status ----------------------------------------------------------------------------------------------
#
# What a table's writer tells of itself: totals, the line per flush, metrics. Owns their words, not the numbers.


logger = logging.getLogger(__name__)


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


# --- writer.buffer_facts ----------------------------------------------------------------------------------------------
#
# What waits between the log and the tables, in a few numbers for those who send and those who watch.


class Waiting(Protocol):
    """A table, as far as it matters here."""

    trouble: Trouble

    @property
    def buffered_rows(self) -> int:
        """Rows in memory."""

    def oldest_age_s(self, *, now: float) -> float | None:
        """Tell how long the oldest change that is not committed has been here."""

    def next_flush(self, *, now: float) -> Threshold | None:
        """Tell when the buffer will be flushed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferFacts:
    """What is durable and not committed: log records, rows of them in memory, the oldest's age, the next flush.

    Commits to the paused tables have failed several times in a row.
    """

    batches: int
    changes: int
    oldest_age_s: float | None
    next_flush_in_s: float | None
    paused_tables: int


def gather_facts(tables: Iterable[Waiting], *, uncommitted_records: int, now: float) -> BufferFacts:
    """Sum up all tables."""
    every = list(tables)
    ages = (table.oldest_age_s(now=now) for table in every)
    flushes = (table.next_flush(now=now) for table in every)
    return BufferFacts(
        batches=uncommitted_records,
        changes=sum(table.buffered_rows for table in every),
        oldest_age_s=max((age for age in ages if age is not None), default=None),
        next_flush_in_s=min((max(0.0, flush.in_s) for flush in flushes if flush is not None), default=None),
        paused_tables=sum(table.trouble.is_paused for table in every),
    )


# --- writer.flush_report ----------------------------------------------------------------------------------------------
#
# What a flush of several tables committed, and what not. Owns the JSON that /flush and flush_response send.


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
        told = {"error": "; ".join(f"{name}: {problem}" for name, problem in problems.items())} if problems else {}
        return {
            "success": not problems,
            **told,
            "batchesFlushed": sum(item.files for item in flushed),
            "eventsFlushed": sum(item.rows for item in flushed),
            "bytesWritten": sum(item.bytes for item in flushed),
            "paths": [path for item in flushed for path in item.paths],
            "durationMs": round(self.duration_s * 1_000, 3),
            "usedFallback": False,
            "tables": {name: _table_json(item) for name, item in self.tables.items()},
        }


def _table_json(item: Flushed) -> dict[str, Any]:
    done = {"snapshotId": item.snapshot_id, "rows": item.rows, "files": item.files}
    return done if item.problem is None else {**done, "success": False, "error": item.problem}


# --- writer.completeness ----------------------------------------------------------------------------------------------
#
# Up to where a source is committed, whichever table its changes belong to. Owns the reckoning; tables say what waits.
#
#     shop   10 a   11 b   12 a   13 c   14 a        a has committed all of its changes, b and c have not
#                  ^ complete up to 10: 11 waits for b
#
# A source that goes to another node, or back to one that has lost its log, resumes from there (table_marks.py). Marks
# of
# single tables do not do: a table that has nothing of the source yet has none, and would hold nothing back. So whoever
# commits writes beside its own marks what is complete once its commit has landed. Epochs sort before sequences: while
# something of an old epoch waits, nothing of a later one is complete.


def complete_positions(
    sources: Iterable[SourceId],
    *,
    waiting: Iterable[Mapping[SourceId, Span]],
    applied: Mapping[SourceId, Position],
) -> dict[SourceId, Position]:
    """Tell up to where sources are complete: right below the first change that waits, or all that was applied.

    `waiting` is what is not committed, of all tables and in whichever parts.
    """
    wanted = {source for source in sources if source in applied and not is_own_mark(source)}
    firsts: dict[SourceId, Position] = {}
    for spans in waiting:
        # Thousands of sources may be in hundreds of parts, at every commit.
        few, many = (wanted, spans) if len(wanted) < len(spans) else (spans, wanted)
        for source in few:
            if source in many:
                first, known = spans[source].first, firsts.get(source)
                if known is None or (first.epoch, first.sequence) < (known.epoch, known.sequence):
                    firsts[source] = first
    return {source: _before(firsts[source]) if source in firsts else applied[source] for source in wanted}


def _before(first: Position) -> Position:
    return Position(first.epoch, first.sequence - 1)


# --- writer.feed_status -----------------------------------------------------------------------------------------------


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
