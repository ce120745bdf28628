"""A proxy in front of a real HTTP server on loopback, which spoils requests when told to.

It serves from a thread of its own, so that tests that block and clients of every kind can use it. Rules are asked in
the order in which they were set; a request that meets none goes through as it is, body and headers untouched (S3 signs
them). What is told to clients is the proxy's `url`; it stays the same over `stop` and `resume`.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar

import aiohttp
from aiohttp import web
from yarl import URL

from tests.service_process import free_ports

T = TypeVar("T")
# Method and address in, the address with a signature out.
Sign: TypeAlias = Callable[[str, str], str]

_WAIT_S = 120.0
_CHUNK_BYTES = 64 * 1024
# Of one connection only; clients and servers agree on their own.
_HOP_HEADERS = ("connection", "keep-alive", "transfer-encoding", "expect")


@dataclass(frozen=True, slots=True)
class Answer:
    """Answer with this status instead of the server; `forwarded` lets the server do it all the same."""

    status: int
    forwarded: bool = False
    body: bytes = b""


@dataclass(frozen=True, slots=True)
class Silence:
    """Never answer; `forwarded` lets the server do it all the same."""

    forwarded: bool = False


@dataclass(frozen=True, slots=True)
class Slow:
    """Wait before the request goes on, then let bodies trickle both ways."""

    delay_s: float = 0.0
    bytes_per_s: float = float("inf")


@dataclass(frozen=True, slots=True)
class CutRequest:
    """Lose both connections when the server has half of the request's body."""


@dataclass(frozen=True, slots=True)
class CutResponse:
    """Lose the client's connection when it has half of the response's body, or nothing of one that has no body."""


@dataclass(frozen=True, slots=True)
class Meanwhile:
    """Let something else happen, then let the request through: whoever sent it comes second."""

    action: Callable[[], object]


Fault = Answer | Silence | Slow | CutRequest | CutResponse | Meanwhile


@dataclass(slots=True)
class Rule:
    """A fault, the requests that it is for, and how many of them are left (None: until it is lifted).

    It counts the requests that it met, and keeps the headers of the last one.
    """

    fault: Fault
    method: re.Pattern[str]
    path: re.Pattern[str]
    left: int | None
    met: int = 0
    last_headers: Mapping[str, str] = field(default_factory=dict)


