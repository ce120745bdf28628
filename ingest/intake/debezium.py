"""Debezium's requests on their way to the log. Owns the order of a source's requests and what is remembered of them.

    body --read_events--> events --Positions.plan--> new changes --numbered--> a batch like any other --> intake

One request of a source at a time: what is new depends on what the request before made durable. The plan's state
becomes durable in the same record as its changes (sources.py), so a crash forgets neither or both. What waits is the
body alone: events are read when there is room for what they become, and take many times their bytes.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import msgspec

from lakefeed.contract.changes import Position, SourceId
from lakefeed.ingest.debezium.envelope import read_events
from lakefeed.ingest.debezium.events import Change, DebeziumConfig, DebeziumEvent
from lakefeed.ingest.debezium.forms import read_context
from lakefeed.ingest.debezium.positions import Plan, Positions, digest_of
from lakefeed.ingest.debezium.transactions import Report, TransactionTally
from lakefeed.ingest.intake.intake import Intake
from lakefeed.ingest.intake.rows import next_position
from lakefeed.ingest.metrics import IngestMetrics
from lakefeed.ingest.protocol.offers import Duplicate, Durable, NackReason, Offer, Refused, Verdict
from lakefeed.writer.wal.payload import Encoding

logger = logging.getLogger(__name__)

# Newest doubts about transactions in /status; all of them are in the log lines and counted.
DOUBTS_SHOWN = 20
# Tables named in a doubt: enough to know where to look, and a log line stays one that can be read.
TABLES_SHOWN = 20


class _State(msgspec.Struct):
    """What is remembered of a source: the last positions, and the transactions that are not complete."""

    positions: Positions
    tally: TransactionTally


# Left out of the JSON, by identity.
_ABSENT = msgspec.Raw()


class _Event(msgspec.Struct, rename="camel", omit_defaults=True):
    sequence: int
    operation: str
    table: str
    timestamp: int
    row_id: str = ""
    before: msgspec.Raw = _ABSENT
    after: msgspec.Raw = _ABSENT
    unchanged: tuple[str, ...] = ()
    metadata: msgspec.Raw = _ABSENT


class _Batch(msgspec.Struct, tag_field="type", tag="cdc_batch"):
    events: list[_Event]


_encode = msgspec.json.Encoder().encode
_decode_state = msgspec.json.Decoder(_State).decode


@dataclass(frozen=True, slots=True)
class DebeziumReceipt:
    """What came of a request: how many of its changes were new and how many had been taken before."""

    verdict: Verdict | None
    fresh: int
    repeated: int


@dataclass(frozen=True, slots=True)
class _Request:
    """A request that was read: what to write, what is new in it, and what it says of transactions."""

    offer: Offer
    plan: Plan
    reports: Sequence[Report]


class DebeziumIntake:
    """Takes Debezium's requests, each source's in order."""

    def __init__(
        self, intake: Intake, *, config: DebeziumConfig, metrics: IngestMetrics, clock: Callable[[], float]
    ) -> None:
        self.doubts: deque[dict[str, Any]] = deque(maxlen=DOUBTS_SHOWN)
        self._intake = intake
        self._config = config
        self._metrics = metrics
        self._clock = clock
        self._turns: weakref.WeakValueDictionary[str, asyncio.Lock] = weakref.WeakValueDictionary()
        self._verdicts: weakref.WeakValueDictionary[str, asyncio.Future[Verdict]] = weakref.WeakValueDictionary()

    async def take(self, source: SourceId, body: bytes, headers: Mapping[str, str]) -> DebeziumReceipt:
        """Make the new changes of a request durable; returns after the log is synced.

        Cancelling it leaves the request durable or not; sent again, it is found out which.

        Raises: DebeziumMalformed, or ProtocolError if the source has no numbers left.
        """
        turn = self._turns.setdefault(source, asyncio.Lock())
        async with turn:
            if (abandoned := self._verdicts.get(source)) is not None:
                await asyncio.wait([abandoned])  # whoever waited for it was cancelled: it may be durable by now
            if (unmet := await self._intake.meet(source)) is not None:
                return DebeziumReceipt(unmet, 0, 0)
            await self._intake.wait_for_room()
            request = self._read(source, body, headers)
            if isinstance(request, DebeziumReceipt):
                return request
            plan = request.plan
            return DebeziumReceipt(await self._make_durable(request), len(plan.fresh), len(plan.repeated))

    def _read(self, source: SourceId, body: bytes, headers: Mapping[str, str]) -> _Request | DebeziumReceipt:
        """Read a request and decide what is new in it; nothing has changed yet. One sent again has its receipt."""
        events = read_events(body, headers, self._config)
        now_us = int(self._clock() * 1_000_000)
        first = next_position(self._intake, source, count=len(events), now_us=now_us)
        state = self._load_state(source, first)
        plan = state.positions.plan(events, digest=digest_of(body), run_id=read_context(headers).run_id)
        if plan.is_retry:
            return self._known(events)
        reports = _observe(state.tally, events, plan)
        origin = _encode(_State(plan.after, state.tally)).decode()
        offer = _offer_of(source, events, plan, first=first, origin=origin, received_at_us=now_us)
        if self._intake.heeds_transactions:
            offer = replace(offer, open_transaction=state.tally.open_transaction)
        return _Request(offer, plan, reports)

    def _known(self, events: Sequence[DebeziumEvent]) -> DebeziumReceipt:
        repeated = sum(isinstance(event, Change) for event in events)
        self._metrics.counts.received_changes += repeated
        self._metrics.counts.duplicate_changes += repeated
        return DebeziumReceipt(None, 0, repeated)

    def _load_state(self, source: SourceId, first: Position) -> _State:
        text = self._intake.origin(source)
        state = _decode_state(text) if text else _State(Positions(), TransactionTally())
        # The log's own mark has the last word: a log that was repaired may have lost the text.
        state.positions = replace(state.positions, taken=first.sequence - 1)
        return state

    async def _make_durable(self, request: _Request) -> Verdict:
        offer = request.offer
        if not self._intake.has_room_for_origin(offer.source, offer.origin):
            return Refused(NackReason.BUFFER_FULL, "no room for the positions of another source", retry=False)
        future = await self._intake.offer(offer)
        self._verdicts[offer.source] = future
        future.add_done_callback(functools.partial(self._note, offer.source, request.plan, request.reports))
        verdict = await asyncio.shield(future)
        if isinstance(verdict, Duplicate):
            # Nothing of it was written. Sent again, it is numbered behind what the other client wrote.
            message = "another client numbers the changes of this source"
            return Refused(NackReason.INVALID_SEQUENCE, message, retry=True)
        return verdict

    def _note(self, source: SourceId, plan: Plan, reports: Sequence[Report], future: asyncio.Future[Verdict]) -> None:
        """Count and report what is now durable, also if nobody waits for the answer any more."""
        if future.cancelled() or not isinstance(future.result(), Durable):
            return
        self._metrics.counts.received_changes += len(plan.fresh) + len(plan.repeated)
        self._metrics.counts.duplicate_changes += len(plan.repeated)
        for report in reports:
            self._report(source, report)

    def _report(self, source: SourceId, report: Report) -> None:
        self._metrics.transaction_doubts.labels(report.doubt.value).inc()
        doubt = {
            "source": source,
            "doubt": report.doubt.value,
            "transaction": report.transaction,
            "arrived": report.arrived,
            "expected": report.expected,
            "missing": dict(islice(report.missing.items(), TABLES_SHOWN)),
        }
        self.doubts.append(doubt)
        logger.warning("transaction_in_doubt", extra=doubt)


def _observe(tally: TransactionTally, events: Sequence[DebeziumEvent], plan: Plan) -> list[Report]:
    repeated = set(plan.repeated)
    reports = (tally.observe(event, repeat=index in repeated) for index, event in enumerate(events))
    return [report for report in reports if report is not None]


def _offer_of(
    source: SourceId,
    events: Sequence[DebeziumEvent],
    plan: Plan,
    *,
    first: Position,
    origin: str,
    received_at_us: int,
) -> Offer:
    changes = [event for index in plan.fresh if isinstance(event := events[index], Change)]
    sequences = range(first.sequence, first.sequence + len(changes))
    return Offer(
        source=source,
        epoch=first.epoch,
        sequences=sequences,
        received_at_us=received_at_us,
        encoding=Encoding.JSON_BATCH,
        body=_encode(_Batch(list(map(_event_of, changes, sequences)))),
        origin=origin,
        tables=frozenset(change.table for change in changes),
    )


def _event_of(change: Change, sequence: int) -> _Event:
    return _Event(
        sequence=sequence,
        operation=change.operation.value,
        table=change.table,
        timestamp=change.timestamp_ms,
        row_id=change.row_id,
        before=change.before or _ABSENT,
        after=change.after or _ABSENT,
        unchanged=change.unchanged,
        metadata=change.metadata or _ABSENT,
    )
