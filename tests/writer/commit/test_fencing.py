from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from lakefeed.backoff import Backoff
from lakefeed.contract.changes import Position
from lakefeed.contract.errors import CatalogError, CatalogUnavailable, CommitUnknown, Fenced
from lakefeed.contract.progress import Progress
from lakefeed.writer.commit.committer import ATTEMPTS_MAX, Committer
from lakefeed.writer.commit.fencing import Fence, check_fence, join_catalog
from lakefeed.writer.commit.rest_catalog import open_catalog
from tests.fakes import CatalogFault
from tests.writer.committing import SHOP, USERS, open_bench

NAMESPACE = ("default",)


@pytest.fixture
async def bench(local_lake, monkeypatch):
    monkeypatch.setattr("lakefeed.writer.commit.committer.BACKOFF", Backoff(0.01, 0.01))
    monkeypatch.setattr("lakefeed.writer.commit.fencing.CHECK_INTERVAL_S", 0.01)
    async with open_bench(local_lake) as opened:
        yield opened


@asynccontextmanager
async def service(bench, *, node="n1", now=1000.0):
    """What a service is to the catalog: a claim on its node id, and a committer under it."""
    async with open_catalog(bench.lake.catalog_url) as catalog:
        fence = Fence(catalog, node=node, namespace=NAMESPACE, clock=lambda: now)
        await join_catalog(catalog, fence)
        yield fence, Committer(catalog, bench.store, fence=fence)


@pytest.mark.parametrize(("generation", "fenced"), [(16, True), (17, False), (18, False)])
def test_a_table_that_has_seen_a_higher_generation_fences_off(generation, fenced):
    progress = Progress({"n1": 5}, {}, {"n1": 17})
    if fenced:
        with pytest.raises(Fenced, match=r"give one of them another server.node_id: node=n1 generation=16 found=17"):
            check_fence(progress, node="n1", generation=generation)
    else:
        check_fence(progress, node="n1", generation=generation)
    check_fence(progress, node="n2", generation=0)


async def test_the_later_of_two_services_commits_and_the_earlier_finds_itself_fenced_off(bench):
    state = await bench.create()
    async with service(bench) as (_, earlier), service(bench) as (_, later):
        old = (await earlier.commit(state, await bench.make_flush(state, 1, 5))).state
        await later.commit(old, await bench.make_flush(old, 6, 10))
        with pytest.raises(Fenced):
            await earlier.commit(old, await bench.make_flush(old, 6, 12))
        fresh = await earlier.load(USERS)
        with pytest.raises(Fenced):  # and it stays fenced after the table is loaded again
            await earlier.commit(fresh, await bench.make_flush(fresh, 11, 12))
    assert bench.sequences() == list(range(1, 11))
    assert (await bench.committer.load(USERS)).progress.sources == {SHOP: Position(0, 10)}


async def test_a_commit_that_landed_before_we_were_fenced_counts_as_committed(bench):
    state = await bench.create()
    async with service(bench) as (fence, _), service(bench) as (_, later):
        earlier = Committer(bench.committer._catalog, bench.store, fence=fence)
        ours = await bench.make_flush(state, 1, 5)
        bench.flaky.commit_faults.append(CatalogFault.ERROR_AFTER)
        bench.flaky.load_faults.extend([CatalogFault.ERROR_BEFORE] * ATTEMPTS_MAX)
        with pytest.raises(CommitUnknown):
            await earlier.commit(state, ours)
        bench.flaky.load_faults.clear()
        fresh = await later.load(USERS)
        await later.commit(fresh, await bench.make_flush(fresh, 6, 10))
        landed = await earlier.commit(fresh, ours)
        assert landed.snapshot_id == fresh.snapshot_id
    assert bench.sequences() == list(range(1, 11))


async def test_services_of_different_nodes_do_not_fence_each_other_off(bench):
    state = await bench.create()
    async with service(bench, node="n1") as (_, one), service(bench, node="n2") as (_, two):
        state = (await one.commit(state, await bench.make_flush(state, 1, 5, node="n1"))).state
        state = (await two.commit(state, await bench.make_flush(state, 6, 9, node="n2"))).state
        state = (await one.commit(state, await bench.make_flush(state, 10, 12, node="n1"))).state
    assert set(state.progress.generations) == {"n1", "n2"}


async def test_a_service_that_writes_nothing_notices_too(bench):
    async with service(bench) as (earlier, _):
        await earlier.check()
        watch = asyncio.create_task(earlier.run())
        async with service(bench) as (later, _):
            async with asyncio.timeout(20):
                with pytest.raises(Fenced):
                    await watch
            await later.check()


async def test_a_later_start_has_a_higher_generation_even_if_its_clock_is_behind(bench):
    async with service(bench, now=5_000.0) as (earlier, _), service(bench, now=1.0) as (later, _):
        assert later.generation > earlier.generation


async def test_of_two_that_start_at_the_same_moment_the_higher_one_remains(bench):
    async with service(bench) as (one, _), service(bench) as (two, _):
        high, low = sorted((one, two), key=lambda fence: -fence.generation)
        await low._register()  # as if it had read before the other one wrote, and written after it
        await high.check()
        with pytest.raises(Fenced):
            await low.check()
        await high.check()


async def test_a_catalog_that_keeps_no_properties_leaves_the_fence_to_the_tables(caplog):
    async def refuse(request: web.Request) -> web.Response:
        if request.path.endswith("/config"):
            return web.json_response({})
        return web.json_response({"error": {"message": "not here"}}, status=406)

    async with serve(refuse) as url, open_catalog(url) as catalog:
        fence = Fence(catalog, node="n1", namespace=NAMESPACE, clock=lambda: 1000.0)
        await join_catalog(catalog, fence)
    assert fence.generation >= 1_000_000_000
    assert "node_not_registered" in caplog.text


async def test_clock_set_back_does_not_fence_a_restart_off_where_the_catalog_keeps_no_properties(bench, monkeypatch):
    async def refuse(*_: object) -> None:
        raise CatalogError("not here")

    for name in ("load_properties", "set_properties"):
        monkeypatch.setattr(f"lakefeed.writer.commit.rest_catalog.CatalogClient.{name}", refuse)
    state = await bench.create()
    async with service(bench, now=5_000.0) as (_, earlier):
        await earlier.commit(state, await bench.make_flush(state, 1, 5))
    async with service(bench, now=1_000.0) as (_, restarted):
        fresh = await restarted.load(USERS)
        await restarted.commit(fresh, await bench.make_flush(fresh, 6, 10))


async def test_a_start_waits_for_a_catalog_that_is_not_up_yet(monkeypatch):
    monkeypatch.setattr("lakefeed.writer.commit.fencing.BACKOFF", Backoff(0.001, 1.0))
    answers = []

    async def slow_start(request: web.Request) -> web.Response:
        answers.append(request.path)
        return web.json_response({}, status=503 if len(answers) < 4 else 200)

    async with serve(slow_start) as url, open_catalog(url) as catalog:
        fence = Fence(catalog, node="n1", namespace=NAMESPACE)
        await join_catalog(catalog, fence)
        assert fence.generation > 0
        monkeypatch.setattr("lakefeed.writer.commit.fencing.ATTEMPTS_MAX", 2)
        answers[:] = answers[:0]
        with pytest.raises(CatalogUnavailable):
            await join_catalog(catalog, fence)


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
