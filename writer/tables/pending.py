"""Rows of one table that are decoded but not yet written. Owns what is open; when it is flushed is flush_control's.

A buffer holds chunks in the order of the log. It knows no partitions: all of a table flush together, because the
progress marker speaks for the table ("everything of this source up to here is committed"), and rows are put into their
partitions only then (files/write.py), so that a table of ten thousand partitions is buffered as any other.
"""

from __future__ import annotations

import asyncio
import enum
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import pyarrow as pa
import pyarrow.compute as pc

from lakefeed.contract import changes
from lakefeed.contract.changes import Position, SourceId, Span
from lakefeed.writer.rows.runs import Decoded

# --- writer.buffer ----------------------------------------------------------------------------------------------------


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


@dataclass(frozen=True, slots=True)
class Chunk:
    """Decoded rows of one table: a run of the log."""

    rows: pa.Table
    log_from: int
    log_to: int
    spans: Mapping[SourceId, Span]


@dataclass(frozen=True, slots=True)
class Gathered:
    """What one flush writes: the rows, the log range [from, to) and the sources they cover."""

    tables: Sequence[pa.Table]
    rows: int
    bytes: int
    log_from: int
    log_to: int
    spans: Mapping[SourceId, Span]
    oldest_at: float

    def after(self, marks: Mapping[SourceId, Position]) -> Gathered:
        """Leave out the rows that the table already has, by its own marks."""
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
    """Cut the spans at the marks; a first position that no row has is fine, it only bounds the rows from below."""
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
    """The open buffer of one table."""

    rows: int = 0
    bytes: int = 0
    oldest_at: float = 0.0
    log_from: int = 0
    log_to: int = 0
    spans: dict[SourceId, Span] = field(default_factory=dict)
    _tables: list[pa.Table] = field(default_factory=list)

    def add(self, chunk: Chunk, *, now: float) -> None:
        """Take a chunk that follows everything added before."""
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
        """Tell whether a source starts over in this chunk; a flush holds one epoch of each source only."""
        return any(
            source in self.spans and added.first.epoch != self.spans[source].last.epoch
            for source, added in chunk.spans.items()
        )

    def take(self) -> Gathered:
        """Hand over everything and start empty."""
        gathered = Gathered(
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
        return gathered


# --- writer.inbox -----------------------------------------------------------------------------------------------------
#
# Changes that a table was given and has not looked at yet. Owns their order, their bytes, and what they cover.


@dataclass(frozen=True, slots=True)
class Arrival:
    """Changes that came together; `committed`, if somebody waits for them, is set once they are in a snapshot."""

    decoded: Decoded
    spans: Mapping[SourceId, Span]
    arrived_at: float
    committed: asyncio.Future[None] | None = None


@dataclass(slots=True)
class Inbox:
    """Arrivals in the order of the log. The first one stays until all of it is in the buffer."""

    bytes: int = 0
    rows: int = 0
    _arrivals: deque[Arrival] = field(default_factory=deque)

    def __bool__(self) -> bool:
        return bool(self._arrivals)

    def __iter__(self) -> Iterator[Arrival]:
        return iter(self._arrivals)

    @property
    def first(self) -> Arrival:
        """The arrival that is next."""
        return self._arrivals[0]

    @property
    def needed_offset(self) -> int | None:
        """The oldest log offset in here, or None."""
        return self._arrivals[0].decoded.group.first_offset if self._arrivals else None

    def first_waiting(self, source: SourceId) -> Position | None:
        """Find a source's first position in here, or None."""
        return next((each.spans[source].first for each in self._arrivals if source in each.spans), None)

    def add(self, arrival: Arrival) -> None:
        """Put changes behind all others."""
        self._arrivals.append(arrival)
        self.bytes += arrival.decoded.held_bytes
        self.rows += len(arrival.decoded.group)

    def drop_first(self) -> None:
        """Let go of what has been dealt with."""
        arrival = self._arrivals.popleft()
        self.bytes -= arrival.decoded.held_bytes
        self.rows -= len(arrival.decoded.group)

    def clear(self) -> None:
        """Let go of everything."""
        self._arrivals.clear()
        self.bytes = self.rows = 0
