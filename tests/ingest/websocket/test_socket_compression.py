"""permessage-deflate: only where it is switched on, and inside the same memory bound."""

from __future__ import annotations

import asyncio
import contextlib
import json

from tests.ingest.limited_service import serving_with, status_of, wait_for_status
from tests.ingest.ws_client import connect, connected, insert

MIB = 1024 * 1024


async def test_compression_is_not_negotiated_unless_it_is_switched_on(tmp_path):
    async with serving_with(tmp_path) as addresses, connect(addresses.ws_url, compression="deflate") as socket:
        assert socket.protocol.extensions == []


async def test_packed_batches_are_taken_where_compression_is_on(tmp_path):
    async with serving_with(tmp_path, compression=True) as addresses:
        async with connect(addresses.ws_url, compression="deflate") as socket:
            assert [extension.name for extension in socket.protocol.extensions] == ["permessage-deflate"]
        async with connected(addresses.ws_url) as plain:
            assert (await plain.batch(1))["status"] == "ok"


async def test_packed_messages_that_unpack_to_much_stay_inside_the_memory_bound(tmp_path, stuck_log):
    frame_max = MIB // 4
    bound = 4 * MIB
    async with serving_with(tmp_path, compression=True, frame_max_bytes=frame_max, memory_max_bytes=bound) as addresses:
        async with contextlib.AsyncExitStack() as stack:
            sockets = [
                await stack.enter_async_context(connect(addresses.ws_url, compression="deflate")) for _ in range(30)
            ]
            stuck_log.clear()
            senders = [asyncio.create_task(_send_much(socket, f"source-{n}")) for n, socket in enumerate(sockets)]
            status = await wait_for_status(addresses, lambda found: found["memory"]["pausedConnections"] > 0)
            # Each of 30 x 20 messages unpacks to some 100 KiB: 60 MiB in all. One read may unpack beyond the bound.
            assert status["memory"]["heldBytes"] < bound + 4096 * 1032 + frame_max
            stuck_log.set()
            await asyncio.gather(*senders)
        assert (await status_of(addresses))["problems"] == []


async def _send_much(socket, source: str) -> None:
    for sequence in range(20):
        event = insert(sequence, after={"id": sequence, "pad": "x" * 100_000})
        await socket.send(_batch(source, event))
    for _ in range(20):
        await socket.recv()


def _batch(source: str, event: dict) -> str:
    return json.dumps({"type": "cdc_batch", "sourceDoId": source, "events": [event]})
