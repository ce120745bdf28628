"""Who may connect, how much a client may send, and when load is shed."""

from __future__ import annotations

import pytest

from lakefeed.ingest.admission.addresses import parse_address
from lakefeed.ingest.admission.limits import (
    BACKOFF_MAX_MS,
    SOURCE_BUCKETS_MAX,
    ConnectionLimits,
    Connections,
    LoadLevel,
    MessageLimits,
    Messages,
    RequestRates,
    Slot,
    SourceRates,
    load_level,
)
from lakefeed.ingest.protocol.offers import NackReason, Refused

NOW = 1_763_251_200.0


def slot(address: str = "127.0.0.1", source: str = "") -> Slot:
    return Slot(parse_address(address), source)


def connections(**limits: object) -> Connections:
    return Connections(ConnectionLimits(**{"total": 1_000, **limits}), NOW)


def reason_of(refusal) -> str | None:
    return refusal.reason.value if refusal is not None else None


def messages(*, jitter: float = 1.0, high: bool = False, **limits: object) -> Messages:
    return Messages(MessageLimits(**limits), high, lambda: jitter, NOW)


# -- connections


def test_place_is_free_again_after_its_connection_has_ended():
    desk = connections(total=2)
    first = slot()
    assert desk.enter(first, NOW) is None
    assert desk.enter(slot(), NOW) is None
    assert reason_of(desk.enter(slot(), NOW)) == "connection_limit"
    desk.leave(first)
    assert desk.enter(slot(), NOW) is None
    assert (desk.active, desk.peak) == (2, 2)


def test_source_has_its_own_limit_and_others_are_unaffected():
    desk = connections(per_source=1)
    assert desk.enter(slot(source="shop"), NOW) is None
    assert reason_of(desk.enter(slot(source="shop"), NOW)) == "connection_limit"
    assert desk.enter(slot(source="other"), NOW) is None
    assert desk.enter(slot(), NOW) is None, "who has no source yet is counted when it has"


def test_connection_counts_for_the_source_that_it_binds_to():
    desk = connections(per_source=1)
    bound, unbound = slot(source="header"), slot()
    desk.enter(bound, NOW)
    desk.enter(unbound, NOW)
    assert desk.bind(bound, "shop")
    assert not desk.bind(unbound, "shop")
    assert desk.bind(bound, "shop"), "the same again is nothing new"
    assert desk.bind(unbound, "header"), "its first name is free again"
    desk.leave(bound)
    assert desk.enter(slot(source="shop"), NOW) is None


def test_address_and_subnet_have_limits_of_their_own():
    desk = connections(per_address=2, per_subnet=3)
    assert [reason_of(desk.enter(slot("8.8.8.1"), NOW)) for _ in range(3)] == [None, None, "ip_limit"]
    assert desk.enter(slot("8.8.8.2"), NOW) is None
    assert reason_of(desk.enter(slot("8.8.8.3"), NOW)) == "ip_limit", "the subnet is full"
    assert desk.enter(slot("8.8.9.1"), NOW) is None


def test_ipv6_subnet_is_a_64():
    desk = connections(per_subnet=1)
    assert desk.enter(slot("2a00:1450:4001:81b::1"), NOW) is None
    assert reason_of(desk.enter(slot("2a00:1450:4001:81b:ffff::9"), NOW)) == "ip_limit"
    assert desk.enter(slot("2a00:1450:4001:81c::1"), NOW) is None


@pytest.mark.parametrize("address", ["127.0.0.1", "10.1.2.3", "::1"])
def test_private_addresses_are_not_limited_unless_they_are_to_be(address):
    lenient, strict = connections(per_address=1), connections(per_address=1, private_addresses_count=True)
    assert [lenient.enter(slot(address), NOW) for _ in range(3)] == [None] * 3
    assert [reason_of(strict.enter(slot(address), NOW)) for _ in range(2)] == [None, "ip_limit"]


def test_new_connections_are_limited_by_rate_and_told_when_to_come_back():
    desk = connections(per_s=0.5, burst=2)
    assert [reason_of(desk.enter(slot(), NOW)) for _ in range(3)] == [None, None, "rate_limited"]
    assert desk.enter(slot(), NOW).retry_after_s == 2
    assert desk.enter(slot(), NOW + 2) is None


