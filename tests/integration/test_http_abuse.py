"""Many large HTTP requests against the real service, with a log that is stuck: memory stays bounded, all are taken."""

from __future__ import annotations

import asyncio
import gzip
import io
import json
import math
from typing import Any

import aiohttp
import psutil
import pytest

from tests.ingest.debezium.envelopes import streamed
from tests.ingest.ws_client import connected, insert
from tests.integration.stuck_disk import StuckDisk
from tests.service_process import ServiceProcess, service_process

pytestmark = pytest.mark.integration

MIB = 1024 * 1024
DEADLINE_S = 240.0
CONNECTIONS = 300

# What docs/operations.md says that memory is bounded by, for the settings below.
MEMORY_MAX_BYTES = 16 * MIB
QUEUE_MAX_BYTES = 8 * MIB
PER_CONNECTION_BYTES = 400 * 1024
BOUND_BYTES = MEMORY_MAX_BYTES + 2 * QUEUE_MAX_BYTES + CONNECTIONS * PER_CONNECTION_BYTES

SETTINGS = {
    "ingest.memory_max_bytes": MEMORY_MAX_BYTES,
    "ingest.queue_max_bytes": QUEUE_MAX_BYTES,
    "ingest.load_shedding": "false",
    "log.max_bytes": "2GiB",
    "writer.buffer_max_bytes": 32 * MIB,
    "writer.flush_max_bytes": 8 * MIB,
}

# Each is above a megabyte: together twice what memory may grow by.
BLOB = "x" * 100_000
BATCH = json.dumps({"events": [insert(n, after={"id": n, "blob": BLOB}) for n in range(12)]}).encode()
ROWS = b"".join(b'{"id": %d, "blob": "%b"}\n' % (n, BLOB.encode()) for n in range(12))
EVENTS = json.dumps([streamed(90, 100 + n, n) | {"after": {"id": n, "blob": BLOB}} for n in range(12)]).encode()
NDJSON = {"Content-Type": "application/x-ndjson"}
GZIP = {"Content-Encoding": "gzip"}

# Path, headers and body of a request; every source sends one.
KINDS = [
    ("/cdc?source=batch-{}", {}, BATCH),
    ("/cdc?source=rows-{}&table=rows", NDJSON, ROWS),
    ("/cdc/debezium?source=dbz-{}", {}, EVENTS),
    ("/cdc/debezium?source=packed-{}", GZIP, gzip.compress(EVENTS)),
]


async def post(client: aiohttp.ClientSession, number: int) -> tuple[int, dict[str, Any]]:
    path, headers, body = KINDS[number % len(KINDS)]
    async with client.post(path.format(number), data=io.BytesIO(body), headers=headers) as answer:
        return answer.status, await answer.json()


async def watch(service: ServiceProcess, *, until_held: bool) -> tuple[int, dict[str, Any]]:
    """Look until requests wait and no more is held, or until nothing is: the most memory used, and the status."""
    peak_bytes, before = 0, -math.inf
    async with asyncio.timeout(DEADLINE_S):
        while True:
            status = await asyncio.to_thread(service.get, "/status")
            peak_bytes = max(peak_bytes, psutil.Process(service.pid).memory_info().rss)
            held = status["memory"]["heldBytes"]
            assert held <= MEMORY_MAX_BYTES + CONNECTIONS * PER_CONNECTION_BYTES
            is_stuck = status["httpIngest"]["waiting"] and held == before
            if is_stuck if until_held else not held:
                return peak_bytes, status
            before = held
            await asyncio.sleep(0.2)


async def test_memory_is_bounded_with_many_large_posts_against_a_stuck_log_and_all_are_taken(tmp_path):
    disk = StuckDisk(tmp_path)
    with service_process(tmp_path, SETTINGS) as service:
        service.start(disk.serve)
        before_bytes = psutil.Process(service.pid).memory_info().rss
        connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=DEADLINE_S)
        async with (
            aiohttp.ClientSession(service.http_url, connector=connector, timeout=timeout) as client,
            connected(service.ws_url, source="other_client") as other_client,
        ):
            assert (await other_client.batch(1))["status"] == "ok"
            disk.stick()
            posts = [asyncio.ensure_future(post(client, number)) for number in range(CONNECTIONS)]
            peak_bytes, status = await watch(service, until_held=True)
            assert disk.has_waiting_sync
            assert peak_bytes - before_bytes < BOUND_BYTES
            assert status["memory"]["httpHeldBytes"] > MEMORY_MAX_BYTES // 2
            assert sum(status["httpIngest"]["requests"].values()) == CONNECTIONS
            assert (await other_client.request("heartbeat"))["type"] == "pong", "though nothing can become durable"
            assert not any(task.done() for task in posts)
            await other_client.send_batch(2)
            disk.release()
            assert (await other_client.receive())["status"] == "ok", "with all the others still posting"
            answers = await asyncio.gather(*posts)
            assert [(status, document["eventsAccepted"]) for status, document in answers] == [(200, 12)] * CONNECTIONS
            _, status = await watch(service, until_held=False)
        assert status["memory"]["httpHeldBytes"] == status["httpIngest"]["served"] == 0
        by_source = {source["sourceDoId"]: source for source in status["sources"]}
        assert by_source["rows-1"]["httpRequests"] == 1
        assert by_source["rows-1"]["httpEventsAccepted"] == 12
        metrics = service.get_text("/metrics")
        assert f'lakefeed_ingest_http_requests_total{{route="/cdc",status="200"}} {CONNECTIONS / 2}' in metrics
        assert f'lakefeed_ingest_http_requests_total{{route="/cdc/debezium",status="200"}} {CONNECTIONS / 2}' in metrics
