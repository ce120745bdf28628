"""The process's memory, as the system sees it, while the store is down and clients push far more than may be held."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import psutil
import pytest
from websockets.asyncio.client import ClientConnection, connect

from tests.fault_proxy import Answer, fault_proxy
from tests.s3_server import S3Server
from tests.service_process import ServiceProcess, service_process

pytestmark = pytest.mark.integration

MIB = 1024 * 1024
BUFFER_MAX_BYTES = 8 * MIB
# What docs/operations.md says of the writer's rows, and what allocators keep of memory that is free again.
BOUND_BYTES = 4 * BUFFER_MAX_BYTES + 32 * MIB
# Enough that the service has come to the memory of its everyday work.
WARM_BYTES = 3 * BUFFER_MAX_BYTES
PUSHED_BYTES = 2 * BOUND_BYTES

ROW_BYTES = 4096
BATCH_ROWS = 200
TABLES = 2
DAYS = 2
DAY_MS = 86_400_000
WAIT_S = 240.0
POLL_S = 0.02

SETTINGS: dict[str, Any] = {
    "writer.buffer_max_bytes": BUFFER_MAX_BYTES,
    "writer.flush_max_bytes": BUFFER_MAX_BYTES // 4,
    "writer.flush_max_age_s": 0.5,
    "storage.request_timeout_s": 1.0,
}


class Source:
    """Pushes rows that are large in memory and small in files, and keeps the largest memory of the service."""

    def __init__(self, service: ServiceProcess, socket: ClientConnection) -> None:
        self.rows = 0
        self.peak_bytes = 0
        self._service = service
        self._process = psutil.Process(service.pid)
        self._socket = socket

    async def push_all(self, size_bytes: int) -> None:
        """Push so much, batch by batch."""
        for _ in range(size_bytes // (BATCH_ROWS * ROW_BYTES)):
            await self._push()

    async def _push(self) -> None:
        message = {"type": "cdc_batch", "sourceDoId": "shop", "events": [self._event() for _ in range(BATCH_ROWS)]}
        await self._socket.send(orjson.dumps(message))
        async with asyncio.timeout(WAIT_S):
            while (answer := orjson.loads(await self._socket.recv())).get("status") == "persisted":
                pass
        assert answer["type"] == "ack", answer
        self.look()

    def _event(self) -> dict[str, Any]:
        self.rows += 1
        return {
            "sequence": self.rows,
            "timestamp": 1_794_700_800_000 + self.rows % DAYS * DAY_MS,
            "operation": "INSERT",
            "table": f"t{self.rows % TABLES}",
            "after": {"id": self.rows, "text": f"{self.rows:08}" * (ROW_BYTES // 8)},
        }

    def look(self) -> None:
        """Note how much memory the service has now."""
        self.peak_bytes = max(self.peak_bytes, self._process.memory_info().rss)

    async def wait_for(self, condition: Callable[[dict[str, Any]], bool]) -> None:
        """Wait until /status fulfils a condition."""
        async with asyncio.timeout(WAIT_S):
            while not condition(await asyncio.to_thread(self._service.get, "/status")):
                self.look()
                await asyncio.sleep(POLL_S)


async def test_memory_during_an_outage_of_the_store_stays_within_its_bound(tmp_path: Path, s3_server: S3Server) -> None:
    with (
        fault_proxy(s3_server.endpoint) as proxy,
        service_process(tmp_path, SETTINGS | s3_server.new_warehouse(endpoint=proxy.url)) as service,
    ):
        await asyncio.to_thread(service.start)
        async with connect(service.ws_url, max_size=None) as socket:
            source = Source(service, socket)
            await source.push_all(WARM_BYTES)
            await source.wait_for(lambda status: status["log"]["uncommittedRecords"] == 0)
            usual_bytes = source.peak_bytes
            proxy.spoil(Answer(503))
            await source.push_all(PUSHED_BYTES)
            await source.wait_for(lambda status: all(table["failedAttempts"] for table in status["tables"]))
            proxy.lift()
            await source.wait_for(lambda status: status["log"]["uncommittedRecords"] == 0)
            committed = sum(table["committedRows"] for table in service.get("/status")["tables"])
    assert committed == source.rows
    assert source.peak_bytes - usual_bytes < BOUND_BYTES