def test_who_is_turned_away_uses_up_nothing():
    desk = connections(total=1, per_s=1, burst=2)
    first = slot()
    desk.enter(first, NOW)
    for _ in range(100):
        assert reason_of(desk.enter(slot(), NOW)) == "connection_limit"
    desk.leave(first)
    assert desk.enter(slot(), NOW) is None


def test_allowance_is_that_of_the_rate_or_of_the_places():
    limited, unlimited = connections(per_s=1, burst=10), connections(total=4)
    for desk in (limited, unlimited):
        desk.enter(slot(), NOW)
    assert (limited.allowance(NOW).limit, limited.allowance(NOW).remaining) == (10, 9)
    assert limited.allowance(NOW).reset_at == NOW + 1
    assert (unlimited.allowance(NOW).limit, unlimited.allowance(NOW).remaining) == (4, 3)


def test_nothing_is_remembered_of_those_who_left():
    desk = connections()
    for number in range(100):
        visitor = slot(f"8.8.{number}.1", f"source-{number}")
        desk.enter(visitor, NOW)
        desk.bind(visitor, f"other-{number}")
        desk.leave(visitor)
    assert (desk._per_source, desk._per_address, desk._per_subnet) == ({}, {}, {})


# -- messages


def test_messages_beyond_the_rate_are_refused_and_to_be_retried():
    gate = messages(per_s=10, burst=2)
    assert [gate.admit(NOW) for _ in range(2)] == [None, None]
    refusal = gate.admit(NOW)
    assert isinstance(refusal, Refused)
    assert (refusal.reason, refusal.retry, refusal.retry_delay_ms) == (NackReason.RATE_LIMITED, True, 100)
    assert gate.admit(NOW + 0.11) is None


def test_no_limit_refuses_nothing():
    gate = messages()
    assert all(gate.admit(NOW, size_bytes=2**40) is None for _ in range(10_000))
    assert gate.allowance(NOW) is None


def test_delay_doubles_each_time_a_client_comes_back_too_early_up_to_a_cap():
    gate = messages()
    now, delays = NOW, []
    for _ in range(12):
        delays.append(gate.shed(LoadLevel.CRITICAL, now).retry_delay_ms)
        now += (delays[-1] + 1) / 1_000
    assert delays[:4] == [100, 200, 400, 800]
    assert delays[-2:] == [BACKOFF_MAX_MS, BACKOFF_MAX_MS]


def test_delay_is_at_least_what_the_limit_needs():
    gate = messages(per_s=0.5, burst=1)
    gate.admit(NOW)
    assert gate.admit(NOW).retry_delay_ms == 2_000


def test_messages_under_way_at_the_first_refusal_are_told_the_same_moment():
    gate = messages(per_s=10, burst=1)
    gate.admit(NOW)
    assert [gate.admit(NOW + ms / 1_000).retry_delay_ms for ms in (0, 20, 40)] == [100, 80, 60]


def test_message_that_passes_starts_the_backoff_over():
    gate = messages(per_s=10, burst=1)
    for round_trip in range(5):
        now = NOW + round_trip
        assert gate.admit(now) is None
        assert gate.admit(now).retry_delay_ms == 100


def test_jitter_spreads_the_delay():
    gates = [messages(jitter=jitter) for jitter in (0.5, 1.0, 1.5)]
    assert [gate.shed(LoadLevel.CRITICAL, NOW).retry_delay_ms for gate in gates] == [50, 100, 150]


def test_source_is_limited_by_its_bytes_over_all_connections():
    rates = SourceRates(1_000)
    gates = [messages(), messages()]
    assert gates[0].admit(NOW, size_bytes=900, source=rates.bucket("shop", NOW)) is None
    refusal = gates[1].admit(NOW, size_bytes=900, source=rates.bucket("shop", NOW))
    assert (refusal.reason, refusal.retry_delay_ms) == (NackReason.RATE_LIMITED, 800)
    assert gates[1].admit(NOW, size_bytes=900, source=rates.bucket("other", NOW)) is None


def test_refused_bytes_cost_no_message_and_refused_messages_no_bytes():
    rates = SourceRates(1_000)
    gate = messages(per_s=1, burst=2)
    source = rates.bucket("shop", NOW)
    assert gate.admit(NOW, size_bytes=1_000, source=source) is None
    assert gate.admit(NOW, size_bytes=1_000, source=source) is not None
    assert gate.admit(NOW) is None, "the second token is still there"
    assert gate.admit(NOW + 0.9, size_bytes=500, source=source) is not None
    assert source.has(900, NOW + 0.9001)


