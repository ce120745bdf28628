"""Rows that were quarantined, replayed or dropped, and then come again with the log: they stay what they are."""

from __future__ import annotations

import pytest

from lakefeed.contract.properties import Kind
from lakefeed.writer.commit.rest_catalog import open_catalog
from lakefeed.writer.commit.sources import load_resume_positions
from lakefeed.writer.quarantine.store import Quarantine
from tests.unwritable_tables import create_unwritable, make_writable
from tests.writer.feeding import read_sequences, running_feed, shop
from tests.writer.quarantine.bench import USERS, lake_bench


async def open_sequences(lake):
    async with lake_bench(lake) as bench:
        return sorted((await bench.contents()).entries["sequence"].to_pylist())


async def test_rows_that_are_well_when_they_are_read_again_stay_in_quarantine(tmp_path, local_lake):
    create_unwritable(local_lake.catalog_url, "users")
    async with running_feed(tmp_path, local_lake) as running:
        await running.append(range(1, 4))
        await running.flush()
    make_writable(local_lake.catalog_url, "users")
    async with running_feed(tmp_path, local_lake) as running:
        await running.append(range(4, 6))
        await running.flush()
    assert read_sequences(local_lake) == shop(4, 5)
    assert await open_sequences(local_lake) == [1, 2, 3]


@pytest.mark.parametrize("restarts", [1, 2])
async def test_replayed_rows_that_are_read_again_are_not_written_twice(tmp_path, local_lake, restarts):
    create_unwritable(local_lake.catalog_url, "users")
    async with running_feed(tmp_path, local_lake) as running:
        await running.append(range(1, 4))
        await running.flush()
    make_writable(local_lake.catalog_url, "users")
    async with lake_bench(local_lake) as bench:
        assert (await bench.replay()).replayed == 3
    for number in range(restarts):
        async with running_feed(tmp_path, local_lake) as running:
            await running.append(range(4 + number, 5 + number))
            await running.flush()
    assert read_sequences(local_lake) == shop(*range(1, 4 + restarts))


async def test_dropped_rows_that_are_read_again_stay_dropped(tmp_path, local_lake):
    create_unwritable(local_lake.catalog_url, "users")
    async with running_feed(tmp_path, local_lake) as running:
        await running.append(range(1, 3))
        await running.flush()
    make_writable(local_lake.catalog_url, "users")
    async with lake_bench(local_lake) as bench:
        ids = (await bench.contents()).entries["id"].to_pylist()
        await Quarantine(USERS.namespace, bench.context).resolve(ids, kind=Kind.DROPPED, table=USERS, now_us=1)
    async with running_feed(tmp_path, local_lake) as running:
        await running.append(range(3, 4))
        await running.flush()
    assert read_sequences(local_lake) == shop(3)
    assert await open_sequences(local_lake) == []


async def test_marks_of_the_quarantine_are_no_sources_to_resume(tmp_path, local_lake):
    create_unwritable(local_lake.catalog_url, "users")
    async with running_feed(tmp_path, local_lake) as running:
        await running.append(range(1, 3))
        await running.append(range(3, 5), table="orders")
        await running.flush()
    make_writable(local_lake.catalog_url, "users")
    async with lake_bench(local_lake) as bench:
        await bench.replay()
    async with open_catalog(local_lake.catalog_url) as catalog:
        await catalog.load_config()
        assert set(await load_resume_positions(catalog)) == {"shop"}
