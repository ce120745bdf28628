"""Limits of connections, messages and requests, timeouts, and load levels; no sockets and no clock."""

from __future__ import annotations

import random

import pytest

from lakefeed.ingest.admission.addresses import parse_address
from lakefeed.ingest.admission.limits import (
    BACKOFF,
    SOURCE_BUCKETS_MAX,
    ConnectionSlot,
    ConnectionSlots,
    Liveness,
    LoadLevel,
    MessageLimiter,
    RequestRates,
    SourceRates,
    TokenBucket,
    find_timeout,
    load_level,
)
from lakefeed.ingest.config import IngestConfig
from lakefeed.ingest.protocol.offers import Durable, NackReason, Refused

NOW = 1_763_251_200.0


def slot(address: str = "127.0.0.1", source: str = "") -> ConnectionSlot:
    return ConnectionSlot(parse_address(address), source)


def connections(
    *,
    total: int = 1_000,
    per_source: int = 0,
    per_address: int = 0,
    per_subnet: int = 0,
    per_s: float = 0,
    burst: int = 1,
    limit_private_ips: bool = False,
) -> ConnectionSlots:
    config = IngestConfig(
        connections_max=total,
        connections_per_source_max=per_source,
        connections_per_ip_max=per_address,
        connections_per_subnet_max=per_subnet,
        connection_rate_per_s=per_s,
        connection_burst=burst,
        limit_private_ips=limit_private_ips,
    )
    return ConnectionSlots(config, NOW)


def reason_of(refusal) -> str | None:
    return refusal.reason.value if refusal is not None else None


def messages(
    *, jitter: float = 1.0, per_s: float = 0, burst: int = 1, heartbeats_per_s: float = 0, refusals_max: int = 0
) -> MessageLimiter:
    config = IngestConfig(
        message_rate_per_s=per_s,
        message_burst=burst,
        heartbeat_rate_per_s=heartbeats_per_s,
        refusals_max=refusals_max,
    )
    return MessageLimiter(config, lambda: jitter, NOW)


# -- token buckets


def spend(bucket: TokenBucket, cost: float, now: float) -> bool:
    if not bucket.has(cost, now):
        return False
    bucket.take(cost)
    return True


def test_burst_passes_at_once_and_then_the_rate():
    bucket = TokenBucket(10, 5, 100.0)
    assert [spend(bucket, 1, 100.0) for _ in range(6)] == [True] * 5 + [False]
    assert bucket.wait_s(1) == pytest.approx(0.1)
    assert not spend(bucket, 1, 100.09)
    assert spend(bucket, 1, 100.1001)


def test_bucket_never_holds_more_than_the_burst():
    bucket = TokenBucket(10, 5, 0.0)
    assert [spend(bucket, 1, 1_000.0) for _ in range(6)] == [True] * 5 + [False]


def test_rate_of_zero_never_refuses():
    bucket = TokenBucket(0, 1, 0.0)
    assert all(spend(bucket, 1_000, 0.0) for _ in range(10))


def test_cost_above_the_burst_passes_a_full_bucket_and_leaves_a_debt():
    bucket = TokenBucket(100, 100, 0.0)
    assert spend(bucket, 350, 0.0)
    assert not spend(bucket, 350, 3.4)
    assert bucket.wait_s(350) == pytest.approx(0.1)
    assert spend(bucket, 350, 3.51)


def test_clock_that_is_set_back_gives_nothing_and_takes_nothing():
    bucket = TokenBucket(10, 5, 1_000.0)
    assert spend(bucket, 5, 1_000.0)
    assert not spend(bucket, 1, 500.0)
    assert spend(bucket, 1, 500.2)


def test_over_any_time_no_more_than_burst_and_rate_allow_passes():
    seed = random.randrange(2**32)
    chance = random.Random(seed)
    for _ in range(200):
        rate, burst = chance.uniform(0.5, 100), chance.randint(1, 50)
        bucket = TokenBucket(rate, burst, 0.0)
        now = passed = 0.0
        for _ in range(200):
            now += chance.expovariate(rate)
            cost = chance.randint(1, burst)
            passed += cost if spend(bucket, cost, now) else 0
        assert passed <= burst + rate * now + 1e-6, f"seed={seed}"


