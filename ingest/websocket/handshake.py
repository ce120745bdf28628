"""Applies the limits to connections and messages as they come. Owns the counts of all; admission/limits.py decides.

Nothing here is done per change: a message costs one look at its buckets, and load is measured twice a second.
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
from lakefeed.ingest.admission.auth import Auth, Refusal
from lakefeed.ingest.admission.budget import ReadBudget
from lakefeed.ingest.admission.limits import (
    BUFFER_OVERFLOW,
    CRITICAL_ABOVE,
    SIZE_VIOLATIONS_MAX,
    TOO_MANY_CONNECTIONS,
    TOO_MANY_REFUSALS,
    TOO_MANY_SIZE_VIOLATIONS,
    Allowance,
    Closing,
    Connections,
    LoadLevel,
    Messages,
    RequestRates,
    Slot,
    SourceRates,
    TurnedAway,
    find_overdue,
    load_level,
    not_authenticated,
)
from lakefeed.ingest.config import IngestConfig
from lakefeed.ingest.errors import ProtocolError
from lakefeed.ingest.http.gate import HttpGate
from lakefeed.ingest.metrics import IngestMetrics
from lakefeed.ingest.protocol.batch import head_of
from lakefeed.ingest.protocol.messages import ClientMessage, Connect, DebeziumBatch, Disconnect, Heartbeat
from lakefeed.ingest.protocol.offers import NackReason, Refused, Verdict
from lakefeed.ingest.websocket.socket import BudgetedConnection
from lakefeed.writer.wire.arrow_frame import ArrowFrame
from lakefeed.writer.wire.json_batch import BatchHead

# --- ingest.upgrades --------------------------------------------------------------------------------------------------
#
# The door of the data plane: the HTTP request that asks for a WebSocket. Owns its headers and its refusals.
#
#     X-Client-ID    source, unless `connect` or the first batch names another    X-Priority  `high` is not shed
#     X-Shard-Name   label, shown in /status
#
# Whoever is turned away gets 429 with the reason and when to come back; whoever gets in, what is left of the limit. Who
# has no valid token gets in too, to be told so with a close code: browsers show no answer to an upgrade but that.


# Longer labels only fill memory and /status.
LABEL_MAX_CHARS = 255


class Door:
    """Lets clients in, one request at a time."""

    def __init__(
        self,
        path: str,
        connections: Connections,
        *,
        auth: Auth,
        trusted_proxies: Sequence[Network],
        metrics: IngestMetrics,
    ) -> None:
        self._path = path
        self._auth = auth
        self._connections = connections
        self._trusted_proxies = trusted_proxies
        self._metrics = metrics

    def on_request(self, client: ServerConnection, request: Request) -> Response | None:
        """Give the client a place, or say why not."""
        if request.path.partition("?")[0] != self._path:
            return client.respond(http.HTTPStatus.NOT_FOUND, f"the data plane listens on {self._path}\n")
        assert isinstance(client, BudgetedConnection)
        if client.state is not State.CONNECTING:  # gone again: nobody would free its place
            return client.respond(http.HTTPStatus.SERVICE_UNAVAILABLE, "closed\n")
        now = time.time()
        slot = self._slot_of(client, request.headers)
        client.refusal = self._refusal(request.headers)
        if client.refusal is not None:
            slot.source = ""  # a stranger does not take the places of the source that it names
        refusal = self._connections.enter(slot, now)
        if refusal is not None:
            self._metrics.counts.rejected_connections[refusal.reason.value] += 1
            return _turn_away(client, refusal, slot, allowance=self._connections.allowance(now))
        client.slot = slot
        client.on_lost = lambda: self._connections.leave(slot)
        return None

    def _refusal(self, headers: Headers) -> Refusal | None:
        authorization = _header(headers, "Authorization") or None
        offered = [text.strip() for text in _header(headers, "Sec-WebSocket-Protocol").split(",")]
        return self._auth.admit_socket(self._path, authorization, offered)

    def on_response(self, client: ServerConnection, request: Request, response: Response) -> None:
        """Tell a client that gets in what is left of the limit."""
        del client, request
        if response.status_code == http.HTTPStatus.SWITCHING_PROTOCOLS:
            _add_allowance(response.headers, self._connections.allowance(time.time()))

    def _slot_of(self, client: ServerConnection, headers: Headers) -> Slot:
        peer = client.remote_address
        return Slot(
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
    """Read a header; of one that came several times, all values, as HTTP has it."""
    return ",".join(headers.get_all(name))


def _turn_away(client: ServerConnection, refusal: TurnedAway, slot: Slot, *, allowance: Allowance) -> Response:
    document = {
        "error": refusal.message,
        "reason": refusal.reason.value,
        "retryAfter": refusal.retry_after_s,
        "clientIp": masked(slot.address),
    }
    response = client.respond(http.HTTPStatus.TOO_MANY_REQUESTS, orjson.dumps(document).decode())
    del response.headers["Content-Type"]
    response.headers["Content-Type"] = "application/json"
    response.headers["Retry-After"] = str(refusal.retry_after_s)
    _add_allowance(response.headers, allowance)
    return response


def _add_allowance(headers: Headers, allowance: Allowance) -> None:
    headers["X-RateLimit-Limit"] = str(allowance.limit)
    headers["X-RateLimit-Remaining"] = str(allowance.remaining)
    headers["X-RateLimit-Reset"] = str(int(allowance.reset_at))


# --- ingest.gatekeeper ------------------------------------------------------------------------------------------------


# The spread of a retry delay, so that clients that were refused together do not come back together.
JITTER_MIN, JITTER_MAX = 0.5, 1.5

# When a client that has one connection too many may try again: by then a lost one may have been noticed.
TOO_MANY_CONNECTIONS_DELAY_MS = 5_000

# How long a client has to answer our goodbye before the connection is cut.
CLOSE_TIMEOUT_S = 5.0

_LEVELS = list(LoadLevel)

AnyMessage: TypeAlias = ClientMessage | ArrowFrame


def jitter() -> float:
    """Draw how much of a retry delay to ask for."""
    return random.uniform(JITTER_MIN, JITTER_MAX)  # noqa: S311 - nobody gains by guessing it


class Gate:
    """What one client may send."""

    def __init__(self, client: BudgetedConnection, messages: Messages, slot: Slot) -> None:
        self.client = client
        self.messages = messages
        self.slot = slot
        self.closing: Closing | None = None
        self.is_closing = False

    def on_verdict(self, verdict: Verdict | None, *, received_at: float, now: float) -> None:
        """Find out a client that does not wait as it is told while the log has no room."""
        if not isinstance(verdict, Refused):
            self.messages.on_taken()
        elif verdict.reason is NackReason.BUFFER_FULL:
            delay_s = (verdict.retry_delay_ms or 0) / 1_000
            self.messages.on_full(received_at=received_at, retry_delay_s=delay_s, now=now)
        if self.messages.is_impatient:
            self.closing = self.closing or BUFFER_OVERFLOW

    def on_protocol_error(self, error: ProtocolError) -> None:
        """Count messages that are too large."""
        if error.reason == NackReason.EVENT_TOO_LARGE.value:
            self.messages.size_violations += 1
            if self.messages.size_violations >= SIZE_VIOLATIONS_MAX:
                self.closing = TOO_MANY_SIZE_VIOLATIONS


class Gatekeeper:
    """The limits of the data plane, of HTTP ingest too, and what is counted against them."""

    def __init__(
        self,
        path: str,
        *,
        config: IngestConfig,
        metrics: IngestMetrics,
        auth: Auth | None = None,
        jitter: Callable[[], float] = jitter,
    ) -> None:
        self.budget = ReadBudget(config.memory_max_bytes, config.frame_max_bytes)
        self.connections = Connections(config.connection_limits(), time.time())
        self.door = Door(
            path,
            self.connections,
            auth=auth or Auth(),
            trusted_proxies=config.proxy_networks(),
            metrics=metrics,
        )
        self.level = LoadLevel.NORMAL
        self.config = config
        self._metrics = metrics
        self._jitter = jitter
        self._message_limits = config.message_limits()
        self._patience = config.patience()
        self._source_rates = SourceRates(config.source_bytes_per_s) if config.source_bytes_per_s else None
        message_rate = config.message_rate_per_s
        request_rates = SourceRates(message_rate, config.message_burst) if message_rate else None
        self.http = HttpGate(config, budget=self.budget, rates=RequestRates(request_rates, self._source_rates))

    def gate_of(self, client: BudgetedConnection) -> Gate:
        """Begin with a client that has got in."""
        slot = client.slot
        assert slot is not None, "who has no place is turned away at the door"
        self._metrics.peak_connections.set(self.connections.peak)
        messages = Messages(self._message_limits, slot.is_high_priority, self._jitter, time.time())
        gate = Gate(client, messages, slot)
        if client.refusal is not None:
            gate.closing = not_authenticated(client.refusal.value)
        return gate

    def sheds(self, gate: Gate) -> bool:
        """Tell whether a client's batches are refused for now, so that there is no point in waiting for room."""
        return self._sheds_at(self.level) and not gate.slot.is_high_priority

    def _sheds_at(self, level: LoadLevel) -> bool:
        return self.config.load_shedding and level is LoadLevel.CRITICAL

    def admit(self, message: AnyMessage, gate: Gate, *, size_bytes: int, now: float) -> Refused | None:
        """Let a message pass, or say when to come back."""
        match message:
            case Disconnect():
                return None
            case Heartbeat():
                refusal = gate.messages.admit_heartbeat(now)
            case BatchHead() | ArrowFrame() | DebeziumBatch():
                head = message if isinstance(message, DebeziumBatch) else head_of(message)
                refusal = self._admit_batch(head.source_do_id or gate.slot.source, gate, size_bytes, now)
            case Connect():
                refusal = self._bind(message.source_do_id, gate) or gate.messages.admit(now)
            case _:
                refusal = gate.messages.admit(now)
        if gate.messages.is_offender:
            gate.closing = TOO_MANY_REFUSALS
        if isinstance(message, Connect | BatchHead) and message.source_shard_name:
            gate.slot.shard = message.source_shard_name[:LABEL_MAX_CHARS]
        return refusal

    def _admit_batch(self, source: str, gate: Gate, size_bytes: int, now: float) -> Refused | None:
        refusal = self._bind(source, gate)
        if refusal is None and self._sheds_at(self.level):
            refusal = gate.messages.shed(self.level, now)
        if refusal is not None:
            return refusal
        bucket = self._source_rates.bucket(source, now) if self._source_rates is not None and source else None
        return gate.messages.admit(now, size_bytes=size_bytes, source=bucket)

    def _bind(self, source: str, gate: Gate) -> Refused | None:
        if not source or self.connections.bind(gate.slot, source):
            return None
        gate.closing = TOO_MANY_CONNECTIONS
        limit = self.config.connections_per_source_max
        return Refused(
            NackReason.CONNECTION_LIMIT,
            f"too many connections of this source: limit={limit}",
            retry=True,
            retry_delay_ms=TOO_MANY_CONNECTIONS_DELAY_MS,
        )

    def find_overdue(self, gates: Iterable[Gate]) -> list[Gate]:
        """Find the clients to wait for no longer, also those that do not read why they are to be closed."""
        now = asyncio.get_running_loop().time()
        overdue = []
        for gate in gates:
            closing = find_overdue(gate.client.signs_of_life(), self._patience, now)
            if closing is not None and not gate.is_closing:
                gate.closing = gate.closing or closing
                overdue.append(gate)
        return overdue

    async def close(self, gate: Gate) -> None:
        """End a connection as its gate says; a client that does not even read that is cut off."""
        assert gate.closing is not None
        gate.is_closing = True
        if gate.client.state is State.OPEN:
            self._metrics.counts.closed_connections[gate.closing.code.value] += 1
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await gate.client.close(gate.closing.code, gate.closing.reason)
        except TimeoutError:
            gate.client.transport.abort()

    def note_ended(self, gate: Gate, end: ConnectionClosed) -> None:
        """Count a connection that websockets has ended by itself: for a frame that is too large or none at all."""
        if gate.closing is None and end.sent is not None and not end.rcvd_then_sent:
            self._metrics.counts.closed_connections[end.sent.code] += 1

    def measure_load(self, *, longest_wait_s: float, log_utilization: float) -> None:
        """Judge how busy the service is."""
        shed_delay_s = self.config.shed_delay_s
        self.level = load_level(
            connections=self.connections.active / self.config.connections_max,
            delay=longest_wait_s / shed_delay_s * CRITICAL_ABOVE if shed_delay_s else 0.0,
            log=log_utilization,
        )
        self._metrics.load_level.set(_LEVELS.index(self.level))
        self._metrics.held_bytes.set(self.budget.used_bytes)
        self._metrics.paused_connections.set(self.budget.waiting_readers)
        self._metrics.http_held_bytes.set(self.http.held_bytes)
        self._metrics.http_requests_waiting.set(self.http.places.waiting)
        for route, count in self.http.under_way.items():
            self._metrics.http_requests_in_flight.labels(route).set(count)
