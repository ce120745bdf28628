from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace

import orjson
import pytest

from lakefeed.backoff import Backoff
from lakefeed.contract.changes import Position, SourceId, Span
from lakefeed.contract.errors import (
    CommitConflict,
    CommitUnknown,
    RowsAlreadyCommitted,
    StorageError,
    TableMissing,
    TableReplaced,
)
from lakefeed.iceberg.terms import PartitionRejected
from lakefeed.iceberg.types import Field, Schema, StructType
from lakefeed.writer.commit.committer import ATTEMPTS_MAX
from tests.fakes import CatalogFault
from tests.writer.committing import SHOP, USERS, open_bench
from tests.writer.examples import nested_rows


@pytest.fixture
async def bench(local_lake, monkeypatch):
    monkeypatch.setattr("lakefeed.writer.commit.committer.BACKOFF", Backoff(0.01, 0.01))
    async with open_bench(local_lake) as opened:
        yield opened


async def test_flushes_are_read_back_by_pyiceberg_and_duckdb(bench):
    state = await bench.create()
    for first in (1, 11, 21):
        state = (await bench.committer.commit(state, await bench.make_flush(state, first, first + 9))).state
    assert bench.sequences() == list(range(1, 31))
    with bench.lake.open_duckdb() as duckdb:
        query = "SELECT count(*), min(_cdc_sequence) FROM lake.default.users WHERE _cdc_sequence > 15"
        assert duckdb.execute(query).fetchall() == [(15, 16)]


async def test_flushes_reach_s3_too(s3_lake):
    async with open_bench(s3_lake) as bench:
        state = await bench.create()
        state = (await bench.committer.commit(state, await bench.make_flush(state, 1, 10))).state
        await bench.committer.commit(state, await bench.make_flush(state, 11, 20))
        assert bench.sequences() == list(range(1, 21))
        with bench.lake.open_duckdb() as duckdb:
            assert duckdb.execute("SELECT count(*) FROM lake.default.users").fetchall() == [(20,)]


async def test_a_table_of_format_3_gets_row_ids(bench):
    state = await bench.create(format_version=3)
    for first in (1, 11):
        state = (await bench.committer.commit(state, await bench.make_flush(state, first, first + 9))).state
    assert state.next_row_id == 20
    assert bench.sequences() == list(range(1, 21))
    assert (await bench.committer.load(USERS)).next_row_id == 20


async def test_a_commit_carries_its_progress_in_property_and_summary(bench):
    state = await bench.create()
    flush = await bench.make_flush(state, 1, 10)
    result = await bench.committer.commit(state, flush)
    fresh = await bench.committer.load(USERS)
    assert fresh.progress.sources.get(SHOP) == Position(0, 10)
    assert fresh.progress.nodes["n1"] == 11
    assert fresh.summary["lakefeed.flush-id"] == flush.id
    assert orjson.loads(fresh.summary["lakefeed.sources"]) == {"shop": [0, 1, 10]}
    assert (fresh.summary["lakefeed.log-from"], fresh.summary["lakefeed.log-to"]) == ("1", "11")
    assert fresh.snapshot_id == result.snapshot_id


async def test_the_state_after_a_commit_is_what_the_catalog_says(bench):
    state = await bench.create()
    for first in (1, 11):
        state = (await bench.committer.commit(state, await bench.make_flush(state, first, first + 9))).state
    fresh = await bench.committer.load(USERS)
    assert replace(fresh, manifests=None, last_updated_ms=0) == replace(state, manifests=None, last_updated_ms=0)


async def test_a_row_of_own_commits_reads_nothing_from_storage(bench, monkeypatch):
    state = await bench.create()

    async def refuse(location):
        raise AssertionError(location)

    monkeypatch.setattr(bench.store, "read", refuse)
    for first in (1, 11, 21):
        state = (await bench.committer.commit(state, await bench.make_flush(state, first, first + 9))).state
    assert bench.sequences() == list(range(1, 31))


