"""Uncommitted rows of one table: in the log only, received, buffered, flushing. Pure.

                     +------------ offered live ------------+
                     |                                      v
    log -- passed --> backlog -- read again --> received -- fitted --> buffer -- taken --> flushing --> committed
                     ^                             |                     |                    |
                     +---------------- eviction ---+---------------------+--------------------+

Nothing is lost, because the oldest offset of every stage keeps the log from being trimmed. Nothing comes twice or out
of order, because everything below the backlog's `resume_offset` is in memory or committed, and everything above is
neither. `needed_offset` never falls: eviction moves rows out of memory, not out of what the table needs from the log.

A buffer knows no partitions: all of a table is flushed together, because the progress marker holds for the table
("everything of this source up to here is committed"). Rows are partitioned when they are written (files/parquet.py), so
a table of ten thousand partitions is buffered like any other.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import pyarrow as pa
import pyarrow.compute as pc

from lakefeed.contract import changes
from lakefeed.contract.changes import Position, SourceId, Span
from lakefeed.contract.errors import WriterError
from lakefeed.contract.properties import is_own_mark
from lakefeed.writer.rows.runs import Decoded

# A flush without progress for this long, and longer the more it has to write, is stalled. A store that is slower than
# this, in bytes of Arrow, cannot be used. Requests that hang mostly fail by their own timeouts before this.
STALLED_AFTER_S = 30.0
SLOWEST_BYTES_PER_S = 1024 * 1024


class FlushReason(enum.Enum):
    """Why a flush started."""

    CHANGES = "changes"
    BYTES = "bytes"
    SIZE = "size"
    AGE = "age"
    FRESHNESS = "freshness"
    MEMORY = "memory"
    EPOCH = "epoch"
    REQUEST = "request"
    SHUTDOWN = "shutdown"


# Called once rows are committed, with None, or have left memory before that, with the error. May be called again.
Waiter: TypeAlias = Callable[[WriterError | None], None]


# -- the log only


@dataclass(slots=True)
class LogBacklog:
    """Rows of a table that are in the log only: none while there is no offset to resume from."""

    resume_offset: int | None = None
    since: float | None = None
    # Of each source, the positions between which changes lie in the log and not in memory. The first is a lower bound.
    spans: dict[SourceId, Span] = field(default_factory=dict)

    def evict_to(self, offset: int, *spans: Mapping[SourceId, Span], since: float) -> None:
        """Record that everything of the table from `offset` on has left memory; the oldest of it arrived at `since`."""
        assert self.resume_offset is None or offset <= self.resume_offset, "rows in the log cannot be skipped"
        self.resume_offset = offset
        self.since = since if self.since is None else min(since, self.since)
        for each in spans:
            self._widen(each)

    def pass_by(self, spans: Mapping[SourceId, Span]) -> None:
        """Record changes that the live reader has met and not delivered."""
        assert self.resume_offset is not None
        self._widen(spans)

    def _widen(self, spans: Mapping[SourceId, Span]) -> None:
        for source, span in spans.items():
            known = self.spans.get(source, span)
            self.spans[source] = Span(min(known.first, span.first), max(known.last, span.last))

    def reread(self, spans: Mapping[SourceId, Span]) -> None:
        """Record changes that were read again and are in memory now."""
        for source, span in spans.items():
            known = self.spans.get(source)
            if known is None or known.last <= span.last:
                self.spans.pop(source, None)
            else:
                following = Position(span.last.epoch, span.last.sequence + 1)
                self.spans[source] = Span(max(known.first, following), known.last)

    def advance(self, offset: int, *, applied_offset: int) -> bool:
        """Record that the log was read again up to `offset`; return whether that is where the live reader is."""
        assert self.resume_offset is not None
        assert self.resume_offset <= offset <= applied_offset, "catch-up reads behind the live reader"
        self.resume_offset = offset
        if offset < applied_offset:
            return False
        self.resume_offset = self.since = None
        self.spans.clear()
        return True


@dataclass(frozen=True, slots=True)
class CatchUpRange:
    """The records [start, until) to read again next, for these tables."""

    start: int
    until: int
    tables: frozenset[str]


def plan_catch_up(resume_offsets: Mapping[str, int], *, applied_offset: int) -> CatchUpRange | None:
    """Choose what to read again next for tables that are behind; None if there are none.

    The table furthest behind goes first, up to where the next one waits; from there they continue together. A table
    costs what it missed, and an outage of all tables is read again once.
    """
    if not resume_offsets:
        return None
    start = min(resume_offsets.values())
    later = [offset for offset in resume_offsets.values() if offset > start]
    members = frozenset(name for name, offset in resume_offsets.items() if offset == start)
    return CatchUpRange(start, min([applied_offset, *later]), members)


# -- received


@dataclass(frozen=True, slots=True)
class PendingRun:
    """Changes that arrived together; a caller may wait until they are committed."""

    decoded: Decoded
    spans: Mapping[SourceId, Span]
    arrived_at: float
    waiter: Waiter | None = None


@dataclass(slots=True)
class Received:
    """Runs in log order that are not fitted yet. The first one stays until all of it is in the buffer."""

    bytes: int = 0
    rows: int = 0
    _runs: deque[PendingRun] = field(default_factory=deque)

    def __bool__(self) -> bool:
        return bool(self._runs)

    def __iter__(self) -> Iterator[PendingRun]:
        return iter(self._runs)

    @property
    def first(self) -> PendingRun:
        """The next run."""
        return self._runs[0]

    def add(self, run: PendingRun) -> None:
        """Append a run."""
        self._runs.append(run)
        self.bytes += run.decoded.held_bytes
        self.rows += len(run.decoded.group)

    def drop_first(self) -> None:
        """Remove the first run."""
        run = self._runs.popleft()
        self.bytes -= run.decoded.held_bytes
        self.rows -= len(run.decoded.group)


# -- buffered


@dataclass(frozen=True, slots=True)
class Chunk:
    """Rows of one table in its columns, and the range [from, to) of the log that they are from."""

    rows: pa.Table
    log_from: int
    log_to: int
    spans: Mapping[SourceId, Span]


@dataclass(slots=True)
class TableBuffer:
    """Rows that one flush takes, in log order: the range [from, to) of the log and the sources that they cover."""

    tables: list[pa.Table] = field(default_factory=list)
    rows: int = 0
    bytes: int = 0
    oldest_at: float = 0.0
    log_from: int = 0
    log_to: int = 0
    spans: dict[SourceId, Span] = field(default_factory=dict)

    def add(self, chunk: Chunk, *, now: float) -> None:
        """Append a chunk that follows everything added before."""
        if not self.rows:
            self.oldest_at = now
            self.log_from = chunk.log_from
        self.log_to = chunk.log_to
        self.tables.append(chunk.rows)
        self.rows += chunk.rows.num_rows
        self.bytes += chunk.rows.nbytes
        for source, added in chunk.spans.items():
            self.spans[source] = self.spans[source].joined(added) if source in self.spans else added

    def begins_epoch(self, chunk: Chunk) -> bool:
        """Return whether a source starts over in this chunk; a flush holds one epoch of each source only."""
        return any(
            source in self.spans and added.first.epoch != self.spans[source].last.epoch
            for source, added in chunk.spans.items()
        )

    def after(self, marks: Mapping[SourceId, Position]) -> TableBuffer:
        """Return the rows that the table does not have, by its own marks."""
        cut = (_rows_after(table, marks, self.spans) for table in self.tables)
        kept = [table for table in cut if table.num_rows]
        return replace(
            self,
            tables=kept,
            rows=sum(table.num_rows for table in kept),
            bytes=sum(table.nbytes for table in kept),
            spans=_spans_after(self.spans, marks),
        )


def _rows_after(table: pa.Table, marks: Mapping[SourceId, Position], spans: Mapping[SourceId, Span]) -> pa.Table:
    for source, mark in marks.items():
        span = spans.get(source)
        if span is None or mark < span.first:
            continue
        own = pc.equal(table[changes.SOURCE], source)
        # An epoch after ours means that the source started over: everything we hold of it is history.
        is_old = (
            own if mark.epoch > span.last.epoch else pc.and_(own, pc.less_equal(table[changes.SEQUENCE], mark.sequence))
        )
        table = table.filter(pc.invert(is_old))
    return table


def _spans_after(spans: Mapping[SourceId, Span], marks: Mapping[SourceId, Position]) -> dict[SourceId, Span]:
    """Cut the spans at the marks. A first position that no row has is fine: it only bounds the rows from below."""
    kept = {}
    for source, span in spans.items():
        mark = marks.get(source)
        if mark is None or mark < span.first:
            kept[source] = span
        elif mark < span.last:
            kept[source] = Span(Position(mark.epoch, mark.sequence + 1), span.last)
    return kept


# -- flushing, and all together


@dataclass(slots=True, eq=False)
class Flushing:
    """The flush under way: its rows, fewer once the table turns out to have some, and the callers that wait."""

    rows: TableBuffer
    reason: FlushReason
    started_at: float
    # When a file was last stored, or the commit began.
    progress_at: float
    waiters: Sequence[Waiter] = ()
    # Whether other tables' flushes are committed with it.
    is_shared: bool = False
    # Why, and since when, the commit is being retried.
    retry_reason: str | None = None
    retrying_since: float | None = None

    def note_progress(self, *, now: float) -> None:
        """Record that a file was stored, or that the commit begins."""
        self.progress_at = now
        self.retrying_since = None

    def note_retry(self, reason: str, *, now: float) -> None:
        """Record why the commit is being retried."""
        self.retry_reason = reason
        if self.retrying_since is None:
            self.retrying_since = now

    def is_retried_for(self, seconds: float, *, now: float) -> bool:
        """Return whether the commit has been retried for longer than this."""
        return self.retrying_since is not None and now - self.retrying_since > seconds

    def is_stalled(self, *, now: float) -> bool:
        """Return whether it has made no progress for longer than a large flush to a slow store explains."""
        return now - self.progress_at > STALLED_AFTER_S + self.rows.bytes / SLOWEST_BYTES_PER_S


@dataclass(slots=True)
class Pending:
    """All uncommitted rows of one table."""

    backlog: LogBacklog = field(default_factory=LogBacklog)
    received: Received = field(default_factory=Received)
    buffer: TableBuffer = field(default_factory=TableBuffer)
    flushing: Flushing | None = None
    # Of the callers that wait for buffered rows.
    waiters: list[Waiter] = field(default_factory=list)
    # Received rows wait until the buffered ones are flushed.
    has_barrier: bool = False
    # Counts evictions: work on rows of an earlier generation is dropped, because they will be read again.
    generation: int = 0

    # -- what there is

    def _stages(self) -> Iterator[tuple[int, float]]:
        """Yield, of each stage that has rows, the oldest log offset and when the oldest row arrived."""
        if self.backlog.resume_offset is not None:
            assert self.backlog.since is not None
            yield self.backlog.resume_offset, self.backlog.since
        if self.received:
            yield self.received.first.decoded.group.first_offset, self.received.first.arrived_at
        if self.buffer.rows:
            yield self.buffer.log_from, self.buffer.oldest_at
        if self.flushing is not None:
            yield self.flushing.rows.log_from, self.flushing.rows.oldest_at

    @property
    def needed_offset(self) -> int | None:
        """The oldest log offset that is not committed, or None."""
        return min((offset for offset, _ in self._stages()), default=None)

    @property
    def oldest_at(self) -> float | None:
        """When the oldest uncommitted change arrived, or None."""
        return min((arrived_at for _, arrived_at in self._stages()), default=None)

    @property
    def rows(self) -> int:
        """Rows in memory."""
        return self.received.rows + self.buffer.rows + (self.flushing.rows.rows if self.flushing else 0)

    @property
    def waiting_bytes(self) -> int:
        """Bytes in memory that no flush has taken."""
        return self.received.bytes + self.buffer.bytes

    @property
    def flushing_bytes(self) -> int:
        """Bytes of the flush under way."""
        return self.flushing.rows.bytes if self.flushing else 0

    @property
    def bytes(self) -> int:
        """Bytes in memory."""
        return self.waiting_bytes + self.flushing_bytes

    def due_at(self, *, flush_max_age_s: float) -> float | None:
        """Return when the oldest change had to be on its way into a snapshot, or None.

        It lies ahead while everything is in the buffer, which may collect rows for `flush_max_age_s`.
        """
        moments = [] if self.backlog.since is None else [self.backlog.since]
        if self.received:
            moments.append(self.received.first.arrived_at)
        if self.buffer.rows:
            moments.append(self.buffer.oldest_at + flush_max_age_s)
        if self.flushing is not None:
            moments.append(self.flushing.started_at)
        return min(moments, default=None)

    def uncommitted_spans(self, *, landing: Collection[Flushing] = ()) -> list[Mapping[SourceId, Span]]:
        """List, part by part, what is not committed once the flushes `landing` are."""
        parts = [run.spans for run in self.received]
        if self.backlog.spans:
            parts.append(self.backlog.spans)
        if self.buffer.rows:
            parts.append(self.buffer.spans)
        if self.flushing is not None and self.flushing not in landing:
            parts.append(self.flushing.rows.spans)
        return parts

    # -- moving rows on

    def buffer_first(self) -> None:
        """Drop the first received run; all its rows are in the buffer or in quarantine."""
        waiter = self.received.first.waiter
        self.received.drop_first()
        if waiter is not None:
            self.waiters.append(waiter)

    def take(self, reason: FlushReason, *, now: float) -> Flushing:
        """Start a flush of all that is buffered."""
        assert self.flushing is None, "one flush at a time"
        self.flushing = Flushing(self.buffer, reason, started_at=now, progress_at=now, waiters=self.waiters)
        self.buffer, self.waiters = TableBuffer(), []
        return self.flushing

    def finish(self) -> Flushing:
        """Remove and return the flush under way, which is committed."""
        flushing, self.flushing = self.flushing, None
        assert flushing is not None
        return flushing

    # -- eviction

    def evict(self, *, flushing: bool) -> list[Waiter] | None:
        """Remove the rows that no flush has taken, or all: the flush under way then ends as it would in a crash.

        Return the callers that waited for these rows; None if there were no rows.
        """
        parts = [(run.decoded.group.first_offset, run.spans) for run in self.received]
        waiters = [*self.waiters, *(run.waiter for run in self.received if run.waiter is not None)]
        if self.buffer.rows:
            parts.append((self.buffer.log_from, self.buffer.spans))
        if flushing and self.flushing is not None:
            parts.append((self.flushing.rows.log_from, self.flushing.rows.spans))
            waiters += self.flushing.waiters
        if not parts:
            return None
        since = self.oldest_at
        assert since is not None, "rows have an arrival time"
        resume_offset = self.backlog.resume_offset
        offsets = [*(offset for offset, _ in parts), *([] if resume_offset is None else [resume_offset])]
        self.backlog.evict_to(min(offsets), *(spans for _, spans in parts), since=since)
        if flushing:
            self.flushing = None
        self.generation += 1
        self.received, self.buffer, self.waiters = Received(), TableBuffer(), []
        return waiters


# -- all tables


def complete_positions(
    sources: Iterable[SourceId],
    *,
    waiting: Iterable[Mapping[SourceId, Span]],
    applied: Mapping[SourceId, Position],
) -> dict[SourceId, Position]:
    """Return up to where sources are complete: right below the first change that waits, or all that was delivered.

    `waiting` is everything uncommitted, of all tables and in any parts. Epochs sort before sequences: while something
    of an old epoch is uncommitted, nothing of a later one is complete.
    """
    wanted = {source for source in sources if source in applied and not is_own_mark(source)}
    firsts: dict[SourceId, Position] = {}
    for spans in waiting:
        # Thousands of sources may be in hundreds of parts, at every commit: walk the smaller side.
        few: Collection[SourceId] = wanted if len(wanted) < len(spans) else spans
        many: Collection[SourceId] = spans if few is wanted else wanted
        for source in few:
            if source in many:
                first, known = spans[source].first, firsts.get(source)
                if known is None or (first.epoch, first.sequence) < (known.epoch, known.sequence):
                    firsts[source] = first
    return {source: _before(firsts[source]) if source in firsts else applied[source] for source in wanted}


def _before(first: Position) -> Position:
    return Position(first.epoch, first.sequence - 1)
