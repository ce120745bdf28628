"""HTTP at the level of bytes, for what HTTP libraries do not send: odd heads, broken bodies, silence."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import urlsplit

DEADLINE_S = 60.0


async def send_raw(url: str, *requests: bytes) -> list[tuple[int, dict[str, Any]]]:
    """Send requests as they are over one connection, each after the answer to the one before."""
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        heard = []
        async with asyncio.timeout(DEADLINE_S):
            for request in requests:
                writer.write(request)
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                length = int(head.lower().split("content-length:")[1].split()[0])
                body = await reader.readexactly(length)
                heard.append((int(head.split()[1]), json.loads(body) if body.startswith(b"{") else {}))
        return heard
    finally:
        writer.close()
        await writer.wait_closed()


class RawHttp:
    """One connection that sends any bytes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def answer(self) -> tuple[int, dict[str, str], dict[str, Any]]:
        """Read an answer: its status, headers and document."""
        async with asyncio.timeout(DEADLINE_S):
            head = (await self.reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            headers = dict(line.lower().split(": ", 1) for line in head[1:] if line)
            body = await self.reader.readexactly(int(headers["content-length"]))
        return int(head[0].split()[1]), headers, json.loads(body)

    async def closed(self) -> bytes:
        """Read until the server closes the connection; return what it sent before."""
        async with asyncio.timeout(DEADLINE_S):
            try:
                return await self.reader.read()
            except ConnectionError:
                return b""

    def abort(self) -> None:
        """Abort the connection."""
        self.writer.transport.abort()


@contextlib.asynccontextmanager
async def raw_connection(url: str, *, buffer_bytes: int | None = None) -> AsyncIterator[RawHttp]:
    """Connect. `buffer_bytes` bounds what the system keeps of what is not read."""
    target = urlsplit(url)
    connection = socket.socket()
    connection.setblocking(False)
    if buffer_bytes is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
    await asyncio.get_running_loop().sock_connect(connection, (target.hostname, target.port))
    client = RawHttp(*await asyncio.open_connection(sock=connection))
    try:
        yield client
    finally:
        client.abort()


def post_head(path: str, **headers: Any) -> bytes:
    """Encode the head of a request; headers are named with underscores."""
    fields = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items())
    return f"POST {path} HTTP/1.1\r\nHost: h\r\n{fields}\r\n".encode()