def test_allowance_says_what_is_left_and_when_it_is_whole():
    bucket = TokenBucket(2, 10, 50.0)
    for _ in range(4):
        spend(bucket, 1, 50.0)
    allowance = bucket.allowance(50.0)
    assert (allowance.limit, allowance.remaining, allowance.reset_at) == (10, 6, 52.0)


# -- connections


def test_slot_is_free_again_after_its_connection_has_ended():
    slots = connections(total=2)
    first = slot()
    assert slots.acquire(first, NOW) is None
    assert slots.acquire(slot(), NOW) is None
    assert reason_of(slots.acquire(slot(), NOW)) == "connection_limit"
    slots.release(first)
    assert slots.acquire(slot(), NOW) is None
    assert (slots.active, slots.peak) == (2, 2)


def test_source_has_its_own_limit_and_others_are_unaffected():
    slots = connections(per_source=1)
    assert slots.acquire(slot(source="shop"), NOW) is None
    assert reason_of(slots.acquire(slot(source="shop"), NOW)) == "connection_limit"
    assert slots.acquire(slot(source="other"), NOW) is None
    assert slots.acquire(slot(), NOW) is None, "a connection without a source is counted once it names one"


def test_connection_counts_for_the_source_that_it_binds_to():
    slots = connections(per_source=1)
    bound, unbound = slot(source="header"), slot()
    slots.acquire(bound, NOW)
    slots.acquire(unbound, NOW)
    assert slots.bind(bound, "shop")
    assert not slots.bind(unbound, "shop")
    assert slots.bind(bound, "shop"), "the same again is nothing new"
    assert slots.bind(unbound, "header"), "its first name is free again"
    slots.release(bound)
    assert slots.acquire(slot(source="shop"), NOW) is None


def test_address_and_subnet_have_limits_of_their_own():
    slots = connections(per_address=2, per_subnet=3)
    assert [reason_of(slots.acquire(slot("8.8.8.1"), NOW)) for _ in range(3)] == [None, None, "ip_limit"]
    assert slots.acquire(slot("8.8.8.2"), NOW) is None
    assert reason_of(slots.acquire(slot("8.8.8.3"), NOW)) == "ip_limit", "the subnet is full"
    assert slots.acquire(slot("8.8.9.1"), NOW) is None


def test_ipv6_subnet_is_a_64():
    slots = connections(per_subnet=1)
    assert slots.acquire(slot("2a00:1450:4001:81b::1"), NOW) is None
    assert reason_of(slots.acquire(slot("2a00:1450:4001:81b:ffff::9"), NOW)) == "ip_limit"
    assert slots.acquire(slot("2a00:1450:4001:81c::1"), NOW) is None


@pytest.mark.parametrize("address", ["127.0.0.1", "10.1.2.3", "::1"])
def test_private_addresses_are_not_limited_unless_configured(address):
    lenient, strict = connections(per_address=1), connections(per_address=1, limit_private_ips=True)
    assert [lenient.acquire(slot(address), NOW) for _ in range(3)] == [None] * 3
    assert [reason_of(strict.acquire(slot(address), NOW)) for _ in range(2)] == [None, "ip_limit"]


def test_new_connections_are_limited_by_rate_with_a_time_to_retry_after():
    slots = connections(per_s=0.5, burst=2)
    assert [reason_of(slots.acquire(slot(), NOW)) for _ in range(3)] == [None, None, "rate_limited"]
    assert slots.acquire(slot(), NOW).retry_after_s == 2
    assert slots.acquire(slot(), NOW + 2) is None


