"""The intake: the queue in front of the log, and group commit. The one task that touches dedup and the log.

    offer() --bounded by bytes--> queue --group--> decide -> persist -> record -> verdicts

Offers gather while the log syncs. The next group takes them together, so one sync serves many clients. Verdicts are
given after the sync and never before: what an ack promises is on disk.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from lakefeed.contract.changes import Position, SourceId
from lakefeed.contract.errors import CatalogError, WalFailed, WalFull
from lakefeed.ingest.config import IngestConfig
from lakefeed.ingest.intake.sources import ResumePositions, encode_head, load_source_state
from lakefeed.ingest.metrics import IngestMetrics
from lakefeed.ingest.protocol.batch import open_transaction
from lakefeed.ingest.protocol.offers import BEFORE_ALL, Duplicate, Durable, Fresh, NackReason, Offer, Refused, Verdict
from lakefeed.writer.tables.limit import SOURCES_ADVICE, TableLimit
from lakefeed.writer.wal.payload import Frame, encode_frame
from lakefeed.writer.wal.protocol import Log

# One write and sync. Larger groups do not sync faster per byte (measured flat from 4 MiB) but make acks wait longer.
GROUP_MAX_BYTES = 4 * 1024 * 1024

# Retry delay after `buffer_full`: about the time of a flush, which is what makes room.
FULL_RETRY_DELAY_MS = 1_000

# Retry delay while the catalog does not answer: about the time of a restart.
LOOKUP_RETRY_DELAY_MS = 2_000

# How long a full log counts as a problem after it last refused a batch. Clients return sooner while it lasts.
FULL_SHOWN_S = 10.0

# Upper bounds of what a record has besides the body: per character of its texts (escaped), and for the rest.
_CHAR_MAX_BYTES = 6
_HEADER_MAX_BYTES = 256

_ENDED = Refused(NackReason.SHUTTING_DOWN, "the service is stopping: send it again to the next one", retry=True)
_REVOKED = Refused(
    NackReason.INVALID_SEQUENCE,
    "the source has connected on another connection, or lost its lease: connect here to go on from what is durable",
    retry=False,
)
_ADAPTER_OWNS_SOURCE = Refused(
    NackReason.INVALID_SEQUENCE,
    "an adapter numbers the changes of this source, and others would take its numbers: use another source name",
    retry=False,
)
_RECONNECTED = Refused(
    NackReason.INVALID_SEQUENCE, "source has connected anew and resumes from its durable position", retry=True
)


@dataclass(frozen=True, slots=True)
class _QueuedOffer:
    offer: Offer
    verdict: asyncio.Future[Verdict]


class Intake:
    """Accepts offers from all sessions and makes them durable in groups."""

    def __init__(
        self,
        log: Log,
        *,
        config: IngestConfig,
        metrics: IngestMetrics,
        resume_positions: ResumePositions | None = None,
        tracks_transactions: bool = False,
        table_limit: TableLimit | None = None,
    ) -> None:
        self.tracks_transactions = tracks_transactions
        self.newest_received_at_us: int | None = None
        self._log = log
        self._config = config
        self._metrics = metrics
        self._resume_positions = resume_positions
        self._table_limit = table_limit
        self._dedup, self.adapter_states = load_source_state(log)
        self._queue: deque[_QueuedOffer] = deque()
        # The highest position of each source's offers that are queued or being written.
        self._pending_ends: dict[SourceId, Position] = {}
        self._queue_bytes = 0
        self._arrived = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()
        self._group: list[_QueuedOffer] = []
        self._full: tuple[float, str] | None = None
        self._closing = False
        self._ended = False

    # -- sources

    def durable_position(self, source: SourceId) -> Position | None:
        """Return up to where a source is durable."""
        return self._dedup.mark(source)

    def sources(self) -> dict[SourceId, Position]:
        """Return all known sources and up to where they are durable."""
        return dict(self._dedup.marks())

    async def look_up_source(self, source: SourceId) -> Refused | None:
        """Ask the tables about a source that has nothing in this log; return a refusal if they cannot be asked.

        An epoch that is over in the tables is over here too, because they would skip its changes. Cancelling it changes
        nothing.
        """
        if self._resume_positions is None or self._has_changes_of(source):
            return None
        try:
            position = await self._resume_positions.find(source)
        except CatalogError as error:
            return _lookup_failure(f"the source is new here, and the tables cannot be asked where it stands: {error}")
        if position is not None:
            self._dedup.learn_epoch(source, position.epoch)
        return None

    async def _look_up_previous(self, offer: Offer) -> Offer | Refused:
        """Return an offer with what the tables have of its epoch; a refusal if they cannot be asked.

        They are read again only if the change before the offer is not known here: another node may have committed it.
        """
        if self._resume_positions is None or offer.previous_sequence is None:
            return offer
        previous = Position(offer.epoch, offer.previous_sequence)
        source, tables = offer.source, self._resume_positions
        known = (self._dedup.mark(source), self._pending_ends.get(source), tables.last_known(source))
        if not any(each is not None and each >= previous for each in known):
            try:
                await tables.refresh()
            except CatalogError as error:
                return _lookup_failure(
                    "the change before this batch is not known here, and the tables cannot be asked for it:"
                    f" previous_sequence={offer.previous_sequence} error={error}"
                )
        position = tables.last_known(source)
        if position is None:
            return offer
        self._dedup.learn_epoch(source, position.epoch)
        return offer if position.epoch != offer.epoch else replace(offer, committed_sequence=position.sequence)

    def _has_changes_of(self, source: SourceId) -> bool:
        mark = self._dedup.mark(source)
        return mark is not None and mark.sequence > BEFORE_ALL

    def resume(self, source: SourceId) -> Position | None:
        """Return where a reconnecting source resumes: its last durable position on this node, else that of the tables.

        Its refused batches no longer block it. The caller has revoked the leases of its other connections.
        """
        if self._dedup.unblock(source):
            self._refuse_queued(source)
        if self._resume_positions is not None and not self._has_changes_of(source):
            return self._resume_positions.last_known(source) or self._dedup.mark(source)
        return self._dedup.mark(source)

    def _refuse_queued(self, source: SourceId) -> None:
        """Refuse what an earlier connection queued behind a refused batch: it would now overtake that batch."""
        overtaking = [queued for queued in self._queue if queued.offer.source == source]
        self._queue = deque(queued for queued in self._queue if queued.offer.source != source)
        self._release_queue_bytes(overtaking)
        self._resolve(overtaking, [_RECONNECTED] * len(overtaking))

    def block_behind(self, refused: Offer) -> None:
        """Block a source behind an offer that was refused before it was queued."""
        if not refused.is_revoked:
            self._revoke(self._dedup.block([refused], ahead=self._pending_ends.get(refused.source)))

    def _revoke(self, forgotten: Sequence[Offer]) -> None:
        """Revoke the leases of refused offers for which dedup has no room, until their sources connect again.

        An offer without a lease is of an HTTP request, whose client has no other one in flight.
        """
        for offer in forgotten:
            if offer.lease is not None:
                offer.lease.is_revoked = True
                self._refuse_queued(offer.source)

    # -- the queue

    def longest_wait_s(self, now: float) -> float:
        """Return how long the oldest batch without a verdict has been here."""
        oldest = next(iter(self._group or self._queue), None)
        return max(0.0, now - oldest.offer.received_at_us / 1_000_000) if oldest is not None else 0.0

    def problems(self, *, now: float) -> list[str]:
        """Return why batches are refused at present, if they are; `now` is the event loop's time."""
        if self._full is None or now - self._full[0] > FULL_SHOWN_S:
            return []
        return [f"batches are refused: {self._full[1]}"]

    def source_problems(self) -> list[str]:
        """Return why new sources are refused, if they are; known ones are not affected."""
        return self._table_limit.problems() if self._table_limit is not None else []

    async def wait_for_room(self) -> None:
        """Wait until an offer can be queued at once; another may still come first."""
        while not self._room.is_set():
            await self._room.wait()

    async def offer(self, offer: Offer) -> asyncio.Future[Verdict]:
        """Queue an offer, waiting while the queue is full; the future resolves to the verdict.

        Cancelling the wait queues nothing. Cancelling the future leaves the offer in the queue: it may become durable.
        """
        if self.tracks_transactions:
            offer = replace(offer, open_transaction=open_transaction(offer))
        lookup_failure = await self.look_up_source(offer.source)
        if lookup_failure is None:
            looked_up = await self._look_up_previous(offer)
            offer, lookup_failure = (offer, looked_up) if isinstance(looked_up, Refused) else (looked_up, None)
        await self.wait_for_room()
        verdict: asyncio.Future[Verdict] = asyncio.get_running_loop().create_future()
        refused = self._refuse_at_once(offer, lookup_failure)
        if refused is not None:
            verdict.set_result(refused)
            return verdict
        self._queue.append(_QueuedOffer(offer, verdict))
        if offer.sequences:
            end = Position(offer.epoch, offer.last_sequence)
            self._pending_ends[offer.source] = max(end, self._pending_ends.get(offer.source, end))
        self._queue_bytes += len(offer.body)
        if self._queue_bytes >= self._config.queue_max_bytes:
            self._room.clear()
        self._arrived.set()
        return verdict

    async def offer_and_wait(self, offer: Offer) -> Verdict:
        """Queue an offer and return its verdict. If this is cancelled, the offer may or may not become durable."""
        return await (await self.offer(offer))

    def _refuse_at_once(self, offer: Offer, lookup_failure: Refused | None) -> Refused | None:
        """Return why an offer cannot be queued, if so. Otherwise its tables count as known from now on."""
        if self._ended:
            return _ENDED
        if offer.is_revoked:
            return _REVOKED
        if lookup_failure is not None:
            self.block_behind(offer)
            return lookup_failure
        if not offer.adapter_state and self.adapter_states.get(offer.source):
            return _ADAPTER_OWNS_SOURCE
        size_bytes, max_bytes = _record_max_bytes(offer), self._log.group_max_bytes
        if size_bytes > max_bytes:
            message = "the batch is larger than a segment of the log can hold"
            sizes = {"max_size": max_bytes, "actual_size": size_bytes}
            return Refused(NackReason.PAYLOAD_TOO_LARGE, message, retry=False, **sizes)
        limit = self._table_limit
        if limit is None:
            return None
        if (table := limit.take(offer.tables)) is not None:
            self.block_behind(offer)  # a higher limit will let it in
            message = (
                "table: no room for another table; if its name has an id in it, put that into a column, else raise"
                f" writer.tables_max: table={table} known={limit.count} tables_max={limit.tables_max}"
            )
            # Not `buffer_full`, which HTTP clients wait out: this stays until an operator acts.
            return Refused(NackReason.INVALID_FORMAT, message, retry=True, retry_delay_ms=FULL_RETRY_DELAY_MS)
        if (table := limit.take_source(offer.source, offer.tables)) is not None:
            self.block_behind(offer)
            message = (
                f"source: the table has no room for another source; {SOURCES_ADVICE}:"
                f" table={table} sources_max={limit.sources_max}"
            )
            return Refused(NackReason.INVALID_FORMAT, message, retry=False)
        return None

    async def run(self) -> None:
        """Admit groups until closed and empty. If it is cancelled, offers that were refused for now may be durable."""
        try:
            while self._queue or not self._closing:
                if not self._queue:
                    self._arrived.clear()
                    await self._arrived.wait()
                    continue
                await self._admit(self._next_group())
        finally:
            # A connection that waits for a verdict could not be closed.
            self._ended = True
            left = [*self._group, *self._queue]
            self._queue.clear()
            self._resolve(left, [_ENDED] * len(left))
            self._room.set()

    def close(self) -> None:
        """End `run` once every offer has its verdict."""
        self._closing = True
        self._arrived.set()

    def _next_group(self) -> list[_QueuedOffer]:
        group: list[_QueuedOffer] = []
        room_bytes = min(GROUP_MAX_BYTES, self._log.group_max_bytes)
        while self._queue and (not group or _record_max_bytes(self._queue[0].offer) <= room_bytes):
            group.append(self._queue.popleft())
            room_bytes -= _record_max_bytes(group[-1].offer)
        self._release_queue_bytes(group)
        self._group = group
        return group

    def _release_queue_bytes(self, removed: list[_QueuedOffer]) -> None:
        self._queue_bytes -= sum(len(queued.offer.body) for queued in removed)
        if self._queue_bytes < self._config.queue_max_bytes:
            self._room.set()

    # -- group commit

    async def _admit(self, group: list[_QueuedOffer]) -> None:
        offers = [queued.offer for queued in group]
        decisions = self._dedup.decide(offers)  # decide: nothing has changed yet
        fresh = [decision for decision in decisions if isinstance(decision, Fresh)]
        verdicts: list[Verdict]
        try:
            first_offset = await self._persist(fresh)  # persist: returns after the sync
        except (WalFull, WalFailed) as error:
            if isinstance(error, WalFull):
                self._full = (asyncio.get_running_loop().time(), str(error))
            verdicts = self._decide_after_failure(offers, _log_refusal(error, self._log.max_bytes))
        else:
            self._record(fresh)  # record: only what is durable
            offsets = iter(range(first_offset, first_offset + len(fresh)))
            verdicts = [Durable(next(offsets), item.changes) if isinstance(item, Fresh) else item for item in decisions]
        refused = (
            offer for offer, item in zip(offers, verdicts, strict=True) if isinstance(item, Refused) and item.retry
        )
        self._revoke(self._dedup.block(refused))
        self._resolve(group, verdicts)
        self._group = []

    async def _persist(self, fresh: list[Fresh]) -> int:
        if not fresh:
            return self._log.durable_end
        payloads = [encode_frame(_frame_of(item)) for item in fresh]
        return await self._log.append(
            payloads, head=lambda: encode_head(self._dedup.marks(), self.adapter_states.texts())
        )

    def _record(self, fresh: list[Fresh]) -> None:
        self._dedup.record(fresh)
        for item in fresh:
            self.adapter_states.record(item.offer.source, item.offer.adapter_state)
        if fresh:
            self._full = None
            self.newest_received_at_us = fresh[-1].offer.received_at_us
        self._metrics.count_durable(fresh)

    def _decide_after_failure(self, offers: list[Offer], refusal: Refused) -> list[Verdict]:
        """Decide on each offer by what is durable alone: a copy of a batch that was refused is not a duplicate."""
        decisions = [self._dedup.decide([offer])[0] for offer in offers]
        return [refusal if isinstance(item, Fresh) else item for item in decisions]

    def _resolve(self, group: list[_QueuedOffer], verdicts: list[Verdict] | list[Refused]) -> None:
        for queued, verdict in zip(group, verdicts, strict=True):
            offer = queued.offer
            # Offers behind it that end at or below this position are resends, which the mark covers.
            if offer.sequences and self._pending_ends.get(offer.source) == Position(offer.epoch, offer.last_sequence):
                del self._pending_ends[offer.source]
            if queued.verdict.done():  # its client may be gone
                continue
            queued.verdict.set_result(verdict)
            if isinstance(verdict, Duplicate):
                self._metrics.counts.add_duplicate(queued.offer)


def _record_max_bytes(offer: Offer) -> int:
    """Return an upper bound of an offer's bytes in the log, without encoding it."""
    text_chars = len(offer.source) + len(offer.adapter_state) + len(offer.declared) + len(offer.open_transaction)
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
        origin=offer.adapter_state,
        expanded_bytes=offer.expanded_bytes,
        declared=offer.declared,
        open_transaction=offer.open_transaction,
    )


def _lookup_failure(message: str) -> Refused:
    return Refused(NackReason.INTERNAL_ERROR, message, retry=True, retry_delay_ms=LOOKUP_RETRY_DELAY_MS)


def _log_refusal(error: WalFull | WalFailed, log_max_bytes: int) -> Refused:
    is_full = isinstance(error, WalFull)
    return Refused(
        NackReason.BUFFER_FULL if is_full else NackReason.INTERNAL_ERROR,
        str(error),
        retry=True,
        retry_delay_ms=FULL_RETRY_DELAY_MS,
        max_size=log_max_bytes if is_full else None,
    )
