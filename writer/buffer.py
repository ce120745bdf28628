"""Rows of one table that are decoded but not yet written. Owns what is open, and when it is time to flush.

A buffer holds chunks per partition, in the order of the log. All partitions of a table flush together, because the
progress marker speaks for the table: "everything of this source up to here is committed".
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import pyarrow as pa
import pyarrow.compute as pc

from writer import columns
from writer.changes import Position, SourceId, Span
from writer.config import WriterConfig
from writer.iceberg.partitions import Partition, PartitionSpec

# What a partition's values stand for: name and transform of each field.
Layout: TypeAlias = tuple[tuple[str, str], ...]


def layout_of(spec: PartitionSpec) -> Layout:
    """Tell what the partition values of a spec stand for."""
    return tuple((field.name, field.transform) for field in spec.fields)


class FlushReason(enum.Enum):
    """Why a flush started."""

    CHANGES = "changes"
    BYTES = "bytes"
    AGE = "age"
    MEMORY = "memory"
    EPOCH = "epoch"
    REQUEST = "request"
    SHUTDOWN = "shutdown"


@dataclass(frozen=True, slots=True)
class Chunk:
    """Decoded rows of one table: a run of the log, split by partition."""

    parts: Sequence[tuple[Partition, pa.Table]]
    log_from: int
    log_to: int
    spans: Mapping[SourceId, Span]
    layout: Layout


@dataclass(frozen=True, slots=True)
class Gathered:
    """What one flush writes: the rows per partition, the log range [from, to) and the sources they cover."""

    partitions: Mapping[Partition, Sequence[pa.Table]]
    rows: int
    bytes: int
    log_from: int
    log_to: int
    spans: Mapping[SourceId, Span]
    layouts: frozenset[Layout]
    oldest_at: float

    def after(self, marks: Mapping[SourceId, Position]) -> Gathered:
        """Leave out the rows that the table already has, by its own marks."""
        kept = {
            partition: [_rows_after(table, marks, self.spans) for table in tables]
            for partition, tables in self.partitions.items()
        }
        kept = {partition: tables for partition, tables in kept.items() if any(table.num_rows for table in tables)}
        every = [table for tables in kept.values() for table in tables]
        return replace(
            self,
            partitions=kept,
            rows=sum(table.num_rows for table in every),
            bytes=sum(table.nbytes for table in every),
            spans=_spans_after(self.spans, marks),
        )


def _rows_after(table: pa.Table, marks: Mapping[SourceId, Position], spans: Mapping[SourceId, Span]) -> pa.Table:
    for source, mark in marks.items():
        span = spans.get(source)
        if span is None or mark < span.first:
            continue
        own = pc.equal(table[columns.SOURCE], source)
        # An epoch after ours means that the source started over: everything we hold of it is history.
        is_old = (
            own if mark.epoch > span.last.epoch else pc.and_(own, pc.less_equal(table[columns.SEQUENCE], mark.sequence))
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
    _layouts: set[Layout] = field(default_factory=set)
    _partitions: dict[Partition, list[pa.Table]] = field(default_factory=dict)

    def add(self, chunk: Chunk, *, now: float) -> None:
        """Take a chunk that follows everything added before."""
        if not self.rows:
            self.oldest_at = now
            self.log_from = chunk.log_from
        self.log_to = chunk.log_to
        self._layouts.add(chunk.layout)
        for partition, table in chunk.parts:
            self._partitions.setdefault(partition, []).append(table)
            self.rows += table.num_rows
            self.bytes += table.nbytes
        for source, added in chunk.spans.items():
            self.spans[source] = self.spans[source].joined(added) if source in self.spans else added

    @property
    def partition_count(self) -> int:
        """Count the open partitions."""
        return len(self._partitions)

    def begins_epoch(self, chunk: Chunk) -> bool:
        """Tell whether a source starts over in this chunk; a flush holds one epoch of each source only."""
        return any(
            source in self.spans and added.first.epoch != self.spans[source].last.epoch
            for source, added in chunk.spans.items()
        )

    def due(self, config: WriterConfig, *, now: float) -> FlushReason | None:
        """Tell why the buffer should be flushed now, or None."""
        if not self.rows:
            return None
        if self.rows >= config.flush_max_changes:
            return FlushReason.CHANGES
        if self.bytes >= config.flush_max_bytes:
            return FlushReason.BYTES
        if now - self.oldest_at >= config.flush_max_age_s:
            return FlushReason.AGE
        return None

    def take(self) -> Gathered:
        """Hand over everything and start empty."""
        gathered = Gathered(
            partitions=self._partitions,
            rows=self.rows,
            bytes=self.bytes,
            log_from=self.log_from,
            log_to=self.log_to,
            spans=self.spans,
            layouts=frozenset(self._layouts),
            oldest_at=self.oldest_at,
        )
        self.rows = self.bytes = 0
        self.spans = {}
        self._layouts = set()
        self._partitions = {}
        return gathered
