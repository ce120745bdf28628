"""Changes over HTTP: /cdc and /cdc/debezium. Owns the requests and answers; what is new is decided as for everybody.

An answer of 2xx says durable: the log is synced. Where there is no room, in the log, in memory or among the requests
under way, the answer is late instead of an error: for /cdc up to WAIT_MAX_S, for Debezium as long as it waits, because
Debezium Server gives up after five errors in a row and can then lose rows. What was not answered is sent again by the
client and taken once, if it has numbers or positions of its own.
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
import orjson
from aiohttp import web

from lakefeed.contract.changes import INT64_MAX, Position, SourceId
from lakefeed.ingest.config import IngestConfig
from lakefeed.ingest.debezium.events import DebeziumMalformed
from lakefeed.ingest.debezium.forms import read_context
from lakefeed.ingest.errors import ProtocolError
from lakefeed.ingest.http.bodies import TIMEOUT, read_body
from lakefeed.ingest.http.gate import Busy, HttpGate, Visit
from lakefeed.ingest.intake.debezium import DebeziumIntake, DebeziumReceipt
from lakefeed.ingest.intake.intake import Intake
from lakefeed.ingest.intake.rows import RowIntake, Rows, has_rows
from lakefeed.ingest.metrics import IngestMetrics
from lakefeed.ingest.protocol.batch import invalid
from lakefeed.ingest.protocol.messages import decode_checked
from lakefeed.ingest.protocol.offers import Duplicate, Durable, NackReason, Offer, Refused, Verdict
from lakefeed.ingest.protocol.session import Session
from lakefeed.writer.wire.json_batch import BatchHead

# --- ingest.http_answers ----------------------------------------------------------------------------------------------
#
# What HTTP ingest answers. Owns the documents and which status a reason has.


def taken(received: int, *, accepted: int, is_duplicate: bool, last_durable: int | None = None) -> web.Response:
    """Tell that a request is durable, and what was new of it."""
    document: dict[str, Any] = {
        "success": True,
        "eventsReceived": received,
        "eventsAccepted": accepted,
        "isDuplicate": is_duplicate,
    }
    if last_durable is not None:
        document["lastDurableSequence"] = last_durable
    return _json(document, 200)


# All others are 400: something that the request says.
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


def refused(reason: str, message: str, *, retry: bool = False, retry_after_s: int | None = None) -> web.Response:
    """Refuse a request."""
    document = {"success": False, "reason": reason, "error": message, "shouldRetry": retry}
    response = _json(document, STATUS_OF_REASON.get(reason, 400))
    if retry_after_s is not None:
        response.headers["Retry-After"] = str(retry_after_s)
    return response


def refused_for(error: ProtocolError) -> web.Response:
    """Refuse a request for what it says, or because there is no room for it."""
    retry_after_s = error.retry_after_s if isinstance(error, Busy) else None
    return refused(error.reason, str(error), retry=error.retry, retry_after_s=retry_after_s)


def refused_by(verdict: Refused) -> web.Response:
    """Refuse a request that the log has not taken."""
    delay_ms = verdict.retry_delay_ms
    retry_after_s = math.ceil(delay_ms / 1_000) if delay_ms is not None else None
    return refused(verdict.reason.value, verdict.message, retry=verdict.retry, retry_after_s=retry_after_s)


def _json(document: Mapping[str, Any], status: int) -> web.Response:
    return web.Response(body=orjson.dumps(document), status=status, content_type="application/json")


# --- ingest.http_ingest -----------------------------------------------------------------------------------------------


CDC, DEBEZIUM = "/cdc", "/cdc/debezium"
ROUTES = (CDC, DEBEZIUM)

# How long a request on /cdc waits for room: below the minute that clients commonly wait for an answer.
WAIT_MAX_S = 45.0

# Between two tries while the log is full: the second is soon, later ones cost reading the request again.
FULL_PAUSE_S = 0.25
FULL_PAUSE_MAX_S = 2.0

# Refusals that are waited out. Debezium also waits for a log that has failed, and for a catalog that cannot be asked
# where a source stands: someone will look after these, and after some errors in a row it would end.
_PASSING = frozenset({NackReason.BUFFER_FULL})
_PASSING_FOR_DEBEZIUM = _PASSING | {NackReason.INTERNAL_ERROR}

DEFAULT_DEBEZIUM_SOURCE = "debezium"
DEFAULT_KEY = "id"

_NDJSON = "application/x-ndjson"
_NUMBER_MAX_DIGITS = len(str(INT64_MAX))

_decode_batch_head = msgspec.json.Decoder(BatchHead).decode


@dataclass(frozen=True, slots=True)
class HttpIngest:
    """What the handlers need."""

    config: IngestConfig
    intake: Intake
    debezium: DebeziumIntake
    gate: HttpGate
    metrics: IngestMetrics


HTTP_INGEST: web.AppKey[HttpIngest] = web.AppKey("http_ingest", HttpIngest)
ROW_INTAKE: web.AppKey[RowIntake] = web.AppKey("row_intake", RowIntake)

_Take: TypeAlias = Callable[[web.Request, HttpIngest], Awaitable[web.Response]]


def add_http_ingest(app: web.Application, parts: HttpIngest) -> None:
    """Add the routes to the control plane."""
    app[HTTP_INGEST] = parts
    app[ROW_INTAKE] = RowIntake(parts.intake, event_max_bytes=parts.config.event_max_bytes, clock=time.time)
    app.router.add_post(CDC, functools.partial(_answered, _take_changes))
    app.router.add_post(DEBEZIUM, functools.partial(_answered, _take_debezium))


async def _answered(take: _Take, request: web.Request) -> web.Response:
    """Answer a request, which by then holds nothing any more: a client that does not read is waited for alone."""
    parts = request.app[HTTP_INGEST]
    try:
        response = await take(request, parts)
    except ProtocolError as error:
        parts.metrics.counts.nacks[error.reason] += 1
        response = refused_for(error)
    except DebeziumMalformed as error:
        parts.metrics.counts.nacks[NackReason.INVALID_FORMAT.value] += 1
        response = refused(NackReason.INVALID_FORMAT.value, str(error))
    except ConnectionError:  # nobody is there to read it
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


async def _take_changes(request: web.Request, parts: HttpIngest) -> web.Response:
    async with parts.gate.visit(request, wait_max_s=WAIT_MAX_S) as visit:
        await visit.enter()
        body = await _read_body(request, parts, visit)
        if request.content_type == _NDJSON:
            return await _take_rows(request, body, parts=parts, visit=visit)
        return await _take_batch(request, body, parts=parts, visit=visit)


async def _take_batch(request: web.Request, body: bytes, *, parts: HttpIngest, visit: Visit) -> web.Response:
    await parts.intake.wait_for_room()
    offer, received = _read_batch(request, body, parts.config)
    parts.metrics.counts.received_changes += received
    if offer is None:
        return taken(received, accepted=0, is_duplicate=False)
    if wait_s := parts.gate.rates.admit(offer.source, len(body), time.time()):
        parts.intake.hold(offer)
        raise _too_fast(wait_s)
    verdict = await _until_taken(visit, lambda: _offer(parts.intake, offer))
    return _answer_verdict(parts, verdict, source=offer.source, received=received)


def _read_batch(request: web.Request, body: bytes, config: IngestConfig) -> tuple[Offer | None, int]:
    """Read a batch as an offer, and count its changes. What else was decoded does not wait with it."""
    message = _decode_batch(body)
    source = message.source_do_id or _given_source(request)
    if not source:
        raise invalid("sourceDoId: expected a non-empty string, here, in the query as source or in X-Client-ID")
    session = Session(event_max_bytes=config.event_max_bytes, default_source=source)
    session.epoch = _whole_number(request, "epoch") or 0
    offer = session.on_batch(message, body, received_at_us=int(time.time() * 1_000_000))
    return offer, len(message.events)


def _decode_batch(body: bytes) -> BatchHead:
    """Decode a batch, whose type may be left out on a route of its own."""
    try:
        return decode_checked(_decode_batch_head, body)
    except ProtocolError as error:
        if str(error).startswith("type: "):
            raise invalid("type: expected cdc_batch") from None
        raise


async def _offer(intake: Intake, offer: Offer) -> Verdict:
    return await (await intake.offer(offer))


async def _take_rows(request: web.Request, body: bytes, *, parts: HttpIngest, visit: Visit) -> web.Response:
    rows = Rows(
        source=_checked_source(_given_source(request)),
        table=request.query.get("table", ""),
        body=body,
        key=request.query.get("key", DEFAULT_KEY),
        epoch=_whole_number(request, "epoch"),
    )
    first = _whole_number(request, "sequence")
    if not has_rows(body):
        return taken(0, accepted=0, is_duplicate=False)
    intake = request.app[ROW_INTAKE]
    if wait_s := parts.gate.rates.admit(rows.source, len(body), time.time()):
        if first is not None:
            parts.intake.hold(intake.offer_of(rows, Position(rows.epoch or 0, first)))
        raise _too_fast(wait_s)
    take = (
        functools.partial(intake.take, rows) if first is None else functools.partial(intake.take_numbered, rows, first)
    )
    verdict = await _until_taken(visit, take)
    parts.metrics.counts.received_changes += rows.count or 0
    return _answer_verdict(parts, verdict, source=rows.source, received=rows.count or 0)


def _too_fast(wait_s: float) -> Busy:
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


async def _take_debezium(request: web.Request, parts: HttpIngest) -> web.Response:
    source = _debezium_source(request)
    receipt: DebeziumReceipt | None = None

    async def take() -> Verdict:
        nonlocal receipt
        receipt = await parts.debezium.take(source, body, request.headers)
        return receipt.verdict if receipt.verdict is not None else Duplicate(0)

    async with parts.gate.visit(request, wait_max_s=None) as visit:
        announced_bytes = request.content_length or 0
        await visit.pace(source, announced_bytes)
        await visit.enter()
        body = await _read_body(request, parts, visit)
        parts.gate.rates.correct(source, len(body) - announced_bytes, time.time())
        verdict = await _until_taken(visit, take, passing=_PASSING_FOR_DEBEZIUM)
    if isinstance(verdict, Refused):
        parts.metrics.counts.nacks[verdict.reason.value] += 1
        return refused_by(verdict)
    assert receipt is not None
    received = receipt.fresh + receipt.repeated
    parts.gate.note_taken(source, changes=receipt.fresh)
    return taken(received, accepted=receipt.fresh, is_duplicate=0 < received == receipt.repeated)


def _debezium_source(request: web.Request) -> SourceId:
    """Name the source: as the URL says, as the connector calls itself, or by default."""
    named = request.query.get("source") or read_context(request.headers).logical_name
    return _checked_source(named or DEFAULT_DEBEZIUM_SOURCE)


# -- both


async def _read_body(request: web.Request, parts: HttpIngest, visit: Visit) -> bytes:
    config = parts.config
    body = await read_body(request, visit, max_bytes=config.frame_max_bytes, timeout_s=config.message_timeout_s)
    parts.metrics.received_bytes.inc(len(body))
    return body


async def _until_taken(
    visit: Visit, take: Callable[[], Awaitable[Verdict]], *, passing: Container[NackReason] = _PASSING
) -> Verdict:
    """Try again while the log has no room, or what else is to pass; the answer is late instead of an error.

    Not for a client that is gone: what it sends next, restarted, must not be overtaken by what it sent before.
    """
    pause_s = FULL_PAUSE_S
    while True:
        verdict = await take()
        may_pass = isinstance(verdict, Refused) and verdict.reason in passing and verdict.retry
        if not may_pass or visit.is_late:
            return verdict
        await asyncio.sleep(pause_s)
        if visit.is_gone:
            return verdict
        pause_s = min(2 * pause_s, FULL_PAUSE_MAX_S)


def _answer_verdict(parts: HttpIngest, verdict: Verdict, *, source: SourceId, received: int) -> web.Response:
    if isinstance(verdict, Refused):
        parts.metrics.counts.nacks[verdict.reason.value] += 1
        return refused_by(verdict)
    durable = parts.intake.durable_position(source)
    accepted = verdict.changes if isinstance(verdict, Durable) else 0
    parts.gate.note_taken(source, changes=accepted)
    return taken(
        received,
        accepted=accepted,
        is_duplicate=isinstance(verdict, Duplicate),
        last_durable=durable.sequence if durable is not None else None,
    )
