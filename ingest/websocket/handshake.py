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
from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

import orjson
from websockets.asyncio.server import ServerConnection
from websockets.datastructures import Headers
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response
from websockets.protocol import State

from lakefeed.ingest.admission.addresses import Network, client_address, masked
from lakefeed.ingest.admission.auth import Auth, Unauthenticated
from lakefeed.ingest.admission.limits import (
    CRITICAL_ABOVE,
    TOO_MANY_CONNECTIONS,
    TOO_MANY_REFUSALS,
    TOO_MANY_SIZE_VIOLATIONS,
    Allowance,
    Closing,
    ConnectionSlot,
    ConnectionSlots,
    LoadLevel,
    MessageLimiter,
    Rejected,
    SharedLimits,
    find_timeout,
    load_level,
    not_authenticated,
)
from lakefeed.ingest.config import IngestConfig
from lakefeed.ingest.errors import ProtocolError
from lakefeed.ingest.metrics import IngestMetrics
from lakefeed.ingest.protocol.batch import head_of
from lakefeed.ingest.protocol.messages import ClientMessage, Connect, DebeziumBatch, Disconnect, Heartbeat
from lakefeed.ingest.protocol.offers import NackReason, Refused, Verdict
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


class Handshake:
    """Accepts or rejects clients."""

    def __init__(
        self, slots: ConnectionSlots, *, auth: Auth, trusted_proxies: Sequence[Network], metrics: IngestMetrics
    ) -> None:
        self._auth = auth
        self._slots = slots
        self._trusted_proxies = trusted_proxies
        self._counts = metrics.counts

    def on_request(self, client: ServerConnection, request: Request) -> Response | None:
        """Take a connection slot for the client, or return why not."""
        if request.path.partition("?")[0] != PATH:
            return client.respond(http.HTTPStatus.NOT_FOUND, f"the data plane listens on {PATH}\n")
        assert isinstance(client, BudgetedConnection)
        if client.state is not State.CONNECTING:  # gone already: nothing would release its slot
            return client.respond(http.HTTPStatus.SERVICE_UNAVAILABLE, "closed\n")
        now = time.time()
        slot = self._slot_of(client, request.headers)
        offered = [text.strip() for text in _header(request.headers, "Sec-WebSocket-Protocol").split(",")]
        authorization = _header(request.headers, "Authorization") or None
        client.principal = self._auth.admit_websocket(PATH, authorization, offered)
        if isinstance(client.principal, Unauthenticated):
            slot.source = ""  # it must not use up the connections of the source that it names
        rejected = self._slots.acquire(slot, now)
        if rejected is not None:
            self._counts.rejected_connections[rejected.reason.value] += 1
            return _reject(client, rejected, slot, allowance=self._slots.allowance(now))
        client.slot = slot
        client.on_lost = lambda: self._slots.release(slot)
        return None

    def on_response(self, client: ServerConnection, request: Request, response: Response) -> None:
        """Add the rate-limit headers for an accepted client."""
        del client, request
        if response.status_code == http.HTTPStatus.SWITCHING_PROTOCOLS:
            _add_allowance(response.headers, self._slots.allowance(time.time()))

    def _slot_of(self, client: ServerConnection, headers: Headers) -> ConnectionSlot:
        peer = client.remote_address
        return ConnectionSlot(
            address=client_address(
                str(peer[0]) if peer else "",
                self._trusted_proxies,
                connecting=_header(headers, "CF-Connecting-IP") or None,
                forwarded=_header(headers, "X-Forwarded-For") or None,
            ),
            source=_header(headers, "X-Client-ID"),
            shard=_header(headers, "X-Shard-Name")[:LABEL_MAX_CHARS],
            is_high_priority=_header(headers, "X-Priority").strip().lower() == "high",
        )


def _header(headers: Headers, name: str) -> str:
    """Return a header; if it was sent several times, all values joined by commas, as HTTP defines it."""
    return ",".join(headers.get_all(name))


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


class ClientGate:
    """The limits of one client, and how its connection is to be closed, once that is decided."""

    def __init__(self, socket: BudgetedConnection, limiter: MessageLimiter, slot: ConnectionSlot) -> None:
        self.socket = socket
        self.limiter = limiter
        self.slot = slot
        self.closing: Closing | None = None
        self.is_closing = False
        # Set where the decision falls while the reader waits for a frame, so that the sender has to close.
        self.closes_at_once = False
        if isinstance(socket.principal, Unauthenticated):
            self.closing = not_authenticated(socket.principal.message)

    def on_verdict(self, verdict: Verdict | None, *, received_at: float, now: float) -> None:
        """Count the verdict on a batch, and close on a client that ignores its retry delays."""
        self.limiter.on_verdict(verdict, received_at=received_at, now=now)
        if self.limiter.ignores_refusals and self.closing is None:
            self.closing = TOO_MANY_REFUSALS
            self.closes_at_once = True

    def on_protocol_error(self, error: ProtocolError) -> None:
        """Count a message with an event that is too large."""
        if error.reason == NackReason.EVENT_TOO_LARGE.value and self.limiter.count_too_large():
            self.closing = TOO_MANY_SIZE_VIOLATIONS


