"""Debezium requests on their way to the log, one at a time per source.

    body --read_events--> events --Positions.plan--> new changes --numbered--> a batch like any other --> intake

The requests of a source are serialized, because what is new depends on what the request before made durable. The state
of the plan becomes durable in the same record as its changes, so a crash loses both or neither. Only the body waits:
events take many times its bytes, so they are read when there is room for what they become.
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

# Newest incomplete transactions in /status; all of them are logged and counted.
REPORTS_SHOWN = 20
# Tables named per incomplete transaction: enough to know where to look, and log lines stay readable.
TABLES_SHOWN = 20


class _State(msgspec.Struct):
    """The adapter state of a source: the last positions, and the transactions that are not complete."""

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
    """The result of a request: how many of its changes were new and how many had been accepted before."""

    verdict: Verdict | None
    fresh: int
    repeated: int


@dataclass(frozen=True, slots=True)
class _Request:
    """A request that was read: the offer, which changes are new, and reports on transactions."""

    offer: Offer
    plan: Plan
    reports: Sequence[Report]


class DebeziumIntake:
    """Makes Debezium requests durable, in order per source."""

    def __init__(
        self, intake: Intake, *, config: DebeziumConfig, metrics: IngestMetrics, clock: Callable[[], float]
    ) -> None:
        self.incomplete_transactions: deque[dict[str, Any]] = deque(maxlen=REPORTS_SHOWN)
        self._intake = intake
        self._config = config
        self._metrics = metrics
        self._clock = clock
        self._locks: weakref.WeakValueDictionary[str, asyncio.Lock] = weakref.WeakValueDictionary()
        self._verdicts: weakref.WeakValueDictionary[str, asyncio.Future[Verdict]] = weakref.WeakValueDictionary()

    async def accept(self, source: SourceId, body: bytes, headers: Mapping[str, str]) -> DebeziumReceipt:
        """Make the new changes of a request durable; returns after the log is synced.

        A cancelled request may be durable or not; sending it again resolves that.

        Raises: DebeziumMalformed, or ProtocolError if the source has no numbers left.
        """
        lock = self._locks.setdefault(source, asyncio.Lock())
        async with lock:
            if (abandoned := self._verdicts.get(source)) is not None:
                await asyncio.wait([abandoned])  # its caller was cancelled: it may be durable by now
            if (refused := await self._intake.look_up_source(source)) is not None:
                return DebeziumReceipt(refused, 0, 0)
            await self._intake.wait_for_room()
            request = self._read(source, body, headers)
            if isinstance(request, DebeziumReceipt):
                return request
            plan = request.plan
            return DebeziumReceipt(await self._make_durable(request), len(plan.fresh), len(plan.repeated))

    def _read(self, source: SourceId, body: bytes, headers: Mapping[str, str]) -> _Request | DebeziumReceipt:
        """Read a request and decide what is new in it; changes nothing. A retried request has its receipt already."""
        events = read_events(body, headers, self._config)
        now_us = int(self._clock() * 1_000_000)
        first = next_position(self._intake, source, count=len(events), now_us=now_us)
        state = self._load_state(source, first)
        plan = state.positions.plan(events, digest=digest_of(body), run_id=read_context(headers).run_id)
        if plan.is_retry:
            return self._count_retry(events)
        repeated = set(plan.repeated)
        observed = (state.tally.observe(event, repeat=index in repeated) for index, event in enumerate(events))
        reports = [report for report in observed if report is not None]
        adapter_state = _encode(_State(plan.after, state.tally)).decode()
        offer = _offer_of(source, events, plan, first=first, adapter_state=adapter_state, received_at_us=now_us)
        if self._intake.tracks_transactions:
            offer = replace(offer, open_transaction=state.tally.open_transaction)
        return _Request(offer, plan, reports)

    def _count_retry(self, events: Sequence[DebeziumEvent]) -> DebeziumReceipt:
        repeated = sum(isinstance(event, Change) for event in events)
        self._metrics.counts.received_changes += repeated
        self._metrics.counts.duplicate_changes += repeated
        return DebeziumReceipt(None, 0, repeated)

    def _load_state(self, source: SourceId, first: Position) -> _State:
        text = self._intake.adapter_state(source)
        state = _decode_state(text) if text else _State(Positions(), TransactionTally())
        # The log's mark decides: a log that was repaired may have lost the text.
        state.positions = replace(state.positions, taken=first.sequence - 1)
        return state

    async def _make_durable(self, request: _Request) -> Verdict:
        offer = request.offer
        if not self._intake.has_room_for_adapter_state(offer.source, offer.adapter_state):
            return Refused(NackReason.BUFFER_FULL, "no room for the positions of another source", retry=False)
        future = await self._intake.offer(offer)
        self._verdicts[offer.source] = future
        future.add_done_callback(functools.partial(self._on_verdict, offer.source, request.plan, request.reports))
        verdict = await asyncio.shield(future)
        if isinstance(verdict, Duplicate):
            # Nothing of it was written. Sent again, it is numbered behind what the other client wrote.
            message = "another client numbers the changes of this source"
            return Refused(NackReason.INVALID_SEQUENCE, message, retry=True)
        return verdict

    def _on_verdict(
        self, source: SourceId, plan: Plan, reports: Sequence[Report], future: asyncio.Future[Verdict]
    ) -> None:
        """Count and report what is now durable, also if the caller is gone."""
        if future.cancelled() or not isinstance(future.result(), Durable):
            return
        self._metrics.counts.received_changes += len(plan.fresh) + len(plan.repeated)
        self._metrics.counts.duplicate_changes += len(plan.repeated)
        for report in reports:
            self._report(source, report)

    def _report(self, source: SourceId, report: Report) -> None:
        self._metrics.incomplete_transactions.labels(report.reason.value).inc()
        facts = {
            "source": source,
            "reason": report.reason.value,
            "transaction": report.transaction,
            "arrived": report.arrived,
            "expected": report.expected,
            "missing": dict(islice(report.missing.items(), TABLES_SHOWN)),
        }
        self.incomplete_transactions.append(facts)
        logger.warning("transaction_incomplete", extra=facts)


def _offer_of(
    source: SourceId,
    events: Sequence[DebeziumEvent],
    plan: Plan,
    *,
    first: Position,
    adapter_state: str,
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
        adapter_state=adapter_state,
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
