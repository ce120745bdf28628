"""Exponential backoff."""

from __future__ import annotations

from lakefeed.backoff import Backoff


def test_pauses_double_up_to_their_maximum():
    backoff = Backoff(first_s=0.1, max_s=5.0)
    assert [backoff.limit_s(attempt) for attempt in (1, 2, 3, 100, 10_000)] == [0.1, 0.2, 0.4, 5.0, 5.0]


def test_jittered_pauses_differ_and_stay_below_the_limit():
    backoff = Backoff(first_s=1.0, max_s=8.0)
    pauses = [backoff.jittered_s(3) for _ in range(100)]
    assert all(0 <= pause <= 4.0 for pause in pauses)
    assert len(set(pauses)) > 90
