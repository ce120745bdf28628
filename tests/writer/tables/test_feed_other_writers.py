"""Tables that others change between and during our commits: nothing of ours is lost or doubled, nor theirs undone."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from dataclasses import replace
from decimal import Decimal

import pytest
from pyiceberg.types import DecimalType, StringType

from lakefeed.backoff import Backoff
from lakefeed.contract.changes import Position, SourceId, Span
from lakefeed.contract.errors import CommitConflict, CommitUnknown, RowsAlreadyCommitted
from lakefeed.iceberg.manifests import ListHeader, encode_manifest_list
from lakefeed.writer.commit.committer import ATTEMPTS_MAX
from lakefeed.writer.commit.manifests import load_manifests, maybe_merge
from lakefeed.writer.commit.plan import Request
from lakefeed.writer.commit.state import metadata_location
from tests.fakes import CatalogFault
from tests.writer.committing import SHOP, USERS, open_bench
from tests.writer.feeding import read_sequences, running_feed, shop


@pytest.fixture
async def bench(local_lake, monkeypatch):
    monkeypatch.setattr("lakefeed.writer.commit.committer.BACKOFF", Backoff(0.02, 0.02))
    async with open_bench(local_lake) as opened:
        yield opened


async def compact(bench, monkeypatch):
    """Replace a table's manifests as another engine's rewrite would: a `replace` snapshot without a marker of ours."""
    state = await load_manifests(bench.store, await bench.committer.load(USERS))
    snapshot_id, number = uuid.uuid4().int >> 65, state.last_sequence_number + 1
    with monkeypatch.context() as patch:
        patch.setattr("lakefeed.writer.commit.manifests.MIN_COUNT_DEFAULT", 2)
        merged, _ = await maybe_merge(bench.store, state, snapshot_id=snapshot_id)
    location = metadata_location(state, f"snap-{snapshot_id}-1-{uuid.uuid4()}.avro")
    header = ListHeader(snapshot_id, state.snapshot_id, number, state.format_version)
    await bench.store.write(location, encode_manifest_list(merged.manifests, header))
    snapshot = {
        "snapshot-id": snapshot_id,
        "parent-snapshot-id": state.snapshot_id,
        "sequence-number": number,
        "timestamp-ms": state.last_updated_ms + 1,
        "manifest-list": location,
        "summary": {"operation": "replace"},
        "schema-id": state.schema.schema_id,
    }
    updates = (
        {"action": "add-snapshot", "snapshot": snapshot},
        {"action": "set-snapshot-ref", "ref-name": "main", "type": "branch", "snapshot-id": snapshot_id},
    )
    await bench.committer._catalog.commit_table(USERS, Request((), updates))
    return snapshot_id


async def test_eight_nodes_that_meet_at_one_table_all_commit_once(bench):
    state = await bench.create()

    async def work(number):
        source, own = SourceId(f"source-{number}"), state
        for step in range(4):
            first = 1000 * number + 10 * step
            flush = await bench.make_flush(state, first, first + 4, node=f"n{number}")
            spans = {source: Span(Position(0, first), Position(0, first + 4))}
            own = await commit_until_done(own, replace(flush, spans=spans))

    async def commit_until_done(own, flush):
        while True:  # as a table's writer does
            with contextlib.suppress(CommitConflict):
                return (await bench.committer.commit(own, flush)).state

    await asyncio.gather(*(work(number) for number in range(1, 9)))
    expected = [1000 * n + 10 * step + i for n in range(1, 9) for step in range(4) for i in range(5)]
    assert bench.sequences() == sorted(expected)
    assert len(bench.snapshots()) == 32


async def test_compaction_during_our_commit_keeps_its_files_and_our_rows(bench, monkeypatch):
    state = await bench.create()
    for first in (1, 11, 21):
        state = (await bench.committer.commit(state, await bench.make_flush(state, first, first + 9))).state
    theirs = await compact(bench, monkeypatch)
    result = await bench.committer.commit(state, await bench.make_flush(state, 31, 40))
    assert bench.sequences() == list(range(1, 41))
    assert len(result.state.manifests.manifests) == 2
    assert theirs in {snapshot.snapshot_id for snapshot in bench.snapshots()}
    assert result.state.progress.sources.get(SHOP) == Position(0, 40)


async def test_the_snapshot_before_a_compaction_outlives_our_expiry(bench, monkeypatch):
    monkeypatch.setattr("lakefeed.writer.commit.expiry.LOOK_EVERY_SNAPSHOTS", 10)
    limit = {"lakefeed.snapshots-max": "5", "history.expire.min-snapshots-to-keep": "1"}
    monkeypatch.setattr("lakefeed.writer.commit.plan.UPKEEP_PROPERTIES", limit)
    state = await bench.create()
    flush = await bench.make_flush(state, 1, 3)
    for number in range(8):
        state = (await bench.committer.commit(state, bench.renumber(flush, number))).state
    before, theirs = state.snapshot_id, await compact(bench, monkeypatch)
    for number in range(8, 40):
        state = (await bench.committer.commit(state, bench.renumber(flush, number))).state
        state = await bench.committer.maybe_expire(state)
    left = [snapshot.snapshot_id for snapshot in bench.snapshots()]
    assert left[:2] == [before, theirs]
    assert len(left) <= 5 + 2 + 10
    with contextlib.closing(bench.lake.open_pyiceberg()) as catalog:
        table = catalog.load_table("default.users")
        assert table.scan(snapshot_id=before).to_arrow().num_rows == 24
        assert table.scan().to_arrow().num_rows == 120


async def test_a_commit_whose_snapshot_expired_before_its_outcome_was_checked_is_not_repeated(bench):
    state = await bench.create()
    ours = await bench.make_flush(state, 1, 10)
    bench.flaky.commit_faults.append(CatalogFault.ERROR_AFTER)
    bench.flaky.load_faults.extend([CatalogFault.ERROR_BEFORE] * ATTEMPTS_MAX)
    with pytest.raises(CommitUnknown):
        await bench.committer.commit(state, ours)
    bench.flaky.load_faults.clear()
    fresh = await bench.committer.load(USERS)
    landed = fresh.snapshot_id
    spans = {SourceId("bank"): Span(Position(0, 1), Position(0, 1))}
    await bench.committer.commit(fresh, replace(await bench.make_flush(fresh, 101, 101, node="n2"), spans=spans))
    expiry = Request((), ({"action": "remove-snapshots", "snapshot-ids": [landed]},))
    await bench.committer._catalog.commit_table(USERS, expiry)
    with pytest.raises(RowsAlreadyCommitted) as raised:
        await bench.committer.commit(state, ours)
    assert raised.value.marks == {SHOP: Position(0, 10)}  # all of them: the caller has nothing left to write
    assert bench.sequences() == [*range(1, 11), 101]


async def test_a_column_that_another_writer_adds_during_our_commit_costs_one_more_request_and_no_other_files(bench):
    state = await bench.create()
    flush = await bench.make_flush(state, 1, 3)
    with contextlib.closing(bench.lake.open_pyiceberg()) as catalog:
        with catalog.load_table("default.users").update_schema() as update:
            update.add_column("note", StringType()).update_column("price", DecimalType(12, 2))
        seen = bench.flaky.commits_seen
        await bench.committer.commit(state, flush)
        assert bench.flaky.commits_seen - seen == 2
        table = catalog.load_table("default.users")
        assert [task.file.file_path for task in table.scan().plan_files()] == [flush.files[0].location]
        assert table.current_snapshot().schema_id == table.metadata.current_schema_id
        assert table.scan().to_arrow()["price"][0].as_py() == Decimal("0.01")


async def test_a_column_that_came_with_another_writers_rows_is_kept_by_our_next_commits(tmp_path, local_lake):
    async with running_feed(tmp_path, local_lake, partition="none") as running:
        await running.append(range(1, 3))
        await running.flush()
        with contextlib.closing(local_lake.open_pyiceberg()) as catalog:
            table = catalog.load_table("default.users")
            with table.update_schema() as update:
                update.add_column("note", StringType())
            table.append(table.scan().to_arrow())  # moves main, so that our next commit has to look
        for first in (3, 5, 7):
            await running.append(range(first, first + 2))
            await running.flush()
    with contextlib.closing(local_lake.open_pyiceberg()) as catalog:
        assert catalog.load_table("default.users").schema().find_field("note").field_type == StringType()
    assert read_sequences(local_lake) == sorted(shop(1, 2, *range(1, 9)))