class FaultProxy:
    """See the module. Made by `fault_proxy`."""

    def __init__(self, target_url: str, *, sign: Sign | None = None) -> None:
        self._target_url = target_url.rstrip("/")
        self._sign = sign
        self._port = free_ports(1)[0]
        self._rules: list[Rule] = []
        self._lock = threading.Lock()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="fault-proxy", daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    # -- what tests say

    def spoil(self, fault: Fault, *, method: str = ".*", path: str = "", times: int | None = None) -> Rule:
        """Spoil requests whose method fits and whose path (with query) holds a match."""
        rule = Rule(fault, re.compile(method), re.compile(path), times)
        with self._lock:
            self._rules.append(rule)
        return rule

    def lift(self) -> None:
        """Let everything through again; requests that are being spoiled stay so."""
        with self._lock:
            self._rules.clear()

    def stop(self) -> None:
        """Refuse connections and lose those that are open."""
        self._run(self._close())

    def resume(self) -> None:
        """Listen again, at the same address."""
        self._run(self._listen())

    # -- the thread

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(_WAIT_S)

    def __enter__(self) -> FaultProxy:
        self._thread.start()
        self._run(self._open())
        return self

    def __exit__(self, *_: object) -> None:
        self._run(self._shut())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_WAIT_S)
        self._loop.close()

    async def _open(self) -> None:
        # One connection per request: a server may close an idle one just when it is used again.
        connector = aiohttp.TCPConnector(force_close=True, limit=0)
        self._session = aiohttp.ClientSession(
            connector=connector, auto_decompress=False, timeout=aiohttp.ClientTimeout()
        )
        self._runner: web.AppRunner | None = None
        await self._listen()

    async def _shut(self) -> None:
        await self._close()
        await self._session.close()

    async def _listen(self) -> None:
        assert self._runner is None, "the proxy listens already"
        self._closing = asyncio.Event()
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(app, auto_decompress=False, access_log=None, shutdown_timeout=0.0)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self._port).start()

    async def _close(self) -> None:
        if self._runner is not None:
            self._closing.set()
            await self._runner.cleanup()
            self._runner = None

    # -- one request

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        fault = self._next_fault(request)
        try:
            body = await request.content.read()
        except ConnectionResetError:  # the client has lost its patience
            return await self._hang_up(request)
        match fault:
            case CutRequest():
                with contextlib.suppress(aiohttp.ClientError, ConnectionAbortedError):
                    await self._forward(request, _half_of(body))
                return await self._hang_up(request)
            case Slow(delay_s, bytes_per_s):
                await asyncio.sleep(delay_s)
                return await self._pass_on(request, body, bytes_per_s=bytes_per_s)
            case Meanwhile(action):
                await asyncio.to_thread(action)
                return await self._pass_on(request, body)
            case Answer(status, forwarded, answer):
                if forwarded:
                    await self._pass_through(request, body)
                return web.Response(status=status, body=answer)
            case Silence(forwarded):
                if forwarded:
                    await self._pass_through(request, body)
                await self._closing.wait()
                return await self._hang_up(request)
            case CutResponse():
                return await self._pass_on(request, body, is_cut=True)
        return await self._pass_on(request, body)

    def _next_fault(self, request: web.Request) -> Fault | None:
        with self._lock:
            for rule in self._rules:
                if (
                    rule.left == 0
                    or not rule.method.fullmatch(request.method)
                    or not rule.path.search(request.raw_path)
                ):
                    continue
                rule.met += 1
                rule.last_headers = request.headers
                rule.left = None if rule.left is None else rule.left - 1
                return rule.fault
        return None

    async def _pass_through(self, request: web.Request, body: bytes) -> None:
        """Let the server have the request, and keep its answer."""
        await (await self._forward(request, _trickle(body) if body else None)).read()

    async def _forward(self, request: web.Request, body: AsyncIterator[bytes] | None) -> aiohttp.ClientResponse:
        url, dropped = f"{self._target_url}{request.raw_path}", _HOP_HEADERS
        if self._sign is not None:
            url, dropped = self._sign(request.method, url), (*_HOP_HEADERS, "authorization", "host")
        headers = [(name, value) for name, value in request.headers.items() if name.lower() not in dropped]
        skipped = ("Content-Type", "User-Agent", "Accept-Encoding", "Accept")
        return await self._session.request(
            request.method,
            URL(url, encoded=True),
            data=body,
            headers=headers,
            skip_auto_headers=skipped,
            allow_redirects=False,
        )

    async def _pass_on(
        self, request: web.Request, body: bytes, *, bytes_per_s: float = float("inf"), is_cut: bool = False
    ) -> web.StreamResponse:
        upload = _trickle(body, bytes_per_s) if body else None
        try:
            answer = await self._forward(request, upload)
            received = await answer.read()
        except aiohttp.ClientError:
            return await self._hang_up(request)  # as the server did
        if is_cut and not received:
            return await self._hang_up(request)
        headers = [(name, value) for name, value in answer.headers.items() if name.lower() not in _HOP_HEADERS]
        response = web.StreamResponse(status=answer.status, headers=dict(headers))
        if request.method != "HEAD":
            response.content_length = len(received)
        with contextlib.suppress(ConnectionResetError):  # the client has lost its patience
            await response.prepare(request)
            if is_cut:
                await response.write(received[: len(received) // 2])
                return await self._hang_up(request)
            async for piece in _trickle(received, bytes_per_s):
                await response.write(piece)
            await response.write_eof()
        return response

    async def _hang_up(self, request: web.Request) -> web.StreamResponse:
        if request.transport is not None:
            await asyncio.sleep(0)  # what was written is on its way
            request.transport.abort()
        return web.Response(status=500)


async def _half_of(body: bytes) -> AsyncIterator[bytes]:
    yield body[: len(body) // 2]
    raise ConnectionAbortedError("the fault proxy cut the request")


async def _trickle(body: bytes, bytes_per_s: float = float("inf")) -> AsyncIterator[bytes]:
    step = int(min(_CHUNK_BYTES, max(1, bytes_per_s / 10)))
    for start in range(0, len(body), step):
        yield body[start : start + step]
        await asyncio.sleep(step / bytes_per_s)


@contextlib.contextmanager
def fault_proxy(target_url: str, *, sign: Sign | None = None) -> Iterator[FaultProxy]:
    """Put a proxy in front of a server; with `sign` requests are signed by it, whatever the client has signed."""
    with FaultProxy(target_url, sign=sign) as proxy:
        yield proxy