@pytest.mark.parametrize("format_version", [2, 3])
async def test_many_commits_leave_a_short_list_of_manifests(bench, monkeypatch, format_version):
    monkeypatch.setattr("lakefeed.writer.commit.manifests.MIN_COUNT_DEFAULT", 4)
    state = await bench.create(format_version=format_version)
    for first in range(1, 100, 10):
        state = (await bench.committer.commit(state, await bench.make_flush(state, first, first + 9))).state
    assert bench.sequences() == list(range(1, 101))
    counts = [(m["added_files_count"], m["existing_files_count"]) for m in state.manifests.manifests]
    assert sorted(counts) == [(0, 4), (0, 4), (1, 0), (1, 0)]
    with bench.lake.open_duckdb() as duckdb:
        assert duckdb.execute("SELECT count(*) FROM lake.default.users").fetchall() == [(100,)]
    first = bench.snapshots()[0]
    with contextlib.closing(bench.lake.open_pyiceberg()) as catalog:
        assert catalog.load_table("default.users").scan(snapshot_id=first.snapshot_id).to_arrow().num_rows == 10


async def test_a_merge_that_cannot_read_is_postponed_and_the_rows_are_committed(bench, monkeypatch):
    monkeypatch.setattr("lakefeed.writer.commit.manifests.MIN_COUNT_DEFAULT", 2)
    state = await bench.create()
    for first in (1, 11):
        state = (await bench.committer.commit(state, await bench.make_flush(state, first, first + 9))).state

    async def refuse(location):
        raise StorageError(f"cannot read file: location={location}")

    with monkeypatch.context() as patch:
        patch.setattr(bench.store, "read", refuse)
        state = (await bench.committer.commit(state, await bench.make_flush(state, 21, 30))).state
    assert len(state.manifests.manifests) == 3
    state = (await bench.committer.commit(state, await bench.make_flush(state, 31, 40))).state
    assert len(state.manifests.manifests) == 2
    assert bench.sequences() == list(range(1, 41))


async def test_totals_are_carried_from_snapshot_to_snapshot(bench):
    state = await bench.create()
    for first in (1, 11):
        state = (await bench.committer.commit(state, await bench.make_flush(state, first, first + 9))).state
    assert (state.summary["added-records"], state.summary["total-records"]) == ("10", "20")
    assert (state.summary["added-data-files"], state.summary["total-data-files"]) == ("1", "2")


async def test_a_new_table_is_append_only_and_partitioned_by_day(bench):
    state = await bench.create()
    assert state.properties["lakefeed.append-only"] == "true"
    assert state.properties["write.parquet.compression-codec"] == "zstd"
    assert [(field.name, field.transform) for field in state.spec.fields] == [("_cdc_timestamp_day", "day")]
    assert (await bench.create()).uuid == state.uuid


async def test_a_partition_on_a_missing_column_is_rejected(bench):
    with pytest.raises(PartitionRejected, match="unknown column"):
        await bench.create(partition="day(nowhere)")


@pytest.mark.parametrize(
    "fault", [CatalogFault.ERROR_AFTER, CatalogFault.HANG_UP_AFTER, CatalogFault.SILENCE_AFTER], ids=lambda f: f.name
)
async def test_commit_that_landed_but_timed_out_is_not_committed_twice(bench, fault):
    state = await bench.create()
    flush = await bench.make_flush(state, 1, 10)
    bench.flaky.commit_faults.append(fault)
    result = await bench.committer.commit(state, flush)
    assert bench.sequences() == list(range(1, 11))
    assert [snapshot.snapshot_id for snapshot in bench.snapshots()] == [result.snapshot_id]
    assert bench.flaky.commits_seen == 1
    await bench.committer.commit(result.state, await bench.make_flush(result.state, 11, 20))
    assert bench.sequences() == list(range(1, 21))


