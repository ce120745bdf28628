"""Run records, and the state of a chunk by the snapshots of its table."""

from __future__ import annotations

import datetime as dt
from dataclasses import replace

import pytest

from lakefeed.contract.ledger import BACKFILL_KEY, RUN_PROPERTY_PREFIX, ChunkMark, Ledger, count_backfilled
from lakefeed.pipeline.backfill.target import RunRecord, find_chunk, parse_record
from lakefeed.pipeline.spark.tables import Snapshot, ancestors

NOW = dt.datetime(2026, 11, 16, tzinfo=dt.UTC)
RECORD = RunRecord(
    run="r", source="shop", key=("a", "b"), owner="me", facts={"cut": 3}, next=1, after=1, at_us=7, rows=5, checksum=9
)
PROPERTY = RUN_PROPERTY_PREFIX + RECORD.run


def snapshot(snapshot_id: int, chunk: int | None = None, run: str = "r") -> Snapshot:
    summary = {} if chunk is None else {BACKFILL_KEY: ChunkMark(run, chunk, 3).to_text()}
    return Snapshot(snapshot_id, snapshot_id - 1 or None, NOW, "append", summary)


def found(snapshots: list[Snapshot], *, after: int | None, chunk: int = 1) -> list[int] | None:
    of_chunk = find_chunk(ancestors(snapshots, snapshots[-1].snapshot_id), run="r", chunk=chunk, after=after)
    return None if of_chunk is None else [each.snapshot_id for each in of_chunk]


def test_a_chunk_is_found_among_the_snapshots_after_its_start() -> None:
    history = [snapshot(1), snapshot(2), snapshot(3, chunk=1), snapshot(4)]
    assert found(history, after=1) == [3]
    assert found(history, after=3) == []
    assert found(history, after=1, chunk=2) == []
    assert found([snapshot(1), snapshot(2, chunk=1, run="another")], after=1) == []
    assert found([snapshot(1), snapshot(2, chunk=1)], after=None) == [2]
    assert find_chunk([], run="r", chunk=0, after=None) == []


def test_a_chunk_is_unknown_if_snapshots_in_between_expired_even_if_a_tag_keeps_the_first() -> None:
    assert found([snapshot(1), snapshot(3), snapshot(4)], after=1) is None
    assert found([snapshot(3), snapshot(4)], after=None) is None


def test_a_record_is_read_back_whole() -> None:
    assert parse_record("r", RECORD.to_text()) == RECORD
    bare = RunRecord(run="r", source="shop", key=("id",), owner="me", facts={}, checksum=None, is_done=True)
    assert parse_record("r", bare.to_text()) == bare
    assert (
        RECORD.after_chunk(3, 2**64 - 1).to_text()
        == parse_record("r", RECORD.after_chunk(3, 2**64 - 1).to_text()).to_text()
    )
    assert (RECORD.after_chunk(3, 2**64 - 1).checksum, RECORD.after_chunk(3, None).checksum) == (8, None)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"source":"shop"}'])
def test_a_damaged_record_is_an_error(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - whatever is wrong with it
        parse_record("r", text)


def test_rows_of_runs_are_counted_from_records_and_from_snapshots_that_no_record_covers_yet() -> None:
    properties = {PROPERTY: RECORD.to_text(), "owner": "x"}
    counted = count_backfilled(properties, [(ChunkMark("r", 0, 3), None), (None, None)], known_after={1, 2})
    assert (counted.is_known, {s: (t.rows, t.checksum) for s, t in counted.sources.items()}) == (True, {"shop": (5, 9)})
    assert not count_backfilled(properties, [(ChunkMark("r", 1, 3), None)], known_after={1}).is_known
    assert not count_backfilled({PROPERTY: "{"}, [], known_after={None}).is_known


def test_a_chunk_that_may_have_been_expired_before_its_run_was_resumed_leaves_its_rows_unknown() -> None:
    def is_known(record: RunRecord, *chunks: ChunkMark, known_after: set[int | None]) -> bool:
        snapshots = [(chunk, Ledger({}, {})) for chunk in chunks]
        return count_backfilled({PROPERTY: record.to_text()}, snapshots, known_after=known_after).is_known

    assert not is_known(RECORD, known_after={2, 3})
    assert not is_known(RECORD, ChunkMark("r", 0, 3), ChunkMark("another", 1, 3), known_after={2, 3})
    assert is_known(RECORD, known_after={1, 2, 3})
    assert is_known(RECORD, known_after={None, 2, 3}), "the whole history, to which main was put back"
    assert is_known(RECORD, ChunkMark("r", 1, 3), known_after={2, 3})
    assert is_known(replace(RECORD, is_done=True, after=None), known_after={2, 3})
    assert not is_known(replace(RECORD, after=None), known_after={2, 3})
