from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from lakefeed.contract.errors import CatalogError, Fenced
from lakefeed.writer.commit.fencing import Fence
from lakefeed.writer.commit.rest_catalog import open_catalog
from lakefeed.writer.commit.watch import CatalogWatch

NAMESPACE = ("default",)
DEADLINE_S = 60.0


@pytest.fixture(autouse=True)
def short_intervals(monkeypatch):
    monkeypatch.setattr("lakefeed.writer.commit.watch.CHECK_INTERVAL_S", 0.01)
    monkeypatch.setattr("lakefeed.writer.commit.watch.RETRY_INTERVAL_S", 0.01)


class Answers:
    """A catalog whose answers a test sets: a status for everything but /config, and the properties of a namespace."""

    def __init__(self, status: int = 200, *, config_status: int = 200) -> None:
        self.status = status
        self.config_status = config_status
        self.properties: dict[str, str] = {}

    async def handle(self, request: web.Request) -> web.Response:
        if request.path.endswith("/config"):
            return web.json_response({}, status=self.config_status)
        if request.method == "POST":
            self.properties |= (await request.json())["updates"]
        return web.json_response({"properties": self.properties}, status=self.status)


@asynccontextmanager
async def watching(answers: Answers, *, on_return: Callable[[], object] = lambda: None):
    async with serve(answers.handle) as url, open_catalog(url) as catalog:
        fence = Fence(catalog, node="n1", namespace=NAMESPACE)
        yield CatalogWatch(catalog, fence, on_return=on_return, clock=lambda: 1000.0), fence, catalog


async def test_catalog_that_does_not_answer_is_joined_when_it_does():
    answers, returned = Answers(config_status=503), asyncio.Event()
    async with watching(answers, on_return=returned.set) as (watch, fence, catalog):
        assert watch.is_down  # until it was asked
        await watch.ask()
        assert (watch.joined.is_set(), fence.generation) == (False, 0)
        assert watch.problems(now=1007.0) == [f"{catalog.outage}: seconds=7"]
        assert "status=503" in catalog.outage
        running = asyncio.create_task(watch.run())
        answers.config_status = 200
        async with asyncio.timeout(DEADLINE_S):
            await returned.wait()
        running.cancel()
        assert watch.joined.is_set()
        assert answers.properties == {"lakefeed.node.n1": str(fence.generation)}
        assert (watch.problems(now=1007.0), watch.down_s(now=1007.0), catalog.outage) == ([], 0.0, None)


async def test_catalog_that_refuses_to_be_joined_is_an_error_and_while_it_is_watched_an_outage():
    answers = Answers(config_status=401)
    async with watching(answers) as (watch, _, catalog):
        with pytest.raises(CatalogError, match="status=401"):
            await watch.ask()
        running = asyncio.create_task(watch.run())
        async with asyncio.timeout(DEADLINE_S):
            while "status=401" not in catalog.outage:  # noqa: ASYNC110 - the watch tells nobody of an outage
                await asyncio.sleep(0.01)
            answers.config_status = 200
            await watch.joined.wait()
        running.cancel()


async def test_catalog_that_is_slow_to_answer_is_down(monkeypatch):
    monkeypatch.setattr("lakefeed.writer.commit.watch.ANSWER_MAX_S", 0.01)

    async def wait(_request: web.Request) -> web.Response:
        await asyncio.sleep(DEADLINE_S)
        return web.json_response({})

    async with serve(wait) as url, open_catalog(url) as catalog:
        watch = CatalogWatch(catalog, Fence(catalog, node="n1", namespace=NAMESPACE))
        await watch.ask()
        assert "did not answer in time" in catalog.outage


async def test_later_service_of_the_node_is_noticed_by_one_that_writes_nothing():
    answers = Answers()
    async with watching(answers) as (watch, fence, _):
        await watch.ask()
        running = asyncio.create_task(watch.run())
        answers.properties["lakefeed.node.n1"] = str(fence.generation + 1)
        async with asyncio.timeout(DEADLINE_S):
            with pytest.raises(Fenced):
                await running


async def test_catalog_that_keeps_no_properties_is_up_and_leaves_the_fence_to_the_tables(caplog):
    async with watching(Answers(406)) as (watch, fence, _):
        for _ in ("join", "check"):
            await watch.ask()
            assert not watch.is_down
    assert fence.generation > 0
    assert "node_not_registered" in caplog.text


@asynccontextmanager
async def serve(handler):
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handler)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield "http://{}:{}".format(*runner.addresses[0][:2])
    finally:
        await runner.cleanup()
