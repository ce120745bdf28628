"""What became of a chunk is told by the snapshots, and where they no longer tell, that is said."""

from __future__ import annotations

import datetime as dt
from dataclasses import replace

import pytest

from lakefeed.contract.changes import Position
from lakefeed.contract.ledger import BACKFILL_KEY, ChunkMark, Ledger, count_backfilled
from lakefeed.pipeline.backfill.positions import BEFORE_ALL, ReadPosition, parse_position
from lakefeed.pipeline.backfill.records import ChunkState, RunRecord, find_chunk, parse_record
from lakefeed.pipeline.spark.tables import Snapshot
from lakefeed.settings import SettingsError

NOW = dt.datetime(2026, 11, 16, tzinfo=dt.UTC)
RECORD = RunRecord(
    run="r", source="shop", key=("a", "b"), owner="me", facts={"cut": 3}, next=1, after=1, at_us=7, rows=5, checksum=9
)


def snapshot(snapshot_id: int, chunk: int | None = None, run: str = "r") -> Snapshot:
    summary = {} if chunk is None else {BACKFILL_KEY: ChunkMark(run, chunk, 3).to_text()}
    return Snapshot(snapshot_id, snapshot_id - 1 or None, NOW, "append", summary)


def state_of(snapshots: list[Snapshot], *, after: int | None, chunk: int = 1) -> ChunkState:
    return find_chunk(snapshots, snapshots[-1].snapshot_id, run="r", chunk=chunk, after=after).state


def test_a_chunk_is_found_behind_where_it_was_begun() -> None:
    history = [snapshot(1), snapshot(2), snapshot(3, chunk=1), snapshot(4)]
    assert state_of(history, after=1) is ChunkState.COMMITTED
    assert state_of(history, after=3) is ChunkState.ABSENT
    assert state_of(history, after=1, chunk=2) is ChunkState.ABSENT
    assert state_of([snapshot(1), snapshot(2, chunk=1, run="another")], after=1) is ChunkState.ABSENT
    assert state_of([snapshot(1), snapshot(2, chunk=1)], after=None) is ChunkState.COMMITTED
    assert find_chunk([], None, run="r", chunk=0, after=None).state is ChunkState.ABSENT


def test_what_is_expired_in_between_is_unknown_also_if_a_tag_keeps_the_start() -> None:
    assert state_of([snapshot(1), snapshot(3), snapshot(4)], after=1) is ChunkState.UNKNOWN
    assert state_of([snapshot(3), snapshot(4)], after=None) is ChunkState.UNKNOWN


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


def test_rows_of_runs_are_counted_from_records_and_from_snapshots_that_they_do_not_speak_of_yet() -> None:
    properties = {RECORD.property_name: RECORD.to_text(), "owner": "x"}
    counted = count_backfilled(properties, [(ChunkMark("r", 0, 3), None), (None, None)], known_after={1, 2})
    assert (counted.is_known, {s: (t.rows, t.checksum) for s, t in counted.sources.items()}) == (True, {"shop": (5, 9)})
    assert not count_backfilled(properties, [(ChunkMark("r", 1, 3), None)], known_after={1}).is_known
    assert not count_backfilled({RECORD.property_name: "{"}, [], known_after={None}).is_known


def test_a_chunk_that_may_have_been_expired_before_its_run_was_resumed_leaves_its_rows_unknown() -> None:
    def is_known(record: RunRecord, *chunks: ChunkMark, known_after: set[int | None]) -> bool:
        snapshots = [(chunk, Ledger({}, {})) for chunk in chunks]
        return count_backfilled({record.property_name: record.to_text()}, snapshots, known_after=known_after).is_known

    assert not is_known(RECORD, known_after={2, 3})
    assert not is_known(RECORD, ChunkMark("r", 0, 3), ChunkMark("another", 1, 3), known_after={2, 3})
    assert is_known(RECORD, known_after={1, 2, 3})
    assert is_known(RECORD, known_after={None, 2, 3}), "the whole history, to which main was put back"
    assert is_known(RECORD, ChunkMark("r", 1, 3), known_after={2, 3})
    assert is_known(replace(RECORD, is_done=True, after=None), known_after={2, 3})
    assert not is_known(replace(RECORD, after=None), known_after={2, 3})


def test_rows_are_as_of_the_mark_or_as_of_what_was_noted_but_never_ahead_of_the_table() -> None:
    mark = Position(1, 50)
    assert parse_position("mark").resolve(mark) == mark
    assert parse_position("mark").resolve(None) == BEFORE_ALL
    assert parse_position("start").resolve(mark) == BEFORE_ALL
    assert parse_position("start").resolve(None) == BEFORE_ALL
    assert parse_position("1:20").resolve(mark) == Position(1, 20)
    assert parse_position("20") == ReadPosition(Position(0, 20))
    for ahead in ("1:51", "2:0"):
        with pytest.raises(SettingsError, match="has not reached this position"):
            parse_position(ahead).resolve(mark)
    with pytest.raises(SettingsError, match="EPOCH:SEQUENCE"):
        parse_position("yesterday")
