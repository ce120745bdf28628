"""Low watermarks of sources: how they are computed, and what commits of a real feed record."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from lakefeed.contract.changes import Position, SourceId, Span, TableName
from lakefeed.contract.progress import PROGRESS_PROPERTY, progress_from_text
from lakefeed.contract.properties import mark_of
from lakefeed.writer.tables.pending import complete_positions
from tests.writer.conftest import Lake
from tests.writer.feeding import running_feed, wait_for

SHOP, BANK = SourceId("shop"), SourceId("bank")


def at(sequence: int, *, epoch: int = 0) -> Position:
    return Position(epoch, sequence)


def from_(sequence: int, *, epoch: int = 0) -> Span:
    return Span(at(sequence, epoch=epoch), at(100, epoch=epoch))


def test_the_first_change_that_waits_in_any_table_bounds_what_is_complete():
    waiting = [{SHOP: from_(7), BANK: from_(1)}, {}, {SHOP: from_(5)}]
    applied = {SHOP: at(20), BANK: at(30)}
    assert complete_positions([SHOP], waiting=waiting, applied=applied) == {SHOP: at(4)}


def test_all_that_was_applied_is_complete_when_nothing_of_the_source_waits():
    assert complete_positions([SHOP], waiting=[{BANK: from_(1)}], applied={SHOP: at(20)}) == {SHOP: at(20)}


def test_nothing_of_a_later_epoch_is_complete_while_something_of_an_earlier_one_waits():
    waiting = [{SHOP: from_(3, epoch=1)}, {SHOP: from_(9)}]
    assert complete_positions([SHOP], waiting=waiting, applied={SHOP: at(4, epoch=1)}) == {SHOP: at(8)}
    del waiting[1]
    assert complete_positions([SHOP], waiting=waiting, applied={SHOP: at(4, epoch=1)}) == {SHOP: at(2, epoch=1)}


def test_marks_of_the_quarantine_are_no_sources():
    mark = mark_of(SHOP, TableName(("default",), "users"))
    assert complete_positions([mark], waiting=[], applied={mark: at(4)}) == {}


def recorded_watermark(lake: Lake, table: str) -> Position | None:
    with contextlib.closing(lake.open_pyiceberg()) as catalog:
        text = catalog.load_table(f"default.{table}").properties.get(PROGRESS_PROPERTY)
    return progress_from_text(text).complete.get(SHOP)


async def test_a_commit_says_up_to_where_its_source_is_in_all_tables(tmp_path: Path, local_lake: Lake) -> None:
    async with running_feed(tmp_path, local_lake) as running:
        await running.append_inserts((1, "a", {"id": 1}), (2, "b", {"id": 2}), (3, "a", {"id": 3}))
        await running.flush("a")
        assert recorded_watermark(local_lake, "a") == at(1), "2 waits for a table that has no mark at all"
        await running.flush("b")
        assert recorded_watermark(local_lake, "b") == at(3)
        await running.append_inserts((1, "b", {"id": 1}), (2, "a", {"id": 2}), epoch=1)
        await running.flush("a")
        assert recorded_watermark(local_lake, "a") == at(0, epoch=1)


async def test_rows_that_have_left_memory_are_not_complete(tmp_path: Path, local_lake: Lake) -> None:
    async with running_feed(tmp_path, local_lake) as running:
        running.store.broken = lambda location: "/b-" in location
        await running.append_inserts((1, "a", {"id": 1}), (2, "b", {"id": 2}), (3, "a", {"id": 3}))
        assert not (await running.flush("b"))["success"]
        running.feed.tables["default.b"].evict_all()
        await running.append_inserts((4, "b", {"id": 4}), (5, "a", {"id": 5}))
        await running.flush("a")
        assert recorded_watermark(local_lake, "a") == at(1)
        running.store.broken = lambda _: False
        await wait_for(lambda: running.status("default.b")["state"] == "writing")
        await running.flush("b")
        assert recorded_watermark(local_lake, "b") == at(5)


@pytest.mark.usefixtures("poison")
async def test_rows_on_their_way_to_the_quarantine_are_not_complete(tmp_path: Path, local_lake: Lake) -> None:
    async with running_feed(tmp_path, local_lake) as running:
        running.store.broken = lambda location: "/lakefeed_quarantine-" in location
        await running.append_inserts((1, "a", {"id": 1}), (2, "b", {"id": "poison"}), (3, "a", {"id": 3}))
        await wait_for(lambda: "lakefeed_quarantine" in (running.status("default.b").get("problem") or ""))
        await running.flush("a")
        assert recorded_watermark(local_lake, "a") == at(1)
        running.store.broken = lambda _: False
        await running.flush()
        await running.append_inserts((4, "a", {"id": 4}))
        await running.flush("a")
        assert recorded_watermark(local_lake, "a") == at(4)


async def test_tables_that_are_committed_together_say_what_is_complete_with_all_of_them(
    tmp_path: Path, local_lake: Lake
) -> None:
    async with running_feed(tmp_path, local_lake, transactions=True) as running:
        await running.append_inserts((1, "a", {"id": 1}), (2, "b", {"id": 2}), (3, "a", {"id": 3}))
        await running.flush()
        assert [recorded_watermark(local_lake, table) for table in ("a", "b")] == [at(3), at(3)]
