"""A WebSocket client at the level of bytes, for what well-behaved libraries do not do: stay silent, stop in the middle
of a frame, send it byte by byte, never read.
"""

from __future__ import annotations

import asyncio
import base64
import json
import socket
import struct
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

DEADLINE_S = 240.0

TEXT, CLOSE, PING = 0x1, 0x8, 0x9

# A mask of zeros changes nothing, so that what is sent can be read here.
_MASK = b"\0\0\0\0"


def encode_frame(opcode: int, payload: bytes, *, fin: bool = True, length: int | None = None) -> bytes:
    """Encode a client's frame; `length` announces more than is there."""
    size = len(payload) if length is None else length
    first = opcode | (0x80 if fin else 0)
    if size < 126:
        head = struct.pack("!BB", first, 0x80 | size)
    elif size < 2**16:
        head = struct.pack("!BBH", first, 0x80 | 126, size)
    else:
        head = struct.pack("!BBQ", first, 0x80 | 127, size)
    return head + _MASK + payload


def text_frame(kind: str, **fields: Any) -> bytes:
    return encode_frame(TEXT, json.dumps({"type": kind, **fields}).encode())


class RawClient:
    """One connection, already upgraded."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def receive(self) -> tuple[int, bytes]:
        """Read one frame: its opcode and payload."""
        async with asyncio.timeout(DEADLINE_S):
            first, size = struct.unpack("!BB", await self.reader.readexactly(2))
            if size >= 126:
                form = "!H" if size == 126 else "!Q"
                (size,) = struct.unpack(form, await self.reader.readexactly(struct.calcsize(form)))
            return first & 0x0F, await self.reader.readexactly(size)

    async def answer(self) -> dict[str, Any]:
        """Read the next message."""
        while True:
            opcode, payload = await self.receive()
            if opcode == TEXT:
                return json.loads(payload)
            assert opcode == PING

    async def closed(self) -> tuple[int, str]:
        """Read up to the server's goodbye: code and reason."""
        while True:
            opcode, payload = await self.receive()
            if opcode == CLOSE:
                return struct.unpack("!H", payload[:2])[0], payload[2:].decode()

    def abort(self) -> None:
        """Go without a goodbye."""
        self.writer.transport.abort()


async def open_raw(url: str, *, headers: Mapping[str, str] | None = None, buffer_bytes: int | None = None) -> RawClient:
    """Upgrade a connection. `buffer_bytes` bounds what the system keeps of what is not read or not yet sent."""
    target = urlsplit(url)
    connection = socket.socket()
    connection.setblocking(False)
    if buffer_bytes is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer_bytes)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    await asyncio.get_running_loop().sock_connect(connection, (target.hostname, target.port))
    reader, writer = await asyncio.open_connection(sock=connection)
    fields = {
        "Host": target.netloc,
        "Upgrade": "websocket",
        "Connection": "Upgrade",
        "Sec-WebSocket-Key": base64.b64encode(b"0123456789abcdef").decode(),
        "Sec-WebSocket-Version": "13",
        **(headers or {}),
    }
    head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    writer.write(f"GET {target.path} HTTP/1.1\r\n{head}\r\n".encode())
    async with asyncio.timeout(DEADLINE_S):
        answer = await reader.readuntil(b"\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 101 "), answer
    return RawClient(reader, writer)
