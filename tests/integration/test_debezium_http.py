"""Every recording, sent over HTTP, folds in its change tables to the rows that PostgreSQL had, however it was sent."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import shutil
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from lakefeed.ingest.config import load_config
from lakefeed.ingest.debezium.events import Change
from lakefeed.ingest.service import serving
from tests.clients import open_pyiceberg
from tests.ingest.debezium.envelopes import mark, streamed
from tests.ingest.debezium.recordings import EXPECTED, NAMES, Request, load, load_events
from tests.ingest.debezium.test_hostile_requests import CANARY, mutated
from tests.ingest.debezium.test_recordings import changes_of
from tests.integration.debezium_replay import (
    SETTINGS,
    changes_in,
    count_changes,
    in_batches,
    read_changes,
    table_differences_of,
    with_killed_servers,
)
from tests.service_process import SMALL_LOG

pytestmark = pytest.mark.integration

SEED = 20261116
DEADLINE_S = 240.0
MUTATIONS = 400


class Service:
    """A running service, and a sink that speaks to it."""

    def __init__(self, url: str, client: aiohttp.ClientSession) -> None:
        self.url = url
        self._client = client

    async def post(self, request: Request) -> tuple[int, dict[str, Any]]:
        url = f"{self.url}/cdc/debezium?source=shop"
        async with asyncio.timeout(DEADLINE_S):
            async with self._client.post(url, data=request.body, headers=request.headers) as response:
                return response.status, json.loads(await response.read())

    async def send(self, requests: Iterable[Request]) -> int:
        """Send requests in turn; the number of changes that were new."""
        accepted = 0
        for request in requests:
            status, document = await self.post(request)
            assert status == 200, document
            accepted += document["eventsAccepted"]
        return accepted

    async def get(self, path: str) -> str:
        async with asyncio.timeout(DEADLINE_S), self._client.get(self.url + path) as response:
            return await response.text()

    async def status(self) -> dict[str, Any]:
        return json.loads(await self.get("/status"))

    async def flush(self) -> None:
        async with asyncio.timeout(DEADLINE_S), self._client.post(f"{self.url}/flush") as response:
            assert (await response.json())["success"]
        assert (await self.status())["problems"] == []

    async def differences(self, variant: str) -> list[str]:
        """Commit everything, and compare what the tables fold to with what PostgreSQL printed."""
        await self.flush()
        assert await asyncio.to_thread(count_changes, self.url) == changes_in(variant)
        return await asyncio.to_thread(table_differences_of, self.url, variant)


@asynccontextmanager
async def service(directory: Path, **writer: Any) -> AsyncIterator[Service]:
    own = {"server.data_dir": str(directory), "server.http_port": 0, "server.ws_port": 0}
    chosen = {f"writer.{name}": value for name, value in writer.items()}
    config = load_config(None, {}, {**SMALL_LOG, **SETTINGS, **own, "writer.flush_max_age_s": 3_600.0, **chosen}).config
    async with serving(config) as addresses, aiohttp.ClientSession() as client:
        yield Service(addresses.http_url, client)


def ids_of(catalog_url: str, table: str) -> list[int]:
    with contextlib.closing(open_pyiceberg(catalog_url)) as catalog:
        return catalog.load_table(table).scan().to_arrow()["id"].to_pylist()


def request_of(*documents: Any) -> Request:
    return Request({}, json.dumps(list(documents)).encode())


@pytest.mark.parametrize("variant", NAMES)
async def test_recording_folds_to_the_rows_of_the_source(tmp_path, variant):
    async with service(tmp_path) as at_work:
        assert await at_work.send(load(variant)) == changes_in(variant)
        assert await at_work.differences(variant) == []


async def test_recording_whose_requests_are_all_sent_twice_is_taken_once(tmp_path):
    async with service(tmp_path) as at_work:
        twice = (request for request in load("v4") for _ in range(2))
        assert await at_work.send(twice) == changes_in("v4")
        assert await at_work.differences("v4") == []


async def test_recording_is_taken_once_from_servers_that_are_killed_and_go_back(tmp_path):
    requests = with_killed_servers("v1", random.Random(SEED), run_max_requests=60)
    async with service(tmp_path) as at_work:
        assert await at_work.send(requests) == changes_in("v1")
        assert await at_work.differences("v1") == []
        assert (await at_work.status())["incompleteTransactions"] == []
    assert len(requests) > 1.3 * len(load("v1"))


async def test_recording_in_batches_that_are_all_sent_twice_folds_to_the_same_rows(tmp_path):
    async with service(tmp_path) as at_work:
        twice = (request for request in in_batches(load("v1"), 40) for _ in range(2))
        assert await at_work.send(twice) == changes_in("v1")
        assert await at_work.differences("v1") == []


async def test_metadata_of_every_change_says_where_it_comes_from(tmp_path):
    async with service(tmp_path) as at_work:
        await at_work.send(load("v3b"))
        await at_work.flush()
        changes = await asyncio.to_thread(read_changes, at_work.url)
    sent = {place_of(change) for change in changes_of(load_events("v3b")) if change.table in EXPECTED["tables"]}
    assert {place_of(change) for own in changes.values() for change in own} == sent
    assert {name for name, table in EXPECTED["tables"].items() if table["rows"]} <= changes.keys()


def place_of(change: Change) -> tuple[Any, ...]:
    source = json.loads(bytes(change.metadata))["source"]
    own = (source["table"], source.get("lsn"), source.get("txId"), source["sequence"])
    return (change.table, change.operation, change.row_id, *own)


async def test_changes_behind_a_lost_log_are_not_taken_for_those_that_the_tables_have(tmp_path):
    async with service(tmp_path) as at_work:
        await at_work.send([request_of(streamed(90, 100, 1), streamed(90, 105, 2))])
        await at_work.flush()
    shutil.rmtree(tmp_path / "log")
    async with service(tmp_path) as at_work:
        await at_work.send([request_of(streamed(90, 110, 3), streamed(90, 115, 4))])
        await at_work.flush()
        rows = await asyncio.to_thread(ids_of, at_work.url, "public.t")
    assert sorted(rows) == [1, 2, 3, 4]


async def test_transaction_that_is_not_whole_is_seen_in_status_metrics_and_log_after_a_restart_in_it(tmp_path, caplog):
    change = streamed(90, 101, 1) | {"transaction": {"id": "5:101", "total_order": 1, "data_collection_order": 1}}
    async with service(tmp_path) as at_work:
        await at_work.send([request_of(mark("BEGIN", "5:100"), change)])
    async with service(tmp_path) as at_work:
        await at_work.send([request_of(mark("END", "5:200", 3, t=3))])
        (incomplete,) = (await at_work.status())["incompleteTransactions"]
        assert incomplete == {
            "source": "shop",
            "reason": "missing",
            "transaction": "5",
            "arrived": 1,
            "expected": 3,
            "missing": {"public.t": 2},
        }
        assert 'lakefeed_ingest_incomplete_transactions_total{reason="missing"} 1.0' in await at_work.get("/metrics")
    assert [record.levelname for record in caplog.records if record.message == "transaction_incomplete"] == ["WARNING"]


async def test_mutated_requests_are_accepted_or_refused_and_the_service_continues(tmp_path):
    rng = random.Random(SEED)
    statuses = {}
    async with service(tmp_path) as at_work:
        for _ in range(MUTATIONS):
            request = mutated(rng.choice(load(rng.choice(sorted(NAMES)))), rng)
            headers = {
                name: value for name, value in request.headers.items() if value.isascii() and value.isprintable()
            }
            status, document = await at_work.post(Request(headers, request.body))
            assert status in (200, 400), (request, document)
            statuses[status] = statuses.get(status, 0) + 1
            if status == 400:
                place, _, rule = document["error"].partition(": ")
                assert document["reason"] == "invalid_format"
                assert place
                assert rule
                assert CANARY not in document["error"]
        await at_work.flush()
    assert min(statuses.values()) > MUTATIONS // 20
    assert len(statuses) == 2
