"""Rows on their way to the log. Owns the numbers of those that come without.

    lines --wrap_rows--> a batch of inserts like any other --> intake

Rows without numbers go on from what is durable, one request of a source at a time. Another client of the same source
may still take their numbers before they are durable: what the log then leaves out is numbered again.

What waits is the request's body alone. It is read anew each time that it is offered, when there is room for what it
becomes; a second time is rare.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace

from ingest.batch_checks import invalid
from ingest.errors import ProtocolError
from ingest.intake import Intake
from ingest.ndjson import wrap_rows
from ingest.numbering import next_position
from ingest.offers import Durable, NackReason, Offer, Refused, Verdict
from ingest.session import Session
from writer.changes import Position, SourceId
from writer.envelope import INT64_MAX, BatchHead, EventHead

# How often the rows of a request are numbered at most. The second time is rare, so that a tenth means a rival.
NUMBERINGS_MAX = 10


@dataclass(slots=True)
class Rows:
    """The rows of a request, at least one. Without an epoch they go on in that of their source.

    `count` is known once they were offered; of these, the last `taken` are durable.
    """

    source: SourceId
    table: str
    body: bytes
    key: str
    epoch: int | None = None
    count: int | None = None
    taken: int = 0

    @property
    def left(self) -> int | None:
        """How many are not yet durable; None if nobody has counted them."""
        return None if self.count is None else self.count - self.taken


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
        await self._intake.wait_for_room()
        return await self._offer(self.offer_of(rows, Position(rows.epoch or 0, first_sequence)))

    async def take(self, rows: Rows) -> Verdict:
        """Make rows durable that have no numbers. Of rows that are refused, some may have been taken: `left` are not.

        Raises: ProtocolError.
        """
        turn = self._turns.setdefault(rows.source, asyncio.Lock())
        async with turn:
            if (unmet := await self._intake.meet(rows.source)) is not None:
                return unmet
            for _ in range(NUMBERINGS_MAX):
                await self._intake.wait_for_room()
                verdict = await self._offer(self._numbered(rows))
                if isinstance(verdict, Durable):
                    rows.taken += verdict.changes
                if isinstance(verdict, Refused) or not rows.left:
                    return Durable(verdict.offset, rows.taken) if isinstance(verdict, Durable) else verdict
        return Refused(NackReason.INVALID_SEQUENCE, "another client numbers the changes of this source", retry=True)

    def _numbered(self, rows: Rows) -> Offer:
        # Until they are counted, they are at most as many as there are bytes.
        count = len(rows.body) if rows.left is None else rows.left
        position = next_position(self._intake, rows.source, count=count, now_us=self._now_us())
        return self.offer_of(rows, position if rows.epoch is None else Position(rows.epoch, position.sequence))

    async def _offer(self, offer: Offer) -> Verdict:
        return await (await self._intake.offer(offer))

    def offer_of(self, rows: Rows, first: Position) -> Offer:
        """Wrap the rows that are left.

        Raises: ProtocolError.
        """
        # What is not in the rows is the same for all of them, so it is checked with the first.
        checked = self._offer_of_first(rows, first)
        wrapped = wrap_rows(
            rows.body,
            key=rows.key,
            table=rows.table,
            first_sequence=first.sequence,
            row_max_bytes=self._event_max_bytes,
            rows_max=rows.left,
        )
        if rows.count is None:
            rows.count = wrapped.count
        if first.sequence + wrapped.count - 1 > INT64_MAX:
            raise invalid(f"sequence: expected a whole number of at most {INT64_MAX} for every row")
        sequences = range(first.sequence, first.sequence + wrapped.count)
        return replace(checked, sequences=sequences, body=wrapped.batch)

    def _offer_of_first(self, rows: Rows, first: Position) -> Offer:
        session = Session(event_max_bytes=self._event_max_bytes, default_source=rows.source, epoch=first.epoch)
        batch = BatchHead(events=[EventHead(sequence=first.sequence, operation="INSERT", table=rows.table)])
        try:
            offer = session.on_batch(batch, b"", received_at_us=self._now_us())
        except ProtocolError as error:
            raise ProtocolError(error.reason, str(error).removeprefix("events[0].")) from None
        assert offer is not None
        return offer

    def _now_us(self) -> int:
        return int(self._clock() * 1_000_000)
