"""Ingest over HTTP: POST /cdc and /cdc/debezium.

A 2xx response means durable: the log is synced. Without room in the log, in memory or among the request slots, the
response is late instead of an error: for /cdc up to WAIT_MAX_S, for Debezium as long as the client waits, because
Debezium Server gives up after five errors in a row and can then lose rows. A client resends what was not answered, and
it is accepted once if it has numbers or positions of its own.
"""

from __future__ import annotations

import asyncio
import functools
import math
import time
from collections.abc import Awaitable, Callable, Container, Mapping
from typing import Any, TypeAlias

import msgspec
from aiohttp import web

from lakefeed.backoff import Backoff
from lakefeed.contract.changes import INT64_MAX, Position, SourceId
from lakefeed.ingest.config import IngestConfig
from lakefeed.ingest.debezium.events import DebeziumMalformed
from lakefeed.ingest.debezium.forms import read_context
from lakefeed.ingest.errors import ProtocolError
from lakefeed.ingest.http.bodies import TIMEOUT, read_body
from lakefeed.ingest.http.gate import Busy, RequestGate, RequestLease, json_response
from lakefeed.ingest.intake.debezium import DebeziumIntake, DebeziumReceipt
from lakefeed.ingest.intake.intake import Intake
from lakefeed.ingest.intake.rows import RowIntake, Rows, has_rows
from lakefeed.ingest.metrics import IngestMetrics
from lakefeed.ingest.protocol.batch import invalid
from lakefeed.ingest.protocol.messages import decode_checked
from lakefeed.ingest.protocol.offers import Duplicate, Durable, NackReason, Offer, Refused, Verdict
from lakefeed.ingest.protocol.session import Session
from lakefeed.writer.wire.json_batch import BatchHead

CDC, DEBEZIUM = "/cdc", "/cdc/debezium"
ROUTES = (CDC, DEBEZIUM)

# How long a request on /cdc waits for room: below the minute that clients usually wait for a response.
WAIT_MAX_S = 45.0

# Pause between two attempts while the log is full: short at first, then longer, because each reads the request again.
FULL_BACKOFF = Backoff(first_s=0.25, max_s=2.0)

# Refusals that are retried here. For Debezium also a failed log, and a catalog that does not answer: an operator will
# repair these, and Debezium Server would end after some errors in a row.
_RETRIED = frozenset({NackReason.BUFFER_FULL})
_RETRIED_FOR_DEBEZIUM = _RETRIED | {NackReason.INTERNAL_ERROR}

DEFAULT_DEBEZIUM_SOURCE = "debezium"
DEFAULT_KEY = "id"

_NDJSON = "application/x-ndjson"
_NUMBER_MAX_DIGITS = len(str(INT64_MAX))

# All other reasons are 400: the request itself is wrong.
STATUS_OF_REASON: Mapping[str, int] = {
    TIMEOUT: 408,
    NackReason.INVALID_SEQUENCE.value: 409,
    NackReason.MISSING_CHANGES.value: 409,
    NackReason.PAYLOAD_TOO_LARGE.value: 413,
    NackReason.EVENT_TOO_LARGE.value: 413,
    NackReason.RATE_LIMITED.value: 429,
    NackReason.CONNECTION_LIMIT.value: 503,
    NackReason.BUFFER_FULL.value: 503,
    NackReason.SHUTTING_DOWN.value: 503,
    NackReason.INTERNAL_ERROR.value: 503,
}

_decode_batch_head = msgspec.json.Decoder(BatchHead).decode

_Accept: TypeAlias = Callable[[web.Request], Awaitable[web.Response]]


