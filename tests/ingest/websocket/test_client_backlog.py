"""What clients are told of the buffers: when the next flush will be, what waits for it, and since when."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterator
from pathlib import Path

import aiohttp

from lakefeed.ingest.service import Addresses, serving
from tests.ingest.conftest import small_config
from tests.ingest.ws_client import DEADLINE_S, WsClient, connected

MAX_AGE_MS = 3_600_000  # of the settings for tests


def now_ms() -> int:
    return int(time.time() * 1_000)


async def status_with(client: WsClient, changes: int) -> dict:
    """Connect again until the writer has so many changes in its buffers, and knows when it flushes them."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            status = await client.request("connect", sourceDoId="shop")
            if status["buffer"]["eventCount"] == changes and ("nextFlushTime" in status) == (changes > 0):
                return status
            await asyncio.sleep(0.01)


async def test_status_of_an_empty_service_counts_nothing_and_names_no_times(service: Addresses):
    async with connected(service.ws_url, source=None) as client:
        status = await client.request("connect", sourceDoId="shop")
    assert (status["buffer"]["batchCount"], status["buffer"]["eventCount"]) == (0, 0)
    assert not {"oldestBatchTime", "newestBatchTime"} & status["buffer"].keys()
    assert "nextFlushTime" not in status


async def test_ack_tells_when_the_batch_is_flushed_at_the_latest(service: Addresses):
    async with connected(service.ws_url) as client:
        first = (await client.batch(1))["details"]["timeUntilFlush"]
        assert 0 < first <= MAX_AGE_MS
        await status_with(client, 1)
        later = (await client.batch(2))["details"]["timeUntilFlush"]
        assert 0 < later <= MAX_AGE_MS


async def test_status_counts_what_is_not_committed_and_says_since_when(service: Addresses):
    began = now_ms()
    async with connected(service.ws_url) as client:
        await client.batch(1, 2)
        await client.batch(3)
        status = await status_with(client, 3)
        buffer = status["buffer"]
        assert buffer["batchCount"] == 2
        assert began <= buffer["newestBatchTime"] <= now_ms()
        assert began - 1_000 <= buffer["oldestBatchTime"] <= now_ms()
        assert now_ms() < status["nextFlushTime"] <= now_ms() + MAX_AGE_MS
        await client.request("flush_request")
        assert (await status_with(client, 0))["buffer"]["batchCount"] == 0


async def test_control_plane_shows_the_same(service: Addresses):
    async with connected(service.ws_url) as client, aiohttp.ClientSession(service.http_url) as http:
        await client.batch(1, 2)
        status = await status_with(client, 2)
        async with http.get("/status") as answer:
            shown = await answer.json()
    assert (shown["buffer"]["batchCount"], shown["buffer"]["eventCount"]) == (1, 2)
    assert shown["buffer"]["newestBatchTime"] == status["buffer"]["newestBatchTime"]
    assert abs(shown["nextFlushTime"] - status["nextFlushTime"]) < 60_000
    assert shown["buffer"]["maxSizeBytes"] > 0


VIEW = {
    "name": "bad",
    "schema": {"type": "struct", "schema-id": 0, "fields": []},
    "properties": {},
    "view-version": {
        "version-id": 1,
        "timestamp-ms": 1_794_700_800_000,
        "schema-id": 0,
        "summary": {},
        "default-namespace": ["default"],
        "representations": [{"type": "sql", "sql": "SELECT 1", "dialect": "spark"}],
    },
}


async def batches_until(client: WsClient, breaker: str, sequences: Iterator[int]) -> None:
    """Send batches until their acks say that the circuit breaker is open, or closed."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            ack = await client.batch(next(sequences), table="good")
            if ack["details"]["circuitBreakerState"] == breaker:
                return
            await asyncio.sleep(0.05)


async def test_acks_say_that_commits_fail_while_they_do(tmp_path: Path):
    sequences = itertools.count(2)
    async with (
        serving(small_config(tmp_path, flush_max_age_s=0.05)) as addresses,
        aiohttp.ClientSession(addresses.http_url) as http,
        connected(addresses.ws_url) as client,
    ):
        async with http.post("/v1/namespaces/default/views", json=VIEW) as answer:
            assert answer.status == 200, await answer.text()
        ack = await client.batch(1, table="bad")
        assert ack["details"]["circuitBreakerState"] == "closed"
        await batches_until(client, "open", sequences)
        async with http.delete("/v1/namespaces/default/views/bad") as answer:
            assert answer.status == 204
        async with http.post("/flush?table=bad") as answer:
            assert answer.status == 200, await answer.text()
        await batches_until(client, "closed", sequences)
