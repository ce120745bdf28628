from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest

from lakefeed.backoff import Backoff
from lakefeed.contract.errors import StorageError
from lakefeed.storage.local import local_path
from tests.fakes import CatalogFault
from tests.writer.committing import USERS, open_bench

# `make soak` commits 2,000 times.
COMMITS = int(os.environ.get("AGED_COMMITS", "300"))
SNAPSHOTS_MAX = 60


@pytest.fixture
async def bench(local_lake, monkeypatch):
    monkeypatch.setattr("lakefeed.writer.commit.committer.BACKOFF", Backoff(0.01, 0.01))
    monkeypatch.setattr("lakefeed.writer.commit.expiry.LOOK_EVERY_SNAPSHOTS", 20)
    monkeypatch.setattr("lakefeed.writer.commit.manifests.MIN_COUNT_DEFAULT", 10)
    upkeep = {"lakefeed.snapshots-max": str(SNAPSHOTS_MAX), "write.metadata.previous-versions-max": "5"}
    kept = {"write.metadata.delete-after-commit.enabled": "true", **upkeep}
    monkeypatch.setattr("lakefeed.writer.commit.plan.UPKEEP_PROPERTIES", kept)
    async with open_bench(local_lake) as opened:
        yield opened


async def commit_many(bench, state, flush, numbers):
    for number in numbers:
        state = (await bench.committer.commit(state, bench.renumber(flush, number))).state
        state = await bench.committer.maybe_expire(state)
    return state


def metadata_files(state) -> list[Path]:
    return list((local_path(state.location) / "metadata").iterdir())


def names(state, prefix):
    return {path.name for path in metadata_files(state) if path.name.startswith(prefix)}


def load(bench):
    with contextlib.closing(bench.lake.open_pyiceberg()) as catalog:
        return catalog.load_table("default.users")


async def test_metadata_stays_small_however_often_the_table_is_committed_to(bench):
    state = await bench.create()
    flush = await bench.make_flush(state, 1, 3)
    counts, sizes = [], []
    for number in range(COMMITS):
        state = await commit_many(bench, state, flush, [number])
        if number >= 2 * SNAPSHOTS_MAX:
            files = metadata_files(state)
            counts.append(len(files))
            sizes.append(max(path.stat().st_size for path in files if path.name.endswith(".metadata.json")))
    # Lists and fresh manifests of the snapshots kept and of those that wait for the next look, and old metadata files.
    assert max(counts) <= 2 * (SNAPSHOTS_MAX + 20) + 20 + 10
    assert max(sizes) <= 2 * min(sizes)
    assert len(state.manifests.manifests) <= 10 + 10 + COMMITS // 100
    assert state.snapshot_count == len(load(bench).snapshots()) <= SNAPSHOTS_MAX + 20
    assert load(bench).scan().to_arrow().num_rows == 3 * COMMITS


async def test_snapshots_that_are_left_can_be_read(bench):
    state = await bench.create()
    flush = await bench.make_flush(state, 1, 3)
    state = await commit_many(bench, state, flush, range(120))
    table = load(bench)
    oldest, *_, newest = sorted(table.snapshots(), key=lambda snapshot: snapshot.sequence_number)
    assert table.scan(snapshot_id=oldest.snapshot_id).to_arrow().num_rows == 3 * oldest.sequence_number
    assert table.scan(snapshot_id=newest.snapshot_id).to_arrow().num_rows == 360
    with bench.lake.open_duckdb() as duckdb:
        assert duckdb.execute("SELECT count(*) FROM lake.default.users").fetchall() == [(360,)]


async def test_only_what_no_snapshot_uses_is_deleted(bench):
    state = await bench.create()
    flush = await bench.make_flush(state, 1, 3)
    state = await commit_many(bench, state, flush, range(120))
    table = load(bench)
    lists = {snapshot.manifest_list.rpartition("/")[2] for snapshot in table.snapshots()}
    manifests = {
        manifest.manifest_path.rpartition("/")[2]
        for snapshot in table.snapshots()
        for manifest in snapshot.manifests(table.io)
    }
    assert names(state, "snap-") == lists
    assert names(state, "lakefeed-") == manifests