def test_rejected_connections_use_up_nothing():
    slots = connections(total=1, per_s=1, burst=2)
    first = slot()
    slots.acquire(first, NOW)
    for _ in range(100):
        assert reason_of(slots.acquire(slot(), NOW)) == "connection_limit"
    slots.release(first)
    assert slots.acquire(slot(), NOW) is None


def test_allowance_is_that_of_the_rate_or_of_the_free_slots():
    limited, unlimited = connections(per_s=1, burst=10), connections(total=4)
    for slots in (limited, unlimited):
        slots.acquire(slot(), NOW)
    assert (limited.allowance(NOW).limit, limited.allowance(NOW).remaining) == (10, 9)
    assert limited.allowance(NOW).reset_at == NOW + 1
    assert (unlimited.allowance(NOW).limit, unlimited.allowance(NOW).remaining) == (4, 3)


def test_nothing_is_kept_of_connections_that_ended():
    slots = connections()
    for number in range(100):
        connection = slot(f"8.8.{number}.1", f"source-{number}")
        slots.acquire(connection, NOW)
        slots.bind(connection, f"other-{number}")
        slots.release(connection)
    assert (slots._per_source, slots._per_address, slots._per_subnet) == ({}, {}, {})


# -- messages


def test_messages_beyond_the_rate_are_refused_and_to_be_retried():
    limiter = messages(per_s=10, burst=2)
    assert [limiter.admit(NOW) for _ in range(2)] == [None, None]
    refusal = limiter.admit(NOW)
    assert isinstance(refusal, Refused)
    assert (refusal.reason, refusal.retry, refusal.retry_delay_ms) == (NackReason.RATE_LIMITED, True, 100)
    assert limiter.admit(NOW + 0.11) is None


def test_no_limit_refuses_nothing():
    limiter = messages()
    assert all(limiter.admit(NOW, size_bytes=2**40) is None for _ in range(10_000))
    assert limiter.allowance(NOW) is None


def test_delay_doubles_each_time_a_client_returns_too_early_up_to_a_cap():
    limiter = messages()
    now, delays = NOW, []
    for _ in range(12):
        delays.append(limiter.shed(now).retry_delay_ms)
        now += (delays[-1] + 1) / 1_000
    assert delays[:4] == [100, 200, 400, 800]
    assert delays[-2:] == [1_000 * BACKOFF.max_s] * 2


def test_delay_is_at_least_what_the_limit_needs():
    limiter = messages(per_s=0.5, burst=1)
    limiter.admit(NOW)
    assert limiter.admit(NOW).retry_delay_ms == 2_000


def test_messages_in_flight_at_the_first_refusal_get_the_same_moment():
    limiter = messages(per_s=10, burst=1)
    limiter.admit(NOW)
    assert [limiter.admit(NOW + ms / 1_000).retry_delay_ms for ms in (0, 20, 40)] == [100, 80, 60]


def test_message_that_passes_starts_the_backoff_over():
    limiter = messages(per_s=10, burst=1)
    for round_trip in range(5):
        now = NOW + round_trip
        assert limiter.admit(now) is None
        assert limiter.admit(now).retry_delay_ms == 100


def test_jitter_spreads_the_delay():
    limiters = [messages(jitter=jitter) for jitter in (0.5, 1.0, 1.5)]
    assert [limiter.shed(NOW).retry_delay_ms for limiter in limiters] == [50, 100, 150]


def test_source_is_limited_by_its_bytes_over_all_connections():
    rates = SourceRates(1_000, 1_000)
    limiters = [messages(), messages()]
    assert limiters[0].admit(NOW, size_bytes=900, source=rates.bucket("shop", NOW)) is None
    refusal = limiters[1].admit(NOW, size_bytes=900, source=rates.bucket("shop", NOW))
    assert (refusal.reason, refusal.retry_delay_ms) == (NackReason.RATE_LIMITED, 800)
    assert limiters[1].admit(NOW, size_bytes=900, source=rates.bucket("other", NOW)) is None


