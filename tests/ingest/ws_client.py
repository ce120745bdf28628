"""A client for tests of the data plane: says one thing, hears one thing, with a deadline on everything."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from websockets.asyncio.client import ClientConnection, connect

DEADLINE_S = 120.0


class Talker:
    """One connection to the data plane."""

    def __init__(self, socket: ClientConnection) -> None:
        self.socket = socket
        self.receipts: list[dict[str, Any]] = []

    async def say(self, kind: str, **fields: Any) -> None:
        await self.socket.send(json.dumps({"type": kind, **fields}))

    async def hear(self) -> dict[str, Any]:
        """Hear the next answer; receipts, which come whenever there was a commit, are put aside."""
        while True:
            answer = await self._hear()
            if answer.get("status") != "persisted":
                return answer
            self.receipts.append(answer)

    async def hear_receipt(self, number: int) -> dict[str, Any]:
        """Wait for the receipt that covers a batch."""
        while not self.receipts or self.receipts[-1]["sequenceNumber"] < number:
            self.receipts.append(await self._hear())
        return self.receipts[-1]

    async def _hear(self) -> dict[str, Any]:
        async with asyncio.timeout(DEADLINE_S):
            return json.loads(await self.socket.recv())

    async def ask(self, kind: str, **fields: Any) -> dict[str, Any]:
        await self.say(kind, **fields)
        return await self.hear()

    async def send_batch(self, *sequences: int, table: str = "users", **fields: Any) -> None:
        events = [insert(sequence, table=table) for sequence in sequences]
        await self.say("cdc_batch", **{"events": events, **fields})

    async def batch(self, *sequences: int, table: str = "users", **fields: Any) -> dict[str, Any]:
        await self.send_batch(*sequences, table=table, **fields)
        return await self.hear()

    async def closed(self) -> int:
        """Wait for the end; its code."""
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
async def talking(url: str, source: str | None = "shop", **options: Any) -> AsyncIterator[Talker]:
    """Open a connection and, with a source, bind it."""
    async with connect(url, compression=None, max_size=None, **options) as socket:
        talker = Talker(socket)
        if source is not None:
            answer = await talker.ask("connect", sourceDoId=source)
            assert answer["type"] == "status"
        yield talker
