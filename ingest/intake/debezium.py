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

from lakefeed.contract.changes import SourceId
from lakefeed.ingest.debezium.envelope import read_events
from lakefeed.ingest.debezium.events import Change, DebeziumConfig
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
    timestamp: int | None = None
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
            offer, plan, reports = self._read(source, body, headers)
            if plan.is_retry:
                self._count(plan)
                return DebeziumReceipt(None, 0, len(plan.repeated))
            verdict = await self._make_durable(offer, plan, reports)
            return DebeziumReceipt(verdict, len(plan.fresh), len(plan.repeated))

    def _read(self, source: SourceId, body: bytes, headers: Mapping[str, str]) -> tuple[Offer, Plan, Sequence[Report]]:
        """Read a request; return its offer, which changes are new, and reports on transactions. Changes nothing."""
        events = read_events(body, headers, self._config)
        now_us = int(self._clock() * 1_000_000)
        first = next_position(self._intake, source, count=len(events), now_us=now_us)
        text = self._intake.adapter_states.get(source)
        state = _decode_state(text) if text else _State(Positions(), TransactionTally())
        # The log's mark decides: a log that was repaired may have lost the text.
        positions = replace(state.positions, taken=first.sequence - 1)
        plan = positions.plan(events, digest=digest_of(body), run_id=read_context(headers).run_id)
        repeated = set(plan.repeated)
        observed = (state.tally.observe(event, repeat=index in repeated) for index, event in enumerate(events))
        reports = [report for report in observed if report is not None]
        changes = [event for index in plan.fresh if isinstance(event := events[index], Change)]
        sequences = range(first.sequence, first.sequence + len(changes))
        offer = Offer(
            source=source,
            epoch=first.epoch,
            sequences=sequences,
            received_at_us=now_us,
            encoding=Encoding.JSON_BATCH,
            body=_encode(_Batch(list(map(_event_of, changes, sequences)))),
            adapter_state=_encode(_State(plan.after, state.tally)).decode(),
            open_transaction=state.tally.open_transaction if self._intake.tracks_transactions else "",
            tables=frozenset(change.table for change in changes),
        )
        return offer, plan, reports

    def _count(self, plan: Plan) -> None:
        self._metrics.counts.received_changes += len(plan.fresh) + len(plan.repeated)
        self._metrics.counts.duplicate_changes += len(plan.repeated)

    async def _make_durable(self, offer: Offer, plan: Plan, reports: Sequence[Report]) -> Verdict:
        if not self._intake.adapter_states.has_room_for(offer.source, offer.adapter_state):
            return Refused(NackReason.BUFFER_FULL, "no room for the positions of another source", retry=False)
        future = await self._intake.offer(offer)
        self._verdicts[offer.source] = future
        future.add_done_callback(functools.partial(self._on_verdict, offer.source, plan, reports))
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
        self._count(plan)
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


def _event_of(change: Change, sequence: int) -> _Event:
    return _Event(
        sequence=sequence,
        operation=change.operation.value,
        table=change.table,
        timestamp=change.timestamp_ms or None,
        row_id=change.row_id,
        before=change.before or _ABSENT,
        after=change.after or _ABSENT,
        unchanged=change.unchanged,
        metadata=change.metadata or _ABSENT,
    )
