"""What HTTP ingest answers. Owns the documents and which status a reason has."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import orjson
from aiohttp import web

from ingest.errors import ProtocolError
from ingest.http_bodies import TIMEOUT
from ingest.http_gate import Busy
from ingest.offers import NackReason, Refused


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
