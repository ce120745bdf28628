"""When a table counts as paused, when it is tried again, and whose trouble it is."""

from __future__ import annotations

from lakefeed.writer.tables.state import PAUSED_AFTER_ATTEMPTS, RETRY_MAX_S, Trouble


def failing(*commits: int) -> Trouble:
    trouble = Trouble()
    for number, count in enumerate(commits):
        trouble.note_failure(f"failure {number}", now=float(number), jitter=0.5, commits=count)
    return trouble


def test_one_failure_is_a_hiccup_and_several_in_a_row_pause_the_table():
    assert not failing(*[0] * (PAUSED_AFTER_ATTEMPTS - 1)).is_paused
    paused = failing(*[0] * PAUSED_AFTER_ATTEMPTS)
    assert paused.is_paused
    assert (paused.reason, paused.since) == (f"failure {PAUSED_AFTER_ATTEMPTS - 1}", 0.0)


def test_pauses_grow_to_a_limit_however_long_it_lasts():
    pauses = [failing(*[0] * count).retry_at - (count - 1) for count in (1, 2, 3, 20, 2_000)]
    assert pauses == sorted(pauses)
    assert pauses[-1] <= RETRY_MAX_S


def test_success_ends_it():
    trouble = failing(0, 5, 5)
    trouble.note_success()
    assert trouble == Trouble()


def test_trouble_is_a_tables_own_once_others_commit_between_its_failures():
    assert not failing(7).is_its_own
    assert not failing(7, 7, 7).is_its_own, "nobody commits: storage or catalog are down for all"
    assert failing(7, 8).is_its_own
