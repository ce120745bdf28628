"""The changes of one table that are not committed: where they are, how many, how old. Owns the places, not the moves.

in the log only (standing) --> inbox --> buffer --> running flush --> committed
"""

from __future__ import annotations

from collections.abc import Mapping

from writer.buffer import TableBuffer
from writer.changes import Position, SourceId, Span
from writer.inbox import Inbox
from writer.parking import Holding, Standing
from writer.table_flush import TableFlush


class TableRows:
    """What a table has to commit yet; its writer moves it on."""

    def __init__(self) -> None:
        self.standing = Standing()
        self._inbox = Inbox()
        self._buffer = TableBuffer()
        self._running: TableFlush | None = None
        # What is in the inbox has to wait for a flush of what is in the buffer.
        self._awaits_flush = False

    @property
    def is_idle(self) -> bool:
        """Tell whether everything that the table was given is committed."""
        return self.needed_offset is None

    @property
    def open_bytes(self) -> int:
        """Arrow data that a flush could take now."""
        return self._buffer.bytes

    @property
    def open_rows(self) -> int:
        """Rows that a flush could take now."""
        return self._buffer.rows

    @property
    def is_flushing(self) -> bool:
        """Tell whether a flush is under way."""
        return self._running is not None

    @property
    def is_settled(self) -> bool:
        """Tell whether the buffer holds all that a flush could take of what the table was given."""
        return self._running is None and (not self._inbox or self._awaits_flush)

    @property
    def is_cut_short(self) -> bool:
        """Tell whether the next flush takes only a part of what the table was given."""
        return self._awaits_flush and bool(self._inbox)

    def runs(self, flush: TableFlush) -> bool:
        """Tell whether this flush is under way: its rows may have left memory since it began."""
        return self._running is flush

    @property
    def holding(self) -> Holding:
        """Tell what the table holds in memory."""
        flushing = self._running.gathered.bytes if self._running else 0
        return Holding(self._inbox.bytes + self._buffer.bytes, flushing)

    @property
    def buffered_bytes(self) -> int:
        """Bytes in memory, flushing or not."""
        return self.holding.waiting_bytes + self.holding.flushing_bytes

    @property
    def buffered_rows(self) -> int:
        """Rows in memory, flushing or not."""
        return self._inbox.rows + self._buffer.rows + (self._running.gathered.rows if self._running else 0)

    @property
    def pending_rows(self) -> int:
        """Rows in memory that have not been fitted into the table's columns yet."""
        return self._inbox.rows

    @property
    def needed_offset(self) -> int | None:
        """The oldest log offset that is not committed, or None."""
        offsets = [self._inbox.needed_offset, self.standing.resume_offset]
        if self._running is not None:
            offsets.append(self._running.gathered.log_from)
        if self._buffer.rows:
            offsets.append(self._buffer.log_from)
        return min((offset for offset in offsets if offset is not None), default=None)

    def first_waiting(self, source: SourceId) -> Position | None:
        """Find a source's first position that is not committed, or None."""
        spans = [self._buffer.spans.get(source)]
        if self._running is not None:
            spans.append(self._running.gathered.spans.get(source))
        firsts = [span.first for span in spans if span is not None]
        others = (self._inbox.first_waiting(source), self.standing.first_passed(source))
        return min([*firsts, *(each for each in others if each is not None)], default=None)

    def waiting_spans(self, *, landing: frozenset[TableFlush]) -> list[Mapping[SourceId, Span]]:
        """List, part by part, what is not committed once the flushes `landing` are."""
        parts: list[Mapping[SourceId, Span]] = []
        if self._inbox:
            parts += (arrival.spans for arrival in self._inbox)
        if self.standing.is_behind:
            parts.append(self.standing.passed_spans)
        if self._buffer.rows:
            parts.append(self._buffer.spans)
        if self._running is not None and self._running not in landing:
            parts.append(self._running.gathered.spans)
        return parts

    @property
    def oldest_at(self) -> float | None:
        """When the oldest change came that is not committed, or None."""
        moments = [self.standing.since]
        if self._running is not None:
            moments.append(self._running.gathered.oldest_at)
        if self._buffer.rows:
            moments.append(self._buffer.oldest_at)
        if self._inbox:
            moments.append(self._inbox.first.arrived_at)
        return min((each for each in moments if each is not None), default=None)

    def due_since(self, *, flush_max_age_s: float) -> float | None:
        """Tell when the oldest change had to leave for a snapshot, or None; a buffer may gather for `flush_max_age_s`.

        It lies ahead while all that there is may gather for some time yet.
        """
        moments = [self.standing.since]
        if self._running is not None:
            moments.append(self._running.started_at)
        if self._buffer.rows:
            moments.append(self._buffer.oldest_at + flush_max_age_s)
        if self._inbox:
            moments.append(self._inbox.first.arrived_at)
        return min((each for each in moments if each is not None), default=None)

    def oldest_age_s(self, *, now: float) -> float | None:
        """Tell how long the oldest change that is not committed has been here, or None."""
        oldest_at = self.oldest_at
        return None if oldest_at is None else now - oldest_at

    def _leaving(self) -> list[tuple[int, Mapping[SourceId, Span]]]:
        """List what no flush has taken: the first offset and the spans of each part."""
        waiting = [(each.decoded.group.first_offset, each.spans) for each in self._inbox]
        return [*waiting, (self._buffer.log_from, self._buffer.spans)] if self._buffer.rows else waiting
