"""The WebSocket handshake, and admission control of connections and messages. `admission` decides, this acts.

    X-Client-ID    source, unless `connect` or the first batch names another
    X-Shard-Name   label, shown in /status
    X-Priority     `high` is not shed

Rejected clients get 429 with Retry-After; accepted ones get rate-limit headers. An unauthenticated client is accepted
and then closed with 4001, because browsers expose no other handshake error.

Nothing here runs per change: a message costs one look at its buckets, and load is measured twice a second.
"""

from __future__ import annotations

import asyncio
import http
import random
import time
from collections.abc import Iterable
from typing import TypeAlias

import orjson
from websockets.asyncio.server import ServerConnection
from websockets.datastructures import Headers
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response
from websockets.protocol import State

from lakefeed.ingest.admission.addresses import client_address, masked
from lakefeed.ingest.admission.auth import Auth, Unauthenticated
from lakefeed.ingest.admission.limits import (
    CRITICAL_ABOVE,
    TOO_MANY_CONNECTIONS,
    TOO_MANY_REFUSALS,
    Allowance,
    ConnectionSlot,
    LoadLevel,
    MessageLimiter,
    Rejected,
    SharedLimits,
    find_timeout,
    load_level,
)
from lakefeed.ingest.config import IngestConfig
from lakefeed.ingest.metrics import IngestMetrics
from lakefeed.ingest.protocol.batch import head_of
from lakefeed.ingest.protocol.messages import ClientMessage, Connect, DebeziumBatch, Disconnect, Heartbeat
from lakefeed.ingest.protocol.offers import NackReason, Refused
from lakefeed.ingest.websocket.client import ClientConnection
from lakefeed.ingest.websocket.socket import BudgetedConnection
from lakefeed.writer.wire.arrow_frame import ArrowFrame
from lakefeed.writer.wire.json_batch import BatchHead

PATH = "/ws"

# Longer labels only fill memory and /status.
LABEL_MAX_CHARS = 255

# The spread of a retry delay, so that clients which were refused together do not return together.
JITTER_MIN, JITTER_MAX = 0.5, 1.5

# When a client with one connection too many may try again: by then a lost one may have been noticed.
TOO_MANY_CONNECTIONS_DELAY_MS = 5_000

# How long a client has to answer our close frame before the connection is aborted.
CLOSE_TIMEOUT_S = 5.0

_LEVELS = list(LoadLevel)

AnyMessage: TypeAlias = ClientMessage | ArrowFrame


