from __future__ import annotations

import pytest

from lakefeed.writer.commit.rest_catalog import open_catalog
from lakefeed.writer.commit.sources import LOAD_EVERY_S, ConsumerWatch
from tests.fakes import CatalogFault, FlakyCatalog
from tests.writer.committing import open_bench


class Clock:
    now = 1_800_000_000.0

    def __call__(self):
        return self.now


@pytest.fixture
async def bench(local_lake):
    async with open_bench(local_lake) as opened:
        yield opened


def tag(bench, name, snapshot_id):
    catalog = bench.lake.open_pyiceberg()
    catalog.load_table("default.users").manage_snapshots().create_tag(snapshot_id, f"lakefeed_consumer_{name}").commit()
    catalog.close()


async def commit(bench, state, number):
    flush = await bench.make_flush(state, 1, 3)
    return (await bench.committer.commit(state, bench.renumber(flush, number))).state


def facts(described):
    return [(each["table"], each["name"], each["snapshotsBehind"]) for each in described]


async def test_consumers_of_every_table_are_seen_again_only_after_some_seconds(bench):
    clock = Clock()
    state = await commit(bench, await bench.create(), 1)
    tag(bench, "report", state.snapshot_id)
    async with open_catalog(bench.lake.catalog_url) as catalog:
        watch = ConsumerWatch(catalog, clock=clock)
        assert facts(await watch.describe()) == [("default.users", "report", 0)]
        await commit(bench, state, 2)
        assert facts(await watch.describe()) == [("default.users", "report", 0)]
        clock.now += LOAD_EVERY_S
        assert facts(await watch.describe()) == [("default.users", "report", 1)]


async def test_a_catalog_that_fails_or_is_silent_leaves_what_was_seen_last(bench, monkeypatch):
    clock = Clock()
    state = await commit(bench, await bench.create(), 1)
    tag(bench, "report", state.snapshot_id)
    async with FlakyCatalog(bench.lake.catalog_url) as flaky, open_catalog(flaky.url) as catalog:
        monkeypatch.setattr("lakefeed.writer.commit.sources.LOAD_MAX_S", 60.0)
        watch = ConsumerWatch(catalog, clock=clock)
        assert facts(await watch.describe()) == [("default.users", "report", 0)]
        monkeypatch.setattr("lakefeed.writer.commit.sources.LOAD_MAX_S", 0.2)
        for fault in (CatalogFault.ERROR_BEFORE, CatalogFault.SILENCE_AFTER):
            flaky.load_faults.append(fault)
            while flaky.load_faults:  # on a busy machine, the time may be over before the request is sent
                clock.now += LOAD_EVERY_S
                [seen] = await watch.describe()
                assert seen["seenSecondsAgo"] >= LOAD_EVERY_S


async def test_tables_beyond_one_look_are_seen_by_the_next(bench, monkeypatch):
    monkeypatch.setattr("lakefeed.writer.commit.sources.TABLES_PER_LOAD", 1)
    clock = Clock()
    state = await commit(bench, await bench.create(), 1)
    tag(bench, "report", state.snapshot_id)
    catalog = bench.lake.open_pyiceberg()
    for name in ("a", "z"):
        catalog.create_table(f"default.{name}", schema=catalog.load_table("default.users").schema())
    catalog.close()
    async with open_catalog(bench.lake.catalog_url) as client:
        watch = ConsumerWatch(client, clock=clock)
        seen = []
        for _ in range(3):
            seen = await watch.describe()
            clock.now += LOAD_EVERY_S
    assert facts(seen) == [("default.users", "report", 0)]
