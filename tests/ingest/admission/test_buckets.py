"""Token buckets: what they let through over time."""

from __future__ import annotations

import random

import pytest

from lakefeed.ingest.admission.limits import TokenBucket


def spend(bucket: TokenBucket, cost: float, now: float) -> bool:
    if not bucket.has(cost, now):
        return False
    bucket.take(cost)
    return True


def test_burst_passes_at_once_and_then_the_rate():
    bucket = TokenBucket.full(10, 5, now=100.0)
    assert [spend(bucket, 1, 100.0) for _ in range(6)] == [True] * 5 + [False]
    assert bucket.wait_s(1) == pytest.approx(0.1)
    assert not spend(bucket, 1, 100.09)
    assert spend(bucket, 1, 100.1001)


def test_bucket_never_holds_more_than_the_burst():
    bucket = TokenBucket.full(10, 5, now=0.0)
    assert [spend(bucket, 1, 1_000.0) for _ in range(6)] == [True] * 5 + [False]


def test_rate_of_zero_never_refuses():
    bucket = TokenBucket.full(0, 1, now=0.0)
    assert all(spend(bucket, 1_000, 0.0) for _ in range(10))


def test_cost_above_the_burst_passes_a_full_bucket_and_leaves_a_debt():
    bucket = TokenBucket.full(100, 100, now=0.0)
    assert spend(bucket, 350, 0.0)
    assert not spend(bucket, 350, 3.4)
    assert bucket.wait_s(350) == pytest.approx(0.1)
    assert spend(bucket, 350, 3.51)


def test_clock_that_is_set_back_gives_nothing_and_takes_nothing():
    bucket = TokenBucket.full(10, 5, now=1_000.0)
    assert spend(bucket, 5, 1_000.0)
    assert not spend(bucket, 1, 500.0)
    assert spend(bucket, 1, 500.2)


def test_over_any_time_no_more_than_burst_and_rate_allow_passes():
    seed = random.randrange(2**32)
    chance = random.Random(seed)
    for _ in range(200):
        rate, burst = chance.uniform(0.5, 100), chance.randint(1, 50)
        bucket = TokenBucket.full(rate, burst, now=0.0)
        now = passed = 0.0
        for _ in range(200):
            now += chance.expovariate(rate)
            cost = chance.randint(1, burst)
            passed += cost if spend(bucket, cost, now) else 0
        assert passed <= burst + rate * now + 1e-6, f"seed={seed}"


def test_allowance_says_what_is_left_and_when_it_is_whole():
    bucket = TokenBucket.full(2, 10, now=50.0)
    for _ in range(4):
        spend(bucket, 1, 50.0)
    allowance = bucket.allowance(50.0)
    assert (allowance.limit, allowance.remaining, allowance.reset_at) == (10, 6, 52.0)
