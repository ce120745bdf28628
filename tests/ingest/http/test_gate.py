"""HTTP ingest inside the limits: memory, requests at a time, rates. Who has to wait waits, and Debezium always does."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gzip
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from lakefeed.contract.changes import Position, SourceId
from lakefeed.contract.errors import CatalogUnavailable
from lakefeed.ingest.admission.budget import ALLOWANCE_BYTES
from lakefeed.ingest.config import IngestConfig
from lakefeed.ingest.http import changes, gate
from lakefeed.ingest.intake.sources import ResumePositions
from lakefeed.settings import MIB
from lakefeed.writer.config import LogConfig
from tests.fakes import FaultyFilesystem, HeldFilesystem
from tests.ingest.debezium.envelopes import streamed
from tests.ingest.http_ingest import Answer, HttpIngestClient, insert, serving_routes
from tests.ingest.raw_http import post_head, raw_connection
from tests.ingest.running_intake import DEADLINE_S, LARGE, fill_log, run_ready_tasks, until

ROOMY_LOG = LogConfig(segment_max_bytes=4 * MIB, max_bytes=256 * MIB)
DEBEZIUM_INSERT = streamed(90, 100, 1)


def large(client: HttpIngestClient, source: str, *, padding: int = 300_000) -> asyncio.Task[Answer]:
    return asyncio.create_task(client.batch(1, source=source, padding="x" * padding))


def held(client: HttpIngestClient) -> int:
    return client.gate.budget.used_bytes


# -- memory


async def test_bodies_are_held_against_the_budget_until_they_are_durable(tmp_path):
    files = HeldFilesystem()
    async with serving_routes(tmp_path, log_config=ROOMY_LOG, files=files) as client:
        await client.batch(1, source="first")
        files.open_gate.clear()
        batch = large(client, "shop")
        rows = asyncio.create_task(client.rows({"id": 1, "name": "x" * 200_000}, source="rows"))
        event = streamed(90, 100, 1) | {"padding": "x" * 100_000}
        debezium = asyncio.create_task(client.debezium(event, source="dbz"))
        await until(lambda: held(client) > 600_000)
        assert held(client) == client.gate.held_bytes
        await run_ready_tasks()
        assert not any(task.done() for task in (batch, rows, debezium))
        files.open_gate.set()
        assert [(await task).status for task in (batch, rows, debezium)] == [200] * 3
        assert (held(client), client.gate.held_bytes) == (0, 0)


async def test_many_large_posts_stay_inside_a_small_budget_and_all_are_taken(tmp_path):
    files = HeldFilesystem()
    config = IngestConfig(frame_max_bytes=MIB, memory_max_bytes=4 * MIB, queue_max_bytes=MIB)
    async with serving_routes(tmp_path, log_config=ROOMY_LOG, config=config, files=files) as client:
        await client.batch(1, source="first")
        files.open_gate.clear()
        posts = [large(client, f"source-{number}", padding=900_000) for number in range(40)]
        await until(lambda: client.gate.budget.waiting_readers > 30)
        most = held(client)
        files.open_gate.set()
        while not all(task.done() for task in posts):
            most = max(most, held(client))
            await asyncio.sleep(0)
        assert [task.result().status for task in posts] == [200] * 40
        assert most <= config.memory_max_bytes + 40 * ALLOWANCE_BYTES
        assert (held(client), client.gate.budget.waiting_readers) == (0, 0)


async def test_client_that_announces_much_and_sends_little_reserves_nothing(tmp_path):
    config = IngestConfig(frame_max_bytes=MIB, memory_max_bytes=4 * MIB)
    async with serving_routes(tmp_path, config=config) as client, raw_connection(client.url) as raw:
        await raw.send(post_head("/cdc?source=shop", Content_Length=MIB) + b" " * (ALLOWANCE_BYTES - 1))
        await until(lambda: client.gate.slots.used == 1)
        await run_ready_tasks()
        assert held(client) == 0
        await raw.send(b"  ")
        await until(lambda: held(client) == MIB)


async def test_no_room_in_memory_is_a_503_on_cdc_after_its_wait_and_never_for_debezium(tmp_path, monkeypatch):
    monkeypatch.setattr(changes, "WAIT_MAX_S", 0.05)
    async with serving_routes(tmp_path) as client:
        client.gate.budget.charge(client.gate.budget.max_bytes)
        debezium = asyncio.create_task(client.debezium(DEBEZIUM_INSERT))
        answer = await post_for_headers(client, "/cdc?source=shop", {"events": [insert(1)]})
        assert (answer[0], answer[2]["reason"], answer[2]["shouldRetry"]) == (503, "buffer_full", True)
        assert int(answer[1]["Retry-After"]) >= 1
        assert not debezium.done()
        client.gate.budget.release(client.gate.budget.max_bytes)
        assert (await debezium).status == 200


async def post_for_headers(client: HttpIngestClient, path: str, document: Any) -> tuple[int, Any, dict[str, Any]]:
    async with asyncio.timeout(DEADLINE_S), client._client.post(client.url + path, data=json.dumps(document)) as answer:
        return answer.status, answer.headers, await answer.json()


# -- requests at a time


async def test_request_beyond_the_limit_waits_for_a_slot_and_is_then_accepted(tmp_path):
    files = HeldFilesystem()
    async with serving_routes(tmp_path, config=IngestConfig(http_requests_max=2), files=files) as client:
        await client.batch(1, source="first")
        files.open_gate.clear()
        posts = [asyncio.create_task(client.batch(1, source=f"source-{number}")) for number in range(5)]
        await until(lambda: client.gate.slots.waiting == 3)
        assert client.gate.slots.used == 2
        assert client.gate.in_flight == {"/cdc": 5}
        files.open_gate.set()
        assert [(await task).status for task in posts] == [200] * 5
        assert (client.gate.slots.used, client.gate.slots.waiting) == (0, 0)
        assert client.gate.in_flight["/cdc"] == 0


@contextlib.asynccontextmanager
async def full_house(directory: Path) -> AsyncIterator[tuple[HttpIngestClient, HeldFilesystem, asyncio.Task[Answer]]]:
    """The one place is taken by a request that waits for a disk."""
    files = HeldFilesystem()
    async with serving_routes(directory, config=IngestConfig(http_requests_max=1), files=files) as client:
        await client.batch(1)
        files.open_gate.clear()
        inside = asyncio.create_task(client.batch(2))
        await until(lambda: client.gate.slots.used == 1)
        yield client, files, inside


async def test_no_place_is_a_503_on_cdc_after_its_wait_and_never_for_debezium(tmp_path, monkeypatch):
    monkeypatch.setattr(changes, "WAIT_MAX_S", 0.05)
    async with full_house(tmp_path) as (client, files, inside):
        debezium = asyncio.create_task(client.debezium(DEBEZIUM_INSERT, source="dbz"))
        status, headers, document = await post_for_headers(client, "/cdc?source=other", {"events": [insert(1)]})
        assert (status, document["reason"], document["shouldRetry"]) == (503, "connection_limit", True)
        assert int(headers["Retry-After"]) >= 1
        assert not debezium.done()
        files.open_gate.set()
        assert (await inside).status == 200
        assert (await debezium).status == 200


async def test_client_address_has_its_share_of_slots_and_leaves_the_others_theirs(tmp_path):
    files = HeldFilesystem()
    config = IngestConfig(http_requests_per_ip_max=1, trusted_proxies="127.0.0.1")
    async with serving_routes(tmp_path, config=config, files=files) as client:
        await client.batch(1, source="first")
        files.open_gate.clear()
        headers = [{"X-Forwarded-For": ip} for ip in ("8.8.8.8", "8.8.8.8", "9.9.9.9")]
        bodies = [{"sourceDoId": f"source-{number}", "events": [insert(1)]} for number in range(3)]
        posts = [
            asyncio.create_task(client.post("/cdc", body, headers=header))
            for body, header in zip(bodies, headers, strict=True)
        ]
        await until(lambda: (client.gate.slots.used, client.gate.slots.waiting) == (2, 1))
        files.open_gate.set()
        assert [(await task).status for task in posts] == [200] * 3


async def test_client_that_goes_while_it_waits_is_forgotten(tmp_path, monkeypatch):
    monkeypatch.setattr(gate, "CLIENT_CHECK_S", 0.01)
    async with full_house(tmp_path) as (client, files, inside):
        waiting = asyncio.create_task(client.debezium(DEBEZIUM_INSERT, source="dbz"))
        await until(lambda: client.gate.slots.waiting == 1)
        waiting.cancel()
        await until(lambda: client.gate.slots.waiting == 0)
        files.open_gate.set()
        assert (await inside).status == 200
        assert client.sequences("dbz") == []


async def test_connection_too_many_is_hung_up_on_and_its_place_is_free_again_later(tmp_path):
    async with serving_routes(tmp_path, config=IngestConfig(http_connections_max=1)) as client:
        async with raw_connection(client.url) as first, raw_connection(client.url) as second:
            assert await second.closed() == b""
            body = json.dumps({"sourceDoId": "shop", "events": [insert(1)]}).encode()
            await first.send(post_head("/cdc", Content_Length=len(body)) + body)
            assert (await first.answer())[0] == 200, "requests with a slot are not disturbed"
        async with asyncio.timeout(DEADLINE_S):
            while not await is_let_in(client):  # noqa: ASYNC110 - over the network there is only looking
                await asyncio.sleep(0.01)


async def is_let_in(client: HttpIngestClient) -> bool:
    async with raw_connection(client.url) as raw:
        try:
            await raw.send(b"GET /nothing HTTP/1.1\r\nHost: h\r\n\r\n")
            return b"404" in await raw.reader.readline()
        except ConnectionError:
            return False


# -- rates


class FrozenTime:
    """The clock of the token buckets, which stands still until it is released: then no test depends on speed."""

    def __init__(self) -> None:
        self.monotonic = time.monotonic
        self._frozen_at: float | None = time.time()

    def time(self) -> float:
        return time.time() if self._frozen_at is None else self._frozen_at

    def release(self) -> None:
        self._frozen_at = None


@pytest.fixture
def frozen_time(monkeypatch: pytest.MonkeyPatch) -> FrozenTime:
    clock = FrozenTime()
    for module in (changes, gate):
        monkeypatch.setattr(module, "time", clock)
    return clock


@pytest.mark.parametrize("limit", [{"source_bytes_per_s": 150.0}, {"message_rate_per_s": 0.5, "message_burst": 1}])
async def test_batch_beyond_the_rate_is_a_429_and_nothing_overtakes_it(tmp_path, limit, frozen_time):
    async with serving_routes(tmp_path, config=IngestConfig(**limit)) as client:
        assert (await client.batch(1)).status == 200
        status, headers, document = await post_for_headers(client, "/cdc?source=shop", {"events": [insert(2)]})
        assert (status, document["reason"], document["shouldRetry"]) == (429, "rate_limited", True)
        assert 1 <= int(headers["Retry-After"]) <= 3
        assert (await client.batch(1, source="other")).status == 200
        frozen_time.release()
        answers = [await until_taken(client, number) for number in (3, 2)]
        assert [answer.status for answer in answers] == [409, 200], "the one behind was told to wait for it"
        assert client.sequences() == [1, 2]


async def until_taken(client: HttpIngestClient, number: int) -> Answer:
    """Send a batch as often as its rate refuses it."""
    async with asyncio.timeout(DEADLINE_S):
        while (answer := await client.batch(number)).status == 429:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
    return answer


async def test_numbered_rows_beyond_the_rate_are_held_for_and_others_are_not(tmp_path):
    async with serving_routes(tmp_path, config=IngestConfig(message_rate_per_s=0.001, message_burst=1)) as client:
        for source, sequence in (("numbered", {"sequence": 10}), ("not", {})):
            assert (await client.rows({"id": 1}, source=source, **sequence)).status == 200
            following = {"sequence": 11} if sequence else {}
            assert (await client.rows({"id": 2}, source=source, **following)).document["reason"] == "rate_limited"
        assert client.running.intake._dedup.is_blocked("numbered")
        assert not client.running.intake._dedup.is_blocked("not")


@pytest.mark.parametrize("limit", [{"source_bytes_per_s": 500.0}, {"message_rate_per_s": 1.0, "message_burst": 1}])
async def test_debezium_beyond_its_rate_is_answered_late_and_holds_no_slot_meanwhile(tmp_path, limit, frozen_time):
    async with serving_routes(tmp_path, config=IngestConfig(**limit, http_requests_max=1)) as client:
        events = [streamed(90, 100 + number, number) for number in range(4)]
        assert (await client.debezium(events[0])).status == 200
        late = asyncio.create_task(client.debezium(events[1]))
        await until(lambda: client.gate.in_flight["/cdc/debezium"] == 1)
        assert (client.gate.slots.used, late.done()) == (0, False)
        assert (await client.batch(1, source="other")).status == 200
        frozen_time.release()
        assert (await late).status == 200
        assert [(await client.debezium(event)).status for event in events[2:]] == [200, 200]
        assert [row["id"] for row in client.accepted_rows()] == [0, 1, 2, 3]


async def test_compressed_events_count_as_what_they_unpack_to(tmp_path):
    async with serving_routes(tmp_path, config=IngestConfig(source_bytes_per_s=1_000.0)) as client:
        body = json.dumps(streamed(90, 100, 1) | {"padding": "x" * 50_000}).encode()
        packed = gzip.compress(body)
        headers = {"Content-Encoding": "gzip"}
        assert (await client.post("/cdc/debezium", packed, headers=headers, params={"source": "shop"})).status == 200
        assert client.gate.rates.bytes.bucket("shop", 0.0).tokens < -40_000


# -- a log that is full


async def test_log_that_stays_full_keeps_debezium_waiting_as_long_as_it_does(tmp_path, monkeypatch):
    monkeypatch.setattr(changes, "WAIT_MAX_S", 0.0)
    async with serving_routes(tmp_path) as client:
        await fill_log(client.running)
        tries = []
        take = client.debezium_intake.accept

        async def counted(*arguments: Any) -> Any:
            tries.append(1)
            return await take(*arguments)

        monkeypatch.setattr(client.debezium_intake, "accept", counted)
        event = streamed(90, 100, 1) | {"padding": "x" * LARGE}
        event["after"]["name"] = "x" * LARGE
        late = asyncio.create_task(client.debezium(event))
        await until(lambda: len(tries) >= 3)
        assert not late.done()
        await client.running.log.trim(client.running.log.durable_end)
        assert (await late).status == 200
        assert [row["id"] for row in client.accepted_rows()] == [1]


class Unreachable:
    """Tables that cannot be asked until they can."""

    def __init__(self) -> None:
        self.asked = 0
        self.answers = False

    async def load(self) -> dict[SourceId, Position]:
        self.asked += 1
        if not self.answers:
            raise CatalogUnavailable("no answer")
        return {}


async def test_catalog_that_cannot_be_asked_about_a_new_source_is_a_503_on_cdc_and_keeps_debezium_waiting(tmp_path):
    tables = Unreachable()
    async with serving_routes(tmp_path) as client:
        client.running.intake._resume_positions = ResumePositions(tables.load, clock=time.monotonic)
        refused = await client.batch(1)
        assert (refused.status, refused.document["reason"]) == (503, "internal_error")
        late = asyncio.create_task(client.debezium(DEBEZIUM_INSERT, source="dbz"))
        await until(lambda: tables.asked >= 3)
        assert not late.done()
        tables.answers = True
        assert (await late).status == 200


async def test_log_that_has_failed_keeps_debezium_waiting_until_the_service_stops(tmp_path):
    files = FaultyFilesystem()
    async with serving_routes(tmp_path, files=files) as client:
        files.fail("sync", errno.EIO)
        refused = await client.batch(1)
        assert (refused.status, refused.document["reason"]) == (503, "internal_error")
        late = asyncio.create_task(client.debezium(DEBEZIUM_INSERT, source="dbz"))
        await until(lambda: client.running.intake._dedup.is_blocked(SourceId("dbz")))
        client.running.intake.close()
        answer = await late
        assert (answer.status, answer.document["reason"]) == (503, "shutting_down")


# -- what is shown


async def test_requests_are_counted_by_route_status_and_source(tmp_path):
    async with serving_routes(tmp_path) as client:
        await client.batch(1, 2)
        await client.batch(1, 2)
        await client.rows({"id": 1}, source="rows")
        await client.debezium(DEBEZIUM_INSERT, source="dbz")
        await client.post("/cdc", b"{", params={"source": "shop"})
        assert client.metric("lakefeed_ingest_http_requests_total", route="/cdc", status="200") == 3
        assert client.metric("lakefeed_ingest_http_requests_total", route="/cdc", status="400") == 1
        assert client.metric("lakefeed_ingest_http_requests_total", route="/cdc/debezium", status="200") == 1
        counted = {name: (known.requests, known.changes) for name, known in client.gate.sources.items()}
        assert counted == {"shop": (2, 2), "rows": (1, 1), "dbz": (1, 1)}
