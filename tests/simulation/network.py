"""The network: links between processes that delay, lose, duplicate and reorder; HTTP and WebSocket without sockets.

Fake: TCP, HTTP framing and the WebSocket protocol. Real: the applications behind them, from the routes of aiohttp and
`DataPlane._serve` on, and the catalog's client up to its session.

What was sent arrives whatever becomes of its sender: a request of a process that was killed may still be handled, and
frames of a connection that its client gave up are still read, until the server notices.
"""

from __future__ import annotations

import asyncio
import contextvars
import random
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import aiohttp
from aiohttp import web
from aiohttp.http import HttpVersion11, RawRequestMessage
from aiohttp.streams import StreamReader
from multidict import CIMultiDict, CIMultiDictProxy
from websockets.exceptions import ConnectionClosedError
from websockets.protocol import State
from yarl import URL

from lakefeed.ingest.admission.auth import ANONYMOUS
from lakefeed.ingest.admission.limits import ConnectionSlot, Liveness
from lakefeed.ingest.websocket.socket import BudgetedConnection

# How long a server takes at most to notice that a client is gone.
NOTICED_MAX_S = 3.0


class Refused(ConnectionError):
    """Nothing listens there: the request had no effect."""


class Disconnected(ConnectionError):
    """The connection was lost: the request may have been handled."""


@dataclass(slots=True)
class Conditions:
    """What the network does to messages; shares of 1."""

    delay_max_s: float = 0.01
    lost: float = 0.0
    response_lost: float = 0.0
    duplicated: float = 0.0
    # Pairs of names between which nothing passes.
    cut: set[frozenset[str]] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class HttpRequest:
    method: str
    url: URL
    headers: Mapping[str, str]
    body: bytes


@dataclass(frozen=True, slots=True)
class HttpResponse:
    status: int
    body: bytes


