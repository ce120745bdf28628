"""What the data plane says back: the choice of status, the numbers beside it, and whether to try again."""

from __future__ import annotations

import pytest

from lakefeed.contract.changes import Position
from lakefeed.ingest.protocol.messages import Ack
from lakefeed.ingest.protocol.offers import Duplicate, Durable, NackReason, Refused
from lakefeed.ingest.websocket import replies

NOW = 1_763_251_200.5
NOW_MS = 1_763_251_200_500


def ack(
    verdict: Durable | Duplicate | None,
    *,
    changes: int = 3,
    utilization: float = 0.5,
    commits_fail: bool = False,
    is_regression: bool = False,
) -> Ack:
    return replies.ack(
        verdict,
        number=7,
        changes=changes,
        correlation_id="c",
        backlog=replies.Backlog(utilization=utilization, time_until_flush_ms=1_500, commits_fail=commits_fail),
        is_regression=is_regression,
        now=NOW,
    )


def test_durable_batch_is_ok_with_its_place_in_the_log():
    answer = ack(Durable(42, 3))
    assert (answer.status, answer.sequence_number, answer.batch_id, answer.correlation_id) == ("ok", 7, "42", "c")
    assert answer.timestamp == NOW_MS
    assert answer.details is not None
    assert (answer.details.events_processed, answer.details.buffer_utilization) == (3, 0.5)
    assert (answer.details.duplicates, answer.details.suggested_delay_ms) == (None, None)
    assert (answer.details.time_until_flush, answer.details.message) == (1_500, None)


@pytest.mark.parametrize(("commits_fail", "state"), [(False, "closed"), (True, "open")])
def test_circuit_breaker_is_open_while_commits_fail(commits_fail, state):
    details = ack(Durable(42, 3), commits_fail=commits_fail).details
    assert details is not None
    assert details.circuit_breaker_state == state


def test_refusal_for_its_size_tells_both_sizes_under_all_their_names():
    refused = Refused(NackReason.PAYLOAD_TOO_LARGE, "too large", retry=False, max_size=10, actual_size=12)
    answer = replies.nack(refused, 7, None, now=NOW)
    assert (answer.max_size, answer.actual_size, answer.received_size) == (10, 12, 12)


def test_trimmed_batch_counts_what_was_new_and_what_was_not():
    details = ack(Durable(42, 1), changes=3).details
    assert details is not None
    assert (details.events_processed, details.duplicates) == (1, 2)


def test_duplicate_tells_how_far_the_source_is_durable():
    answer = ack(Duplicate(99))
    assert (answer.status, answer.last_durable_sequence, answer.details) == ("duplicate", 99, None)


def test_duplicate_of_a_source_that_jumps_back_says_why_and_what_to_do():
    details = ack(Duplicate(99), is_regression=True).details
    assert details is not None
    assert (details.events_processed, details.duplicates) == (0, 3)
    assert details.message is not None
    assert "higher epoch: lastDurableSequence=99" in details.message


def test_batch_without_changes_is_ok():
    answer = ack(None, changes=0)
    assert (answer.status, answer.batch_id) == ("ok", None)
    assert answer.details is not None
    assert (answer.details.events_processed, answer.details.duplicates) == (0, None)


@pytest.mark.parametrize(
    ("utilization", "expected", "delay_ms"),
    [(0.8, "ok", None), (0.81, "buffered", 405), (1.0, "buffered", 500)],
)
def test_filling_log_asks_clients_to_slow_down(utilization, expected, delay_ms):
    answer = ack(Durable(1, 3), utilization=utilization)
    assert answer.details is not None
    assert (answer.status, answer.details.suggested_delay_ms) == (expected, delay_ms)


@pytest.mark.parametrize(
    ("position", "sequence"), [(Position(2, 9), 9), (Position(1, 9), None), (Position(2, -1), None), (None, None)]
)
def test_only_a_position_of_the_same_epoch_is_a_resume_point(position, sequence):
    assert replies.sequence_in(position, 2) == sequence


def test_refused_batch_says_whether_and_when_to_try_again():
    refused = Refused(NackReason.BUFFER_FULL, "log has used up its budget", retry=True, retry_delay_ms=1000)
    answer = replies.nack(refused, 7, "c", now=NOW)
    assert (answer.reason, answer.should_retry, answer.retry_delay_ms) == ("buffer_full", True, 1000)
    assert (answer.sequence_number, answer.correlation_id) == (7, "c")
