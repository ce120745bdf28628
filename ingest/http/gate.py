"""The limits of HTTP ingest, applied to its requests as they come. Owns their visits; others decide.

    arrive -> its source's rate (Debezium) -> a place -> the body, within the budget -> durable -> answered -> gone
              admission/limits.py                   admission/budget.py   admission/budget.py, shared with the WebSocket

Who has to wait waits in line. A visit with a deadline (/cdc) is refused at it; one without (Debezium, which gives up
after five refusals and can then lose rows) waits for as long as its client does.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TypeAlias

import orjson
from aiohttp import web
from aiohttp.typedefs import Middleware

from lakefeed.contract.changes import SourceId
from lakefeed.ingest.admission.addresses import Network, client_address
from lakefeed.ingest.admission.auth import Auth, Refusal
from lakefeed.ingest.admission.budget import Places, ReadBudget
from lakefeed.ingest.admission.limits import CONNECTION_RETRY_AFTER_S, RequestRates
from lakefeed.ingest.config import IngestConfig
from lakefeed.ingest.errors import ProtocolError
from lakefeed.ingest.protocol.offers import NackReason

# --- ingest.http_gate -------------------------------------------------------------------------------------------------


# How often a visit that waits looks whether its client still does; nobody tells.
GONE_CHECK_S = 1.0


class Busy(ProtocolError):
    """There is no room for a request now: refuse it and say when to come back."""

    def __init__(self, reason: NackReason, message: str, *, retry_after_s: float = CONNECTION_RETRY_AFTER_S) -> None:
        super().__init__(reason.value, message, retry=True)
        self.retry_after_s = max(1, math.ceil(retry_after_s))


@dataclass(slots=True)
class SourceRequests:
    """What a source has sent over HTTP and was answered 2xx."""

    requests: int = 0
    changes: int = 0
    last_at: float = 0.0


class HttpGate:
    """The limits and what is counted against them."""

    def __init__(self, config: IngestConfig, *, budget: ReadBudget, rates: RequestRates) -> None:
        self.budget = budget
        self.rates = rates
        self.places = Places(
            total=config.http_requests_max,
            per_address=config.http_requests_per_ip_max,
            private_addresses_count=config.limit_private_ips,
        )
        self.under_way: Counter[str] = Counter()
        self.held_bytes = 0
        # As many as there are sources that became durable, which the log bounds.
        self.sources: dict[SourceId, SourceRequests] = {}
        self._trusted_proxies = config.proxy_networks()

    @asynccontextmanager
    async def visit(self, request: web.Request, *, wait_max_s: float | None) -> AsyncIterator[Visit]:
        """Count a request while the block runs, and give back all that it holds when that ends."""
        visit = Visit(self, request, wait_max_s=wait_max_s, trusted_proxies=self._trusted_proxies)
        self.under_way[request.path] += 1
        try:
            yield visit
        finally:
            self.under_way[request.path] -= 1
            visit.leave()

    def note_taken(self, source: SourceId, *, changes: int) -> None:
        """Count a request that is durable."""
        known = self.sources.setdefault(source, SourceRequests())
        known.requests += 1
        known.changes += changes
        known.last_at = time.time()


class Visit:
    """One request, from its arrival until it is durable: its place, and what it holds of the budget."""

    def __init__(
        self, gate: HttpGate, request: web.Request, *, wait_max_s: float | None, trusted_proxies: tuple[Network, ...]
    ) -> None:
        self.address = client_address(
            request.remote or "",
            trusted_proxies,
            connecting=_header(request, "CF-Connecting-IP"),
            forwarded=_header(request, "X-Forwarded-For"),
        )
        self.held_bytes = 0
        self._gate = gate
        self._request = request
        self._deadline = None if wait_max_s is None else time.monotonic() + wait_max_s
        self._has_place = False
        self._wanted_bytes = 0
        self._turn: asyncio.Future[None] | None = None

    @property
    def is_gone(self) -> bool:
        """Tell whether nobody waits for the answer any more."""
        transport = self._request.transport
        return transport is None or transport.is_closing()

    @property
    def is_late(self) -> bool:
        """Tell whether to wait no longer."""
        return self._deadline is not None and time.monotonic() >= self._deadline

    async def pace(self, source: SourceId, size_bytes: int) -> None:
        """Wait until a source may send a request of this size, without a place: others have use for it.

        Raises: ConnectionError if the client is gone.
        """
        while wait_s := self._gate.rates.admit(source, size_bytes, time.time()):
            await asyncio.sleep(min(wait_s, GONE_CHECK_S))
            self._check_client()

    async def enter(self) -> None:
        """Wait for a place.

        Raises: Busy, ConnectionError if the client is gone.
        """
        self._has_place = self._gate.places.enter(self)
        if not self._has_place:
            await self._wait_for_turn(Busy(NackReason.CONNECTION_LIMIT, "too many requests are under way"))

    def on_place(self) -> None:
        """Come in."""
        self._has_place = True
        self._end_wait()

    async def wait_to_read(self) -> None:
        """Wait until another allowance may be read.

        Raises: Busy, ConnectionError if the client is gone.
        """
        if not self._gate.budget.is_open():
            self._gate.budget.wait(self)
            await self._wait_for_turn(_no_memory())

    async def reserve(self, size_bytes: int) -> None:
        """Wait until a whole body may be read.

        Raises: Busy, ConnectionError if the client is gone.
        """
        self._wanted_bytes = size_bytes
        if self._gate.budget.reserve(self, size_bytes):
            self._count(size_bytes)
        else:
            await self._wait_for_turn(_no_memory())

    def on_turn(self, *, reserved: bool) -> None:
        """Read on."""
        if reserved:
            self._count(self._wanted_bytes)
        self._end_wait()

    def settle(self, size_bytes: int) -> None:
        """Hold from now on what a body really takes."""
        more_bytes = size_bytes - self.held_bytes
        self._count(more_bytes)
        if more_bytes > 0:
            self._gate.budget.charge(more_bytes)
        elif more_bytes < 0:
            self._gate.budget.give_back(-more_bytes)

    def leave(self) -> None:
        """Give back place and bytes, or stand in line for them no more."""
        self._gate.budget.forget(self)
        self.settle(0)
        if self._has_place:
            self._has_place = False
            self._gate.places.leave(self)
        else:
            self._gate.places.forget(self)

    def _count(self, more_bytes: int) -> None:
        self.held_bytes += more_bytes
        self._gate.held_bytes += more_bytes

    async def _wait_for_turn(self, busy: Busy) -> None:
        self._turn = asyncio.get_running_loop().create_future()
        while not self._turn.done():
            if self.is_late:
                raise busy
            left_s = math.inf if self._deadline is None else self._deadline - time.monotonic()
            await asyncio.wait([self._turn], timeout=max(0.0, min(GONE_CHECK_S, left_s)))
            self._check_client()

    def _end_wait(self) -> None:
        if self._turn is not None and not self._turn.done():
            self._turn.set_result(None)

    def _check_client(self) -> None:
        if self.is_gone:
            raise ConnectionResetError("the client is gone")


def _no_memory() -> Busy:
    return Busy(NackReason.BUFFER_FULL, "too much of all clients is not yet durable")


def _header(request: web.Request, name: str) -> str | None:
    """Read a header; of one that came several times, all values, as HTTP has it."""
    return ",".join(request.headers.getall(name, [])) or None


# --- ingest.http_auth -------------------------------------------------------------------------------------------------
#
# The door of the control plane: asks for a token before anything else. Owns the answer 401; admission/auth.py decides.


CATALOG_PREFIX = "/v1/"
UNAUTHORIZED = 401

Handler: TypeAlias = Callable[[web.Request], Awaitable[web.StreamResponse]]


def asking_for_token(auth: Auth) -> Middleware:
    """Build the middleware that answers 401, in Iceberg's shape on the catalog's paths."""

    @web.middleware
    async def ask(request: web.Request, handler: Handler) -> web.StreamResponse:
        refusal = auth.admit(request.path, request.headers.get("Authorization"))
        return await handler(request) if refusal is None else _unauthorized(request, refusal)

    return ask


def _unauthorized(request: web.Request, refusal: Refusal) -> web.Response:
    if request.path.startswith(CATALOG_PREFIX):
        error = {"message": refusal.value, "type": "NotAuthorizedException", "code": UNAUTHORIZED}
        body = orjson.dumps({"error": error})
    else:
        body = orjson.dumps({"success": False, "reason": "unauthorized", "error": refusal.value})
    # RFC 6750, section 3: a request without a token is told no error code.
    challenge = 'Bearer realm="lakefeed"' + (', error="invalid_token"' if refusal is Refusal.NOT_VALID else "")
    headers = {"WWW-Authenticate": challenge}
    return web.Response(body=body, status=UNAUTHORIZED, headers=headers, content_type="application/json")
