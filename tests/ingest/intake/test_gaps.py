"""Refused batches: how much is remembered of them, and that nothing is passed over when there is no more room."""

from __future__ import annotations

from lakefeed.contract.changes import Position, SourceId
from lakefeed.ingest.intake.dedup import Gap, Gaps
from lakefeed.ingest.protocol.offers import BEFORE_ALL
from tests.ingest.offered import offer_of

SHOP = SourceId("shop")


def passes(gaps: Gaps, *sequences: int, after: int = BEFORE_ALL, source: str = "shop") -> bool:
    return gaps.first_passed(offer_of(*sequences, source=source), after) is None


def test_gaps_of_one_source_are_bounded_and_the_last_ones_become_one():
    gaps = Gaps(max_per_source=3)
    for first in (10, 20, 30, 40):
        assert gaps.open(offer_of(first, first + 1), BEFORE_ALL)
    assert gaps._open[SHOP] == [Gap(0, 10, 11, True), Gap(0, 20, 21, True), Gap(0, 30, 41, False)]
    assert not passes(gaps, 40, 41, after=31), "what was between the two is not known"
    assert passes(gaps, 30, 31, 40, 41, after=31)


def test_gaps_that_touch_stay_exact_when_they_become_one():
    gaps = Gaps(max_per_source=1)
    for first in (10, 12, 14):
        gaps.open(offer_of(first, first + 1), BEFORE_ALL)
    assert gaps._open[SHOP] == [Gap(0, 10, 15, True)]
    assert passes(gaps, 12, 13, after=11)


def test_source_that_finds_no_room_is_told_so_and_those_that_have_some_keep_it():
    gaps = Gaps(max_in_all=2)
    assert gaps.open(offer_of(1, source="a"), BEFORE_ALL)
    assert gaps.open(offer_of(1, source="b"), BEFORE_ALL)
    assert not gaps.open(offer_of(1, source="c"), BEFORE_ALL)
    assert gaps.open(offer_of(3, source="b"), BEFORE_ALL), "one more of a source that is held finds a place"
    assert not passes(gaps, 3, after=1, source="b")
    gaps.close(SourceId("a"), Position(0, 1))
    assert gaps.open(offer_of(1, source="c"), BEFORE_ALL), "a gap that was filled makes room"


def test_gap_of_an_epoch_that_is_over_takes_no_room_from_the_next():
    gaps = Gaps(max_per_source=1)
    gaps.open(offer_of(5, epoch=0), BEFORE_ALL)
    gaps.open(offer_of(1, 2, epoch=1), BEFORE_ALL)
    assert gaps._open[SHOP] == [Gap(1, 1, 2, True)]


def test_count_of_gaps_is_that_of_the_open_ones():
    gaps = Gaps()
    for first in (1, 3, 5):
        gaps.open(offer_of(first), BEFORE_ALL)
    gaps.open(offer_of(3), BEFORE_ALL)
    gaps.close(SHOP, Position(0, 3))
    assert gaps._count == len(gaps._open[SHOP]) == 1
    assert gaps.forget(SHOP)
    assert not gaps.forget(SHOP)
    assert gaps._count == 0
