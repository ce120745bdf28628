"""Bodies of HTTP requests: read within the memory budget and time, and decompressed piece by piece.

    1  the first pieces, up to the allowance of every connection    a client that stops here holds nothing of others
    2  reserve the rest, as large as it may become                  a body that was begun can be finished
    3  read the rest and decompress it                              never more than `max_bytes`
    4  hold what it really takes until it is durable

Steps 1 and 3 have `timeout_s` each (0 = no limit); waiting for memory does not count.

    gzip     one or several members, each with checksum and length at its end (RFC 1952)
    deflate  a zlib stream with its checksum at its end (RFC 1950), or a bare one (RFC 1951), which some clients send

A body that ends before its coding does was truncated, and nothing of it is accepted, even if what came looks complete.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web

from lakefeed.ingest.admission.budget import ALLOWANCE_BYTES
from lakefeed.ingest.errors import ProtocolError
from lakefeed.ingest.http.gate import RequestLease
from lakefeed.ingest.protocol.batch import invalid
from lakefeed.ingest.protocol.offers import NackReason

# The reason for a body that did not arrive in time. On the WebSocket a close code says so instead of a nack.
TIMEOUT = "timeout"

# Members of one gzip body. Parallel compressors make one per block of 128 KiB or so; more are an attack.
MEMBERS_MAX = 1_000

_GZIP_NAMES = ("gzip", "x-gzip")
_GZIP_WBITS = 16 + zlib.MAX_WBITS
_ZLIB_WBITS = zlib.MAX_WBITS
_BARE_WBITS = -zlib.MAX_WBITS

# The low half of a zlib stream's first byte: 8 stands for deflate. A bare stream cannot begin so.
_METHOD_MASK, _METHOD_DEFLATE = 0x0F, 8


def too_large(max_bytes: int) -> ProtocolError:
    """Return the error for a body that is too large."""
    return ProtocolError(NackReason.PAYLOAD_TOO_LARGE.value, f"body: expected at most {max_bytes} bytes")


class Decompressor:
    """Decodes a body piece by piece, and never yields more than `max_bytes`.

    Without a coding, pieces are only counted (`expands` is False), and HTTP itself marks the end of the body.
    """

    def __init__(self, coding: str, *, max_bytes: int) -> None:
        """Read the Content-Encoding.

        Raises: ProtocolError if it is unknown.
        """
        name = coding.strip().lower()
        if name not in ("", "identity", "deflate", *_GZIP_NAMES):
            raise ProtocolError(NackReason.INVALID_FORMAT.value, "Content-Encoding: expected gzip, deflate or identity")
        self.expands = name not in ("", "identity")
        self._is_gzip = name in _GZIP_NAMES
        self._max_bytes = max_bytes
        self._room_bytes = max_bytes
        self._members = 0
        self._stream: zlib._Decompress | None = None

    def feed(self, piece: bytes) -> bytes:
        """Decode the next piece. Whatever is in it, no more than the limit and one byte is ever decompressed.

        Raises: ProtocolError.
        """
        if not self.expands:
            self._take_room(len(piece))
            return piece
        decoded = []
        while piece:
            stream = self._stream_for(piece)
            try:
                decoded.append(stream.decompress(piece, self._room_bytes + 1))
            except zlib.error:
                raise self._malformed("expected what its Content-Encoding says") from None
            self._take_room(len(decoded[-1]))
            # Nothing stays unconsumed: there was room for one byte more than came out.
            piece = stream.unused_data if stream.eof else b""
        return b"".join(decoded)

    def _take_room(self, size_bytes: int) -> None:
        self._room_bytes -= size_bytes
        if self._room_bytes < 0:
            raise too_large(self._max_bytes)

    def _stream_for(self, piece: bytes) -> zlib._Decompress:
        """Return the stream that a piece belongs to, starting a new member if needed."""
        if self._stream is None or self._stream.eof:
            if self._members >= (MEMBERS_MAX if self._is_gzip else 1):
                raise self._malformed("expected nothing behind the end of the compressed data")
            self._members += 1
            deflate_wbits = _ZLIB_WBITS if piece[0] & _METHOD_MASK == _METHOD_DEFLATE else _BARE_WBITS
            self._stream = zlib.decompressobj(_GZIP_WBITS if self._is_gzip else deflate_wbits)
        return self._stream

    def finish(self) -> None:
        """Check that the body is complete.

        Raises: ProtocolError.
        """
        if self.expands and (self._stream is None or not self._stream.eof):
            raise self._malformed("was cut off before the end of the compressed data")

    def _malformed(self, rule: str) -> ProtocolError:
        name = "gzip" if self._is_gzip else "deflate"
        return ProtocolError(NackReason.INVALID_FORMAT.value, f"body: {rule}: {name}")


async def read_body(request: web.Request, lease: RequestLease, *, max_bytes: int, timeout_s: float) -> bytes:
    """Read a body; the lease then holds its size.

    Raises: ProtocolError, Busy, ConnectionError if the client is gone.
    """
    announced_bytes, content = request.content_length, request.content
    if announced_bytes is not None and announced_bytes > max_bytes:
        raise too_large(max_bytes)
    decompressor = Decompressor(",".join(request.headers.getall("Content-Encoding", [])), max_bytes=max_bytes)
    await lease.wait_to_read()
    pieces: list[bytes] = []
    size_bytes = 0
    async with _arriving(request, timeout_s):
        while size_bytes < ALLOWANCE_BYTES and (piece := await content.readany()):
            pieces.append(piece)
            size_bytes += len(piece)
    if decompressor.expands or not content.at_eof():
        await lease.reserve(max_bytes if decompressor.expands or not announced_bytes else announced_bytes)
    async with _arriving(request, timeout_s):
        decoded = [decompressor.feed(piece) for piece in pieces]
        while piece := await content.readany():
            decoded.append(decompressor.feed(piece))
        decompressor.finish()
    body = b"".join(decoded)
    lease.hold(len(body))
    return body


@asynccontextmanager
async def _arriving(request: web.Request, timeout_s: float) -> AsyncIterator[None]:
    """Turn a timeout or a framing error of the body into a ProtocolError."""
    try:
        async with asyncio.timeout(timeout_s or None):
            yield
    except TimeoutError:
        _stop_reading(request)
        raise ProtocolError(TIMEOUT, f"body: expected to arrive within {timeout_s:g} seconds", retry=True) from None
    except web.RequestPayloadError:
        _stop_reading(request)
        raise invalid("body: expected what its Transfer-Encoding or Content-Length says") from None


def _stop_reading(request: web.Request) -> None:
    """Close the connection after the response. The server would otherwise wait for the rest of the body."""
    request.protocol.close()
    request.content.feed_eof()
