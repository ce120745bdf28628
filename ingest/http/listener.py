"""The control plane's listener. Owns its connections and how much of a request is read ahead; routes are others'.

Beyond `connections_max` whoever connects is hung up on: each connection may hold READ_AHEAD_BYTES that nobody asked
for yet. Bodies of HTTP ingest are read, and unpacked, by their own routes; those of all others are unpacked here.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TypeAlias

from aiohttp import StreamReader, web

from lakefeed.ingest.admission.budget import ALLOWANCE_BYTES
from lakefeed.ingest.errors import ProtocolError
from lakefeed.ingest.http.bodies import open_unpacker
from lakefeed.ingest.protocol.offers import NackReason

# What aiohttp buffers of a body before it stops reading: twice the allowance, and what asyncio reads at once.
READ_AHEAD_BYTES = 2 * ALLOWANCE_BYTES + 256 * 1024

# Idle connections are closed after this: later than proxies do (a minute is usual), so that none meets a closed one.
IDLE_S = 120

# A client that vanishes while it waits for its answer is noticed by the system after two minutes: 60 + 4 x 15 seconds.
KEEPALIVE_IDLE_S, KEEPALIVE_INTERVAL_S, KEEPALIVE_PROBES = 60, 15, 4

# Connections that the system keeps for us until we accept them.
LISTEN_BACKLOG = 1024

_Handler: TypeAlias = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpLimits:
    """What the listener may take."""

    connections_max: int
    unpacked_max_bytes: int
    shutdown_s: float


@asynccontextmanager
async def serve_http(
    app: web.Application,
    listener: socket.socket,
    *,
    limits: HttpLimits,
    unpacked_by_route: Collection[str] = (),
    on_hang_up: Callable[[], None] = lambda: None,
) -> AsyncIterator[None]:
    """Serve an application while the block runs; `unpacked_by_route` are the paths that read their own bodies."""
    app.middlewares.insert(0, _unpacking(unpacked_by_route, limits.unpacked_max_bytes))
    _notice_vanished_clients(listener)
    runner = web.AppRunner(
        app,
        access_log=None,
        auto_decompress=False,
        keepalive_timeout=IDLE_S,
        read_bufsize=ALLOWANCE_BYTES,
        shutdown_timeout=limits.shutdown_s,
    )
    await runner.setup()
    server = None
    try:
        connect = _Connecting(runner, limits.connections_max, on_hang_up)
        server = await asyncio.get_running_loop().create_server(connect, sock=listener, backlog=LISTEN_BACKLOG)
        yield
    finally:
        if server is not None:
            server.close()
        await runner.cleanup()


class _Connecting:
    """Makes the protocol of each new connection."""

    def __init__(self, runner: web.AppRunner, connections_max: int, on_hang_up: Callable[[], None]) -> None:
        assert runner.server is not None, "the runner is set up"
        self._server = runner.server
        self._connections_max = connections_max
        self._on_hang_up = on_hang_up

    def __call__(self) -> asyncio.Protocol:
        if len(self._server.connections) < self._connections_max:
            return self._server()
        self._on_hang_up()
        return _HangUp()


class _HangUp(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.abort()


def _notice_vanished_clients(listener: socket.socket) -> None:
    """Let the system ask silent clients whether they are there. aiohttp switches it on; the rest is inherited."""
    for name, value in (
        ("TCP_KEEPIDLE", KEEPALIVE_IDLE_S),
        ("TCP_KEEPINTVL", KEEPALIVE_INTERVAL_S),
        ("TCP_KEEPCNT", KEEPALIVE_PROBES),
    ):
        if hasattr(socket, name):  # not every system lets it be set
            listener.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _unpacking(unpacked_by_route: Collection[str], max_bytes: int) -> Callable[..., Awaitable[web.StreamResponse]]:
    """Build what unpacks the bodies of all other routes.

    aiohttp would do it for all or none, and does not notice a gzip body that was cut off.
    """

    @web.middleware
    async def unpack(request: web.Request, handler: _Handler) -> web.StreamResponse:
        coding = ",".join(request.headers.getall("Content-Encoding", []))
        if coding and request.path not in unpacked_by_route:
            # There is no public way to hand a route another body; it must not have been looked at through `content`.
            packed = request._payload  # noqa: SLF001
            request._payload = await _unpacked(request, packed, coding, max_bytes=max_bytes)  # noqa: SLF001
        return await handler(request)

    return unpack


async def _unpacked(request: web.Request, packed: StreamReader, coding: str, *, max_bytes: int) -> StreamReader:
    """Unpack a body. A broken one is told to the route when it reads, and so to the client in the route's words.

    Raises: HTTPRequestEntityTooLarge.
    """
    payload = StreamReader(request.protocol, max_bytes)
    try:
        unpacker = open_unpacker(coding, max_bytes=max_bytes)
        while piece := await packed.readany():
            payload.feed_data(unpacker.feed(piece))
        unpacker.finish()
    except ProtocolError as error:
        if error.reason == NackReason.PAYLOAD_TOO_LARGE.value:
            raise web.HTTPRequestEntityTooLarge(max_bytes, max_bytes + 1) from None
        payload.set_exception(web.RequestPayloadError(str(error)))
    payload.feed_eof()
    return payload
