"""The HTTP listener: its connections, and decompression for routes that do not read their own bodies.

Connections beyond `connections_max` are aborted, because each may hold READ_AHEAD_BYTES before any handler runs. The
routes of HTTP ingest read and decompress their bodies themselves, within the memory budget.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import asynccontextmanager

from aiohttp import StreamReader, web

from lakefeed.ingest.admission.budget import ALLOWANCE_BYTES
from lakefeed.ingest.errors import ProtocolError
from lakefeed.ingest.http.bodies import Decompressor
from lakefeed.ingest.http.gate import Handler
from lakefeed.ingest.protocol.offers import NackReason

# What aiohttp buffers of a body before it stops reading: twice the allowance, and one read of asyncio.
READ_AHEAD_BYTES = 2 * ALLOWANCE_BYTES + 256 * 1024

# Idle connections are closed after this: later than proxies do (usually a minute), so that none uses a closed one.
IDLE_S = 120

# TCP keepalive finds a vanished client after two minutes: 60 + 4 x 15 seconds.
KEEPALIVE_IDLE_S, KEEPALIVE_INTERVAL_S, KEEPALIVE_PROBES = 60, 15, 4

# Connections that the kernel queues until we accept them.
LISTEN_BACKLOG = 1024

# How long requests may run on when everything else has stopped.
SHUTDOWN_S = 5.0


@asynccontextmanager
async def serve_http(
    app: web.Application,
    listener: socket.socket,
    *,
    connections_max: int,
    body_max_bytes: int,
    own_body_routes: Collection[str] = (),
    on_rejected: Callable[[], None] = lambda: None,
    shutdown_s: float = SHUTDOWN_S,
) -> AsyncIterator[None]:
    """Serve an application while the block runs; `own_body_routes` are paths that decompress their own bodies."""
    app.middlewares.insert(0, _decompressing(own_body_routes, body_max_bytes))
    _set_keepalive(listener)
    runner = web.AppRunner(
        app,
        access_log=None,
        auto_decompress=False,
        keepalive_timeout=IDLE_S,
        read_bufsize=ALLOWANCE_BYTES,
        shutdown_timeout=shutdown_s,
    )
    await runner.setup()
    protocols = runner.server
    assert protocols is not None, "the runner is set up"

    def connect() -> asyncio.Protocol:
        if len(protocols.connections) < connections_max:
            return protocols()
        on_rejected()
        return _Abort()

    server = None
    try:
        server = await asyncio.get_running_loop().create_server(connect, sock=listener, backlog=LISTEN_BACKLOG)
        yield
    finally:
        if server is not None:
            server.close()
        await runner.cleanup()


class _Abort(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.abort()


def _set_keepalive(listener: socket.socket) -> None:
    """Set the intervals of TCP keepalive, which connections inherit; aiohttp switches it on."""
    for name, value in (
        ("TCP_KEEPIDLE", KEEPALIVE_IDLE_S),
        ("TCP_KEEPINTVL", KEEPALIVE_INTERVAL_S),
        ("TCP_KEEPCNT", KEEPALIVE_PROBES),
    ):
        if hasattr(socket, name):  # not every system has it
            listener.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _decompressing(own_body_routes: Collection[str], max_bytes: int) -> Callable[..., Awaitable[web.StreamResponse]]:
    """Return the middleware that decompresses the bodies of all other routes.

    aiohttp would do it for all routes or none, and does not notice a truncated gzip body.
    """

    @web.middleware
    async def decompress(request: web.Request, handler: Handler) -> web.StreamResponse:
        coding = ",".join(request.headers.getall("Content-Encoding", []))
        if coding and request.path not in own_body_routes:
            # aiohttp has no public way to replace a body; it works as long as `content` was not read.
            compressed = request._payload  # noqa: SLF001
            request._payload = await _decompressed(request, compressed, coding, max_bytes=max_bytes)  # noqa: SLF001
        return await handler(request)

    return decompress


async def _decompressed(request: web.Request, compressed: StreamReader, coding: str, *, max_bytes: int) -> StreamReader:
    """Return the decompressed body. A malformed one raises when the route reads it, so the route words the error.

    Raises: HTTPRequestEntityTooLarge.
    """
    payload = StreamReader(request.protocol, max_bytes)
    try:
        decompressor = Decompressor(coding, max_bytes=max_bytes)
        while piece := await compressed.readany():
            payload.feed_data(decompressor.feed(piece))
        decompressor.finish()
    except ProtocolError as error:
        if error.reason == NackReason.PAYLOAD_TOO_LARGE.value:
            raise web.HTTPRequestEntityTooLarge(max_bytes, max_bytes + 1) from None
        payload.set_exception(web.RequestPayloadError(str(error)))
    payload.feed_eof()
    return payload
