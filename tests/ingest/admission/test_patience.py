"""When a client has kept us waiting too long."""

from __future__ import annotations

import pytest

from lakefeed.ingest.admission.limits import Patience, SignsOfLife, find_overdue

PATIENCE = Patience(heartbeat_s=60, message_s=30, answers_s=20)
LIVELY = {"silent_since": 100.0, "arriving_since": None, "unread_since": None}


def decide(now: float, patience: Patience = PATIENCE, **signs: float | None) -> int | None:
    closing = find_overdue(SignsOfLife(**{**LIVELY, **signs}), patience, now)
    return closing.code.value if closing is not None else None


def test_silence_ends_with_4000():
    assert decide(160.0) is None
    assert decide(160.1) == 4000


def test_message_that_does_not_end_and_answers_unread_end_with_1008():
    assert decide(140.0, arriving_since=110.0, silent_since=140.0) is None
    assert decide(140.1, arriving_since=110.0, silent_since=140.0) == 1008
    assert decide(130.0, unread_since=110.0, silent_since=None) is None
    assert decide(130.1, unread_since=110.0, silent_since=None) == 1008


def test_client_that_we_do_not_read_is_not_silent():
    assert decide(1_000.0, silent_since=None) is None


@pytest.mark.parametrize("sign", ["silent_since", "arriving_since", "unread_since"])
def test_patience_of_zero_waits_for_ever(sign):
    endless = Patience(heartbeat_s=0, message_s=0, answers_s=0)
    assert decide(1e9, endless, **{sign: 0.0}) is None
