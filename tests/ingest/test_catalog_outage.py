"""A catalog that does not answer, at the start or later: what is still accepted, and where the outage is named."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from lakefeed.backoff import Backoff
from lakefeed.catalog.app import build_catalog
from lakefeed.catalog.config import CatalogConfig, Warehouse
from lakefeed.contract.errors import CatalogError
from lakefeed.ingest.config import Config
from lakefeed.ingest.service import serving
from lakefeed.storage.config import StorageConfig
from lakefeed.writer.config import IcebergConfig
from tests.fault_proxy import Answer, FaultProxy, Silence, fault_proxy
from tests.ingest.conftest import small_config
from tests.ingest.control_client import rows_of, until
from tests.ingest.ws_client import DEADLINE_S, connected, insert
from tests.serving import serve_in_thread

NOWHERE = "http://127.0.0.1:1"


class Service:
    """A running service, and a client of its control plane."""

    def __init__(self, ws_url: str, http: aiohttp.ClientSession) -> None:
        self.ws_url = ws_url
        self.http = http

    async def ready(self) -> tuple[int, dict[str, Any]]:
        async with self.http.get("/health/ready") as answer:
            return answer.status, await answer.json()

    async def status(self) -> dict[str, Any]:
        async with self.http.get("/status") as answer:
            return await answer.json()

    async def post(self, path: str, **options: Any) -> tuple[int, dict[str, Any]]:
        async with self.http.post(path, **options) as answer:
            return answer.status, await answer.json()

    async def wait_until_ready(self) -> None:
        await until(self.status, lambda status: not status["problems"])
        assert (await self.ready()) == (200, {"status": "ready", "problems": []})


@asynccontextmanager
async def started(config: Config) -> AsyncIterator[Service]:
    timeout = aiohttp.ClientTimeout(total=DEADLINE_S)
    async with serving(config) as addresses, aiohttp.ClientSession(addresses.http_url, timeout=timeout) as http:
        yield Service(addresses.ws_url, http)


@dataclass(frozen=True, slots=True)
class Lake:
    """A catalog behind a proxy, and the settings of a service that uses it."""

    config: Config
    proxy: FaultProxy
    catalog_url: str


@pytest.fixture
def lake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Lake]:
    monkeypatch.setattr("lakefeed.writer.commit.watch.CHECK_INTERVAL_S", 0.1)
    storage = StorageConfig(warehouse=f"file://{tmp_path}/warehouse")
    app = web.Application()
    app.add_subapp("/v1", build_catalog(CatalogConfig(), Warehouse(storage), tmp_path / "catalog.db"))
    with serve_in_thread(app) as catalog_url, fault_proxy(catalog_url) as proxy:
        base = small_config(tmp_path / "data")
        iceberg = IcebergConfig(uri=proxy.url, request_timeout_s=5.0)
        server = replace(base.server, shutdown_deadline_s=0.0)
        yield Lake(replace(base, iceberg=iceberg, storage=storage, server=server), proxy, catalog_url)


def batch_of(sequence: int) -> dict[str, Any]:
    return {"sourceDoId": "shop", "events": [insert(sequence)]}


def named_catalog(problems: list[str]) -> bool:
    return any(problem.startswith("catalog is not available") for problem in problems)


async def test_restart_without_a_catalog_accepts_the_sources_of_the_log_and_commits_when_the_catalog_is_back(lake):
    async with started(lake.config) as service, connected(service.ws_url) as shop:
        assert (await shop.batch(1, 2))["status"] == "ok"
        assert (await service.post("/flush"))[0] == 200
        assert (await shop.batch(3))["status"] == "ok"
    lake.proxy.stop()
    async with started(lake.config) as service:
        code, health = await service.ready()
        assert (code, health["status"]) == (200, "degraded")
        assert named_catalog(health["problems"])
        assert named_catalog((await service.status())["problems"])
        async with connected(service.ws_url) as shop:
            assert (await shop.batch(4))["status"] == "ok"
            code, document = await service.post("/cdc", json=batch_of(5))
            assert (code, document["eventsAccepted"]) == (200, 1)
            answer = await shop.request("flush_request")
            assert not answer["result"]["success"]
            assert "catalog is not available" in answer["result"]["error"]
        code, document = await service.post("/flush")
        assert (code, document["success"]) == (503, False)
        assert "catalog" in document["error"]
        lake.proxy.resume()
        await service.wait_until_ready()
        assert (await service.post("/flush"))[0] == 200
    rows = await asyncio.to_thread(rows_of, lake.catalog_url, "users")
    assert [row[0] for row in rows] == [1, 2, 3, 4, 5]


async def test_start_without_a_catalog_and_with_an_empty_log_is_not_ready_and_refuses_sources_at_once(tmp_path):
    config = replace(small_config(tmp_path / "data"), iceberg=IcebergConfig(uri=NOWHERE))
    async with started(config) as service:
        code, health = await service.ready()
        assert (code, health["status"]) == (503, "not ready")
        assert named_catalog(health["problems"])
        async with connected(service.ws_url, source=None) as client:
            refused = [await client.request("connect", sourceDoId="shop"), await client.batch(1, sourceDoId="shop")]
            for answer in refused:
                assert (answer["type"], answer["reason"], answer["shouldRetry"]) == ("nack", "internal_error", True)
                assert "catalog is not available" in answer["errorMessage"]
        code, document = await service.post("/cdc", json=batch_of(1))
        assert (code, document["reason"], document["shouldRetry"]) == (503, "internal_error", True)
        code, document = await service.post("/flush")
        assert (code, document["success"]) == (503, False)
        assert "catalog is not available" in document["error"]


async def test_source_that_was_refused_for_the_catalog_resumes_where_the_tables_have_it_after_its_return(lake):
    async with started(lake.config) as service, connected(service.ws_url) as shop:
        await shop.batch(1, 2)
        assert (await service.post("/flush"))[0] == 200
    elsewhere = replace(lake.config, server=replace(lake.config.server, data_dir=f"{lake.config.server.data_dir}-2"))
    lake.proxy.stop()
    async with started(elsewhere) as service:
        assert named_catalog((await service.ready())[1]["problems"])
        lake.proxy.resume()
        await service.wait_until_ready()
        async with connected(service.ws_url, source=None) as shop:
            assert (await shop.request("connect", sourceDoId="shop"))["lastDurableSequence"] == 2


async def test_catalog_that_is_lost_while_there_is_nothing_to_commit_is_named_until_it_returns(lake):
    async with started(lake.config) as service, connected(service.ws_url) as shop:
        await shop.batch(1)
        await service.wait_until_ready()
        lake.proxy.stop()
        await until(service.status, lambda status: named_catalog(status["problems"]))
        code, health = await service.ready()
        assert (code, health["status"]) == (200, "degraded")
        lake.proxy.resume()
        await service.wait_until_ready()


async def test_tables_that_failed_while_the_catalog_was_down_are_retried_as_soon_as_it_returns(lake, monkeypatch):
    monkeypatch.setattr("lakefeed.writer.tables.state.BACKOFF", Backoff(3600.0, 3600.0))
    monkeypatch.setattr("lakefeed.writer.commit.committer.BACKOFF", Backoff(0.01, 0.01))
    writer = replace(lake.config.writer, flush_max_age_s=0.1)
    async with started(replace(lake.config, writer=writer)) as service, connected(service.ws_url) as shop:
        lake.proxy.stop()
        await until(service.status, lambda status: named_catalog(status["problems"]))
        await shop.batch(1)
        await until(service.status, lambda status: any(table["failedAttempts"] for table in status["tables"]))
        lake.proxy.resume()
        await until(service.status, lambda status: any(table["committedRows"] for table in status["tables"]))


async def test_idle_service_is_not_ready_once_the_catalog_was_down_for_the_configured_time(lake):
    config = replace(lake.config, server=replace(lake.config.server, stalled_after_s=0.5))
    async with started(config) as service, connected(service.ws_url) as shop:
        await shop.batch(1)
        assert (await service.post("/flush"))[0] == 200
        lake.proxy.stop()

        async def ready() -> dict[str, Any]:
            return (await service.ready())[1]

        health = await until(ready, lambda health: health["status"] == "not ready")
        assert named_catalog(health["problems"])
        lake.proxy.resume()
        await service.wait_until_ready()


async def test_catalog_that_is_silent_at_the_start_is_named_and_used_once_it_answers(lake):
    lake.proxy.spoil(Silence())
    async with started(lake.config) as service:
        assert named_catalog((await service.ready())[1]["problems"])
        async with connected(service.ws_url, source=None) as shop:
            assert (await shop.request("connect", sourceDoId="shop"))["shouldRetry"]
        lake.proxy.lift()
        await service.wait_until_ready()


async def test_catalog_that_refuses_the_service_ends_the_start(lake):
    lake.proxy.spoil(Answer(401))
    with pytest.raises(ExceptionGroup) as raised:
        await started(lake.config).__aenter__()
    assert raised.group_contains(CatalogError, match="status=401")


async def test_catalog_that_comes_back_behind_a_gateway_that_refuses_is_named_and_used_once_it_answers(lake):
    lake.proxy.stop()
    async with started(lake.config) as service:
        lake.proxy.spoil(Answer(401))
        lake.proxy.resume()
        await until(service.status, lambda status: "status=401" in str(status["problems"]))
        lake.proxy.lift()
        await service.wait_until_ready()
