"""The catalog breaks in every way while clients push: nothing is lost or doubled, and it ends without help."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from aiohttp import web

from lakefeed.catalog.app import build_catalog
from lakefeed.catalog.config import CatalogConfig, Warehouse
from lakefeed.storage.config import StorageConfig
from tests.fault_proxy import Answer, CutRequest, CutResponse, Fault, FaultProxy, Silence, Slow, fault_proxy
from tests.integration.outages import SETTINGS, named, pushing
from tests.service_process import ServiceProcess, service_process
from tests.serving import serve_in_thread

pytestmark = pytest.mark.integration

REQUEST_TIMEOUT_S = 1.0
# A commit of a table, and nothing else that is posted.
COMMITS = {"method": "POST", "path": "/tables/"}


@dataclass(frozen=True, slots=True)
class Lake:
    """A service, not yet started, which reaches its catalog through a proxy."""

    service: ServiceProcess
    proxy: FaultProxy
    catalog_url: str

    def pushing(self, *, has_small_buffers: bool = False):
        return pushing(self.service, catalog_url=self.catalog_url, has_small_buffers=has_small_buffers)


@pytest.fixture
def lake(tmp_path: Path) -> Iterator[Lake]:
    location = f"file://{tmp_path}/warehouse"
    app = web.Application()
    app.add_subapp(
        "/v1", build_catalog(CatalogConfig(), Warehouse(StorageConfig(warehouse=location)), tmp_path / "catalog.db")
    )
    with serve_in_thread(app) as catalog_url, fault_proxy(catalog_url) as proxy:
        settings = {
            **SETTINGS,
            "storage.warehouse": location,
            "iceberg.uri": proxy.url,
            "iceberg.request_timeout_s": REQUEST_TIMEOUT_S,
        }
        with service_process(tmp_path, settings) as service:
            yield Lake(service, proxy, catalog_url)


# What goes wrong with some commits.
FAULTS: list[Fault] = [
    Answer(409),
    Answer(429),
    Answer(500),
    Answer(500, forwarded=True),
    Answer(503, forwarded=True),
    Answer(200, body=b"<html>Back soon</html>"),
    CutRequest(),
    CutResponse(),
    Silence(),
    Silence(forwarded=True),
]
TIMES = 6


async def test_commits_that_fail_or_are_not_answered_end_with_every_change_once(lake: Lake):
    async with lake.pushing() as pushed:
        for fault in FAULTS:
            with named(fault):
                spoiled = lake.proxy.spoil(fault, **COMMITS, times=TIMES)
                await pushed.wait_for(lambda _, spoiled=spoiled: spoiled.met == TIMES)
                await pushed.wait_until_recovered()


async def test_a_stopped_catalog_is_reported_and_used_again_after_its_restart(lake: Lake):
    async with lake.pushing(has_small_buffers=True) as pushed:
        lake.proxy.stop()
        problem = await pushed.wait_until_problem("table is not committed")
        assert "table=" in problem
        await pushed.check_memory_while_changes_are_acked()
        lake.proxy.resume()


async def test_a_catalog_that_refuses_is_reported_with_its_status_and_used_again(lake: Lake):
    async with lake.pushing() as pushed:
        for fault in (Answer(403), Answer(404)):
            with named(fault):
                lake.proxy.spoil(fault)
                problem = await pushed.wait_until_problem(f"status={fault.status}")
                assert "table=" in problem
                lake.proxy.lift()
                await pushed.wait_until_recovered()


async def test_a_slow_catalog_makes_commits_slow_and_nothing_else(lake: Lake):
    async with lake.pushing() as pushed:
        lake.proxy.spoil(Slow(delay_s=REQUEST_TIMEOUT_S / 4))
        for _ in range(2):
            await pushed.wait_until_tables_commit()
        assert all(table["problem"] is None for table in (await pushed.status())["tables"])
        lake.proxy.lift()
