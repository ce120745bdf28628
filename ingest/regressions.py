"""Sources that jump back without a new epoch. Owns the rule that tells a jump from an ordinary resend.

A source that starts its sequences over, after a restore say, and does not say so by a higher epoch, sends changes that
look like old ones: they are answered `duplicate` and taken nowhere. So does one that resends what it has no ack for,
which is how it should be. A batch of old changes only is a *jump back* if one of these holds:

    fell      a batch before it on the same connection ended higher, and its number was not sent before
    below     it ends at or below what the source was told, at `connect`, on an earlier connection on which it then went
              on with new changes: by that it has shown that nothing below is missing to it
    too many  it is one of more such batches in a row, on one connection, than can be without an answer

It is counted, warned about and explained in the ack; what is done with the batch is the same. What no rule finds: a
source that starts over on a connection of its own, before it was ever seen to go on, with fewer batches than that.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeVar

from writer.changes import Position, SourceId

Value = TypeVar("Value")

# Sources that are remembered, the latest ones. One that is forgotten may jump back once without being noticed.
SOURCES_MAX = 16_384

# One line a minute says of a source all that there is to say.
WARN_INTERVAL_S = 60.0


@dataclass(slots=True)
class Course:
    """How the batches of one connection have gone so far."""

    source: SourceId
    told: Position | None = None
    floor: Position | None = None
    reach: Position | None = None
    number: int | None = None
    duplicates: int = 0


@dataclass(slots=True)
class Regressions:
    """What all sources were told and went beyond, and when they were last warned about."""

    resend_max_batches: int
    _floors: dict[SourceId, Position] = field(default_factory=dict)
    _warned_at: dict[SourceId, float] = field(default_factory=dict)

    def begin(self, source: SourceId, told: Position | None = None) -> Course:
        """Follow a connection that speaks for a source, and was told where it is durable if it asked."""
        return Course(source, told, self._floors.get(source))

    def is_jump(self, course: Course, *, number: int, end: Position, is_duplicate: bool) -> bool:
        """Take the next batch of a connection into account; tells whether it jumps back."""
        is_sent_again = course.number is not None and number <= course.number
        has_fallen = course.reach is not None and end < course.reach and not is_sent_again
        is_below = course.floor is not None and end <= course.floor
        course.duplicates = course.duplicates + 1 if is_duplicate else 0
        course.reach = max(end, course.reach or end)
        course.number = max(number, course.number or number)
        if not is_duplicate and course.told is not None:
            _remember(self._floors, course.source, course.told)
        return is_duplicate and (has_fallen or is_below or course.duplicates > self.resend_max_batches)

    def is_warning_due(self, source: SourceId, now: float) -> bool:
        """Tell whether to warn about a source that has jumped back."""
        if now - self._warned_at.get(source, now - WARN_INTERVAL_S) < WARN_INTERVAL_S:
            return False
        _remember(self._warned_at, source, now)
        return True


def _remember(known: dict[SourceId, Value], source: SourceId, value: Value) -> None:
    """Keep a value as the newest; the oldest gives way."""
    known.pop(source, None)
    known[source] = value
    if len(known) > SOURCES_MAX:
        del known[next(iter(known))]
