"""Refused ranges: how many are kept, and that nothing overtakes them when there is no more room."""

from __future__ import annotations

from lakefeed.contract.changes import Position, SourceId
from lakefeed.ingest.intake.dedup import RefusedRange, RefusedRanges
from lakefeed.ingest.protocol.offers import BEFORE_ALL
from tests.ingest.offers import offer_of

SHOP = SourceId("shop")


def may_pass(ranges: RefusedRanges, *sequences: int, after: int = BEFORE_ALL, source: str = "shop") -> bool:
    return ranges.first_overtaken(offer_of(*sequences, source=source), after) is None


def test_ranges_of_one_source_are_bounded_and_the_last_ones_become_one():
    ranges = RefusedRanges(max_per_source=3)
    for first in (10, 20, 30, 40):
        assert ranges.open(offer_of(first, first + 1), BEFORE_ALL)
    assert ranges._open[SHOP] == [
        RefusedRange(0, 10, 11, True),
        RefusedRange(0, 20, 21, True),
        RefusedRange(0, 30, 41, False),
    ]
    assert not may_pass(ranges, 40, 41, after=31), "what was between the two is not known"
    assert may_pass(ranges, 30, 31, 40, 41, after=31)


def test_ranges_that_touch_stay_exact_when_they_become_one():
    ranges = RefusedRanges(max_per_source=1)
    for first in (10, 12, 14):
        ranges.open(offer_of(first, first + 1), BEFORE_ALL)
    assert ranges._open[SHOP] == [RefusedRange(0, 10, 15, True)]
    assert may_pass(ranges, 12, 13, after=11)


def test_source_without_room_is_reported_and_others_keep_theirs():
    ranges = RefusedRanges(max_total=2)
    assert ranges.open(offer_of(1, source="a"), BEFORE_ALL)
    assert ranges.open(offer_of(1, source="b"), BEFORE_ALL)
    assert not ranges.open(offer_of(1, source="c"), BEFORE_ALL)
    assert ranges.open(offer_of(3, source="b"), BEFORE_ALL), "a source that is blocked already may have one more"
    assert not may_pass(ranges, 3, after=1, source="b")
    ranges.close(SourceId("a"), Position(0, 1))
    assert ranges.open(offer_of(1, source="c"), BEFORE_ALL), "a range that was filled makes room"


def test_range_of_an_epoch_that_is_over_takes_no_room_from_the_next():
    ranges = RefusedRanges(max_per_source=1)
    ranges.open(offer_of(5, epoch=0), BEFORE_ALL)
    ranges.open(offer_of(1, 2, epoch=1), BEFORE_ALL)
    assert ranges._open[SHOP] == [RefusedRange(1, 1, 2, True)]


def test_count_of_ranges_is_that_of_the_open_ones():
    ranges = RefusedRanges()
    for first in (1, 3, 5):
        ranges.open(offer_of(first), BEFORE_ALL)
    ranges.open(offer_of(3), BEFORE_ALL)
    ranges.close(SHOP, Position(0, 3))
    assert ranges._count == len(ranges._open[SHOP]) == 1
    assert ranges.forget(SHOP)
    assert not ranges.forget(SHOP)
    assert ranges._count == 0
