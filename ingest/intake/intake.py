"""The one task that touches dedup and log, in that order. Owns the queue in front of the log and group commit.

Offers gather while the log syncs; the next group takes them together, so one sync serves many clients. A verdict is
given after the sync and never before: what an ack promises is on disk.

    offer() --bounded by bytes--> queue --group--> decide -> persist -> record -> verdicts
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from lakefeed.contract.changes import Position, SourceId
from lakefeed.contract.errors import CatalogError, WalFailed, WalFull
from lakefeed.ingest.config import IngestConfig
from lakefeed.ingest.intake.dedup import MARKS_MAX_BYTES, Dedup
from lakefeed.ingest.intake.sources import Origins, ResumePoints, decode_head, encode_head
from lakefeed.ingest.metrics import IngestMetrics
from lakefeed.ingest.protocol.batch import open_transaction
from lakefeed.ingest.protocol.offers import BEFORE_ALL, Duplicate, Durable, Fresh, NackReason, Offer, Refused, Verdict
from lakefeed.writer.tables.memory import TableRoom
from lakefeed.writer.wal.payload import Frame, decode_frame, encode_frame
from lakefeed.writer.wal.protocol import Log

# One write and sync. Larger groups do not sync faster per byte (measured flat from 4 MiB) but make acks wait longer.
GROUP_MAX_BYTES = 4 * 1024 * 1024

# How long a client waits after `buffer_full`: about the time of a flush, which is what makes room.
FULL_RETRY_DELAY_MS = 1_000

# How long a client waits while the catalog cannot be asked: about as long as a restart of one takes.
UNMET_RETRY_DELAY_MS = 2_000

# How long a full log counts as a problem after it last refused a batch. Clients come back sooner while it lasts.
FULL_SHOWN_S = 10.0

# What a segment says of itself beside the head; far more than it needs.
SEGMENT_HEADER_MAX_BYTES = 4096

# What adapters may keep of their sources, all together: some thousand sources at a few hundred bytes each.
ORIGINS_MAX_BYTES = 4 * 1024 * 1024

# What a record has beside the body, at most, for each character of its source's texts (escaped) and for all the rest.
_CHAR_MAX_BYTES = 6
_HEADER_MAX_BYTES = 256


_ENDED = Refused(NackReason.SHUTTING_DOWN, "the service is stopping: send it again to the next one", retry=True)
_CUT = Refused(
    NackReason.INVALID_SEQUENCE,
    "the source has connected on another connection, or lost its place: connect here to go on from what is durable",
    retry=False,
)


_NOT_THE_ADAPTER = Refused(
    NackReason.INVALID_SEQUENCE,
    "an adapter numbers the changes of this source, and others would take its numbers: use another source name",
    retry=False,
)


@dataclass(frozen=True, slots=True)
class _Waiting:
    offer: Offer
    verdict: asyncio.Future[Verdict]


class Intake:
    """Takes offers from all sessions and makes them durable in groups."""

    def __init__(
        self,
        log: Log,
        *,
        config: IngestConfig,
        metrics: IngestMetrics,
        elsewhere: ResumePoints | None = None,
        heeds_transactions: bool = False,
        room: TableRoom | None = None,
    ) -> None:
        self._log = log
        self._table_room = room
        self.heeds_transactions = heeds_transactions
        self._elsewhere = elsewhere
        self._config = config
        self._metrics = metrics
        self._dedup, self._origins = load_sources(log)
        self._waiting: deque[_Waiting] = deque()
        self._waiting_bytes = 0
        self._arrived = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()
        self._group: list[_Waiting] = []
        self._full: tuple[float, str] | None = None
        self.newest_received_at_us: int | None = None
        self._closing = False
        self._ended = False

    def durable_position(self, source: SourceId) -> Position | None:
        """Tell how far a source is durable."""
        return self._dedup.mark(source)

    def sources(self) -> dict[SourceId, Position]:
        """List all known sources with how far they are durable."""
        return dict(self._dedup.marks())

    def has_room_for_origin(self, source: SourceId, text: str) -> bool:
        """Tell whether what an adapter wants to keep fits beside what the others keep."""
        return self._origins.has_room_for(source, text)

    def origin(self, source: SourceId) -> str:
        """Give what a source's adapter last made durable."""
        return self._origins.get(source)

    async def meet(self, source: SourceId) -> Refused | None:
        """Ask the tables about a source that has nothing in this log; a refusal if they cannot be asked.

        An epoch that is over in the tables is over here too: they would drop what it brings. Cancelling it changes
        nothing.
        """
        if self._elsewhere is None or self._has_changes_of(source):
            return None
        try:
            point = await self._elsewhere.find(source)
        except CatalogError as error:
            message = f"the source is new here, and the tables cannot be asked where it stands: {error}"
            return Refused(NackReason.INTERNAL_ERROR, message, retry=True, retry_delay_ms=UNMET_RETRY_DELAY_MS)
        if point is not None:
            self._dedup.learn_epoch(source, point.epoch)
        return None

    def _has_changes_of(self, source: SourceId) -> bool:
        mark = self._dedup.mark(source)
        return mark is not None and mark.sequence > BEFORE_ALL

    def resume(self, source: SourceId) -> Position | None:
        """Let a source that connects start over, its other lines are cut by now: from where it is durable here.

        Of a source that has nothing here, from where the tables have it.
        """
        if self._dedup.release(source):
            self._refuse_waiting(source)
        if self._elsewhere is not None and not self._has_changes_of(source):
            return self._elsewhere.last_seen(source) or self._dedup.mark(source)
        return self._dedup.mark(source)

    def _refuse_waiting(self, source: SourceId) -> None:
        """Take back what an earlier connection queued behind a refused batch: it would now overtake that batch."""
        overtaken = [waiting for waiting in self._waiting if waiting.offer.source == source]
        self._waiting = deque(waiting for waiting in self._waiting if waiting.offer.source != source)
        self._forget_waiting_bytes(overtaken)
        message = "source has connected anew and resumes from its durable position"
        self._answer(overtaken, [Refused(NackReason.INVALID_SEQUENCE, message, retry=True)] * len(overtaken))

    def hold(self, refused: Offer) -> None:
        """Let nothing of its source overtake an offer that was refused before it got here."""
        if not _is_cut(refused):
            self._cut_off(self._dedup.hold([refused], ahead=self._reach_of(refused.source)))

    def _reach_of(self, source: SourceId) -> Position | None:
        """Tell how far those offers of a source reach that have no verdict yet."""
        unanswered = (waiting.offer for waiting in (*self._group, *self._waiting))
        ends = (
            Position(each.epoch, each.last_sequence) for each in unanswered if each.source == source and each.sequences
        )
        return max(ends, default=None)

    def _cut_off(self, forgotten: Sequence[Offer]) -> None:
        """Take nothing more on the lines of refused offers that cannot be remembered, until their sources connect.

        An offer without a line stands for a request whose client has no other one under way.
        """
        for offer in forgotten:
            if offer.line is not None:
                offer.line.is_cut = True
                self._refuse_waiting(offer.source)

    def longest_wait_s(self, now: float) -> float:
        """Tell how long the oldest batch that has no verdict has been here."""
        oldest = next(iter(self._group or self._waiting), None)
        return max(0.0, now - oldest.offer.received_at_us / 1_000_000) if oldest is not None else 0.0

    def problems(self, *, now: float) -> list[str]:
        """Tell why batches are refused at present, if they are; `now` is the event loop's time."""
        if self._full is None or now - self._full[0] > FULL_SHOWN_S:
            return []
        return [f"batches are refused: {self._full[1]}"]

    async def wait_for_room(self) -> None:
        """Wait until an offer can be queued at once; another may still come first."""
        while not self._room.is_set():
            await self._room.wait()

    async def offer(self, offer: Offer) -> asyncio.Future[Verdict]:
        """Queue an offer, waiting while the queue is full; the future gives the verdict.

        Cancelling the wait queues nothing. Cancelling the future leaves the offer in the queue: it may become durable.
        """
        if self.heeds_transactions:
            offer = replace(offer, open_transaction=open_transaction(offer))
        unmet = await self.meet(offer.source)
        await self.wait_for_room()
        verdict: asyncio.Future[Verdict] = asyncio.get_running_loop().create_future()
        if self._ended:
            verdict.set_result(_ENDED)
            return verdict
        if _is_cut(offer):
            verdict.set_result(_CUT)
            return verdict
        if unmet is not None:
            self.hold(offer)
            verdict.set_result(unmet)
            return verdict
        if not offer.origin and self._origins.get(offer.source):
            verdict.set_result(_NOT_THE_ADAPTER)
            return verdict
        if _record_max_bytes(offer) > self._log.group_max_bytes:
            verdict.set_result(_too_large(offer, self._log.group_max_bytes))
            return verdict
        if (crowded := self._without_room(offer)) is not None:
            self.hold(offer)  # a higher limit will let it in
            verdict.set_result(crowded)
            return verdict
        self._waiting.append(_Waiting(offer, verdict))
        self._waiting_bytes += len(offer.body)
        if self._waiting_bytes >= self._config.queue_max_bytes:
            self._room.clear()
        self._arrived.set()
        return verdict

    def _without_room(self, offer: Offer) -> Refused | None:
        """Refuse an offer with a table that there is no room for. Otherwise its tables are known from now on."""
        table = self._table_room.take(offer.tables) if self._table_room is not None else None
        return None if self._table_room is None or table is None else _too_many_tables(table, self._table_room)

    async def run(self) -> None:
        """Admit groups until closed and empty. Cancelling it may leave a group durable but told to come again."""
        try:
            while self._waiting or not self._closing:
                if not self._waiting:
                    self._arrived.clear()
                    await self._arrived.wait()
                    continue
                await self._admit(self._next_group())
        finally:
            self._end()

    def _end(self) -> None:
        """Leave nobody waiting for a verdict that will not come: a connection that waits cannot be closed."""
        self._ended = True
        left = [*self._group, *self._waiting]
        self._waiting.clear()
        self._answer(left, [_ENDED] * len(left))
        self._room.set()

    def close(self) -> None:
        """Let `run` end once everything that was offered has its verdict."""
        self._closing = True
        self._arrived.set()

    def _next_group(self) -> list[_Waiting]:
        group: list[_Waiting] = []
        room_bytes = min(GROUP_MAX_BYTES, self._log.group_max_bytes)
        while self._waiting and (not group or _record_max_bytes(self._waiting[0].offer) <= room_bytes):
            group.append(self._waiting.popleft())
            room_bytes -= _record_max_bytes(group[-1].offer)
        self._forget_waiting_bytes(group)
        self._group = group
        return group

    def _forget_waiting_bytes(self, taken: list[_Waiting]) -> None:
        self._waiting_bytes -= sum(len(waiting.offer.body) for waiting in taken)
        if self._waiting_bytes < self._config.queue_max_bytes:
            self._room.set()

    async def _admit(self, group: list[_Waiting]) -> None:
        offers = [waiting.offer for waiting in group]
        decisions = self._dedup.decide(offers)  # decide: nothing has changed yet
        fresh = [decision for decision in decisions if isinstance(decision, Fresh)]
        verdicts: list[Verdict]
        try:
            first_offset = await self._persist(fresh)  # persist: returns after the sync
        except (WalFull, WalFailed) as error:
            if isinstance(error, WalFull):
                self._full = (asyncio.get_running_loop().time(), str(error))
            verdicts = self._judge_again(offers, _refusal(error, self._log.max_bytes))
        else:
            self._full = None if fresh else self._full
            self._dedup.record(fresh)  # record: only what is durable
            for item in fresh:
                self._origins.record(item.offer.source, item.offer.origin)
            if fresh:
                self.newest_received_at_us = fresh[-1].offer.received_at_us
            self._metrics.count_durable(fresh)
            offsets = iter(range(first_offset, first_offset + len(fresh)))
            verdicts = [Durable(next(offsets), item.changes) if isinstance(item, Fresh) else item for item in decisions]
        held = (offer for offer, item in zip(offers, verdicts, strict=True) if isinstance(item, Refused) and item.retry)
        self._cut_off(self._dedup.hold(held))
        self._answer(group, verdicts)
        self._group = []

    def _judge_again(self, offers: list[Offer], refusal: Refused) -> list[Verdict]:
        """Judge each by what is durable alone: a copy of a batch that is refused is no duplicate."""
        decisions = [self._dedup.decide([offer])[0] for offer in offers]
        return [refusal if isinstance(item, Fresh) else item for item in decisions]

    async def _persist(self, fresh: list[Fresh]) -> int:
        if not fresh:
            return self._log.durable_end
        payloads = [encode_frame(_frame_of(item)) for item in fresh]
        return await self._log.append(payloads, head=lambda: encode_head(self._dedup.marks(), self._origins.texts()))

    def _answer(self, group: list[_Waiting], verdicts: list[Verdict]) -> None:
        for waiting, verdict in zip(group, verdicts, strict=True):
            if waiting.verdict.done():  # its client may be gone
                continue
            waiting.verdict.set_result(verdict)
            if isinstance(verdict, Duplicate):
                self._metrics.counts.add_duplicate(waiting.offer)


