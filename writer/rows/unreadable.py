"""A record of the log that cannot be taken apart by table, as one change, and back. Owns its shape, nothing else.

Admission has decoded every frame before it was logged, so only a fault of ours leads here. The record then goes whole
to the quarantine, as a change of a table that has no other: its source's marks, the log and the receipts wait for it
as for any change. Once the fault is mended, a replay makes the frame of it again (quarantine/records.py).

    {"encoding": "JSON_BATCH", "body": "<base64>", "afterSequence": 41, "declared": "{...}"}
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from writer.changes import Position, SourceId
from writer.errors import WriterError
from writer.frames import Encoding, Frame
from writer.rows.groups import ChangeGroup, Run

# Named like a source's table, so that the quarantine of the default namespace keeps it.
UNREADABLE_TABLE = "lakefeed_unreadable"


class RecordIncomplete(WriterError):
    """What was kept of a record is not enough to make its frame again: send its changes again from their source."""


class _Kept(msgspec.Struct, rename="camel"):
    encoding: str
    body: bytes  # base64 in JSON, because it may be anything
    after_sequence: int
    declared: str = ""


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(_Kept).decode


@dataclass(frozen=True, slots=True)
class UnreadableGroup(ChangeGroup):
    """One change that stands for a whole record; no table can take it."""

    reason: str = ""
    after_sequence: int = 0

    def positions(self) -> dict[SourceId, tuple[Position, Position]]:
        """Give the first and the last position of the record: while it waits, all of its changes do."""
        [(source, (_, last))] = ChangeGroup.positions(self).items()
        return {source: (Position(last.epoch, min(self.after_sequence + 1, last.sequence)), last)}


def unreadable_group(frame: Frame, *, table: str, offset: int, reason: str) -> UnreadableGroup:
    """Make a change of a record: the row is its body, with what else it takes to read it."""
    image = _encode(_Kept(frame.encoding.name, frame.body, frame.after_sequence, frame.declared))
    return UnreadableGroup(
        table=table,
        sequences=[frame.last_sequence],
        timestamps=[0],
        operations=["MESSAGE"],
        row_ids=[""],
        images=[image],
        befores=[msgspec.Raw()],
        unchanged=None,
        metadata=None,
        runs=(Run(0, 1, frame.source, frame.epoch, frame.received_at_us, offset),),
        reason=reason,
        after_sequence=frame.after_sequence,
    )


def frame_of_record(text: str, *, source: SourceId, last: Position, received_at_us: int) -> Frame:
    """Make the frame again that a record was, from the row that was made of it.

    Raises:
        RecordIncomplete: the row is not of that shape.
    """
    try:
        kept = _decode(text)
        encoding = Encoding[kept.encoding]
    except (msgspec.MsgspecError, KeyError) as error:
        raise RecordIncomplete(f"record was not kept with all that a replay needs: {error}") from error
    return Frame(
        source=source,
        epoch=last.epoch,
        after_sequence=kept.after_sequence,
        last_sequence=last.sequence,
        received_at_us=received_at_us,
        encoding=encoding,
        body=kept.body,
        declared=kept.declared,
    )
