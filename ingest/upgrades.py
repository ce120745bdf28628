"""The door of the data plane: the HTTP request that asks for a WebSocket. Owns its headers and its refusals.

    X-Client-ID    source, unless `connect` or the first batch names another    X-Priority  `high` is not shed
    X-Shard-Name   label, shown in /status

Whoever is turned away gets 429 with the reason and when to come back; whoever gets in, what is left of the limit. Who
has no valid token gets in too, to be told so with a close code: browsers show no answer to an upgrade but that.
"""

from __future__ import annotations

import http
import time
from collections.abc import Sequence

import orjson
from websockets.asyncio.server import ServerConnection
from websockets.datastructures import Headers
from websockets.http11 import Request, Response
from websockets.protocol import State

from ingest.addresses import Network, client_address, masked
from ingest.admission import Connections, Slot, TurnedAway
from ingest.auth import Auth, Refusal
from ingest.buckets import Allowance
from ingest.metrics import IngestMetrics
from ingest.sockets import BudgetedConnection

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
            self._metrics.turned_away.labels(refusal.reason.value).inc()
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