def test_refused_bytes_cost_no_message_and_refused_messages_no_bytes():
    rates = SourceRates(1_000, 1_000)
    limiter = messages(per_s=1, burst=2)
    source = rates.bucket("shop", NOW)
    assert limiter.admit(NOW, size_bytes=1_000, source=source) is None
    assert limiter.admit(NOW, size_bytes=1_000, source=source) is not None
    assert limiter.admit(NOW) is None, "the second token is still there"
    assert limiter.admit(NOW + 0.9, size_bytes=500, source=source) is not None
    assert source.has(900, NOW + 0.9001)


def test_reconnecting_gives_a_source_no_new_bucket_and_full_ones_are_dropped():
    rates = SourceRates(1_000, 1_000)
    rates.bucket("greedy", NOW).take(1_000_000)
    for number in range(SOURCE_BUCKETS_MAX + 1):
        rates.bucket(f"source-{number}", NOW)
    assert len(rates._buckets) < 10
    assert rates.bucket("greedy", NOW).tokens == -999_000


def test_source_buckets_are_bounded_even_if_none_is_full():
    rates = SourceRates(1_000, 1_000)
    for number in range(SOURCE_BUCKETS_MAX + 100):
        rates.bucket(f"source-{number}", NOW).take(1)
    assert len(rates._buckets) <= SOURCE_BUCKETS_MAX


def test_request_is_admitted_by_count_and_bytes_of_its_source_and_one_that_is_not_costs_nothing():
    rates = RequestRates(SourceRates(1, 2), SourceRates(1_000, 1_000))
    assert rates.admit("shop", 900, NOW) == 0
    assert rates.admit("shop", 900, NOW) == pytest.approx(0.8), "for its bytes"
    assert rates.admit("shop", 100, NOW) == 0, "what was not admitted has cost neither"
    assert rates.admit("shop", 100, NOW) == pytest.approx(1.0), "for its count"
    assert rates.admit("other", 900, NOW) == 0


def test_bytes_that_a_request_turned_out_to_have_are_paid_by_the_next():
    rates = RequestRates(SourceRates(0, 1), SourceRates(1_000, 1_000))
    assert rates.admit("shop", 0, NOW) == 0
    rates.correct("shop", 3_000, NOW)
    assert rates.admit("shop", 500, NOW) == pytest.approx(2.5)
    unlimited = RequestRates(SourceRates(0, 1), SourceRates(0, 0))
    unlimited.correct("shop", 3_000, NOW)
    assert unlimited.admit("shop", 10**9, NOW) == 0


def test_heartbeats_have_a_bucket_of_their_own():
    limiter = messages(per_s=1, burst=1, heartbeats_per_s=2)
    limiter.admit(NOW)
    assert limiter.admit(NOW) is not None
    assert [reason_of(limiter.admit_heartbeat(NOW)) for _ in range(5)] == [None] * 4 + ["rate_limited"]


def accept(limiter: MessageLimiter, now: float) -> None:
    limiter.on_verdict(Durable(0, 1), received_at=now, now=now)


def refuse_full(limiter: MessageLimiter, received_at: float, now: float) -> None:
    full = Refused(NackReason.BUFFER_FULL, "full", retry=True, retry_delay_ms=1_000)
    limiter.on_verdict(full, received_at=received_at, now=now)


def test_client_that_is_refused_more_often_than_accepted_ignores_refusals():
    limiter = messages(per_s=1, burst=1, refusals_max=10)
    now = NOW
    limiter.admit(now)
    while not limiter.ignores_refusals:
        now += 0.3  # three are refused for each that passes
        if limiter.admit(now) is None:
            accept(limiter, now)
        assert now < NOW + 10
    assert not messages(per_s=1, burst=1, refusals_max=0).ignores_refusals


def test_client_that_is_refused_now_and_then_does_not_ignore_refusals():
    limiter = messages(per_s=1, burst=1, refusals_max=3)
    for second in range(100):
        assert limiter.admit(NOW + second) is None
        accept(limiter, NOW + second)
        assert limiter.admit(NOW + second) is not None
    assert not limiter.ignores_refusals