class Process:
    """A process as others see it: its name, its tasks, and the application that it serves, if any."""

    def __init__(self, name: str, context: contextvars.Context) -> None:
        self.name = name
        self.context = context
        self.is_alive = True
        self.app: web.Application | None = None
        self._tasks: set[asyncio.Task[Any]] = set()

    def start(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Start a task that ends with the process."""
        task = asyncio.get_running_loop().create_task(work, context=self.context.copy())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def end(self) -> None:
        """Cancel all tasks. What they do while they end reaches nobody: see `is_alive`."""
        self.is_alive = False
        self.app = None
        for task in list(self._tasks):
            task.cancel()

    async def handle(self, request: HttpRequest) -> HttpResponse:
        """Handle a request as the application would."""
        assert self.app is not None
        response = await self.app._handle(_aiohttp_request(request))  # type: ignore[arg-type]
        body = getattr(response, "body", None)
        return HttpResponse(response.status, bytes(body) if body else b"")


class Network:
    """Carries requests and connections."""

    def __init__(self, chance: random.Random) -> None:
        self.conditions = Conditions()
        self.chance = chance
        self._in_flight: set[asyncio.Task[Any]] = set()

    async def request(
        self, client: Process, server: Callable[[], Process | None], request: HttpRequest
    ) -> HttpResponse:
        """Send a request and return the response; may wait forever, as over a link that lost it.

        Raises: Refused, Disconnected.
        """
        if not client.is_alive:
            raise Refused("the process is dead")
        delivery = asyncio.get_running_loop().create_task(self._deliver(client, server, request))
        self._in_flight.add(delivery)
        delivery.add_done_callback(self._in_flight.discard)
        await asyncio.wait([delivery])
        return delivery.result()

    async def close(self) -> None:
        """Drop what is in flight."""
        for task in list(self._in_flight):
            task.cancel()
        await asyncio.gather(*self._in_flight, return_exceptions=True)

    async def _deliver(
        self, client: Process, server: Callable[[], Process | None], request: HttpRequest
    ) -> HttpResponse:
        now = self.conditions
        await asyncio.sleep(self.delay_s())
        target = server()
        if target is None or not target.is_alive or target.app is None:
            raise Refused("connection refused")
        if self.is_cut(client, target) or self.chance.random() < now.lost:
            await self._fail(Refused("connection reset"))
        handling = target.start(target.handle(request))
        if self.chance.random() < now.duplicated:
            await asyncio.sleep(self.delay_s() * 10)
            if target.is_alive:
                target.start(target.handle(request))
        await asyncio.wait([handling])
        if handling.cancelled():
            raise Disconnected("the server is gone")
        await asyncio.sleep(self.delay_s())
        if self.is_cut(client, target) or self.chance.random() < now.response_lost:
            await self._fail(Disconnected("connection lost"))
        response: HttpResponse = handling.result()
        return response

    async def _fail(self, error: ConnectionError) -> None:
        """Fail at once, or never: then the client's own timeout ends the request."""
        if self.chance.random() < 0.3:
            await asyncio.Event().wait()
        raise error

    def is_cut(self, one: Process, other: Process) -> bool:
        """Return whether nothing passes between two processes."""
        return frozenset((one.name, other.name)) in self.conditions.cut

    def delay_s(self) -> float:
        """Return how long the next message takes. One in twenty takes much longer."""
        longest_s = self.conditions.delay_max_s
        return self.chance.random() * longest_s * (20 if self.chance.random() < 0.05 else 1)


class CatalogSession:
    """Takes the place of `aiohttp.ClientSession` in the catalog's client."""

    def __init__(self, network: Network, client: Process, catalog: Callable[[], Process | None]) -> None:
        self._network = network
        self._client = client
        self._catalog = catalog

    def request(
        self, method: str, url: URL, *, data: bytes | None, headers: Mapping[str, str], **_: object
    ) -> _Exchange:
        relative = URL(str(url.relative()).removeprefix("/v1"), encoded=True)
        return _Exchange(
            self._network, self._client, self._catalog, HttpRequest(method, relative, headers, data or b"")
        )


@dataclass(slots=True)
class _Exchange:
    network: Network
    client: Process
    catalog: Callable[[], Process | None]
    request: HttpRequest

    async def __aenter__(self) -> _Response:
        try:
            response = await self.network.request(self.client, self.catalog, self.request)
        except Refused as error:
            raise aiohttp.ClientConnectorError(_KEY, OSError(str(error))) from error
        except Disconnected as error:
            raise aiohttp.ServerDisconnectedError(str(error)) from error
        return _Response(response.status, response.body)

    async def __aexit__(self, *_: object) -> None:
        """End."""


_KEY: Any = SimpleNamespace(host="catalog", port=80, ssl=False, is_ssl=False)


@dataclass(slots=True)
class _Response:
    status: int
    body: bytes
    headers: Mapping[str, str] = field(default_factory=dict)

    async def read(self) -> bytes:
        return self.body


class _Transport:
    def is_closing(self) -> bool:
        return False

    def get_extra_info(self, _name: str, default: Any = None) -> Any:
        return default

    def abort(self) -> None:
        """Do nothing: the response is read from the response object."""


class _Protocol:
    """What aiohttp's requests and bodies ask of their connection."""

    ssl_context = peername = sockname = None
    _reading_paused = False
    transport = _Transport()

    def close(self) -> None:
        """Do nothing."""

    def pause_reading(self, **_: object) -> None:
        """Do nothing: the body is there."""

    def resume_reading(self, **_: object) -> None:
        """Do nothing: the body is there."""


class _Writer:
    """Takes a response that a handler sends by itself; it is read from the response object."""

    length = None
    chunked = False
    output_size = buffer_size = 0
    transport = _Transport()

    def __getattr__(self, _name: str) -> Callable[..., None]:
        return lambda *_args, **_options: None

    async def write_headers(self, *_: object) -> None: ...

    async def write(self, *_: object) -> None: ...

    async def write_eof(self, *_: object) -> None: ...

    async def drain(self) -> None: ...


_PROTOCOL: Any = _Protocol()
_WRITER: Any = _Writer()


def _aiohttp_request(request: HttpRequest) -> web.Request:
    loop = asyncio.get_running_loop()
    headers = CIMultiDictProxy(CIMultiDict({**request.headers, "Content-Length": str(len(request.body))}))
    payload = StreamReader(_PROTOCOL, 2**16, loop=loop)
    if request.body:
        payload.feed_data(request.body)
    payload.feed_eof()
    path = str(request.url)
    message = RawRequestMessage(
        request.method, path, HttpVersion11, headers, (), False, None, False, False, request.url
    )
    task = asyncio.current_task()
    assert task is not None
    return web.Request(message, payload, _PROTOCOL, _WRITER, task, loop)


# -- WebSocket


class Channel:
    """One direction of a connection: messages in order, each after a delay; closed once the receiver notices."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self._loop = asyncio.get_running_loop()
        self._arrived: deque[bytes] = deque()
        self._event = asyncio.Event()
        self._last_at = 0.0
        self.is_closed = False

    def send(self, message: bytes) -> None:
        self._last_at = max(self._last_at + 1e-6, self._loop.time() + self._network.delay_s())
        self._loop.call_at(self._last_at, self._arrive, message)

    def close_in(self, delay_s: float) -> None:
        self._loop.call_later(delay_s, self.close)

    def close(self) -> None:
        self.is_closed = True
        self._event.set()

    def _arrive(self, message: bytes) -> None:
        if not self.is_closed:
            self._arrived.append(message)
            self._event.set()

    async def recv(self) -> bytes | None:
        """Return the next message; None once closed."""
        while not self._arrived:
            if self.is_closed:
                return None
            self._event.clear()
            await self._event.wait()
        return self._arrived.popleft()


class ServerSocket(BudgetedConnection):
    """A node's end of a connection: takes the place of the WebSocket library."""

    state = State.OPEN  # type: ignore[assignment]

    def __init__(
        self, source: str, incoming: Channel, outgoing: Channel, node: Process, on_sent: Callable[[bytes], object]
    ) -> None:
        self.slot = ConnectionSlot(address=None, source=source)
        self.principal = ANONYMOUS
        self.transport = SimpleNamespace(abort=self._close)  # type: ignore[assignment]
        self._incoming = incoming
        self._outgoing = outgoing
        self._node = node
        self._on_sent = on_sent

    def liveness(self) -> Liveness:
        return Liveness(silent_since=None, arriving_since=None, unread_since=None)

    async def recv(self, decode: bool | None = None) -> Any:
        del decode
        message = await self._incoming.recv()
        if message is None:
            raise ConnectionClosedError(None, None)
        return message

    async def send(self, message: Any, text: bool | None = None) -> None:
        del text
        if self._incoming.is_closed:
            raise ConnectionClosedError(None, None)
        if self._node.is_alive:
            body = message.encode() if isinstance(message, str) else message
            self._on_sent(body)
            self._outgoing.send(body)

    async def close(self, code: int = 1000, reason: str = "") -> None:
        del code, reason
        self._close()

    def _close(self) -> None:
        self._incoming.close()
        self._outgoing.close_in(0.001)

    def take_charge(self) -> int:
        return 0

    def release(self, size_bytes: int) -> None:
        """Do nothing: nothing was charged."""

    def discard_unread(self) -> None:
        """Do nothing."""


class ClientSocket:
    """A source's end of a connection; `on_sent` sees what the node says at the moment it says it."""

    def __init__(self, network: Network, source: str, node: Process, on_sent: Callable[[bytes], object]) -> None:
        self._network = network
        self._up = Channel(network)
        self._down = Channel(network)
        self.server = ServerSocket(source, self._up, self._down, node, on_sent)

    def send(self, message: bytes) -> None:
        self._up.send(message)

    async def recv(self) -> bytes:
        """Return the next message.

        Raises: Disconnected.
        """
        message = await self._down.recv()
        if message is None:
            raise Disconnected("the connection is closed")
        return message

    def give_up(self) -> None:
        """Leave: what was sent may still be read until the node notices."""
        self._down.close()
        self._up.close_in(self._network.chance.random() * NOTICED_MAX_S)

    def lose(self) -> None:
        """Let the network lose the connection: both ends notice, each at its own time."""
        for channel in (self._up, self._down):
            channel.close_in(self._network.chance.random() * NOTICED_MAX_S)
