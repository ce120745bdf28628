"""Numbers for changes whose source gives them none. Owns where they begin and how they go on.

They go on from what is durable. A source that is new here begins at the time, in microseconds since 1970: its tables may
hold rows that another node, or a log that is lost, once numbered, and drop what is not above those. No source makes a
million changes a second for as long as it lives, so the time is above all that was ever given out.
"""

from __future__ import annotations

from ingest.errors import ProtocolError
from ingest.offers import NackReason
from writer.changes import Position
from writer.envelope import INT64_MAX


def next_position(durable: Position | None, *, count: int, now_us: int) -> Position:
    """Tell where the next `count` changes of a source begin.

    Raises: ProtocolError if its numbers are used up.
    """
    if durable is None:
        return Position(0, now_us)
    if durable.sequence < 0:
        return Position(durable.epoch, now_us)
    if durable.sequence + count > INT64_MAX:
        raise ProtocolError(
            NackReason.INVALID_SEQUENCE.value,
            f"the source has used up its sequences: lastDurableSequence={durable.sequence}; begin a higher epoch",
        )
    return Position(durable.epoch, durable.sequence + 1)
