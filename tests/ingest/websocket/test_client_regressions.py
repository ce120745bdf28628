"""A source that restarts its sequences without a new epoch: the rule, and what a client and an operator see."""

from __future__ import annotations

from lakefeed.contract.changes import Position
from lakefeed.ingest.service import serving
from lakefeed.ingest.websocket.client import SequenceHistory
from tests.ingest.conftest import small_config
from tests.ingest.ws_client import WsClient, connected

IN_FLIGHT_MAX = 4


def add(history: SequenceHistory, number: int, end: int, *, is_duplicate: bool) -> bool:
    position = Position(0, end)
    return history.is_regression(number=number, end=position, is_duplicate=is_duplicate, in_flight_max=IN_FLIGHT_MAX)


def test_resend_of_what_was_not_acked_after_a_reconnect_is_not_a_regression():
    history = SequenceHistory()
    ends = [(1, 7, True), (2, 10, True), (3, 15, False), (4, 20, False)]
    assert not any(add(history, number, end, is_duplicate=old) for number, end, old in ends)


def test_sequences_that_fall_on_one_connection_are_a_regression():
    history = SequenceHistory()
    assert not add(history, 1, 10, is_duplicate=False)
    assert add(history, 2, 3, is_duplicate=True)
    assert add(history, 3, 6, is_duplicate=True)
    assert not add(history, 4, 11, is_duplicate=False)


def test_batch_that_is_resent_under_its_number_is_not_a_regression():
    history = SequenceHistory()
    add(history, 1, 10, is_duplicate=False)
    add(history, 2, 20, is_duplicate=False)
    assert not add(history, 1, 10, is_duplicate=True)
    assert not add(history, 2, 20, is_duplicate=True)


def test_more_duplicates_in_a_row_than_can_be_in_flight_are_a_regression():
    history = SequenceHistory()
    found = [add(history, number, number, is_duplicate=True) for number in range(1, IN_FLIGHT_MAX + 2)]
    assert found == [False] * IN_FLIGHT_MAX + [True]
    assert not add(history, 10, 101, is_duplicate=False)
    assert not add(history, 11, 101, is_duplicate=True), "counted anew"


# -- on a connection


async def test_client_gets_the_reason_and_the_operator_is_warned_once(tmp_path, caplog):
    async with serving(small_config(tmp_path)) as service:
        async with connected(service.ws_url) as client:
            await client.batch(1, 2, 3)
        async with connected(service.ws_url) as client:
            resend = await client.batch(2, 3)
            assert (resend["status"], "details" in resend) == ("duplicate", False)
            await client.batch(4)
            for sequence in (1, 2):
                ack = await client.batch(sequence)
                assert ack["status"] == "duplicate"
                assert ack["details"]["message"].endswith("connect with a higher epoch: lastDurableSequence=4")
            assert caplog.messages.count("source_sequence_regressed") == 1
            await _starts_over(client)


async def _starts_over(client: WsClient) -> None:
    assert (await client.request("connect", sourceDoId="shop", epoch=1))["type"] == "status"
    assert (await client.batch(1))["status"] == "ok"