def test_client_that_waits_its_retry_delay_while_the_log_is_full_does_not_ignore_refusals():
    limiter = messages(refusals_max=3)
    for second in range(100):
        refuse_full(limiter, NOW + second, NOW + second)
    assert not limiter.ignores_refusals


def test_batches_in_flight_when_the_log_was_found_full_are_not_counted():
    limiter = messages(refusals_max=3)
    for _ in range(100):
        refuse_full(limiter, NOW, NOW + 0.5)
    assert not limiter.ignores_refusals


def test_client_that_returns_too_early_while_the_log_is_full_ignores_refusals_until_a_batch_is_accepted():
    limiter = messages(refusals_max=3)
    for attempt in range(4):
        assert not limiter.ignores_refusals, attempt
        refuse_full(limiter, NOW + attempt / 10, NOW + attempt / 10 + 0.01)
    assert limiter.ignores_refusals
    accept(limiter, NOW + 1)
    assert not limiter.ignores_refusals


def test_third_message_with_an_event_that_is_too_large_is_one_too_many():
    limiter = messages()
    assert [limiter.count_too_large() for _ in range(3)] == [False, False, True]


def test_batch_that_is_shed_is_to_be_retried_and_does_not_count_against_the_client():
    limiter = messages(refusals_max=1)
    refusal = limiter.shed(NOW)
    assert (refusal.reason, refusal.retry, refusal.retry_delay_ms) == (NackReason.LOAD_SHEDDING, True, 100)
    assert not limiter.ignores_refusals


# -- load


@pytest.mark.parametrize("signal", ["delay", "log"])
@pytest.mark.parametrize(
    ("share", "level"),
    [(0.5, "normal"), (0.51, "elevated"), (0.71, "high"), (0.9, "high"), (0.91, "critical"), (2, "critical")],
)
def test_the_busiest_part_decides_the_level(signal, share, level):
    shares = {"connections": 0.0, "delay": 0.0, "log": 0.0, signal: share}
    assert load_level(**shares).value == level


def test_connections_alone_are_never_critical():
    assert load_level(connections=1.0, delay=0, log=0) is LoadLevel.HIGH
    assert load_level(connections=0.6, delay=0, log=0) is LoadLevel.ELEVATED


def test_high_and_critical_load_is_degraded():
    assert [level.value for level in LoadLevel if level.is_degraded] == ["high", "critical"]


# -- timeouts


TIMEOUTS = IngestConfig(heartbeat_timeout_s=60, message_timeout_s=30, reply_timeout_s=20)
LIVELY = {"silent_since": 100.0, "arriving_since": None, "unread_since": None}


def timeout_code(now: float, timeouts: IngestConfig = TIMEOUTS, **signs: float | None) -> int | None:
    closing = find_timeout(Liveness(**{**LIVELY, **signs}), timeouts, now)
    return closing.code.value if closing is not None else None


def test_silence_ends_with_4000():
    assert timeout_code(160.0) is None
    assert timeout_code(160.1) == 4000


def test_incomplete_message_and_unread_replies_end_with_1008():
    assert timeout_code(140.0, arriving_since=110.0, silent_since=140.0) is None
    assert timeout_code(140.1, arriving_since=110.0, silent_since=140.0) == 1008
    assert timeout_code(130.0, unread_since=110.0, silent_since=None) is None
    assert timeout_code(130.1, unread_since=110.0, silent_since=None) == 1008


def test_client_that_we_do_not_read_is_not_silent():
    assert timeout_code(1_000.0, silent_since=None) is None


@pytest.mark.parametrize("sign", ["silent_since", "arriving_since", "unread_since"])
def test_timeout_of_zero_waits_for_ever(sign):
    endless = IngestConfig(heartbeat_timeout_s=0, message_timeout_s=0, reply_timeout_s=0)
    assert timeout_code(1e9, endless, **{sign: 0.0}) is None
