"""A WebSocket client for tests of the data plane, with a deadline on every wait."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from websockets.asyncio.client import ClientConnection, connect

DEADLINE_S = 120.0


class WsClient:
    """One connection to the data plane."""

    def __init__(self, socket: ClientConnection) -> None:
        self.socket = socket
        self.receipts: list[dict[str, Any]] = []

    async def send(self, kind: str, **fields: Any) -> None:
        await self.socket.send(json.dumps({"type": kind, **fields}))

    async def receive(self) -> dict[str, Any]:
        """Return the next reply. Receipts, which come after every commit, are kept in `receipts`."""
        while True:
            answer = await self._receive()
            if answer.get("status") != "persisted":
                return answer
            self.receipts.append(answer)

    async def receive_receipt(self, number: int) -> dict[str, Any]:
        """Wait for the receipt that covers a batch."""
        while not self.receipts or self.receipts[-1]["sequenceNumber"] < number:
            self.receipts.append(await self._receive())
        return self.receipts[-1]

    async def _receive(self) -> dict[str, Any]:
        async with asyncio.timeout(DEADLINE_S):
            return json.loads(await self.socket.recv())

    async def request(self, kind: str, **fields: Any) -> dict[str, Any]:
        await self.send(kind, **fields)
        return await self.receive()

    async def send_batch(self, *sequences: int, table: str = "users", **fields: Any) -> None:
        events = [insert(sequence, table=table) for sequence in sequences]
        await self.send("cdc_batch", **{"events": events, **fields})

    async def batch(self, *sequences: int, table: str = "users", **fields: Any) -> dict[str, Any]:
        await self.send_batch(*sequences, table=table, **fields)
        return await self.receive()

    async def closed(self) -> int:
        """Wait until the connection is closed; return the close code."""
        async with asyncio.timeout(DEADLINE_S):
            await self.socket.wait_closed()
        assert self.socket.close_code is not None
        return self.socket.close_code


def insert(sequence: int, *, table: str = "users", **fields: Any) -> dict[str, Any]:
    return {
        "sequence": sequence,
        "timestamp": 1_763_251_200_000,
        "operation": "INSERT",
        "table": table,
        "rowId": str(sequence),
        "after": {"id": sequence, "name": f"name {sequence}"},
        **fields,
    }


@asynccontextmanager
async def connected(url: str, source: str | None = "shop", **options: Any) -> AsyncIterator[WsClient]:
    """Open a connection and, if a source is given, bind it to the source."""
    async with connect(url, compression=None, max_size=None, **options) as socket:
        client = WsClient(socket)
        if source is not None:
            answer = await client.request("connect", sourceDoId=source)
            assert answer["type"] == "status"
        yield client
