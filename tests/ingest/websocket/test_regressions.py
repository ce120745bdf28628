"""A source that jumps back is told from one that resends: the rule by itself, and what a client and an operator see."""

from __future__ import annotations

from lakefeed.contract.changes import Position, SourceId
from lakefeed.ingest.service import serving
from lakefeed.ingest.websocket.client import SOURCES_MAX, WARN_INTERVAL_S, Course, Regressions
from tests.ingest.conftest import small_config
from tests.ingest.talking import Talker, talking

SHOP = SourceId("shop")
MANY = 4


class Connection:
    """One connection's batches, each with its number and where it ends."""

    def __init__(self, regressions: Regressions, told: int | None = None, *, epoch: int = 0) -> None:
        self._regressions = regressions
        self._epoch = epoch
        self.number = 0
        self.course: Course = regressions.begin(SHOP, None if told is None else Position(epoch, told))

    def new(self, end: int) -> bool:
        return self._next(end, is_duplicate=False)

    def old(self, end: int) -> bool:
        return self._next(end, is_duplicate=True)

    def again(self, number: int, end: int) -> bool:
        """An old batch under a number that was sent before."""
        return self._judge(number, end, is_duplicate=True)

    def _next(self, end: int, *, is_duplicate: bool) -> bool:
        self.number += 1
        return self._judge(self.number, end, is_duplicate=is_duplicate)

    def _judge(self, number: int, end: int, *, is_duplicate: bool) -> bool:
        position = Position(self._epoch, end)
        return self._regressions.is_jump(self.course, number=number, end=position, is_duplicate=is_duplicate)


def test_resend_of_what_was_not_acked_after_a_reconnect_is_no_jump():
    regressions = Regressions(MANY)
    first = Connection(regressions, told=4)
    assert not first.new(10)
    second = Connection(regressions, told=10)
    assert not any((second.old(7), second.old(10), second.new(15)))
    third = Connection(regressions, told=15)
    assert not any((third.old(15), third.new(20)))


def test_reconnects_in_a_row_do_not_make_a_resend_a_jump():
    regressions = Regressions(MANY)
    assert not Connection(regressions, told=4).new(10)
    for _ in range(3):
        assert not Connection(regressions, told=10).old(10), "it never went on, so its acks may all be lost"


def test_sequences_that_fall_on_one_connection_are_a_jump():
    connection = Connection(Regressions(MANY))
    assert not connection.new(10)
    assert connection.old(3)
    assert connection.old(6)
    assert not connection.new(11)


def test_batch_that_comes_again_under_its_number_is_no_jump():
    connection = Connection(Regressions(MANY))
    connection.new(10)
    connection.new(20)
    assert not connection.again(1, 10)
    assert not connection.again(2, 20)


def test_batch_below_what_the_source_once_went_on_from_is_a_jump():
    regressions = Regressions(MANY)
    Connection(regressions, told=100).new(110)
    restarted = Connection(regressions, told=110)
    assert restarted.old(1)
    assert restarted.old(100)
    assert not restarted.old(105)


def test_more_old_batches_in_a_row_than_can_wait_for_an_answer_are_a_jump():
    connection = Connection(Regressions(MANY), told=100)
    assert [connection.old(end) for end in range(1, MANY + 2)] == [False] * MANY + [True]
    assert not connection.new(101)
    assert not connection.old(101), "counted anew"


def test_new_epoch_is_no_jump():
    regressions = Regressions(MANY)
    Connection(regressions, told=100).new(110)
    assert not Connection(regressions, told=None, epoch=1).old(1)


def test_sources_that_are_remembered_are_bounded_and_the_latest_stay():
    regressions = Regressions(MANY)
    for number in range(SOURCES_MAX + 5):
        course = regressions.begin(SourceId(str(number)), Position(0, 1))
        regressions.is_jump(course, number=1, end=Position(0, 2), is_duplicate=False)
        regressions.is_warning_due(SourceId(str(number)), 0.0)
    assert len(regressions._floors) == len(regressions._warned_at) == SOURCES_MAX
    assert regressions.begin(SourceId("4")).floor is None
    assert regressions.begin(SourceId(str(SOURCES_MAX + 4))).floor == Position(0, 1)


def test_warning_comes_once_a_minute_for_each_source():
    regressions = Regressions(MANY)
    assert regressions.is_warning_due(SHOP, 5.0)
    assert not regressions.is_warning_due(SHOP, 5.0 + WARN_INTERVAL_S / 2)
    assert regressions.is_warning_due(SourceId("other"), 6.0)
    assert regressions.is_warning_due(SHOP, 5.0 + WARN_INTERVAL_S)


# -- seen from outside


async def test_client_is_told_why_and_the_operator_is_warned_once(tmp_path, caplog):
    async with serving(small_config(tmp_path)) as service:
        async with talking(service.ws_url) as client:
            await client.batch(1, 2, 3)
        async with talking(service.ws_url) as client:
            resend = await client.batch(2, 3)
            assert (resend["status"], "details" in resend) == ("duplicate", False)
            await client.batch(4)
            for sequence in (1, 2):
                ack = await client.batch(sequence)
                assert ack["status"] == "duplicate"
                assert ack["details"]["message"].endswith("connect with a higher epoch: lastDurableSequence=4")
            assert caplog.messages.count("source_jumped_back_without_an_epoch") == 1
            await _starts_over(client)


async def _starts_over(client: Talker) -> None:
    assert (await client.ask("connect", sourceDoId="shop", epoch=1))["type"] == "status"
    assert (await client.batch(1))["status"] == "ok"