class AdmissionControl:
    """Admits messages, sheds load and closes clients that exceed a timeout."""

    def __init__(
        self,
        config: IngestConfig,
        *,
        limits: SharedLimits,
        metrics: IngestMetrics,
        jitter: Callable[[], float] = jitter,
    ) -> None:
        self.level = LoadLevel.NORMAL
        self._slots = limits.slots
        self._config = config
        self._metrics = metrics
        self._jitter = jitter
        self._message_limits = config.message_limits()
        self._timeouts = config.idle_timeouts()
        self._source_bytes = limits.source_bytes

    def gate_of(self, socket: BudgetedConnection) -> ClientGate:
        """Return the gate of a client that was accepted."""
        slot = socket.slot
        assert slot is not None, "a client without a slot is rejected in the handshake"
        limiter = MessageLimiter(self._message_limits, slot.is_high_priority, self._jitter, time.time())
        return ClientGate(socket, limiter, slot)

    def sheds(self, gate: ClientGate) -> bool:
        """Return whether a client's batches are refused for now, so that waiting for room is pointless."""
        return self._sheds_load() and not gate.slot.is_high_priority

    def _sheds_load(self) -> bool:
        return self._config.load_shedding and self.level is LoadLevel.CRITICAL

    def admit(self, message: AnyMessage, gate: ClientGate, *, size_bytes: int, now: float) -> Refused | None:
        """Admit a message, or refuse it with a retry delay."""
        match message:
            case Disconnect():
                return None
            case Heartbeat():
                refused = gate.limiter.admit_heartbeat(now)
            case BatchHead() | ArrowFrame() | DebeziumBatch():
                head = message if isinstance(message, DebeziumBatch) else head_of(message)
                refused = self._admit_batch(head.source_do_id or gate.slot.source, gate, size_bytes, now)
            case Connect():
                refused = self._bind(message.source_do_id, gate) or gate.limiter.admit(now)
            case _:
                refused = gate.limiter.admit(now)
        if gate.limiter.ignores_refusals:
            gate.closing = TOO_MANY_REFUSALS
        if isinstance(message, Connect | BatchHead) and message.source_shard_name:
            gate.slot.shard = message.source_shard_name[:LABEL_MAX_CHARS]
        return refused

    def _admit_batch(self, source: str, gate: ClientGate, size_bytes: int, now: float) -> Refused | None:
        refused = self._bind(source, gate)
        if refused is None and self._sheds_load():
            refused = gate.limiter.shed(self.level, now)
        if refused is not None:
            return refused
        bucket = self._source_bytes.bucket(source, now) if self._source_bytes is not None and source else None
        return gate.limiter.admit(now, size_bytes=size_bytes, source=bucket)

    def _bind(self, source: str, gate: ClientGate) -> Refused | None:
        if not source or self._slots.bind(gate.slot, source):
            return None
        gate.closing = TOO_MANY_CONNECTIONS
        return Refused(
            NackReason.CONNECTION_LIMIT,
            f"too many connections of this source: limit={self._config.connections_per_source_max}",
            retry=True,
            retry_delay_ms=TOO_MANY_CONNECTIONS_DELAY_MS,
        )

    def find_timeouts(self, gates: Iterable[ClientGate]) -> list[ClientGate]:
        """Return the clients that exceeded a timeout, also those that do not read why they are to be closed."""
        now = asyncio.get_running_loop().time()
        timed_out = []
        for gate in gates:
            closing = find_timeout(gate.socket.liveness(), self._timeouts, now)
            if closing is not None and not gate.is_closing:
                gate.closing = gate.closing or closing
                timed_out.append(gate)
        return timed_out

    async def close(self, gate: ClientGate) -> None:
        """Close a connection as its gate says; abort it if the client does not read even that."""
        assert gate.closing is not None
        gate.is_closing = True
        if gate.socket.state is State.OPEN:
            self._metrics.counts.closed_connections[gate.closing.code.value] += 1
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await gate.socket.close(gate.closing.code, gate.closing.reason)
        except TimeoutError:
            gate.socket.transport.abort()

    def count_ended(self, gate: ClientGate, end: ConnectionClosed) -> None:
        """Count a connection that websockets closed by itself, for a frame that is too large or malformed."""
        if gate.closing is None and end.sent is not None and not end.rcvd_then_sent:
            self._metrics.counts.closed_connections[end.sent.code] += 1

    def measure_load(self, *, longest_wait_s: float, log_utilization: float) -> None:
        """Set the load level."""
        shed_delay_s = self._config.shed_delay_s
        self.level = load_level(
            connections=self._slots.active / self._config.connections_max,
            delay=longest_wait_s / shed_delay_s * CRITICAL_ABOVE if shed_delay_s else 0.0,
            log=log_utilization,
        )
        self._metrics.load_level.set(_LEVELS.index(self.level))
