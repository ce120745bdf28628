"""Which batches of a connection are durable but not yet told as committed. Owns their numbers and positions."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from writer.changes import Position

# Batches that wait for their receipt, per connection. Beyond it neighbours share one: only the highest number is told.
WAITING_MAX_BATCHES = 4_096


@dataclass(slots=True)
class Receipts:
    """The batches of one connection that wait for a commit, in the order of their acks."""

    _waiting: deque[tuple[int, Position]] = field(default_factory=deque)

    def expect(self, number: int, position: Position) -> None:
        """Remember a durable batch and where it ends."""
        if len(self._waiting) >= WAITING_MAX_BATCHES:
            self._waiting.pop()
        self._waiting.append((number, position))

    def due(self, committed: Position | None) -> int | None:
        """Tell the highest batch number up to which everything is committed, if there is a new one."""
        number = None
        for waiting, position in self._waiting:
            if committed is None or position > committed:
                break
            number = waiting
        return number

    def told(self, number: int) -> None:
        """Forget the batches up to the one that was told."""
        while self._waiting:
            waiting, _ = self._waiting.popleft()
            if waiting == number:
                break

    def clear(self) -> None:
        """Forget all: the source started over, and old positions say nothing about the new ones."""
        self._waiting.clear()
