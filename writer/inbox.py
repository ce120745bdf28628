"""Changes that a table was given and has not looked at yet. Owns their order, their bytes, and what they cover."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from writer.changes import Position, SourceId, Span
from writer.decoding import Decoded


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
