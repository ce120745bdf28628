"""Changes over HTTP: /cdc and /cdc/debezium. Owns the requests and answers; what is new is decided as for everybody.

An answer of 2xx says durable: the log is synced. A log that is slow or full makes the answer late, not an error, up to
FULL_WAIT_S: Debezium Server gives up after five errors in a row and can then lose rows, but waits a minute for an
answer. What was not answered is sent again by the client and taken once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import orjson
from aiohttp import web

from ingest.config import IngestConfig
from ingest.debezium import DebeziumMalformed, read_context
from ingest.debezium_intake import DebeziumIntake
from ingest.errors import ProtocolError
from ingest.intake import Intake
from ingest.metrics import IngestMetrics
from ingest.offers import Duplicate, Durable, NackReason, Offer, Refused, Verdict
from ingest.protocol import Session, decode_message
from writer.changes import SourceId
from writer.envelope import BatchHead

# Below the minute that Debezium Server waits for an answer.
FULL_WAIT_S = 45.0
FULL_PAUSE_S = 0.25

DEFAULT_DEBEZIUM_SOURCE = "debezium"

_NDJSON = "application/x-ndjson"
_BATCH_START = b'{"type":"cdc_batch",'
_decode_object = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class HttpIngest:
    """What the handlers need."""

    config: IngestConfig
    intake: Intake
    debezium: DebeziumIntake
    metrics: IngestMetrics


HTTP_INGEST: web.AppKey[HttpIngest] = web.AppKey("http_ingest", HttpIngest)


def add_http_ingest(app: web.Application, parts: HttpIngest) -> None:
    """Add the routes to the control plane."""
    app[HTTP_INGEST] = parts
    app.router.add_post("/cdc", _take_batch)
    app.router.add_post("/cdc/debezium", _take_debezium)


async def _take_batch(request: web.Request) -> web.Response:
    parts = request.app[HTTP_INGEST]
    try:
        body = await _read_body(request, parts.config)
        offer, received = _read_offer(request, body, parts)
    except ProtocolError as error:
        return _refuse(parts, error.reason, str(error))
    if offer is None:
        return _answer(received, accepted=0, is_duplicate=False)
    verdict = await _until_taken(lambda: _offer(parts.intake, offer))
    if isinstance(verdict, Refused):
        return _refuse_verdict(parts, verdict)
    accepted = verdict.changes if isinstance(verdict, Durable) else 0
    durable = parts.intake.durable_position(offer.source)
    return _answer(
        received,
        accepted=accepted,
        is_duplicate=isinstance(verdict, Duplicate),
        last_durable=durable.sequence if durable is not None else None,
    )


def _read_offer(request: web.Request, body: bytes, parts: HttpIngest) -> tuple[Offer | None, int]:
    """Read a batch, or rows that become one."""
    source: str = request.query.get("source") or request.headers.get("X-Client-ID") or ""
    if request.content_type == _NDJSON:
        body = _batch_of_rows(request, body, source=source, intake=parts.intake)
    elif body.lstrip()[:1] == b"{" and b'"type"' not in body[:200]:
        body = _BATCH_START + body.lstrip()[1:]  # of a batch on its own route the type may be left out
    message = decode_message(body)
    if not isinstance(message, BatchHead):
        raise ProtocolError(NackReason.INVALID_FORMAT.value, "type: expected cdc_batch")
    session = Session(event_max_bytes=parts.config.event_max_bytes, default_source=source)
    session.epoch = _whole_number(request, "epoch", 0)
    offer = session.on_batch(message, body, received_at_us=int(time.time() * 1_000_000))
    parts.metrics.received_changes.inc(len(message.events))
    return offer, len(message.events)


def _batch_of_rows(request: web.Request, body: bytes, *, source: str, intake: Intake) -> bytes:
    """Wrap rows, one JSON object a line, as inserts, numbered from `sequence`, or on from what is durable."""
    table = request.query.get("table", "")
    durable = intake.durable_position(SourceId(source))
    first = _whole_number(request, "sequence", durable.sequence + 1 if durable is not None else 0)
    key = request.query.get("key", "id")
    lines = [line for line in body.splitlines() if line.strip()]
    events = [
        {
            "sequence": first + number,
            "operation": "INSERT",
            "table": table,
            "rowId": _row_id(line, number, key),
            "after": msgspec.Raw(line),
        }
        for number, line in enumerate(lines)
    ]
    return _encode({"type": "cdc_batch", "sourceDoId": source, "events": events})


def _whole_number(request: web.Request, name: str, default: int) -> int:
    text = request.query.get(name, "")
    if text and not text.isdecimal():
        raise ProtocolError(NackReason.INVALID_FORMAT.value, f"{name}: expected a whole number")
    return int(text) if text else default


def _row_id(line: bytes, number: int, key: str) -> str:
    try:
        value = _decode_object(line).get(key, msgspec.Raw(b'""'))
    except (msgspec.MsgspecError, UnicodeDecodeError):
        raise ProtocolError(NackReason.INVALID_FORMAT.value, f"line {number + 1}: expected a JSON object") from None
    text = bytes(value)
    return str(orjson.loads(text)) if text.startswith(b'"') else "" if text == b"null" else text.decode()


async def _take_debezium(request: web.Request) -> web.Response:
    parts = request.app[HTTP_INGEST]
    try:
        body = await _read_body(request, parts.config)
        source = _debezium_source(request)
        receipt = None

        async def take() -> Verdict:
            nonlocal receipt
            receipt = await parts.debezium.take(source, body, request.headers)
            return receipt.verdict if receipt.verdict is not None else Duplicate(0)

        verdict = await _until_taken(take)
    except DebeziumMalformed as error:
        return _refuse(parts, NackReason.INVALID_FORMAT.value, str(error))
    except ProtocolError as error:
        return _refuse(parts, error.reason, str(error))
    if isinstance(verdict, Refused):
        return _refuse_verdict(parts, verdict)
    assert receipt is not None
    return _answer(receipt.fresh + receipt.repeated, accepted=receipt.fresh, is_duplicate=not receipt.fresh)


def _debezium_source(request: web.Request) -> SourceId:
    """Name the source: as the URL says, as the connector calls itself, or by default."""
    named = request.query.get("source") or read_context(request.headers).logical_name or DEFAULT_DEBEZIUM_SOURCE
    session = Session(event_max_bytes=0, default_source=named)
    session.bind("")
    assert session.source is not None
    return session.source


async def _read_body(request: web.Request, config: IngestConfig) -> bytes:
    length = request.content_length
    if length is not None and length > config.frame_max_bytes:
        raise _too_large(config)
    body = bytearray()
    async for chunk in request.content.iter_any():
        body += chunk
        if len(body) > config.frame_max_bytes:
            raise _too_large(config)
    return bytes(body)


def _too_large(config: IngestConfig) -> ProtocolError:
    limit = config.frame_max_bytes
    return ProtocolError(NackReason.PAYLOAD_TOO_LARGE.value, f"body: expected at most {limit} bytes")


async def _offer(intake: Intake, offer: Offer) -> Verdict:
    return await (await intake.offer(offer))


async def _until_taken(take: Callable[[], Awaitable[Verdict]]) -> Verdict:
    """Try again while the log has no room; the answer is late instead of an error."""
    deadline = time.monotonic() + FULL_WAIT_S
    while True:
        verdict = await take()
        is_full = isinstance(verdict, Refused) and verdict.reason is NackReason.BUFFER_FULL and verdict.retry
        if not is_full or time.monotonic() >= deadline:
            return verdict
        await asyncio.sleep(FULL_PAUSE_S)


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


def _refuse(parts: HttpIngest, reason: str, message: str) -> web.Response:
    parts.metrics.nacks.labels(reason).inc()
    document = {"success": False, "reason": reason, "error": message}
    return _json(document, _STATUS_OF_REASON.get(reason, 400))


def _refuse_verdict(parts: HttpIngest, verdict: Refused) -> web.Response:
    parts.metrics.nacks.labels(verdict.reason.value).inc()
    document = {"success": False, "reason": verdict.reason.value, "error": verdict.message}
    return _json(document, 409 if verdict.reason is NackReason.INVALID_SEQUENCE else 503)


def _json(document: Mapping[str, Any], status: int) -> web.Response:
    return web.Response(body=orjson.dumps(document), status=status, content_type="application/json")
