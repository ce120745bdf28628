"""Compressed bodies, unpacked piece by piece. Owns the codings, and telling a whole body from one that was cut off.

    gzip     one or several members, each with its checksum and length at its end (RFC 1952)
    deflate  a zlib stream with its checksum at its end (RFC 1950), or a bare one (RFC 1951), which some clients send

A body that ends before its coding does was cut off on its way: what came of it may look whole, so nothing of it counts.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Protocol

from aiohttp import StreamReader, web

from lakefeed.ingest.admission.budget import ALLOWANCE_BYTES
from lakefeed.ingest.errors import ProtocolError
from lakefeed.ingest.http.gate import Visit
from lakefeed.ingest.protocol.batch import invalid
from lakefeed.ingest.protocol.offers import NackReason

# --- ingest.inflate ---------------------------------------------------------------------------------------------------


# Members of one gzip body. Those who compress in parallel make one per block of 128 KiB or so; more are made to cost.
MEMBERS_MAX = 1_000

_GZIP_NAMES = ("gzip", "x-gzip")
_GZIP_WBITS = 16 + zlib.MAX_WBITS
_ZLIB_WBITS = zlib.MAX_WBITS
_BARE_WBITS = -zlib.MAX_WBITS

# The low half of a zlib stream's first byte: 8 stands for deflate. A bare stream cannot begin so.
_METHOD_MASK, _METHOD_DEFLATE = 0x0F, 8


def too_large(max_bytes: int) -> ProtocolError:
    """Refuse a body for its size."""
    return ProtocolError(NackReason.PAYLOAD_TOO_LARGE.value, f"body: expected at most {max_bytes} bytes")


class Unpacker(Protocol):
    """Turns the pieces of a body as they came into the body as it was meant."""

    @property
    def expands(self) -> bool:
        """Tell whether a piece may become larger."""

    def feed(self, piece: bytes) -> bytes:
        """Unpack the next piece.

        Raises: ProtocolError.
        """

    def finish(self) -> None:
        """Check that the body has come to its end.

        Raises: ProtocolError.
        """


def open_unpacker(coding: str, *, max_bytes: int) -> Unpacker:
    """Begin with a body of this Content-Encoding, of at most `max_bytes` when unpacked.

    Raises: ProtocolError if nobody here knows the coding.
    """
    name = coding.strip().lower()
    if name in ("", "identity"):
        return Plain(max_bytes)
    if name not in (*_GZIP_NAMES, "deflate"):
        raise ProtocolError(NackReason.INVALID_FORMAT.value, "Content-Encoding: expected gzip, deflate or identity")
    return Inflater(is_gzip=name in _GZIP_NAMES, max_bytes=max_bytes)


class Plain:
    """A body that is not compressed: counts it. Its end is HTTP's to tell."""

    expands = False

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._room_bytes = max_bytes

    def feed(self, piece: bytes) -> bytes:
        """Let a piece pass.

        Raises: ProtocolError.
        """
        self._room_bytes -= len(piece)
        if self._room_bytes < 0:
            raise too_large(self._max_bytes)
        return piece

    def finish(self) -> None:
        """Be content with what came."""


class Inflater:
    """A compressed body."""

    expands = True

    def __init__(self, *, is_gzip: bool, max_bytes: int) -> None:
        self._is_gzip = is_gzip
        self._name = "gzip" if is_gzip else "deflate"
        self._max_bytes = max_bytes
        self._room_bytes = max_bytes
        self._members = 0
        self._stream: zlib._Decompress | None = None

    def feed(self, piece: bytes) -> bytes:
        """Unpack the next piece. However much is in it, no more than the limit and a byte is ever unpacked.

        Raises: ProtocolError.
        """
        unpacked = []
        while piece:
            stream = self._stream_for(piece)
            try:
                unpacked.append(stream.decompress(piece, self._room_bytes + 1))
            except zlib.error:
                raise self._malformed("expected what its Content-Encoding says") from None
            self._room_bytes -= len(unpacked[-1])
            if self._room_bytes < 0:
                raise too_large(self._max_bytes)
            # Nothing stays unconsumed: there was room for one byte more than came out.
            piece = stream.unused_data if stream.eof else b""
        return b"".join(unpacked)

    def _stream_for(self, piece: bytes) -> zlib._Decompress:
        """Give the stream that a piece goes on with, or begin one."""
        if self._stream is None or self._stream.eof:
            if self._members >= (MEMBERS_MAX if self._is_gzip else 1):
                raise self._malformed("expected nothing behind the end of the compressed data")
            self._members += 1
            self._stream = zlib.decompressobj(self._wbits_of(piece))
        return self._stream

    def _wbits_of(self, piece: bytes) -> int:
        if self._is_gzip:
            return _GZIP_WBITS
        return _ZLIB_WBITS if piece[0] & _METHOD_MASK == _METHOD_DEFLATE else _BARE_WBITS

    def finish(self) -> None:
        """Check that the body has come to its end.

        Raises: ProtocolError.
        """
        if self._stream is None or not self._stream.eof:
            raise self._malformed("was cut off before the end of the compressed data")

    def _malformed(self, rule: str) -> ProtocolError:
        return ProtocolError(NackReason.INVALID_FORMAT.value, f"body: {rule}: {self._name}")


# --- ingest.http_bodies -----------------------------------------------------------------------------------------------
#
# Bodies of HTTP ingest, read as far as the budget allows. Owns reading them and what a broken one is told.
#
#     1  the first pieces, up to the allowance that everybody has      a client that stops here holds nothing of others
#     2  the rest is reserved, as large as it may become               what was begun can be finished
#     3  the rest is read, and unpacked where it is compressed         never more than `max_bytes`, whatever is in it
#     4  what it really takes is held until it is durable
#
# Steps 1 and 3 have `timeout_s` each (0 = no limit); waiting for other clients does not count.


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