@pytest.mark.parametrize(
    "fault",
    [CatalogFault.CONFLICT, CatalogFault.SLOW_DOWN, CatalogFault.ERROR_BEFORE, CatalogFault.HANG_UP_BEFORE],
    ids=lambda f: f.name,
)
async def test_a_commit_that_did_not_land_is_tried_again(bench, fault):
    state = await bench.create()
    bench.flaky.commit_faults.extend([fault, fault])
    await bench.committer.commit(state, await bench.make_flush(state, 1, 10))
    assert bench.sequences() == list(range(1, 11))
    assert len(bench.snapshots()) == 1
    assert bench.flaky.commits_seen == 3


async def test_an_unknown_outcome_is_checked_before_anything_else_even_if_the_check_fails(bench):
    state = await bench.create()
    bench.flaky.commit_faults.append(CatalogFault.ERROR_AFTER)
    bench.flaky.load_faults.extend([CatalogFault.ERROR_BEFORE, CatalogFault.HANG_UP_BEFORE, CatalogFault.SLOW_DOWN])
    await bench.committer.commit(state, await bench.make_flush(state, 1, 10))
    assert bench.flaky.commits_seen == 1
    assert bench.sequences() == list(range(1, 11))


async def test_after_the_last_attempt_the_same_flush_can_be_committed_later(bench):
    state = await bench.create()
    flush = await bench.make_flush(state, 1, 10)
    bench.flaky.commit_faults.extend([CatalogFault.ERROR_AFTER])
    bench.flaky.load_faults.extend([CatalogFault.ERROR_BEFORE] * ATTEMPTS_MAX)
    with pytest.raises(CommitUnknown):
        await bench.committer.commit(state, flush)
    bench.flaky.load_faults.clear()
    result = await bench.committer.commit(state, flush)
    assert [snapshot.snapshot_id for snapshot in bench.snapshots()] == [result.snapshot_id]
    again = await bench.committer.commit(result.state, flush)
    assert again.snapshot_id == result.snapshot_id
    assert bench.sequences() == list(range(1, 11))


async def test_a_conflict_that_never_ends_is_left_to_the_caller(bench):
    state = await bench.create()
    bench.flaky.commit_faults.extend([CatalogFault.CONFLICT] * ATTEMPTS_MAX)
    with pytest.raises(CommitConflict):
        await bench.committer.commit(state, await bench.make_flush(state, 1, 10))
    assert bench.flaky.commits_seen == ATTEMPTS_MAX


async def test_a_writer_in_between_is_kept_and_so_are_we(bench):
    state = await bench.create(partition="none")
    state = (await bench.committer.commit(state, await bench.make_flush(state, 1, 10))).state
    with contextlib.closing(bench.lake.open_pyiceberg()) as catalog:
        table = catalog.load_table("default.users")
        table.append(nested_rows(5, first_sequence=1001).cast(table.schema().as_arrow()))
    result = await bench.committer.commit(state, await bench.make_flush(state, 11, 20))
    assert bench.sequences() == [*range(1, 21), *range(1001, 1006)]
    assert result.state.summary["total-records"] == "25"
    assert len(bench.snapshots()) == 3


async def test_rows_that_another_node_committed_are_reported_with_the_marks(bench):
    state = await bench.create()
    await bench.committer.commit(state, await bench.make_flush(state, 1, 6, node="n2"))
    with pytest.raises(RowsAlreadyCommitted) as raised:
        await bench.committer.commit(state, await bench.make_flush(state, 1, 10))
    assert raised.value.marks == {SHOP: Position(0, 6)}
    assert bench.sequences() == list(range(1, 7))


async def test_rows_after_the_marks_are_committed_when_the_caller_has_dropped_the_others(bench):
    state = await bench.create()
    await bench.committer.commit(state, await bench.make_flush(state, 1, 6, node="n2"))
    fresh = await bench.committer.load(USERS)
    await bench.committer.commit(fresh, await bench.make_flush(fresh, 7, 10))
    assert bench.sequences() == list(range(1, 11))
    progress = (await bench.committer.load(USERS)).progress
    assert progress.nodes == {"n1": 11, "n2": 7}


