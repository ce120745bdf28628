"""A thousand connections against the real service: those that do nothing, and those that push more than it can take."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import psutil
import pytest

from tests.ingest.ws_client import connected, insert
from tests.integration.stuck_disk import StuckDisk
from tests.raw_client import RawClient, open_raw, text_frame
from tests.service_process import ServiceProcess, service_process

pytestmark = pytest.mark.integration

MIB = 1024 * 1024
CONNECTIONS = 1_000
DEADLINE_S = 240.0

# What docs/operations.md says that memory is bounded by, for the settings below.
MEMORY_MAX_BYTES = 32 * MIB
QUEUE_MAX_BYTES = 8 * MIB
PER_CONNECTION_BYTES = MIB // 4
BOUND_BYTES = MEMORY_MAX_BYTES + 2 * QUEUE_MAX_BYTES + CONNECTIONS * PER_CONNECTION_BYTES


@contextlib.asynccontextmanager
async def many_clients(service: ServiceProcess) -> AsyncIterator[list[RawClient]]:
    """A thousand connections, each of a source of its own."""
    clients: list[RawClient] = []
    try:
        for start in range(0, CONNECTIONS, 50):
            clients += await asyncio.gather(
                *(
                    open_raw(service.ws_url, headers={"X-Client-ID": f"source-{number}"}, buffer_bytes=64 * 1024)
                    for number in range(start, start + 50)
                )
            )
        yield clients
    finally:
        for client in clients:
            client.abort()


async def until_status(service: ServiceProcess, condition: Callable[[dict], object]) -> dict[str, Any]:
    async with asyncio.timeout(DEADLINE_S):
        while not condition(status := await asyncio.to_thread(service.get, "/status")):  # noqa: ASYNC110
            await asyncio.sleep(0.1)
    return status


def held_by(service: ServiceProcess) -> int:
    return psutil.Process(service.pid).memory_info().rss


async def push_for_ever(client: RawClient, frame: bytes) -> None:
    with contextlib.suppress(ConnectionError):
        while True:
            await client.send(frame)


async def test_a_thousand_idle_connections_cost_little_and_disturb_no_other_client(tmp_path):
    with service_process(tmp_path) as service:
        service.start()
        before_bytes = held_by(service)
        async with many_clients(service), connected(service.ws_url, source="other_client") as other_client:
            status = await until_status(service, lambda status: status["connections"] == CONNECTIONS + 1)
            assert status["rateLimitMetrics"]["peakConnections"] == CONNECTIONS + 1
            for number in range(100):
                assert (await other_client.batch(number))["status"] == "ok"
            assert held_by(service) - before_bytes < CONNECTIONS * PER_CONNECTION_BYTES
        await until_status(service, lambda status: status["connections"] == 0)
        assert service.stop() == 0


async def test_memory_is_bounded_with_a_thousand_clients_that_push_against_a_stuck_log(tmp_path):
    disk = StuckDisk(tmp_path)
    settings = {
        "ingest.memory_max_bytes": MEMORY_MAX_BYTES,
        "ingest.queue_max_bytes": QUEUE_MAX_BYTES,
        "ingest.load_shedding": "false",
        "writer.buffer_max_bytes": 32 * MIB,
        "writer.flush_max_bytes": 8 * MIB,
    }
    events = [insert(number, after={"id": number, "blob": "x" * 50_000}) for number in range(20)]
    frame = text_frame("cdc_batch", events=events)
    with service_process(tmp_path, settings) as service:
        service.start(disk.serve)
        before_bytes = held_by(service)
        async with many_clients(service) as clients, connected(service.ws_url, source="other_client") as other_client:
            disk.stick()
            pushing = [asyncio.ensure_future(push_for_ever(client, frame)) for client in clients]
            peak_bytes = await watch_until_stuck(service)
            assert disk.has_waiting_sync
            assert (await other_client.request("heartbeat"))["type"] == "pong", "though nothing can become durable"
            assert peak_bytes - before_bytes < BOUND_BYTES
            await other_client.send_batch(1)
            disk.release()
            assert (await other_client.receive())["status"] == "ok", "with a thousand others still pushing"
            assert (await other_client.batch(2))["status"] == "ok"
            for task in pushing:
                task.cancel()
            await asyncio.gather(*pushing, return_exceptions=True)
        status = await until_status(service, lambda status: status["connections"] == 0)
        status = await until_status(service, lambda status: status["memory"]["heldBytes"] == 0)
        assert status["memory"]["pausedConnections"] == 0
        assert service.is_running


async def watch_until_stuck(service: ServiceProcess) -> int:
    """Wait until nearly all are paused and no more is held; the most memory that was used."""
    peak_bytes, held = 0, -1
    async with asyncio.timeout(DEADLINE_S):
        while True:
            status = await asyncio.to_thread(service.get, "/status")
            peak_bytes = max(peak_bytes, held_by(service))
            memory = status["memory"]
            assert memory["heldBytes"] <= MEMORY_MAX_BYTES + CONNECTIONS * PER_CONNECTION_BYTES
            if memory["pausedConnections"] > 0.9 * CONNECTIONS and memory["heldBytes"] == held:
                return peak_bytes
            held = memory["heldBytes"]
            await asyncio.sleep(0.1)
