"""Changes over HTTP: /cdc and /cdc/debezium. Owns the requests and answers; what is new is decided as for everybody.

An answer of 2xx says durable: the log is synced. A log that is slow or full makes the answer late, not an error, up to
FULL_WAIT_S: Debezium Server gives up after five errors in a row and can then lose rows, but waits a minute for an
answer. What was not answered is sent again by the client and taken once, if it has numbers or positions of its own.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import orjson
from aiohttp import web

from ingest.batch_checks import invalid
from ingest.config import IngestConfig
from ingest.debezium import DebeziumMalformed, read_context
from ingest.debezium_intake import DebeziumIntake, DebeziumReceipt
from ingest.errors import ProtocolError
from ingest.intake import Intake
from ingest.metrics import IngestMetrics
from ingest.ndjson import read_rows
from ingest.offers import Duplicate, Durable, NackReason, Offer, Refused, Verdict
from ingest.protocol import Session, describe_invalid
from ingest.row_intake import RowIntake, Rows
from writer.changes import SourceId
from writer.envelope import INT64_MAX, BatchHead, decode_deeper

# Below the minute that Debezium Server waits for an answer.
FULL_WAIT_S = 45.0
FULL_PAUSE_S = 0.25

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
    metrics: IngestMetrics


HTTP_INGEST: web.AppKey[HttpIngest] = web.AppKey("http_ingest", HttpIngest)
ROW_INTAKE: web.AppKey[RowIntake] = web.AppKey("row_intake", RowIntake)


def add_http_ingest(app: web.Application, parts: HttpIngest) -> None:
    """Add the routes to the control plane."""
    app[HTTP_INGEST] = parts
    app[ROW_INTAKE] = RowIntake(parts.intake, event_max_bytes=parts.config.event_max_bytes, clock=time.time)
    app.router.add_post("/cdc", _take_changes)
    app.router.add_post("/cdc/debezium", _take_debezium)


# -- /cdc


async def _take_changes(request: web.Request) -> web.Response:
    parts = request.app[HTTP_INGEST]
    try:
        body = await _read_body(request, parts)
        if request.content_type == _NDJSON:
            return await _take_rows(request, body, parts)
        return await _take_batch(request, body, parts)
    except ProtocolError as error:
        return _refuse(parts, error.reason, str(error), retry=error.retry)


async def _take_batch(request: web.Request, body: bytes, parts: HttpIngest) -> web.Response:
    message = _decode_batch(body)
    source = message.source_do_id or _given_source(request)
    if not source:
        raise invalid("sourceDoId: expected a non-empty string, here, in the query as source or in X-Client-ID")
    session = Session(event_max_bytes=parts.config.event_max_bytes, default_source=source)
    session.epoch = _whole_number(request, "epoch") or 0
    offer = session.on_batch(message, body, received_at_us=int(time.time() * 1_000_000))
    received = len(message.events)
    parts.metrics.received_changes.inc(received)
    if offer is None:
        return _answer(received, accepted=0, is_duplicate=False)
    verdict = await _until_taken(request, lambda: _offer(parts.intake, offer))
    return _answer_verdict(parts, verdict, source=offer.source, received=received)


def _decode_batch(body: bytes) -> BatchHead:
    """Decode a batch, whose type may be left out on a route of its own."""
    try:
        return decode_deeper(_decode_batch_head, body)
    except msgspec.ValidationError as error:
        message = describe_invalid(str(error))
        raise invalid("type: expected cdc_batch" if message.startswith("type: ") else message) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise invalid(f"not valid JSON: {error}") from None
    except RecursionError:
        raise invalid("a value is nested too deeply") from None


async def _offer(intake: Intake, offer: Offer) -> Verdict:
    return await (await intake.offer(offer))


async def _take_rows(request: web.Request, body: bytes, parts: HttpIngest) -> web.Response:
    rows = Rows(
        source=_checked_source(_given_source(request)),
        table=request.query.get("table", ""),
        left=read_rows(body, key=request.query.get("key", DEFAULT_KEY), row_max_bytes=parts.config.event_max_bytes),
        epoch=_whole_number(request, "epoch"),
    )
    first, received = _whole_number(request, "sequence"), len(rows.left)
    if first is not None and first + received - 1 > INT64_MAX:
        raise invalid(f"sequence: expected a whole number of at most {INT64_MAX} for every row")
    if not received:
        return _answer(0, accepted=0, is_duplicate=False)
    parts.metrics.received_changes.inc(received)
    intake = request.app[ROW_INTAKE]
    take = (
        functools.partial(intake.take, rows) if first is None else functools.partial(intake.take_numbered, rows, first)
    )
    verdict = await _until_taken(request, take)
    return _answer_verdict(parts, verdict, source=rows.source, received=received)


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


async def _take_debezium(request: web.Request) -> web.Response:
    parts = request.app[HTTP_INGEST]
    receipt: DebeziumReceipt | None = None

    async def take() -> Verdict:
        nonlocal receipt
        receipt = await parts.debezium.take(source, body, request.headers)
        return receipt.verdict if receipt.verdict is not None else Duplicate(0)

    try:
        body = await _read_body(request, parts)
        source = _debezium_source(request)
        verdict = await _until_taken(request, take)
    except DebeziumMalformed as error:
        return _refuse(parts, NackReason.INVALID_FORMAT.value, str(error))
    except ProtocolError as error:
        return _refuse(parts, error.reason, str(error), retry=error.retry)
    if isinstance(verdict, Refused):
        return _refuse(parts, verdict.reason.value, verdict.message, retry=verdict.retry, is_verdict=True)
    assert receipt is not None
    received = receipt.fresh + receipt.repeated
    return _answer(received, accepted=receipt.fresh, is_duplicate=0 < received == receipt.repeated)


def _debezium_source(request: web.Request) -> SourceId:
    """Name the source: as the URL says, as the connector calls itself, or by default."""
    named = request.query.get("source") or read_context(request.headers).logical_name
    return _checked_source(named or DEFAULT_DEBEZIUM_SOURCE)


# -- both


async def _read_body(request: web.Request, parts: HttpIngest) -> bytes:
    limit = parts.config.frame_max_bytes
    if (request.content_length or 0) > limit:
        raise _too_large(limit)
    body = bytearray()
    try:
        async for chunk in request.content.iter_any():
            body += chunk
            if len(body) > limit:
                raise _too_large(limit)
    except web.RequestPayloadError:
        request.content.feed_eof()  # nothing more can be read of it, and the server would try
        request.protocol.close()
        encoding = request.headers.get("Content-Encoding", "identity")
        raise invalid(f"body: expected what its Content-Encoding says: {encoding}") from None
    parts.metrics.received_bytes.inc(len(body))
    return bytes(body)


def _too_large(limit: int) -> ProtocolError:
    return ProtocolError(NackReason.PAYLOAD_TOO_LARGE.value, f"body: expected at most {limit} bytes")


async def _until_taken(request: web.Request, take: Callable[[], Awaitable[Verdict]]) -> Verdict:
    """Try again while the log has no room; the answer is late instead of an error.

    Not for a client that is gone: what it sends next, restarted, must not be overtaken by what it sent before.
    """
    deadline = time.monotonic() + FULL_WAIT_S
    while True:
        verdict = await take()
        is_full = isinstance(verdict, Refused) and verdict.reason is NackReason.BUFFER_FULL and verdict.retry
        if not is_full or time.monotonic() >= deadline:
            return verdict
        await asyncio.sleep(FULL_PAUSE_S)
        if request.transport is None or request.transport.is_closing():
            return verdict


def _answer_verdict(parts: HttpIngest, verdict: Verdict, *, source: SourceId, received: int) -> web.Response:
    if isinstance(verdict, Refused):
        return _refuse(parts, verdict.reason.value, verdict.message, retry=verdict.retry, is_verdict=True)
    durable = parts.intake.durable_position(source)
    return _answer(
        received,
        accepted=verdict.changes if isinstance(verdict, Durable) else 0,
        is_duplicate=isinstance(verdict, Duplicate),
        last_durable=durable.sequence if durable is not None else None,
    )


def _answer(received: int, *, accepted: int, is_duplicate: bool, last_durable: int | None = None) -> web.Response:
    document: dict[str, Any] = {
        "success": True,
        "eventsReceived": received,
        "eventsAccepted": accepted,
        "isDuplicate": is_duplicate,
    }
    if last_durable is not None:
        document["lastDurableSequence"] = last_durable
    return _json(document, 200)


_STATUS_OF_REASON = {
    NackReason.PAYLOAD_TOO_LARGE.value: 413,
    NackReason.EVENT_TOO_LARGE.value: 413,
    NackReason.INVALID_SEQUENCE.value: 409,
}


def _refuse(
    parts: HttpIngest, reason: str, message: str, *, retry: bool = False, is_verdict: bool = False
) -> web.Response:
    """Refuse a request: for what it says, or, by the log's verdict, for what the log can take."""
    parts.metrics.nacks.labels(reason).inc()
    document = {"success": False, "reason": reason, "error": message, "shouldRetry": retry}
    return _json(document, _STATUS_OF_REASON.get(reason, 503 if is_verdict else 400))


def _json(document: Mapping[str, Any], status: int) -> web.Response:
    return web.Response(body=orjson.dumps(document), status=status, content_type="application/json")
