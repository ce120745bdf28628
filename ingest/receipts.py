"""Which batches of a connection are durable but not yet told as committed. Owns their numbers and positions."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from writer.changes import Position

# Batches that wait for their receipt, per connection. Beyond it neighbours share one: only the highest number is told.
WAITING_MAX_BATCHES = 4_096


@dataclass(frozen=True, slots=True)
class DueBatch:
    """A batch that is committed, as are those with lower numbers."""

    number: int
    correlation_id: str | None


@dataclass(frozen=True, slots=True)
class _Waiting:
    number: int
    position: Position
    correlation_id: str | None

    def joined(self, earlier: _Waiting) -> _Waiting:
        """Stand for both: committed once both are, told under the higher number."""
        higher = max(self, earlier, key=lambda waiting: waiting.number)
        return _Waiting(higher.number, max(self.position, earlier.position), higher.correlation_id)


@dataclass(slots=True)
class Receipts:
    """The batches of one connection that wait for a commit, in the order of their acks and of their numbers."""

    _waiting: deque[_Waiting] = field(default_factory=deque)

    def expect(self, number: int, position: Position, correlation_id: str | None = None) -> None:
        """Remember a durable batch and where it ends, and the correlation of one that has had no other answer.

        A batch that was sent again, after others with higher numbers, becomes one with those: a receipt speaks for all
        numbers up to its own, so none of them may be told before it.
        """
        batch = _Waiting(number, position, correlation_id)
        while self._waiting and self._waiting[-1].number >= number:
            batch = batch.joined(self._waiting.pop())
        if len(self._waiting) >= WAITING_MAX_BATCHES:
            batch = batch.joined(self._waiting.pop())
        self._waiting.append(batch)

    def take_due(self, committed: Position | None) -> DueBatch | None:
        """Forget the batches up to which everything is committed, and give the one with the highest number."""
        due: DueBatch | None = None
        while committed is not None and self._waiting and self._waiting[0].position <= committed:
            batch = self._waiting.popleft()
            due = DueBatch(batch.number, batch.correlation_id)
        return due

    def clear(self) -> None:
        """Forget all: the source started over, and old positions say nothing about the new ones."""
        self._waiting.clear()
