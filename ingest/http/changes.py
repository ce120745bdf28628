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
from dataclasses import dataclass
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

_decode_batch_head = msgspec.json.Decoder(BatchHead).decode


@dataclass(frozen=True, slots=True)
class HttpIngest:
    """The parts that the handlers use."""

    config: IngestConfig
    intake: Intake
    debezium: DebeziumIntake
    gate: RequestGate
    metrics: IngestMetrics


HTTP_INGEST: web.AppKey[HttpIngest] = web.AppKey("http_ingest", HttpIngest)
ROW_INTAKE: web.AppKey[RowIntake] = web.AppKey("row_intake", RowIntake)

_Accept: TypeAlias = Callable[[web.Request, HttpIngest], Awaitable[web.Response]]


def add_http_ingest(app: web.Application, parts: HttpIngest) -> None:
    """Add the routes to the control plane."""
    app[HTTP_INGEST] = parts
    app[ROW_INTAKE] = RowIntake(parts.intake, event_max_bytes=parts.config.event_max_bytes, clock=time.time)
    app.router.add_post(CDC, functools.partial(_respond, _accept_changes))
    app.router.add_post(DEBEZIUM, functools.partial(_respond, _accept_debezium))


async def _respond(accept: _Accept, request: web.Request) -> web.Response:
    """Handle a request and send the response after its lease has ended: a client that does not read blocks no other."""
    parts = request.app[HTTP_INGEST]
    try:
        response = await accept(request, parts)
    except ProtocolError as error:
        parts.metrics.counts.nacks[error.reason] += 1
        retry_after_s = error.retry_after_s if isinstance(error, Busy) else None
        response = refused_response(error.reason, str(error), retry=error.retry, retry_after_s=retry_after_s)
    except DebeziumMalformed as error:
        parts.metrics.counts.nacks[NackReason.INVALID_FORMAT.value] += 1
        response = refused_response(NackReason.INVALID_FORMAT.value, str(error))
    except ConnectionError:  # the client is gone
        return web.Response(status=400)
    parts.metrics.http_requests.labels(request.path, str(response.status)).inc()
    try:
        async with asyncio.timeout(parts.config.reply_timeout_s or None):
            await response.prepare(request)
            await response.write_eof()
    except TimeoutError:
        parts.metrics.http_unread_responses.inc()
        if request.transport is not None:
            request.transport.abort()
    return response


# -- /cdc


async def _accept_changes(request: web.Request, parts: HttpIngest) -> web.Response:
    async with parts.gate.lease(request, wait_max_s=WAIT_MAX_S) as lease:
        await lease.acquire_slot()
        body = await _read_body(request, parts, lease)
        if request.content_type == _NDJSON:
            return await _accept_rows(request, body, parts=parts, lease=lease)
        return await _accept_batch(request, body, parts=parts, lease=lease)


async def _accept_batch(request: web.Request, body: bytes, *, parts: HttpIngest, lease: RequestLease) -> web.Response:
    await parts.intake.wait_for_room()
    offer, received = _read_batch(request, body, parts.config)
    parts.metrics.counts.received_changes += received
    if offer is None:
        return accepted_response(received, accepted=0, is_duplicate=False)
    if wait_s := parts.gate.rates.admit(offer.source, len(body), time.time()):
        parts.intake.block_behind(offer)
        raise _over_rate(wait_s)
    verdict = await _until_accepted(lease, lambda: parts.intake.offer_and_wait(offer))
    return _verdict_response(parts, verdict, source=offer.source, received=received)


def _read_batch(request: web.Request, body: bytes, config: IngestConfig) -> tuple[Offer | None, int]:
    """Return a batch as an offer, and the number of its changes. Nothing else of what was decoded is kept."""
    message = _decode_batch(body)
    source = message.source_do_id or _given_source(request)
    if not source:
        raise invalid("sourceDoId: expected a non-empty string, here, in the query as source or in X-Client-ID")
    session = Session(event_max_bytes=config.event_max_bytes, default_source=source)
    session.epoch = _whole_number(request, "epoch") or 0
    offer = session.on_batch(message, body, received_at_us=int(time.time() * 1_000_000))
    return offer, len(message.events)


def _decode_batch(body: bytes) -> BatchHead:
    """Decode a batch; on this route its type may be missing."""
    try:
        return decode_checked(_decode_batch_head, body)
    except ProtocolError as error:
        if str(error).startswith("type: "):
            raise invalid("type: expected cdc_batch") from None
        raise