def test_coming_again_gives_a_source_no_new_bucket_and_full_ones_are_forgotten():
    rates = SourceRates(1_000)
    rates.bucket("greedy", NOW).take(1_000_000)
    for number in range(SOURCE_BUCKETS_MAX + 1):
        rates.bucket(f"source-{number}", NOW)
    assert len(rates._buckets) < 10
    assert rates.bucket("greedy", NOW).tokens == -999_000


def test_source_buckets_are_bounded_even_if_none_is_full():
    rates = SourceRates(1_000)
    for number in range(SOURCE_BUCKETS_MAX + 100):
        rates.bucket(f"source-{number}", NOW).take(1)
    assert len(rates._buckets) <= SOURCE_BUCKETS_MAX


def test_request_is_admitted_by_count_and_bytes_of_its_source_and_one_that_is_not_costs_nothing():
    rates = RequestRates(SourceRates(1, 2), SourceRates(1_000))
    assert rates.admit("shop", 900, NOW) == 0
    assert rates.admit("shop", 900, NOW) == pytest.approx(0.8), "for its bytes"
    assert rates.admit("shop", 100, NOW) == 0, "what was not admitted has cost neither"
    assert rates.admit("shop", 100, NOW) == pytest.approx(1.0), "for its count"
    assert rates.admit("other", 900, NOW) == 0


def test_bytes_that_a_request_turned_out_to_have_are_paid_by_the_next():
    rates = RequestRates(None, SourceRates(1_000))
    assert rates.admit("shop", 0, NOW) == 0
    rates.correct("shop", 3_000, NOW)
    assert rates.admit("shop", 500, NOW) == pytest.approx(2.5)
    RequestRates().correct("shop", 3_000, NOW)
    assert RequestRates().admit("shop", 10**9, NOW) == 0, "where there is no limit"


def test_heartbeats_have_a_bucket_of_their_own():
    gate = messages(per_s=1, burst=1, heartbeats_per_s=2)
    gate.admit(NOW)
    assert gate.admit(NOW) is not None
    assert [reason_of(gate.admit_heartbeat(NOW)) for _ in range(5)] == [None] * 4 + ["rate_limited"]


def test_who_is_refused_again_and_again_is_an_offender():
    gate = messages(per_s=1, burst=1, refusals_max=10)
    now = NOW
    gate.admit(now)
    while not gate.is_offender:
        now += 0.3  # three are refused for each that passes
        gate.admit(now)
        assert now < NOW + 10
    assert not messages(per_s=1, burst=1, refusals_max=0).is_offender


def test_who_is_refused_now_and_then_is_none():
    gate = messages(per_s=1, burst=1, refusals_max=3)
    for second in range(100):
        assert gate.admit(NOW + second) is None
        assert gate.admit(NOW + second) is not None
    assert not gate.is_offender


def test_who_waits_as_long_as_it_is_told_while_the_log_is_full_is_not_impatient_however_long_that_lasts():
    gate = messages(refusals_max=3)
    for second in range(100):
        gate.on_full(received_at=NOW + second, retry_delay_s=1.0, now=NOW + second)
    assert not gate.is_impatient


def test_batches_under_way_when_the_log_was_found_full_do_not_make_a_client_impatient():
    gate = messages(refusals_max=3)
    for _ in range(100):
        gate.on_full(received_at=NOW, retry_delay_s=1.0, now=NOW + 0.5)
    assert not gate.is_impatient


def test_who_comes_again_too_early_while_the_log_is_full_is_impatient_until_it_is_taken():
    gate = messages(refusals_max=3)
    for tries in range(4):
        assert not gate.is_impatient, tries
        gate.on_full(received_at=NOW + tries / 10, retry_delay_s=1.0, now=NOW + tries / 10 + 0.01)
    assert gate.is_impatient
    gate.on_taken()
    assert not gate.is_impatient


def test_critical_load_refuses_batches_of_connections_without_priority():
    normal, high = messages(refusals_max=1), messages(high=True)
    refusal = normal.shed(LoadLevel.CRITICAL, NOW)
    assert (refusal.reason, refusal.retry, refusal.retry_delay_ms) == (NackReason.LOAD_SHEDDING, True, 100)
    assert not normal.is_offender, "that is not the client's fault"
    assert high.shed(LoadLevel.CRITICAL, NOW) is None
    assert normal.shed(LoadLevel.HIGH, NOW) is None


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
