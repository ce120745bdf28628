"""Rows on their way to the log. Owns the numbers of those that come without.

    lines --read_rows--> rows --numbered--> a batch of inserts like any other --> intake

Rows without numbers go on from what is durable, one request of a source at a time. Another client of the same source
may still take their numbers before they are durable: what the log then leaves out is numbered again.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ingest.errors import ProtocolError
from ingest.intake import Intake
from ingest.ndjson import Row, batch_of
from ingest.numbering import next_position
from ingest.offers import Durable, NackReason, Offer, Refused, Verdict
from ingest.protocol import Session, decode_message
from writer.changes import Position, SourceId
from writer.envelope import BatchHead

# How often the rows of a request are numbered at most. The second time is rare, so that a tenth means a rival.
NUMBERINGS_MAX = 10


@dataclass(slots=True)
class Rows:
    """The rows of a request that are not yet durable. Without an epoch they go on in that of their source."""

    source: SourceId
    table: str
    left: Sequence[Row]
    epoch: int | None = None
    taken: int = 0


class RowIntake:
    """Takes rows as inserts."""

    def __init__(self, intake: Intake, *, event_max_bytes: int, clock: Callable[[], float]) -> None:
        self._intake = intake
        self._event_max_bytes = event_max_bytes
        self._clock = clock
        self._turns: weakref.WeakValueDictionary[str, asyncio.Lock] = weakref.WeakValueDictionary()

    async def take_numbered(self, rows: Rows, first_sequence: int) -> Verdict:
        """Make rows durable that are numbered from `first_sequence`; those that were taken before are left out.

        Raises: ProtocolError.
        """
        return await self._offer(rows, Position(rows.epoch or 0, first_sequence))

    async def take(self, rows: Rows) -> Verdict:
        """Make rows durable that have no numbers. Of rows that are refused, some may have been taken: `left` are not.

        Raises: ProtocolError.
        """
        turn = self._turns.setdefault(rows.source, asyncio.Lock())
        async with turn:
            for _ in range(NUMBERINGS_MAX):
                verdict = await self._offer(rows, self._next(rows))
                if isinstance(verdict, Durable):
                    rows.taken += verdict.changes
                    rows.left = rows.left[: len(rows.left) - verdict.changes]
                if isinstance(verdict, Refused) or not rows.left:
                    return Durable(verdict.offset, rows.taken) if isinstance(verdict, Durable) else verdict
        return Refused(NackReason.INVALID_SEQUENCE, "another client numbers the changes of this source", retry=True)

    def _next(self, rows: Rows) -> Position:
        position = next_position(self._intake, rows.source, count=len(rows.left), now_us=self._now_us())
        return position if rows.epoch is None else Position(rows.epoch, position.sequence)

    async def _offer(self, rows: Rows, first: Position) -> Verdict:
        return await (await self._intake.offer(self._offer_of(rows, first)))

    def _offer_of(self, rows: Rows, first: Position) -> Offer:
        body = batch_of(rows.left, table=rows.table, first_sequence=first.sequence)
        session = Session(event_max_bytes=self._event_max_bytes, default_source=rows.source, epoch=first.epoch)
        try:
            message = decode_message(body)
            assert isinstance(message, BatchHead)
            offer = session.on_batch(message, body, received_at_us=self._now_us())
        except ProtocolError as error:
            # The client knows of no events: all rows share what is not in them, so what is wrong is so from the first.
            raise ProtocolError(error.reason, str(error).removeprefix("events[0].")) from None
        assert offer is not None, "there are rows"
        return offer

    def _now_us(self) -> int:
        return int(self._clock() * 1_000_000)