class HttpIngest:
    """The routes of HTTP ingest."""

    def __init__(
        self,
        config: IngestConfig,
        *,
        intake: Intake,
        debezium: DebeziumIntake,
        gate: RequestGate,
        metrics: IngestMetrics,
    ) -> None:
        self._config = config
        self._intake = intake
        self._rows = RowIntake(intake, event_max_bytes=config.event_max_bytes, clock=time.time)
        self._debezium = debezium
        self._gate = gate
        self._metrics = metrics

    def add_routes(self, app: web.Application) -> None:
        """Add the routes to the control plane."""
        app.router.add_post(CDC, functools.partial(self._respond, self._accept_changes))
        app.router.add_post(DEBEZIUM, functools.partial(self._respond, self._accept_debezium))

    async def _respond(self, accept: _Accept, request: web.Request) -> web.Response:
        """Send the response after the request's lease has ended: a client that does not read it blocks no other."""
        try:
            response = await accept(request)
        except ProtocolError as error:
            retry_after_s = error.retry_after_s if isinstance(error, Busy) else None
            response = self._refuse(error.reason, str(error), retry=error.retry, retry_after_s=retry_after_s)
        except DebeziumMalformed as error:
            response = self._refuse(NackReason.INVALID_FORMAT.value, str(error), retry=False)
        except ConnectionError:  # the client is gone
            return web.Response(status=400)
        self._metrics.http_requests.labels(request.path, str(response.status)).inc()
        try:
            async with asyncio.timeout(self._config.reply_timeout_s or None):
                await response.prepare(request)
                await response.write_eof()
        except TimeoutError:
            self._metrics.http_unread_responses.inc()
            if request.transport is not None:
                request.transport.abort()
        return response

    # -- /cdc

    async def _accept_changes(self, request: web.Request) -> web.Response:
        async with self._gate.lease(request, wait_max_s=WAIT_MAX_S) as lease:
            await lease.acquire_slot()
            body = await self._read_body(request, lease)
            if request.content_type == _NDJSON:
                return await self._accept_rows(request, body, lease)
            return await self._accept_batch(request, body, lease)

    async def _accept_batch(self, request: web.Request, body: bytes, lease: RequestLease) -> web.Response:
        await self._intake.wait_for_room()
        offer, received = self._read_batch(request, body)
        self._metrics.counts.received_changes += received
        if offer is None:
            return accepted_response(received, accepted=0, is_duplicate=False)
        if wait_s := self._gate.rates.admit(offer.source, len(body), time.time()):
            self._intake.block_behind(offer)
            raise _over_rate(wait_s)
        verdict = await _until_accepted(lease, lambda: self._intake.offer_and_wait(offer))
        return self._verdict_response(verdict, source=offer.source, received=received)

    def _read_batch(self, request: web.Request, body: bytes) -> tuple[Offer | None, int]:
        """Return a batch as an offer, and the number of its changes. Nothing else of what was decoded is kept."""
        try:
            message = decode_checked(_decode_batch_head, body)
        except ProtocolError as error:
            if str(error).startswith("type: "):  # on this route it may be missing
                raise invalid("type: expected cdc_batch") from None
            raise
        source = message.source_do_id or _given_source(request)
        if not source:
            raise invalid("sourceDoId: expected a non-empty string, here, in the query as source or in X-Client-ID")
        epoch = _whole_number(request, "epoch") or 0
        session = Session(event_max_bytes=self._config.event_max_bytes, default_source=source, epoch=epoch)
        offer = session.on_batch(message, body, received_at_us=int(time.time() * 1_000_000))
        return offer, len(message.events)

    async def _accept_rows(self, request: web.Request, body: bytes, lease: RequestLease) -> web.Response:
        rows = Rows(
            source=_checked_source(_given_source(request)),
            table=request.query.get("table", ""),
            body=body,
            key=request.query.get("key", DEFAULT_KEY),
            epoch=_whole_number(request, "epoch"),
            previous_sequence=_whole_number(request, "previousSequence"),
        )
        first = _whole_number(request, "sequence")
        if first is None and rows.previous_sequence is not None:
            raise invalid("previousSequence: expected only together with sequence")
        if not has_rows(body):
            return accepted_response(0, accepted=0, is_duplicate=False)
        if wait_s := self._gate.rates.admit(rows.source, len(body), time.time()):
            if first is not None:
                self._intake.block_behind(self._rows.offer_of(rows, Position(rows.epoch or 0, first)))
            raise _over_rate(wait_s)
        verdict = await _until_accepted(lease, lambda: self._rows.accept(rows, first))
        self._metrics.counts.received_changes += rows.count or 0
        return self._verdict_response(verdict, source=rows.source, received=rows.count or 0)

    # -- /cdc/debezium

    async def _accept_debezium(self, request: web.Request) -> web.Response:
        named = request.query.get("source") or read_context(request.headers).logical_name
        source = _checked_source(named or DEFAULT_DEBEZIUM_SOURCE)
        receipt: DebeziumReceipt | None = None

        async def accept() -> Verdict:
            nonlocal receipt
            receipt = await self._debezium.accept(source, body, request.headers)
            return receipt.verdict if receipt.verdict is not None else Duplicate(0)

        async with self._gate.lease(request, wait_max_s=None) as lease:
            announced_bytes = request.content_length or 0
            await lease.pace(source, announced_bytes)
            await lease.acquire_slot()
            body = await self._read_body(request, lease)
            self._gate.rates.correct(source, len(body) - announced_bytes, time.time())
            verdict = await _until_accepted(lease, accept, retried=_RETRIED_FOR_DEBEZIUM)
        if isinstance(verdict, Refused):
            return self._refuse_verdict(verdict)
        assert receipt is not None
        received = receipt.fresh + receipt.repeated
        self._gate.count_accepted(source, changes=receipt.fresh)
        return accepted_response(received, accepted=receipt.fresh, is_duplicate=0 < received == receipt.repeated)

    # -- both

    async def _read_body(self, request: web.Request, lease: RequestLease) -> bytes:
        config = self._config
        body = await read_body(request, lease, max_bytes=config.frame_max_bytes, timeout_s=config.message_timeout_s)
        self._metrics.received_bytes.inc(len(body))
        return body

    def _verdict_response(self, verdict: Verdict, *, source: SourceId, received: int) -> web.Response:
        if isinstance(verdict, Refused):
            return self._refuse_verdict(verdict)
        durable = self._intake.durable_position(source)
        accepted = verdict.changes if isinstance(verdict, Durable) else 0
        self._gate.count_accepted(source, changes=accepted)
        return accepted_response(
            received,
            accepted=accepted,
            is_duplicate=isinstance(verdict, Duplicate),
            last_durable=durable.sequence if durable is not None else None,
        )

    def _refuse_verdict(self, verdict: Refused) -> web.Response:
        delay_ms = verdict.retry_delay_ms
        retry_after_s = math.ceil(delay_ms / 1_000) if delay_ms is not None else None
        return self._refuse(
            verdict.reason.value,
            verdict.message,
            retry=verdict.retry,
            retry_after_s=retry_after_s,
            last_durable_sequence=verdict.last_durable_sequence,
        )

    def _refuse(
        self,
        reason: str,
        message: str,
        *,
        retry: bool,
        retry_after_s: int | None = None,
        last_durable_sequence: int | None = None,
    ) -> web.Response:
        """Count a refused request, and return the response."""
        self._metrics.counts.nacks[reason] += 1
        document: dict[str, Any] = {"success": False, "reason": reason, "error": message, "shouldRetry": retry}
        if last_durable_sequence is not None:
            document["lastDurableSequence"] = last_durable_sequence
        response = json_response(document, STATUS_OF_REASON.get(reason, 400))
        if retry_after_s is not None:
            response.headers["Retry-After"] = str(retry_after_s)
        return response


