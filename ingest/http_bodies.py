"""Bodies of HTTP ingest, read as far as the budget allows. Owns reading them and what a broken one is told.

    1  the first pieces, up to the allowance that everybody has      a client that stops here holds nothing of others
    2  the rest is reserved, as large as it may become               what was begun can be finished
    3  the rest is read, and unpacked where it is compressed         never more than `max_bytes`, whatever is in it
    4  what it really takes is held until it is durable

Steps 1 and 3 have `timeout_s` each (0 = no limit); waiting for other clients does not count.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import StreamReader, web

from ingest.batch_checks import invalid
from ingest.errors import ProtocolError
from ingest.http_gate import Visit
from ingest.inflate import Unpacker, open_unpacker, too_large
from ingest.read_budget import ALLOWANCE_BYTES

# Why a body is refused that did not arrive in time. On the WebSocket a close code says so, and no nack.
TIMEOUT = "timeout"


async def read_body(request: web.Request, visit: Visit, *, max_bytes: int, timeout_s: float) -> bytes:
    """Read a body; the visit then holds its size.

    Raises: ProtocolError, Busy, ConnectionError if the client is gone.
    """
    announced_bytes = request.content_length
    if announced_bytes is not None and announced_bytes > max_bytes:
        raise too_large(max_bytes)
    unpacker = open_unpacker(",".join(request.headers.getall("Content-Encoding", [])), max_bytes=max_bytes)
    await visit.wait_to_read()
    async with _arriving(request, timeout_s):
        pieces = await _read_allowance(request.content)
    if unpacker.expands or not request.content.at_eof():
        await visit.reserve(max_bytes if unpacker.expands or not announced_bytes else announced_bytes)
    async with _arriving(request, timeout_s):
        body = await _read_rest(request.content, pieces, unpacker)
    visit.settle(len(body))
    return body


async def _read_allowance(content: StreamReader) -> list[bytes]:
    pieces: list[bytes] = []
    size_bytes = 0
    while size_bytes < ALLOWANCE_BYTES and (piece := await content.readany()):
        pieces.append(piece)
        size_bytes += len(piece)
    return pieces


async def _read_rest(content: StreamReader, pieces: list[bytes], unpacker: Unpacker) -> bytes:
    unpacked = [unpacker.feed(piece) for piece in pieces]
    while piece := await content.readany():
        unpacked.append(unpacker.feed(piece))
    unpacker.finish()
    return b"".join(unpacked)


@asynccontextmanager
async def _arriving(request: web.Request, timeout_s: float) -> AsyncIterator[None]:
    """Say what is wrong with a body that does not arrive as it should."""
    try:
        async with asyncio.timeout(timeout_s or None):
            yield
    except TimeoutError:
        _read_no_more(request)
        raise ProtocolError(TIMEOUT, f"body: expected to arrive within {timeout_s:g} seconds", retry=True) from None
    except web.RequestPayloadError:
        _read_no_more(request)
        raise invalid("body: expected what its Transfer-Encoding or Content-Length says") from None


def _read_no_more(request: web.Request) -> None:
    """End the connection after the answer. The server would otherwise wait for the rest of the body."""
    request.protocol.close()
    request.content.feed_eof()