class AdmissionControl:
    """Accepts or rejects clients, admits their messages, sheds load, and closes clients that exceed a timeout."""

    def __init__(self, config: IngestConfig, *, limits: SharedLimits, auth: Auth, metrics: IngestMetrics) -> None:
        self.level = LoadLevel.NORMAL
        self._config = config
        self._limits = limits
        self._auth = auth
        self._metrics = metrics
        self._trusted_proxies = config.proxy_networks()

    # -- connections

    def on_request(self, client: ServerConnection, request: Request) -> Response | None:
        """Take a connection slot for the client, or return why not."""
        if request.path.partition("?")[0] != PATH:
            return client.respond(http.HTTPStatus.NOT_FOUND, f"the data plane listens on {PATH}\n")
        assert isinstance(client, BudgetedConnection)
        if client.state is not State.CONNECTING:  # gone already: nothing would release its slot
            return client.respond(http.HTTPStatus.SERVICE_UNAVAILABLE, "closed\n")

        def header(name: str) -> str:
            """Return a header; if it was sent several times, all values joined by commas, as HTTP defines it."""
            return ",".join(request.headers.get_all(name))

        now, peer = time.time(), client.remote_address
        slot = ConnectionSlot(
            address=client_address(str(peer[0]) if peer else "", self._trusted_proxies, header),
            source=header("X-Client-ID"),
            shard=header("X-Shard-Name")[:LABEL_MAX_CHARS],
            is_high_priority=header("X-Priority").strip().lower() == "high",
        )
        offered = [text.strip() for text in header("Sec-WebSocket-Protocol").split(",")]
        authorization = header("Authorization") or None
        client.principal = self._auth.admit_websocket(PATH, authorization, offered)
        if isinstance(client.principal, Unauthenticated):
            slot.source = ""  # it must not use up the connections of the source that it names
        rejected = self._limits.slots.acquire(slot, now)
        if rejected is not None:
            self._metrics.counts.rejected_connections[rejected.reason.value] += 1
            return _reject(client, rejected, slot, allowance=self._limits.slots.allowance(now))
        client.slot = slot
        client.on_lost = lambda: self._limits.slots.release(slot)
        return None

    def on_response(self, client: ServerConnection, request: Request, response: Response) -> None:
        """Add the rate-limit headers for an accepted client."""
        del client, request
        if response.status_code == http.HTTPStatus.SWITCHING_PROTOCOLS:
            _add_allowance(response.headers, self._limits.slots.allowance(time.time()))

    # -- messages

    def new_limiter(self, now: float) -> MessageLimiter:
        """Return the limits on the messages of a client that was accepted."""
        return MessageLimiter(self._config, jitter, now)

    def sheds(self, client: ClientConnection) -> bool:
        """Return whether a client's batches are refused for now, so that waiting for room is pointless."""
        is_critical = self._config.load_shedding and self.level is LoadLevel.CRITICAL
        return is_critical and not client.slot.is_high_priority

    def admit(self, message: AnyMessage, client: ClientConnection, *, size_bytes: int, now: float) -> Refused | None:
        """Admit a message, or refuse it with a retry delay."""
        match message:
            case Disconnect():
                return None
            case Heartbeat():
                refused = client.limiter.admit_heartbeat(now)
            case BatchHead() | ArrowFrame() | DebeziumBatch():
                head = message if isinstance(message, DebeziumBatch) else head_of(message)
                refused = self._admit_batch(head.source_do_id or client.slot.source, client, size_bytes, now)
            case Connect():
                refused = self._bind(message.source_do_id, client) or client.limiter.admit(now)
            case _:
                refused = client.limiter.admit(now)
        if client.limiter.ignores_refusals:
            client.closing = TOO_MANY_REFUSALS
        if isinstance(message, Connect | BatchHead) and message.source_shard_name:
            client.slot.shard = message.source_shard_name[:LABEL_MAX_CHARS]
        return refused

    def _admit_batch(self, source: str, client: ClientConnection, size_bytes: int, now: float) -> Refused | None:
        refused = self._bind(source, client)
        if refused is not None:
            return refused
        if self.sheds(client):
            return client.limiter.shed(now)
        bucket = self._limits.source_bytes.bucket(source, now) if source else None
        return client.limiter.admit(now, size_bytes=size_bytes, source=bucket)

    def _bind(self, source: str, client: ClientConnection) -> Refused | None:
        if not source or self._limits.slots.bind(client.slot, source):
            return None
        client.closing = TOO_MANY_CONNECTIONS
        return Refused(
            NackReason.CONNECTION_LIMIT,
            f"too many connections of this source: limit={self._config.connections_per_source_max}",
            retry=True,
            retry_delay_ms=TOO_MANY_CONNECTIONS_DELAY_MS,
        )

    # -- closing

    def find_timeouts(self, clients: Iterable[ClientConnection]) -> list[ClientConnection]:
        """Return the clients that exceeded a timeout, also those that do not read why they are to be closed."""
        now = asyncio.get_running_loop().time()
        timed_out = []
        for client in clients:
            closing = find_timeout(client.socket.liveness(), self._config, now)
            if closing is not None and not client.is_closing:
                client.closing = client.closing or closing
                timed_out.append(client)
        return timed_out

    async def close(self, client: ClientConnection) -> None:
        """Close a connection as its gate says; abort it if the client does not read even that."""
        assert client.closing is not None
        client.is_closing = True
        if client.socket.state is State.OPEN:
            self._metrics.counts.closed_connections[client.closing.code.value] += 1
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await client.socket.close(client.closing.code, client.closing.reason)
        except TimeoutError:
            client.socket.transport.abort()

    def count_ended(self, client: ClientConnection, end: ConnectionClosed) -> None:
        """Count a connection that websockets closed by itself, for a frame that is too large or malformed."""
        if client.closing is None and end.sent is not None and not end.rcvd_then_sent:
            self._metrics.counts.closed_connections[end.sent.code] += 1

    def measure_load(self, *, longest_wait_s: float, log_utilization: float) -> None:
        """Set the load level."""
        shed_delay_s = self._config.shed_delay_s
        self.level = load_level(
            connections=self._limits.slots.active / self._config.connections_max,
            delay=longest_wait_s / shed_delay_s * CRITICAL_ABOVE if shed_delay_s else 0.0,
            log=log_utilization,
        )
        self._metrics.load_level.set(_LEVELS.index(self.level))


def _reject(client: ServerConnection, rejected: Rejected, slot: ConnectionSlot, *, allowance: Allowance) -> Response:
    document = {
        "error": rejected.message,
        "reason": rejected.reason.value,
        "retryAfter": rejected.retry_after_s,
        "clientIp": masked(slot.address),
    }
    response = client.respond(http.HTTPStatus.TOO_MANY_REQUESTS, orjson.dumps(document).decode())
    del response.headers["Content-Type"]
    response.headers["Content-Type"] = "application/json"
    response.headers["Retry-After"] = str(rejected.retry_after_s)
    _add_allowance(response.headers, allowance)
    return response


def _add_allowance(headers: Headers, allowance: Allowance) -> None:
    headers["X-RateLimit-Limit"] = str(allowance.limit)
    headers["X-RateLimit-Remaining"] = str(allowance.remaining)
    headers["X-RateLimit-Reset"] = str(int(allowance.reset_at))


def jitter() -> float:
    """Return a random share of a retry delay."""
    return random.uniform(JITTER_MIN, JITTER_MAX)  # noqa: S311 - guessing it gains nothing
