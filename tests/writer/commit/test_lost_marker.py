"""A progress marker that another client removed: rebuilt from the snapshots, or the table stops."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lakefeed.contract.changes import Position, SourceId
from lakefeed.contract.errors import RowsAlreadyCommitted
from lakefeed.contract.ledger import Ledger, RowFacts
from lakefeed.contract.progress import PROGRESS_PROPERTY, ProgressUnreadable, progress_from_summaries
from lakefeed.writer.commit.plan import Request
from lakefeed.writer.commit.sources import load_resume_positions
from tests.writer.committing import SHOP, USERS, open_bench


@pytest.fixture
async def bench(local_lake):
    async with open_bench(local_lake) as opened:
        yield opened


async def commit(bench, state, first, last, *, source=SHOP):
    facts = RowFacts(rows=last - first + 1, first=first, last=last, operations={}, checksum=0)
    flush = await bench.make_flush(state, first, last)
    flush = replace(flush, spans={source: flush.spans[SHOP]}, ledger=Ledger({source: facts}, {source: 0}))
    return (await bench.committer.commit(state, flush)).state, flush


async def update(bench, **update):
    await bench.committer._catalog.commit_table(USERS, Request((), (update,)))


async def remove_marker(bench):
    await update(bench, action="remove-properties", removals=[PROGRESS_PROPERTY])


async def test_a_removed_marker_is_rebuilt_from_the_snapshots(bench):
    state, _ = await commit(bench, await bench.create(), 1, 3)
    state, flush = await commit(bench, state, 4, 9)
    await remove_marker(bench)
    fresh = await bench.committer.load(USERS)
    assert fresh.progress.sources == {SHOP: Position(0, 9)}
    assert fresh.progress.nodes == {"n1": 10}
    with pytest.raises(RowsAlreadyCommitted):
        await bench.committer.commit(state, replace(flush, id="another"))
    # Sources learn nothing about what is complete, so that they send this epoch again.
    assert await load_resume_positions(bench.committer._catalog) == {SHOP: Position(0, -1)}
    await commit(bench, fresh, 10, 11)
    assert bench.sequences() == list(range(1, 12))
    assert (await bench.committer.load(USERS)).properties[PROGRESS_PROPERTY]


async def test_a_marker_that_no_snapshot_can_replace_stops_the_table(bench):
    first, _ = await commit(bench, await bench.create(), 1, 3)
    state, _ = await commit(bench, first, 1, 3, source=SourceId("bank"))
    marker = state.properties[PROGRESS_PROPERTY]
    await remove_marker(bench)
    await update(bench, action="remove-snapshots", **{"snapshot-ids": [first.snapshot_id]})
    with pytest.raises(ProgressUnreadable, match=r"lakefeed.progress is missing.*set the property.*source=shop"):
        await bench.committer.load(USERS)
    await update(bench, action="set-properties", updates={PROGRESS_PROPERTY: marker})
    assert (await bench.committer.load(USERS)).progress == state.progress


@pytest.mark.parametrize("text", ["[]", "{", '{"shop":[]}', '{"shop":[0,"a"]}', '{"shop":7}'])
def test_a_damaged_summary_is_an_error(text):
    with pytest.raises(ProgressUnreadable, match="snapshot summary is damaged"):
        progress_from_summaries([{"lakefeed.sources": text}])


def test_snapshots_of_other_writers_say_nothing():
    assert progress_from_summaries([{"operation": "replace"}, {}]).sources == {}
