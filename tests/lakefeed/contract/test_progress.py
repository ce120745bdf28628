from __future__ import annotations

import pytest

from lakefeed.contract.changes import Position, SourceId, Span
from lakefeed.contract.progress import Progress, ProgressUnreadable, progress_from_text, spans_to_text

SHOP = SourceId("shop")
BANK = SourceId("bank")


def span(first: int, last: int, *, epoch: int = 0) -> Span:
    return Span(Position(epoch, first), Position(epoch, last))


def test_the_text_is_compact_and_read_back_whole():
    progress = Progress({"n1": 4711}, {SHOP: Position(0, 9000)})
    assert progress.to_text() == '{"nodes":{"n1":4711},"sources":{"shop":[0,9000]}}'
    assert progress_from_text(progress.to_text()) == progress


def test_a_marker_from_before_there_were_generations_is_read_and_kept():
    text = '{"nodes":{"n1":4711},"sources":{"shop":[0,9000]}}'
    progress = progress_from_text(text)
    assert (progress.nodes["n1"], progress.sources.get(SHOP), progress.generations) == (4711, Position(0, 9000), {})
    assert progress.to_text() == text


def test_generations_stand_beside_the_marks_and_never_fall():
    progress = Progress().advance(node="n1", log_to=8, sources={SHOP: Position(0, 20)}, generation=17)
    assert progress.to_text() == '{"generations":{"n1":17},"nodes":{"n1":8},"sources":{"shop":[0,20]}}'
    assert progress_from_text(progress.to_text()) == progress
    assert progress.advance(node="n1", log_to=9, sources={}, generation=16).generations == {"n1": 17}


def test_what_is_complete_stands_beside_the_marks_and_never_falls():
    progress = Progress().advance(node="n1", log_to=8, sources={SHOP: Position(0, 20)}, complete={SHOP: Position(0, 9)})
    assert progress.to_text() == '{"complete":{"shop":[0,9]},"nodes":{"n1":8},"sources":{"shop":[0,20]}}'
    assert progress_from_text(progress.to_text()) == progress
    later = progress.advance(node="n1", log_to=9, sources={SHOP: Position(0, 30)}, complete={SHOP: Position(0, 7)})
    assert later.complete == {SHOP: Position(0, 9)}
    assert later.advance(node="n1", log_to=9, sources={BANK: Position(0, 1)}).complete == {SHOP: Position(0, 9)}


def test_a_later_service_may_have_a_log_that_begins_again():
    progress = Progress({"n1": 500}, {}, {"n1": 17})
    assert progress.advance(node="n1", log_to=3, sources={}, generation=18).nodes["n1"] == 3
    assert progress.advance(node="n1", log_to=3, sources={}, generation=17).nodes["n1"] == 500


def test_table_without_a_marker_has_no_progress():
    progress = progress_from_text(None)
    assert progress.sources.get(SHOP) is None
    assert progress.nodes == {}


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"nodes":{"n1":"x"}}', '{"sources":{"shop":[1]}}', '{"sources":{"shop":7}}']
)
def test_a_damaged_marker_is_an_error_that_shows_it(text):
    with pytest.raises(ProgressUnreadable, match="progress marker is damaged"):
        progress_from_text(text)


def test_advancing_moves_one_node_and_its_sources_and_leaves_others():
    before = Progress({"n1": 5, "n2": 9}, {SHOP: Position(0, 10), BANK: Position(0, 3)})
    after = before.advance(node="n1", log_to=8, sources={SHOP: Position(0, 20)})
    assert after == Progress({"n1": 8, "n2": 9}, {SHOP: Position(0, 20), BANK: Position(0, 3)})


def test_no_mark_moves_back():
    before = Progress({"n1": 5}, {SHOP: Position(1, 10)})
    assert before.advance(node="n1", log_to=3, sources={SHOP: Position(0, 99)}) == before


def test_a_new_epoch_is_ahead_of_all_sequences_of_the_old_one():
    before = Progress({}, {SHOP: Position(0, 1_000_000)})
    after = before.advance(node="n1", log_to=1, sources={SHOP: Position(1, 1)})
    assert after.sources.get(SHOP) == Position(1, 1)


@pytest.mark.parametrize(
    ("mark", "ahead"),
    [(Position(0, 9), False), (Position(0, 10), True), (Position(0, 25), True), (Position(1, 1), True)],
)
def test_progress_is_ahead_when_a_mark_stands_at_the_first_change_or_beyond(mark, ahead):
    progress = Progress({}, {SHOP: mark})
    spans = {SHOP: span(10, 20), BANK: span(1, 2)}
    assert progress.marks_in(spans) == ({SHOP: mark} if ahead else {})


def test_what_a_flush_covers_is_written_as_epoch_first_and_last():
    assert spans_to_text({SHOP: span(8501, 9000, epoch=2)}) == '{"shop":[2,8501,9000]}'