def load_sources(log: Log) -> tuple[Dedup, Origins]:
    """Rebuild marks and origins from the newest segment: its head, then the records behind it."""
    # A segment's head may be as large as a group: the log gives each one half of a segment.
    room_bytes = log.group_max_bytes - SEGMENT_HEADER_MAX_BYTES
    origins = Origins(max_bytes=min(ORIGINS_MAX_BYTES, room_bytes // 4))
    dedup = Dedup(marks_max_bytes=min(MARKS_MAX_BYTES, room_bytes - 2 * origins.max_bytes))  # JSON may escape a text
    if log.head is not None:
        marks, texts = decode_head(log.head)
        for source, position in marks.items():
            dedup.restore(source, position)
        for source, text in texts.items():
            origins.record(source, text)
    for record in log.newest_records():
        frame = decode_frame(record.payload)
        dedup.restore(frame.source, Position(frame.epoch, frame.last_sequence))
        origins.record(frame.source, frame.origin)
    return dedup, origins


def _is_cut(offer: Offer) -> bool:
    return offer.line is not None and offer.line.is_cut


def _record_max_bytes(offer: Offer) -> int:
    """Bound what an offer takes in the log, without encoding it."""
    text_chars = len(offer.source) + len(offer.origin) + len(offer.declared) + len(offer.open_transaction)
    return len(offer.body) + _CHAR_MAX_BYTES * text_chars + _HEADER_MAX_BYTES


def _frame_of(item: Fresh) -> Frame:
    offer = item.offer
    return Frame(
        source=offer.source,
        epoch=offer.epoch,
        after_sequence=item.after_sequence,
        last_sequence=item.position.sequence,
        received_at_us=offer.received_at_us,
        encoding=offer.encoding,
        body=offer.body,
        origin=offer.origin,
        expanded_bytes=offer.expanded_bytes,
        declared=offer.declared,
        open_transaction=offer.open_transaction,
    )


def _too_large(offer: Offer, max_bytes: int) -> Refused:
    return Refused(
        NackReason.PAYLOAD_TOO_LARGE,
        "the batch is larger than the log takes",
        retry=False,
        max_size=max_bytes,
        actual_size=_record_max_bytes(offer),
    )


def _too_many_tables(table: str, room: TableRoom) -> Refused:
    message = (
        "table: no room for another table; if its name has an id in it, put that into a column, else raise"
        f" writer.tables_max: table={table} known={room.count} tables_max={room.tables_max}"
    )
    # Not as a full log, which HTTP clients wait out: this one stays until somebody does what it says.
    return Refused(NackReason.INVALID_FORMAT, message, retry=True, retry_delay_ms=FULL_RETRY_DELAY_MS)


def _refusal(error: WalFull | WalFailed, log_max_bytes: int) -> Refused:
    if isinstance(error, WalFull):
        return Refused(
            NackReason.BUFFER_FULL,
            str(error),
            retry=True,
            retry_delay_ms=FULL_RETRY_DELAY_MS,
            max_size=log_max_bytes,
        )
    return Refused(NackReason.INTERNAL_ERROR, str(error), retry=True, retry_delay_ms=FULL_RETRY_DELAY_MS)