async def test_a_tagged_snapshot_stays_readable_with_all_its_manifests(bench):
    state = await bench.create()
    flush = await bench.make_flush(state, 1, 3)
    state = await commit_many(bench, state, flush, range(15))
    tagged = state.snapshot_id
    load(bench).manage_snapshots().create_tag(tagged, "audit").commit()
    state = await commit_many(bench, state, flush, range(15, 135))
    table = load(bench)
    assert tagged == min(table.snapshots(), key=lambda snapshot: snapshot.sequence_number).snapshot_id
    assert table.scan(snapshot_id=tagged).to_arrow().num_rows == 45


async def test_every_snapshot_from_a_consumers_tag_on_stays_and_can_be_read(bench):
    state = await bench.create()
    flush = await bench.make_flush(state, 1, 3)
    state = await commit_many(bench, state, flush, range(15))
    at = load(bench).current_snapshot()
    load(bench).manage_snapshots().create_tag(at.snapshot_id, "lakefeed_consumer_report").commit()
    state = await commit_many(bench, state, flush, range(15, 135))
    table = load(bench)
    kept = {snapshot.sequence_number: snapshot for snapshot in table.snapshots()}
    assert sorted(kept) == list(range(at.sequence_number, 136))
    for snapshot in kept.values():
        assert table.scan(snapshot_id=snapshot.snapshot_id).count() == 3 * snapshot.sequence_number


async def test_a_consumer_that_sets_its_tag_between_our_commits_meets_none_of_them(bench):
    state = await bench.create()
    flush = await bench.make_flush(state, 1, 3)
    before = bench.flaky.commits_seen
    for number in range(5):
        state = (await bench.committer.commit(state, bench.renumber(flush, number))).state
        load(bench).manage_snapshots().create_tag(state.snapshot_id, f"lakefeed_consumer_{number}").commit()
    assert bench.flaky.commits_seen - before == 5, "each went through at its first try, on the state it knew"
    assert load(bench).scan().to_arrow().num_rows == 15
    assert len(load(bench).refs()) == 6


async def test_a_tag_that_came_since_the_last_look_is_seen(bench):
    state = await bench.create()
    flush = await bench.make_flush(state, 1, 3)
    state = await commit_many(bench, state, flush, range(79))
    first = min(load(bench).snapshots(), key=lambda snapshot: snapshot.sequence_number).snapshot_id
    load(bench).manage_snapshots().create_tag(first, "audit").commit()
    await commit_many(bench, state, flush, [79])
    assert load(bench).scan(snapshot_id=first).to_arrow().num_rows == 3


@pytest.mark.parametrize(
    "fault", [CatalogFault.ERROR_AFTER, CatalogFault.ERROR_BEFORE, CatalogFault.CONFLICT], ids=lambda f: f.name
)
async def test_nothing_is_deleted_unless_the_catalog_said_yes(bench, fault):
    state = await bench.create()
    flush = await bench.make_flush(state, 1, 3)
    state = await commit_many(bench, state, flush, range(79))
    state = (await bench.committer.commit(state, bench.renumber(flush, 79))).state
    before = names(state, "snap-") | names(state, "lakefeed-")
    bench.flaky.commit_faults.append(fault)
    state = await bench.committer.maybe_expire(state)
    assert names(state, "snap-") | names(state, "lakefeed-") == before
    state = await commit_many(bench, state, flush, range(80, 120))
    assert load(bench).scan().to_arrow().num_rows == 360


async def test_a_store_that_fails_to_delete_or_read_only_leaves_files_behind(bench, monkeypatch):
    state = await bench.create()
    flush = await bench.make_flush(state, 1, 3)
    state = await commit_many(bench, state, flush, range(79))
    state = (await bench.committer.commit(state, bench.renumber(flush, 79))).state
    before = names(state, "snap-") | names(state, "lakefeed-")

    async def refuse(location):
        raise StorageError(f"store is down: location={location}")

    with monkeypatch.context() as patch:
        patch.setattr(bench.store, "delete", refuse)
        patch.setattr(bench.store, "read", refuse)
        state = await bench.committer.maybe_expire(state)
    assert state.snapshot_count == SNAPSHOTS_MAX
    assert names(state, "snap-") | names(state, "lakefeed-") == before
    assert load(bench).scan().to_arrow().num_rows == 240


async def test_a_new_table_says_how_long_it_keeps_history(local_lake):
    async with open_bench(local_lake) as bench:
        await bench.create()
        properties = (await bench.committer.load(USERS)).properties
    assert properties["write.metadata.delete-after-commit.enabled"] == "true"
    assert properties["history.expire.min-snapshots-to-keep"] == "100"
    assert properties["lakefeed.snapshots-max"] == "500"