async def _accept_rows(request: web.Request, body: bytes, *, parts: HttpIngest, lease: RequestLease) -> web.Response:
    rows = Rows(
        source=_checked_source(_given_source(request)),
        table=request.query.get("table", ""),
        body=body,
        key=request.query.get("key", DEFAULT_KEY),
        epoch=_whole_number(request, "epoch"),
    )
    first = _whole_number(request, "sequence")
    if not has_rows(body):
        return accepted_response(0, accepted=0, is_duplicate=False)
    intake = request.app[ROW_INTAKE]
    if wait_s := parts.gate.rates.admit(rows.source, len(body), time.time()):
        if first is not None:
            parts.intake.block_behind(intake.offer_of(rows, Position(rows.epoch or 0, first)))
        raise _over_rate(wait_s)
    accept = (
        functools.partial(intake.accept, rows)
        if first is None
        else functools.partial(intake.accept_numbered, rows, first)
    )
    verdict = await _until_accepted(lease, accept)
    parts.metrics.counts.received_changes += rows.count or 0
    return _verdict_response(parts, verdict, source=rows.source, received=rows.count or 0)


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


# -- /cdc/debezium


async def _accept_debezium(request: web.Request, parts: HttpIngest) -> web.Response:
    named = request.query.get("source") or read_context(request.headers).logical_name
    source = _checked_source(named or DEFAULT_DEBEZIUM_SOURCE)
    receipt: DebeziumReceipt | None = None

    async def accept() -> Verdict:
        nonlocal receipt
        receipt = await parts.debezium.accept(source, body, request.headers)
        return receipt.verdict if receipt.verdict is not None else Duplicate(0)

    async with parts.gate.lease(request, wait_max_s=None) as lease:
        announced_bytes = request.content_length or 0
        await lease.pace(source, announced_bytes)
        await lease.acquire_slot()
        body = await _read_body(request, parts, lease)
        parts.gate.rates.correct(source, len(body) - announced_bytes, time.time())
        verdict = await _until_accepted(lease, accept, retried=_RETRIED_FOR_DEBEZIUM)
    if isinstance(verdict, Refused):
        return _refuse(parts, verdict)
    assert receipt is not None
    received = receipt.fresh + receipt.repeated
    parts.gate.count_accepted(source, changes=receipt.fresh)
    return accepted_response(received, accepted=receipt.fresh, is_duplicate=0 < received == receipt.repeated)


# -- both


async def _read_body(request: web.Request, parts: HttpIngest, lease: RequestLease) -> bytes:
    config = parts.config
    body = await read_body(request, lease, max_bytes=config.frame_max_bytes, timeout_s=config.message_timeout_s)
    parts.metrics.received_bytes.inc(len(body))
    return body


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


def _verdict_response(parts: HttpIngest, verdict: Verdict, *, source: SourceId, received: int) -> web.Response:
    if isinstance(verdict, Refused):
        return _refuse(parts, verdict)
    durable = parts.intake.durable_position(source)
    accepted = verdict.changes if isinstance(verdict, Durable) else 0
    parts.gate.count_accepted(source, changes=accepted)
    return accepted_response(
        received,
        accepted=accepted,
        is_duplicate=isinstance(verdict, Duplicate),
        last_durable=durable.sequence if durable is not None else None,
    )


# -- responses


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


# All other reasons are 400: the request itself is wrong.
STATUS_OF_REASON: Mapping[str, int] = {
    TIMEOUT: 408,
    NackReason.INVALID_SEQUENCE.value: 409,
    NackReason.PAYLOAD_TOO_LARGE.value: 413,
    NackReason.EVENT_TOO_LARGE.value: 413,
    NackReason.RATE_LIMITED.value: 429,
    NackReason.CONNECTION_LIMIT.value: 503,
    NackReason.BUFFER_FULL.value: 503,
    NackReason.SHUTTING_DOWN.value: 503,
    NackReason.INTERNAL_ERROR.value: 503,
}


def refused_response(
    reason: str, message: str, *, retry: bool = False, retry_after_s: int | None = None
) -> web.Response:
    """Return the response to a refused request."""
    document = {"success": False, "reason": reason, "error": message, "shouldRetry": retry}
    response = json_response(document, STATUS_OF_REASON.get(reason, 400))
    if retry_after_s is not None:
        response.headers["Retry-After"] = str(retry_after_s)
    return response


def _refuse(parts: HttpIngest, verdict: Refused) -> web.Response:
    """Count a request that the intake refused, and return the response."""
    parts.metrics.counts.nacks[verdict.reason.value] += 1
    delay_ms = verdict.retry_delay_ms
    retry_after_s = math.ceil(delay_ms / 1_000) if delay_ms is not None else None
    return refused_response(verdict.reason.value, verdict.message, retry=verdict.retry, retry_after_s=retry_after_s)
