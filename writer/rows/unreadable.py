"""A record of the log that cannot be taken apart by table, as one change. Owns its shape, nothing else.

Admission has decoded every frame before it was logged, so only a fault of ours leads here. The record then goes whole
to the quarantine, as a change of a table that has no other: its source's marks, the log and the receipts wait for it
as for any change.
"""

from __future__ import annotations

import base64
from dataclasses import dataclass

import msgspec

from writer.frames import Frame
from writer.rows.groups import ChangeGroup, Run

# Named like a source's table, so that the quarantine of the default namespace keeps it.
UNREADABLE_TABLE = "lakefeed_unreadable"

_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class UnreadableGroup(ChangeGroup):
    """One change that stands for a whole record; no table can take it."""

    reason: str = ""


def unreadable_group(frame: Frame, *, table: str, offset: int, reason: str) -> UnreadableGroup:
    """Make a change of a record: the row is its body, in base64 because it may be anything."""
    image = _encode({"encoding": frame.encoding.name, "body": base64.b64encode(frame.body).decode()})
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
    )
