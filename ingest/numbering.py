"""Numbers for changes whose source gives them none. Owns where they begin and how they go on.

They go on from what is durable. A source that is new here begins at the time, in microseconds since 1970: its tables
may hold rows that another node numbered, or a log that is lost since, and they drop what is not above those. No source
makes a million changes a second for as long as it lives, so the time is above all that was ever given out.
"""

from __future__ import annotations

from ingest.errors import ProtocolError
from ingest.intake import Intake
from ingest.offers import NackReason
from writer.changes import Position, SourceId
from writer.envelope import INT64_MAX


def next_position(intake: Intake, source: SourceId, *, count: int, now_us: int) -> Position:
    """Tell where the next `count` changes of a source begin. One caller at a time per source, until they are durable.

    Raises: ProtocolError if its numbers are used up.
    """
    durable = intake.durable_position(source)
    if durable is None or durable.sequence < 0:
        # What was refused of it is not waited for: it comes again under other numbers, because time has gone on.
        intake.resume(source)
        return Position(durable.epoch if durable is not None else 0, now_us)
    if durable.sequence + count > INT64_MAX:
        raise ProtocolError(
            NackReason.INVALID_SEQUENCE.value,
            f"the source has used up its sequences: lastDurableSequence={durable.sequence}; begin a higher epoch",
        )
    return Position(durable.epoch, durable.sequence + 1)
