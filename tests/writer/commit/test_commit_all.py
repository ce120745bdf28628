"""Flushes of several tables in one commit: all or none, and each once, whatever the catalog answers."""

from __future__ import annotations

import contextlib
from dataclasses import replace

import pytest

from lakefeed.backoff import Backoff
from lakefeed.contract.changes import Position, SourceId, Span, TableName
from lakefeed.contract.errors import ColumnsChanged, CommitConflict, RowsAlreadyCommitted, TableMissing
from lakefeed.writer.commit.committer import ATTEMPTS_MAX
from tests.fakes import CatalogFault
from tests.writer.committing import SHOP, open_bench

NAMES = [TableName(("default",), name) for name in ("orders", "lines", "payments")]


@pytest.fixture
async def bench(local_lake, monkeypatch):
    monkeypatch.setattr("lakefeed.writer.commit.committer.BACKOFF", Backoff(0.01, 0.01))
    async with open_bench(local_lake) as opened:
        yield opened


async def make_flushes(bench, states, first=1, last=5):
    return [(state, await bench.make_flush(state, first, last)) for state in states]


def contents(bench):
    return [bench.sequences(str(name)) for name in NAMES]


async def test_flushes_of_three_tables_are_one_request_and_three_snapshots(bench):
    states = [await bench.create(name) for name in NAMES]
    results = await bench.committer.commit_all(await make_flushes(bench, states))
    assert bench.flaky.commits_seen == 1
    assert contents(bench) == [[1, 2, 3, 4, 5]] * 3
    assert [result.state.name for result in results] == NAMES
    assert [len(bench.snapshots(str(name))) for name in NAMES] == [1, 1, 1]
    flushes = await make_flushes(bench, [result.state for result in results], 6, 9)
    await bench.committer.commit_all(flushes)
    assert contents(bench) == [list(range(1, 10))] * 3


async def test_one_table_that_another_writer_changed_is_planned_again_with_the_others(bench):
    states = [await bench.create(name) for name in NAMES]
    flushes = await make_flushes(bench, states)
    spans = {SourceId("bank"): Span(Position(0, 101), Position(0, 103))}
    theirs = replace(await bench.make_flush(states[1], 101, 103, node="n2"), spans=spans)
    await bench.committer.commit(states[1], theirs)
    await bench.committer.commit_all(flushes)
    assert contents(bench) == [[1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 101, 102, 103], [1, 2, 3, 4, 5]]


@pytest.mark.parametrize(
    "fault", [CatalogFault.ERROR_AFTER, CatalogFault.HANG_UP_AFTER, CatalogFault.SILENCE_AFTER], ids=lambda f: f.name
)
async def test_transaction_that_landed_but_timed_out_is_not_committed_twice(bench, fault):
    states = [await bench.create(name) for name in NAMES]
    bench.flaky.commit_faults.append(fault)
    await bench.committer.commit_all(await make_flushes(bench, states))
    assert bench.flaky.commits_seen == 1
    assert [len(bench.snapshots(str(name))) for name in NAMES] == [1, 1, 1]


@pytest.mark.parametrize(
    "fault", [CatalogFault.CONFLICT, CatalogFault.ERROR_BEFORE, CatalogFault.SLOW_DOWN], ids=lambda f: f.name
)
async def test_transaction_that_did_not_land_is_tried_again(bench, fault):
    states = [await bench.create(name) for name in NAMES]
    bench.flaky.commit_faults.extend([fault, fault])
    await bench.committer.commit_all(await make_flushes(bench, states))
    assert bench.flaky.commits_seen == 3
    assert [len(bench.snapshots(str(name))) for name in NAMES] == [1, 1, 1]


async def test_transaction_that_never_gets_through_changes_nothing(bench):
    states = [await bench.create(name) for name in NAMES]
    flushes = await make_flushes(bench, states)
    bench.flaky.commit_faults.extend([CatalogFault.CONFLICT] * ATTEMPTS_MAX)
    with pytest.raises(CommitConflict):
        await bench.committer.commit_all(flushes)
    assert contents(bench) == [[], [], []]
    await bench.committer.commit_all(flushes)
    assert contents(bench) == [[1, 2, 3, 4, 5]] * 3


async def test_rows_that_one_table_has_are_reported_with_its_name_and_nothing_is_committed(bench):
    states = [await bench.create(name) for name in NAMES]
    flushes = await make_flushes(bench, states)
    await bench.committer.commit(states[1], await bench.make_flush(states[1], 1, 3, node="n2"))
    with pytest.raises(RowsAlreadyCommitted) as raised:
        await bench.committer.commit_all(flushes)
    assert (raised.value.table, raised.value.marks) == (NAMES[1], {SHOP: Position(0, 3)})
    assert contents(bench) == [[], [1, 2, 3], []]


async def test_a_table_that_is_gone_keeps_the_others_as_they_were(bench):
    states = [await bench.create(name) for name in NAMES]
    flushes = await make_flushes(bench, states)
    with contextlib.closing(bench.lake.open_pyiceberg()) as catalog:
        catalog.drop_table("default.payments")
    with pytest.raises(TableMissing):
        await bench.committer.commit_all(flushes)
    assert [bench.sequences(str(name)) for name in NAMES[:2]] == [[], []]


async def test_a_table_that_has_lost_a_column_is_named_and_nothing_is_committed(bench):
    states = [await bench.create(name) for name in NAMES]
    flushes = await make_flushes(bench, states)
    with (
        contextlib.closing(bench.lake.open_pyiceberg()) as catalog,
        catalog.load_table("default.lines").update_schema() as update,
    ):
        update.delete_column("total")
    with pytest.raises(ColumnsChanged) as raised:
        await bench.committer.commit_all(flushes)
    assert raised.value.table == NAMES[1]
    assert contents(bench) == [[], [], []]


async def test_a_part_that_landed_alone_is_not_committed_again(bench):
    """A catalog whose transactions are not whole, or a call that was given up and repeated with more tables."""
    states = [await bench.create(name) for name in NAMES]
    flushes = await make_flushes(bench, states)
    await bench.committer.commit(*flushes[0])
    results = await bench.committer.commit_all(flushes)
    assert [result.state.name for result in results] == NAMES
    assert contents(bench) == [[1, 2, 3, 4, 5]] * 3


async def test_our_own_catalog_says_that_it_has_transactions(bench):
    assert bench.committer.has_transactions
