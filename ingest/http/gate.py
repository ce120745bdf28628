"""Admission of HTTP requests: the token check of all routes, and the lease of an ingest request.

    arrive -> rate of its source (Debezium) -> request slot -> body, within the memory budget -> durable -> reply

Requests wait in line. A lease with a deadline (/cdc) is refused at it. One without (Debezium, which gives up after five
refusals and can then lose rows) waits as long as its client does.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import orjson
from aiohttp import web
from aiohttp.typedefs import Middleware

from lakefeed.contract.changes import SourceId
from lakefeed.ingest.admission.addresses import Address, client_address
from lakefeed.ingest.admission.auth import TOKEN_INVALID, Auth, Principal, Unauthenticated
from lakefeed.ingest.admission.budget import RequestSlots
from lakefeed.ingest.admission.limits import CONNECTION_RETRY_AFTER_S, RequestRates, SharedLimits, SourceRates
from lakefeed.ingest.config import IngestConfig
from lakefeed.ingest.errors import ProtocolError
from lakefeed.ingest.protocol.offers import NackReason

# How often a waiting request checks whether its client is still connected; aiohttp does not notify.
CLIENT_CHECK_S = 1.0

CATALOG_PREFIX = "/v1/"

# Who a request acts as.
PRINCIPAL: web.RequestKey[Principal] = web.RequestKey("principal", Principal)

Handler: TypeAlias = Callable[[web.Request], Awaitable[web.StreamResponse]]


def require_token(auth: Auth) -> Middleware:
    """Return the middleware that keeps the principal in the request, or answers 401."""

    @web.middleware
    async def authenticate(request: web.Request, handler: Handler) -> web.StreamResponse:
        admitted = auth.admit(request.path, request.headers.get("Authorization"))
        if not isinstance(admitted, Unauthenticated):
            request[PRINCIPAL] = admitted
            return await handler(request)
        document: dict[str, Any] = {"success": False, "reason": "unauthorized", "error": admitted.message}
        if request.path.startswith(CATALOG_PREFIX):  # in Iceberg's form
            document = {"error": {"message": admitted.message, "type": "NotAuthorizedException", "code": 401}}
        response = json_response(document, 401)
        # RFC 6750, section 3: the challenge to a request without a token has no error code.
        error_code = ', error="invalid_token"' if admitted is TOKEN_INVALID else ""
        response.headers["WWW-Authenticate"] = f'Bearer realm="lakefeed"{error_code}'
        return response

    return authenticate


def json_response(document: Mapping[str, Any], status: int = 200) -> web.Response:
    """Return a response with a JSON body."""
    return web.Response(body=orjson.dumps(document), status=status, content_type="application/json")


class Busy(ProtocolError):
    """There is no room for a request now: refuse it with the time to retry after."""

    def __init__(self, reason: NackReason, message: str, *, retry_after_s: float = CONNECTION_RETRY_AFTER_S) -> None:
        super().__init__(reason.value, message, retry=True)
        self.retry_after_s = max(1, math.ceil(retry_after_s))


@dataclass(slots=True)
class SourceRequests:
    """The requests of a source that were answered 2xx."""

    requests: int = 0
    changes: int = 0
    last_at: float = 0.0


class RequestGate:
    """The limits of HTTP ingest and what is counted against them."""

    def __init__(self, config: IngestConfig, limits: SharedLimits) -> None:
        self.budget = limits.budget
        # Requests of a source are counted as the WebSocket counts the messages of a connection.
        self.rates = RequestRates(SourceRates(config.message_rate_per_s, config.message_burst), limits.source_bytes)
        self.slots = RequestSlots(config)
        self.in_flight: Counter[str] = Counter()
        self.held_bytes = 0
        # As many as there are durable sources, which the log bounds.
        self.sources: dict[SourceId, SourceRequests] = {}
        self._trusted_proxies = config.proxy_networks()

    @asynccontextmanager
    async def lease(self, request: web.Request, *, wait_max_s: float | None) -> AsyncIterator[RequestLease]:
        """Count a request while the block runs, and release all that it holds at the end."""
        # A header that was sent several times has all its values, joined by commas, as HTTP defines it.
        headers = request.headers
        address = client_address(
            request.remote or "", self._trusted_proxies, lambda name: ",".join(headers.getall(name, []))
        )
        lease = RequestLease(self, request, address, wait_max_s=wait_max_s)
        self.in_flight[request.path] += 1
        try:
            yield lease
        finally:
            self.in_flight[request.path] -= 1
            lease.release()

    def count_accepted(self, source: SourceId, *, changes: int) -> None:
        """Count a request that is durable."""
        known = self.sources.setdefault(source, SourceRequests())
        known.requests += 1
        known.changes += changes
        known.last_at = time.time()


class RequestLease:
    """What one request holds from its arrival until it is durable: a request slot and bytes of the budget.

    The methods that wait raise Busy at the deadline, and ConnectionError if the client is gone.
    """

    def __init__(
        self, gate: RequestGate, request: web.Request, address: Address | None, *, wait_max_s: float | None
    ) -> None:
        self.address = address
        self.held_bytes = 0
        self._gate = gate
        self._request = request
        self._deadline = None if wait_max_s is None else time.monotonic() + wait_max_s
        self._has_slot = False
        self._wanted_bytes = 0
        self._granted: asyncio.Future[None] | None = None

    @property
    def is_client_gone(self) -> bool:
        """Return whether the client has disconnected."""
        transport = self._request.transport
        return transport is None or transport.is_closing()

    @property
    def is_late(self) -> bool:
        """Return whether the deadline has passed."""
        return self._deadline is not None and time.monotonic() >= self._deadline

    async def pace(self, source: SourceId, size_bytes: int) -> None:
        """Wait until a source may send a request of this size; without a slot, which others can use meanwhile."""
        while wait_s := self._gate.rates.admit(source, size_bytes, time.time()):
            await asyncio.sleep(min(wait_s, CLIENT_CHECK_S))
            self._check_client()

    async def acquire_slot(self) -> None:
        """Wait for a request slot."""
        self._has_slot = self._gate.slots.acquire(self)
        if not self._has_slot:
            await self._wait(Busy(NackReason.CONNECTION_LIMIT, "too many requests are in flight"))

    def on_slot(self) -> None:
        """Continue with the slot that was granted."""
        self._has_slot = True
        self._end_wait()

    async def wait_to_read(self) -> None:
        """Wait until another allowance may be read."""
        if not self._gate.budget.is_open():
            self._gate.budget.wait(self)
            await self._wait(_memory_full())

    async def reserve(self, size_bytes: int) -> None:
        """Wait until a whole body may be read."""
        self._wanted_bytes = size_bytes
        if self._gate.budget.reserve(self, size_bytes):
            self._count(size_bytes)
        else:
            await self._wait(_memory_full())

    def on_granted(self, *, reserved: bool) -> None:
        """Continue to read: the budget has room."""
        if reserved:
            self._count(self._wanted_bytes)
        self._end_wait()

    def hold(self, size_bytes: int) -> None:
        """Hold what a body really takes, instead of what was reserved."""
        more_bytes = size_bytes - self.held_bytes
        self._count(more_bytes)
        if more_bytes > 0:
            self._gate.budget.charge(more_bytes)
        elif more_bytes < 0:
            self._gate.budget.release(-more_bytes)

    def release(self) -> None:
        """Release slot and bytes, or stop waiting for them."""
        self._gate.budget.forget(self)
        self.hold(0)
        if self._has_slot:
            self._has_slot = False
            self._gate.slots.release(self)
        else:
            self._gate.slots.forget(self)

    def _count(self, more_bytes: int) -> None:
        self.held_bytes += more_bytes
        self._gate.held_bytes += more_bytes

    async def _wait(self, busy: Busy) -> None:
        self._granted = asyncio.get_running_loop().create_future()
        while not self._granted.done():
            if self.is_late:
                raise busy
            left_s = math.inf if self._deadline is None else self._deadline - time.monotonic()
            await asyncio.wait([self._granted], timeout=max(0.0, min(CLIENT_CHECK_S, left_s)))
            self._check_client()

    def _end_wait(self) -> None:
        if self._granted is not None and not self._granted.done():
            self._granted.set_result(None)

    def _check_client(self) -> None:
        if self.is_client_gone:
            raise ConnectionResetError("the client is gone")


def _memory_full() -> Busy:
    return Busy(NackReason.BUFFER_FULL, "too much data of all clients is not durable yet")
