"""Debezium's requests on their way to the log. Owns the order of a source's requests and what is remembered of them.

    body --read_events--> events --Positions.plan--> new changes --numbered--> a batch like any other --> intake

One request of a source at a time: what is new depends on what the request before made durable. The plan's state
becomes durable in the same record as its changes (origins.py), so a crash forgets neither or both.
"""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from ingest.debezium import (
    Change,
    DebeziumConfig,
    DebeziumEvent,
    Plan,
    Positions,
    Report,
    TransactionTally,
    digest_of,
    read_context,
    read_events,
)
from ingest.intake import Intake
from ingest.metrics import IngestMetrics
from ingest.offers import NackReason, Offer, Refused, Verdict
from writer.changes import SourceId
from writer.frames import Encoding

logger = logging.getLogger(__name__)

# Newest doubts about transactions in /status; all of them are in the log lines and counted.
DOUBTS_SHOWN = 20


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

    async def take(self, source: SourceId, body: bytes, headers: Mapping[str, str]) -> DebeziumReceipt:
        """Make the new changes of a request durable; returns after the log is synced.

        Cancelling it leaves the request durable or not; sent again, it is found out which.

        Raises: DebeziumMalformed.
        """
        events = read_events(body, headers, self._config)
        run_id = read_context(headers).run_id
        turn = self._turns.setdefault(source, asyncio.Lock())
        async with turn:
            state = self._load_state(source)
            plan = state.positions.plan(events, digest=digest_of(body), run_id=run_id)
            if plan.is_retry:
                return DebeziumReceipt(None, 0, sum(isinstance(event, Change) for event in events))
            reports = _observe(state.tally, events, plan)
            verdict = await self._persist(source, events, plan, tally=state.tally)
            if not isinstance(verdict, Refused):
                self._report(source, plan, reports)
            return DebeziumReceipt(verdict, len(plan.fresh), len(plan.repeated))

    def _load_state(self, source: SourceId) -> _State:
        text = self._intake.origin(source)
        if text:
            return _decode_state(text)
        # A log that was repaired may have lost the text. Numbers go on behind those that are taken, whatever else.
        mark = self._intake.durable_position(source)
        return _State(Positions(taken=mark.sequence if mark is not None else 0), TransactionTally())

    async def _persist(
        self, source: SourceId, events: Sequence[DebeziumEvent], plan: Plan, *, tally: TransactionTally
    ) -> Verdict:
        origin = _encode(_State(plan.after, tally)).decode()
        if not self._intake.has_room_for_origin(source, origin):
            return Refused(NackReason.BUFFER_FULL, "no room for the positions of another source", retry=False)
        changes = [event for index in plan.fresh if isinstance(event := events[index], Change)]
        first = plan.after.taken - len(changes) + 1
        offer = Offer(
            source=source,
            epoch=0,
            sequences=range(first, first + len(changes)),
            received_at_us=int(self._clock() * 1_000_000),
            encoding=Encoding.JSON_BATCH,
            body=_encode(_Batch([_event_of(change, first + place) for place, change in enumerate(changes)])),
            origin=origin,
        )
        self._metrics.received_changes.inc(len(changes))
        return await (await self._intake.offer(offer))

    def _report(self, source: SourceId, plan: Plan, reports: Sequence[Report]) -> None:
        self._metrics.duplicate_changes.inc(len(plan.repeated))
        for report in reports:
            self._metrics.transaction_doubts.labels(report.doubt.value).inc()
            doubt = {
                "source": source,
                "doubt": report.doubt.value,
                "transaction": report.transaction,
                "arrived": report.arrived,
                "expected": report.expected,
                "missing": dict(report.missing),
            }
            self.doubts.append(doubt)
            logger.warning("transaction_in_doubt", extra=doubt)


def _observe(tally: TransactionTally, events: Sequence[DebeziumEvent], plan: Plan) -> list[Report]:
    repeated = set(plan.repeated)
    reports = (tally.observe(event, repeat=index in repeated) for index, event in enumerate(events))
    return [report for report in reports if report is not None]


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
