"""Which changes are missing behind a gap, told from what is heard of the sources afterwards."""

from __future__ import annotations

from lakefeed.contract.changes import Position, SourceId
from lakefeed.writer.wal.inspect import Loss, LossFinder, MissingOffsets
from lakefeed.writer.wal.payload import Encoding, Frame

A, B = SourceId("a"), SourceId("b")
GAP, LATER_GAP = MissingOffsets(5, 7, repaired=False), MissingOffsets(9, 10, repaired=False)


def frame(source: SourceId, after: int, last: int, *, epoch: int = 0) -> Frame:
    return Frame(source, epoch, after, last, 0, Encoding.JSON_BATCH, b"{}")


def finder_after(*items: Frame | MissingOffsets | dict) -> LossFinder:
    finder = LossFinder()
    for item in items:
        match item:
            case Frame():
                finder.take_frame(item)
            case MissingOffsets():
                finder.gaps.append(item)
            case _:
                finder.take_head(item)
    return finder


def test_source_that_continues_after_its_last_change_misses_nothing():
    finder = finder_after({}, frame(A, -1, 40), GAP, frame(A, 40, 50))
    assert finder.losses == []
    assert finder.unsettled() == {}
    assert finder.unsettled_gaps() == (GAP,)  # an unknown source may have been in it


def test_source_that_continues_later_misses_the_changes_between():
    before, after = (frame(A, -1, 40), frame(B, -1, 3)), (frame(B, 3, 4), frame(A, 55, 60), frame(A, 60, 61))
    finder = finder_after({}, *before, GAP, *after)
    assert finder.losses == [Loss(A, 0, 40, 55, is_certain=True, gaps=(GAP,))]


def test_source_whose_first_record_is_after_the_gap_misses_all_before():
    finder = finder_after({}, GAP, frame(A, 9, 12), frame(B, -1, 1))
    assert finder.losses == [Loss(A, 0, -1, 9, is_certain=True, gaps=(GAP,))]


def test_losses_of_a_source_without_known_marks_are_uncertain():
    finder = finder_after(GAP, frame(A, 9, 12))
    assert finder.losses == [Loss(A, 0, -1, 9, is_certain=False, gaps=(GAP,))]


def test_head_of_the_next_segment_settles_everything():
    finder = finder_after({A: Position(0, 7)}, frame(A, 7, 40), GAP, {A: Position(0, 55), B: Position(2, 3)})
    assert finder.losses == [
        Loss(A, 0, 40, 55, is_certain=True, gaps=(GAP,)),
        Loss(B, 0, -1, None, is_certain=False, gaps=(GAP,)),
        Loss(B, 2, -1, 3, is_certain=True, gaps=(GAP,)),
    ]
    assert (finder.unsettled(), finder.unsettled_gaps()) == ({}, ())


def test_source_without_later_records_is_unsettled():
    finder = finder_after({A: Position(0, 40), B: Position(1, 2)}, GAP, frame(B, 2, 5))
    assert finder.losses == []
    assert finder.unsettled() == {A: Position(0, 40)}
    assert finder.unsettled_gaps() == (GAP,)


def test_end_of_an_epoch_that_is_over_is_not_certain_to_be_missing():
    finder = finder_after({A: Position(0, 40)}, GAP, frame(A, 3, 5, epoch=1))
    assert finder.losses == [
        Loss(A, 0, 40, None, is_certain=False, gaps=(GAP,)),
        Loss(A, 1, -1, 3, is_certain=True, gaps=(GAP,)),
    ]


def test_loss_names_all_gaps_since_the_last_record_of_its_source():
    finder = finder_after(
        {}, frame(A, -1, 4), frame(B, -1, 4), GAP, frame(A, 4, 5), LATER_GAP, frame(A, 6, 7), frame(B, 9, 10)
    )
    assert finder.losses == [
        Loss(A, 0, 5, 6, is_certain=True, gaps=(LATER_GAP,)),
        Loss(B, 0, 4, 9, is_certain=True, gaps=(GAP, LATER_GAP)),
    ]


def test_jump_of_a_source_without_a_gap_is_no_loss():
    assert finder_after({}, frame(A, -1, 4), frame(A, 9, 10)).losses == []
