"""What is remembered of accepted sequences: exact while it is kept, bounded per source and in total."""

from __future__ import annotations

from lakefeed.contract.changes import SourceId
from lakefeed.ingest.intake import accepted
from lakefeed.ingest.intake.accepted import AcceptedSequences, Stretches, extended, first_contradiction, up_to


def stretches_of(*batches: list[int] | range) -> Stretches:
    kept: Stretches = ()
    for batch in batches:
        kept = extended(kept, batch)
    return kept


def test_consecutive_batches_are_one_range():
    assert stretches_of(range(100), range(100, 101), list(range(101, 150))) == (range(150),)


def test_sparse_batches_are_joined():
    (only,) = stretches_of([1, 3], [7], [9, 12])
    assert list(only) == [1, 3, 7, 9, 12]


def test_change_between_two_accepted_batches_is_a_contradiction():
    kept = stretches_of(range(40), range(50, 90))
    assert first_contradiction([39, 45, 50], kept) == 45
    assert first_contradiction([45], kept) == 45
    assert first_contradiction([39, 50, 51], kept) is None
    assert first_contradiction([39, 51], kept) == 50


def test_changes_below_what_is_kept_agree():
    assert first_contradiction([1, 2, 3], stretches_of(range(10, 50))) is None
    assert first_contradiction([1, 11], stretches_of(range(10, 50))) == 10


def test_oldest_numbers_of_a_source_are_forgotten(monkeypatch):
    monkeypatch.setattr(accepted, "NUMBERS_MAX_PER_SOURCE", 100)
    monkeypatch.setattr(accepted, "_JOINED_MAX_LENGTH", 1)
    kept = stretches_of(*([n, n + 2] for n in range(0, 400, 4)))
    assert sum(map(len, kept)) <= 100
    assert kept[-1][-1] == 398
    (only,) = stretches_of(list(range(0, 1000, 2)))
    assert (len(only), only[-1]) == (100, 998)


def test_sources_that_have_not_sent_for_long_are_forgotten_first():
    kept = AcceptedSequences(max_numbers=60)
    for number, name in enumerate("abca"):
        kept.record(SourceId(name), stretches_of([number, number + 2]))
    kept.record(SourceId("d"), stretches_of([8, 10]))
    assert kept.of(SourceId("a")) == stretches_of([3, 5])
    assert kept.of(SourceId("b")) == ()


def test_of_a_source_that_is_not_kept_the_mark_is_known():
    assert up_to(5, stretches_of([3, 5])) == stretches_of([3, 5])
    assert up_to(9, ()) == (range(9, 10),)
    assert up_to(9, stretches_of([3, 5])) == (range(9, 10),), "they are of an earlier epoch"
    assert up_to(-1, stretches_of([3, 5])) == ()
