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
("everything of this source up to here is committed"). Rows are partitioned when they are written (files/write.py), so a
table of ten thousand partitions is buffered like any other.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, Protocol, TypeVar

import pyarrow as pa
import pyarrow.compute as pc

from lakefeed.contract import changes
from lakefeed.contract.changes import Position, SourceId, Span
from lakefeed.writer.rows.runs import Decoded

Name = TypeVar("Name")


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


class Waiter(Protocol):
    """The future of a caller that waits until certain rows are committed."""

    def done(self) -> bool:
        """Return whether it has a result, or the caller has stopped waiting."""

    def set_result(self, result: Any, /) -> None:
        """Finish it."""

    def set_exception(self, exception: BaseException, /) -> None:
        """Fail it."""


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
class CatchUpRange(Generic[Name]):
    """The records [start, until) to read again next, for these tables."""

    start: int
    until: int
    tables: frozenset[Name]


def plan_catch_up(resume_offsets: Mapping[Name, int], *, applied_offset: int) -> CatchUpRange[Name] | None:
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


@dataclass(frozen=True, slots=True)
class FlushRows:
    """What one flush writes: the rows, the range [from, to) of the log and the sources they cover."""

    tables: Sequence[pa.Table]
    rows: int
    bytes: int
    log_from: int
    log_to: int
    spans: Mapping[SourceId, Span]
    oldest_at: float

    def after(self, marks: Mapping[SourceId, Position]) -> FlushRows:
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


@dataclass(slots=True)
class TableBuffer:
    """Rows that the next flush takes, in log order."""

    rows: int = 0
    bytes: int = 0
    oldest_at: float = 0.0
    log_from: int = 0
    log_to: int = 0
    spans: dict[SourceId, Span] = field(default_factory=dict)
    _tables: list[pa.Table] = field(default_factory=list)

    def add(self, chunk: Chunk, *, now: float) -> None:
        """Append a chunk that follows everything added before."""
        if not self.rows:
            self.oldest_at = now
            self.log_from = chunk.log_from
        self.log_to = chunk.log_to
        self._tables.append(chunk.rows)
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

    def take(self) -> FlushRows:
        """Hand over everything and start empty."""
        taken = FlushRows(
            tables=self._tables,
            rows=self.rows,
            bytes=self.bytes,
            log_from=self.log_from,
            log_to=self.log_to,
            spans=self.spans,
            oldest_at=self.oldest_at,
        )
        self.rows = self.bytes = 0
        self.spans = {}
        self._tables = []
        return taken


# -- flushing, and all together


@dataclass(slots=True, eq=False)
class Flushing:
    """The rows of the flush under way, fewer once the table turns out to have some, and the callers that wait."""

    rows: FlushRows
    started_at: float
    waiters: Sequence[Waiter] = ()


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

    @property
    def needed_offset(self) -> int | None:
        """The oldest log offset that is not committed, or None."""
        offsets = [] if self.backlog.resume_offset is None else [self.backlog.resume_offset]
        if self.received:
            offsets.append(self.received.first.decoded.group.first_offset)
        if self.buffer.rows:
            offsets.append(self.buffer.log_from)
        if self.flushing is not None:
            offsets.append(self.flushing.rows.log_from)
        return min(offsets, default=None)

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

    @property
    def oldest_at(self) -> float | None:
        """When the oldest uncommitted change arrived, or None."""
        moments = [] if self.backlog.since is None else [self.backlog.since]
        if self.received:
            moments.append(self.received.first.arrived_at)
        if self.buffer.rows:
            moments.append(self.buffer.oldest_at)
        if self.flushing is not None:
            moments.append(self.flushing.rows.oldest_at)
        return min(moments, default=None)

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

    def first_uncommitted(self, source: SourceId) -> Position | None:
        """Return a lower bound of a source's positions that are not committed; None if all are."""
        return min((spans[source].first for spans in self.uncommitted_spans() if source in spans), default=None)

    # -- moving rows on

    def buffer_first(self) -> None:
        """Drop the first received run; all its rows are in the buffer or in quarantine."""
        waiter = self.received.first.waiter
        self.received.drop_first()
        if waiter is not None:
            self.waiters.append(waiter)

    def take(self, *, now: float) -> Flushing:
        """Start a flush of all that is buffered."""
        assert self.flushing is None, "one flush at a time"
        self.flushing = Flushing(self.buffer.take(), now, self.waiters)
        self.waiters = []
        return self.flushing

    def finish(self, flushing: Flushing) -> None:
        """Remove the rows of a flush that is committed."""
        assert self.flushing is flushing
        self.flushing = None

    # -- eviction

    def evict_waiting(self) -> list[Waiter] | None:
        """Remove the rows that no flush has taken. None if there are none; else the callers that waited for them."""
        return self._evict(None)

    def evict_all(self) -> list[Waiter] | None:
        """Remove all rows, as `evict_waiting`; the flush under way ends as it would in a crash."""
        return self._evict(self.flushing)

    def _evict(self, flushing: Flushing | None) -> list[Waiter] | None:
        parts = [(run.decoded.group.first_offset, run.spans) for run in self.received]
        waiters = [*self.waiters, *(run.waiter for run in self.received if run.waiter is not None)]
        if self.buffer.rows:
            parts.append((self.buffer.log_from, self.buffer.spans))
        if flushing is not None:
            parts.append((flushing.rows.log_from, flushing.rows.spans))
            waiters += flushing.waiters
        if not parts:
            return None
        since = self.oldest_at
        assert since is not None, "rows have an arrival time"
        offsets = [offset for offset, _ in parts]
        if self.backlog.resume_offset is not None:
            offsets.append(self.backlog.resume_offset)
        self.backlog.evict_to(min(offsets), *(spans for _, spans in parts), since=since)
        if flushing is not None:
            self.flushing = None
        self.generation += 1
        self.received = Received()
        self.buffer.take()
        self.waiters = []
        return waiters
