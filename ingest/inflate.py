"""Compressed bodies, unpacked piece by piece. Owns the codings, and telling a whole body from one that was cut off.

    gzip     one or several members, each with its checksum and length at its end (RFC 1952)
    deflate  a zlib stream with its checksum at its end (RFC 1950), or a bare one (RFC 1951), which some clients send

A body that ends before its coding does was cut off on its way: what came of it may look whole, so nothing of it counts.
"""

from __future__ import annotations

import zlib
from typing import Protocol

from ingest.errors import ProtocolError
from ingest.offers import NackReason

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