async def _until_accepted(
    lease: RequestLease, accept: Callable[[], Awaitable[Verdict]], *, retried: Container[NackReason] = _RETRIED
) -> Verdict:
    """Retry while the log has no room, or for another retried reason.

    Stops when the client is gone: what it sent before must not overtake what it sends after a restart.
    """
    attempt = 0
    while True:
        verdict = await accept()
        is_retried = isinstance(verdict, Refused) and verdict.reason in retried and verdict.retry
        if not is_retried or lease.is_late:
            return verdict
        attempt += 1
        await asyncio.sleep(FULL_BACKOFF.limit_s(attempt))
        if lease.is_client_gone:
            return verdict


def _over_rate(wait_s: float) -> Busy:
    return Busy(NackReason.RATE_LIMITED, "too many requests or bytes of this source", retry_after_s=wait_s)


def _given_source(request: web.Request) -> str:
    return request.query.get("source") or request.headers.get("X-Client-ID") or ""


def _checked_source(name: str) -> SourceId:
    if not name:
        raise invalid("source: expected a non-empty name, in the query or in X-Client-ID")
    session = Session(event_max_bytes=0, default_source=name)
    try:
        session.bind("")
    except ProtocolError as error:
        raise invalid(f"source: {str(error).partition(': ')[2]}") from None
    assert session.source is not None
    return session.source


def _whole_number(request: web.Request, name: str) -> int | None:
    text = request.query.get(name, "")
    if not text:
        return None
    if not (text.isascii() and text.isdecimal() and len(text) <= _NUMBER_MAX_DIGITS and int(text) <= INT64_MAX):
        raise invalid(f"{name}: expected a whole number from 0 to {INT64_MAX}")
    return int(text)


def accepted_response(
    received: int, *, accepted: int, is_duplicate: bool, last_durable: int | None = None
) -> web.Response:
    """Return the response to a durable request: how many changes were new."""
    document: dict[str, Any] = {
        "success": True,
        "eventsReceived": received,
        "eventsAccepted": accepted,
        "isDuplicate": is_duplicate,
    }
    if last_durable is not None:
        document["lastDurableSequence"] = last_durable
    return json_response(document)