async def test_a_new_epoch_of_a_source_starts_over_behind_the_old_one(bench):
    state = await bench.create()
    state = (await bench.committer.commit(state, await bench.make_flush(state, 1, 10))).state
    state = (await bench.committer.commit(state, await bench.make_flush(state, 1, 5, epoch=1))).state
    with pytest.raises(RowsAlreadyCommitted):
        await bench.committer.commit(state, await bench.make_flush(state, 11, 20, epoch=0))


async def test_two_writers_at_once_are_both_committed_exactly_once(bench):
    state = await bench.create()
    other = SourceId("bank")
    ours = await bench.make_flush(state, 1, 10)
    theirs = replace(
        await bench.make_flush(state, 101, 110, node="n2"), spans={other: Span(Position(0, 101), Position(0, 110))}
    )
    await asyncio.gather(bench.committer.commit(state, ours), bench.committer.commit(state, theirs))
    assert bench.sequences() == [*range(1, 11), *range(101, 111)]
    progress = (await bench.committer.load(USERS)).progress
    assert progress.sources == {SHOP: Position(0, 10), other: Position(0, 110)}


async def test_a_table_that_was_replaced_gets_no_files_of_the_old_one(bench):
    state = await bench.create()
    flush = await bench.make_flush(state, 1, 10)
    with contextlib.closing(bench.lake.open_pyiceberg()) as catalog:
        catalog.drop_table("default.users")
    with pytest.raises(TableMissing):
        await bench.committer.commit(state, flush)
    await bench.create()
    with pytest.raises(TableReplaced):
        await bench.committer.commit(state, flush)
    assert bench.sequences() == []


async def test_a_store_that_fails_leaves_the_table_as_it_was(bench, monkeypatch):
    state = await bench.create()
    flush = await bench.make_flush(state, 1, 10)
    with monkeypatch.context() as patch:

        async def refuse(location, _):
            raise StorageError(f"cannot write file: location={location}")

        patch.setattr(bench.store, "write", refuse)
        with pytest.raises(StorageError):
            await bench.committer.commit(state, flush)
    assert bench.snapshots() == []
    await bench.committer.commit(state, flush)
    assert bench.sequences() == list(range(1, 11))


def with_column(state, name):
    field = Field(state.last_column_id + 1, name, "string")
    return Schema(state.schema.schema_id, StructType((*state.schema.columns.fields, field)))


async def test_a_new_column_is_committed_and_filled(bench):
    state = await bench.create()
    state = (await bench.committer.commit(state, await bench.make_flush(state, 1, 10))).state
    state = await bench.committer.commit_schema(state, with_column(state, "email"))
    rows = nested_rows(2, first_sequence=11).append_column("email", [["a@b", None]])
    await bench.committer.commit(state, await bench.make_flush(state, 11, 12, rows=rows))
    with bench.lake.open_duckdb() as duckdb:
        query = "SELECT _cdc_sequence, email FROM lake.default.users WHERE _cdc_sequence > 9 ORDER BY 1"
        assert duckdb.execute(query).fetchall() == [(10, None), (11, "a@b"), (12, None)]


async def test_columns_that_changed_meanwhile_are_a_conflict(bench):
    state = await bench.create()
    await bench.committer.commit_schema(state, with_column(state, "email"))
    with pytest.raises(CommitConflict):
        await bench.committer.commit_schema(state, with_column(state, "phone"))


async def test_a_schema_that_landed_though_the_answer_was_lost_is_taken(bench):
    state = await bench.create()
    bench.flaky.commit_faults.append(CatalogFault.ERROR_AFTER)
    after = await bench.committer.commit_schema(state, with_column(state, "email"))
    assert after.schema.columns.field("email") is not None
    bench.flaky.commit_faults.append(CatalogFault.ERROR_BEFORE)
    with pytest.raises(CommitUnknown):
        await bench.committer.commit_schema(after, with_column(after, "phone"))
