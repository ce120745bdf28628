"""Which changes are new: examples first, then random conversations against a model made of sets."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from lakefeed.contract.changes import Position, SourceId
from lakefeed.ingest.intake.dedup import Dedup
from lakefeed.ingest.intake.sources import decode_head, encode_head
from lakefeed.ingest.protocol.offers import Duplicate, Fresh, NackReason, Offer, Refused
from tests.ingest.offers import offer_of

SHOP = SourceId("shop")


def take(dedup: Dedup, *offers: Offer) -> list[Fresh | Duplicate | Refused]:
    """Judge offers as one group that becomes durable."""
    decisions = dedup.decide(offers)
    dedup.record([decision for decision in decisions if isinstance(decision, Fresh)])
    return decisions


def fresh_sequences(decision: Fresh | Duplicate | Refused) -> list[int]:
    if not isinstance(decision, Fresh):
        return []
    return [sequence for sequence in decision.offer.sequences if sequence > decision.after_sequence]


# -- marks


def test_first_batch_of_a_source_is_fresh_from_sequence_zero():
    (decision,) = take(Dedup(), offer_of(0, 1, 2))
    assert fresh_sequences(decision) == [0, 1, 2]
    assert isinstance(decision, Fresh)
    assert decision.changes == 3


def test_batch_taken_before_is_a_duplicate_up_to_the_mark():
    dedup = Dedup()
    take(dedup, offer_of(1, 2, 3))
    assert take(dedup, offer_of(1, 2)) == [Duplicate(3)]
    assert take(dedup, offer_of(3)) == [Duplicate(3)]


def test_overlapping_batch_is_trimmed_not_refused():
    dedup = Dedup()
    take(dedup, offer_of(1, 2, 3))
    (decision,) = take(dedup, offer_of(2, 3, 4, 7))
    assert fresh_sequences(decision) == [4, 7]
    assert isinstance(decision, Fresh)
    assert decision.changes == 2
    assert dedup.mark(SHOP) == Position(0, 7)


def test_deciding_changes_nothing():
    dedup = Dedup()
    offers = [offer_of(1, 2), offer_of(3)]
    assert dedup.decide(offers) == dedup.decide(offers)
    assert dedup.mark(SHOP) is None


def test_offers_of_one_group_are_judged_one_after_the_other():
    decisions = Dedup().decide([offer_of(1, 2), offer_of(1, 2), offer_of(2, 3)])
    assert [fresh_sequences(decision) for decision in decisions] == [[1, 2], [], [3]]
    assert decisions[1] == Duplicate(2)


def test_sources_do_not_touch_each_other():
    dedup = Dedup()
    take(dedup, offer_of(1, 2, 3, source="a"))
    (decision,) = take(dedup, offer_of(1, source="b"))
    assert fresh_sequences(decision) == [1]
    assert dedup.marks() == {"a": Position(0, 3), "b": Position(0, 1)}


def missing(decision: Fresh | Duplicate | Refused) -> int | None:
    """The resume point of a batch that was refused because changes before it are missing."""
    assert isinstance(decision, Refused)
    assert (decision.reason, decision.retry) == (NackReason.MISSING_CHANGES, True)
    return decision.last_durable_sequence


def test_batch_is_refused_while_the_change_before_it_is_missing():
    dedup = Dedup()
    assert missing(*take(dedup, offer_of(11, 12, previous=10))) is None
    assert missing(*take(dedup, offer_of(1, previous=0))) is None, "0 is a sequence like any other"
    take(dedup, offer_of(1, 5))
    assert missing(*take(dedup, offer_of(11, 12, previous=10))) == 5
    (decision,) = take(dedup, offer_of(9, 11, 12, previous=5))
    assert fresh_sequences(decision) == [9, 11, 12]
    assert missing(*take(dedup, offer_of(1, epoch=1, previous=0))) is None, "each epoch counts for itself"


def test_change_that_the_tables_have_may_come_before_a_batch():
    dedup = Dedup()
    take(dedup, offer_of(1))
    assert missing(*take(dedup, offer_of(11, previous=10, committed=9))) == 9
    (decision,) = take(dedup, offer_of(11, previous=10, committed=10))
    assert fresh_sequences(decision) == [11]


def test_batches_in_flight_behind_one_that_is_missing_changes_are_refused_too():
    decisions = Dedup().decide([offer_of(11, previous=10), offer_of(12, previous=11), offer_of(13), offer_of(1, 11)])
    assert [missing(decision) for decision in decisions[:2]] == [None, None]
    assert isinstance(decisions[2], Refused), "also if it does not say what was before it"
    assert isinstance(decisions[3], Fresh)


def test_batch_that_follows_a_known_change_is_not_blocked_by_one_that_was_refused():
    dedup = Dedup()
    take(dedup, offer_of(1))
    dedup.block([offer_of(5, 20)])
    assert isinstance(*take(dedup, offer_of(5, 7, previous=1)), Fresh), "the source has divided it differently"
    assert isinstance(*take(dedup, offer_of(20, 21, previous=7)), Fresh)


def test_new_epoch_starts_its_sequences_over():
    dedup = Dedup()
    take(dedup, offer_of(100, 200))
    (decision,) = take(dedup, offer_of(1, 2, epoch=1))
    assert fresh_sequences(decision) == [1, 2]
    assert dedup.mark(SHOP) == Position(1, 2)


def test_epoch_that_is_over_is_refused_for_good():
    dedup = Dedup()
    take(dedup, offer_of(1, epoch=3))
    (decision,) = take(dedup, offer_of(500, epoch=2))
    assert decision == Refused(NackReason.INVALID_SEQUENCE, "epoch is over: epoch=2 known=3", retry=False)


def test_offer_without_changes_moves_no_mark():
    dedup = Dedup()
    assert take(dedup, offer_of())[0].position == Position(0, -1)
    take(dedup, offer_of(1, 2))
    assert take(dedup, offer_of())[0].changes == 0
    assert dedup.mark(SHOP) == Position(0, 2)


def test_restoring_never_moves_a_mark_back():
    dedup = Dedup()
    for position in (Position(0, 5), Position(1, 2), Position(0, 9), Position(1, 1)):
        dedup.restore(SHOP, position)
    assert dedup.mark(SHOP) == Position(1, 2)


def test_marks_never_take_more_than_their_room():
    dedup = Dedup(marks_max_bytes=10_000)
    name = '"' * 10 + "ß" * 10
    offers = [offer_of(2**63 - 1, source=f"{name}{number}", epoch=2**63 - 1) for number in range(500)]
    for group in (offers[:30], offers[30:]):
        decisions = take(dedup, *group)
    assert len(encode_head(dedup.marks(), {})) <= 10_000
    assert len(dedup.marks()) >= 50
    assert isinstance(decisions[-1], Refused)
    assert not decisions[-1].retry
    assert decisions[-1].message.startswith("no room for another source: known=")
    assert isinstance(*take(dedup, offers[0]), Duplicate), "known sources go on"


# -- gaps


def test_nothing_overtakes_a_refused_batch():
    dedup = Dedup()
    dedup.block([offer_of(5, 6)])
    (decision,) = take(dedup, offer_of(7, 8))
    assert isinstance(decision, Refused)
    assert (decision.reason, decision.retry) == (NackReason.INVALID_SEQUENCE, True)
    assert "expected_sequence=5 refused_to=6 first_sequence=7" in decision.message
    assert dedup.mark(SHOP) is None


def test_refused_batch_is_still_new_when_it_returns_and_lets_the_next_ones_pass():
    dedup = Dedup()
    dedup.block([offer_of(5, 6), offer_of(7, 8)])
    assert fresh_sequences(*take(dedup, offer_of(5, 6))) == [5, 6]
    assert fresh_sequences(*take(dedup, offer_of(7, 8))) == [7, 8]
    assert fresh_sequences(*take(dedup, offer_of(9))) == [9]


def test_refused_batch_and_the_next_may_return_in_one_group():
    dedup = Dedup()
    dedup.block([offer_of(5, 6), offer_of(7, 8)])
    decisions = take(dedup, offer_of(5, 6), offer_of(7, 8), offer_of(9))
    assert [fresh_sequences(decision) for decision in decisions] == [[5, 6], [7, 8], [9]]


def test_every_refused_batch_has_to_return_not_the_first_alone():
    dedup = Dedup()
    dedup.block([offer_of(5), offer_of(7), offer_of(9)])
    assert fresh_sequences(*take(dedup, offer_of(5))) == [5]
    for early in (offer_of(9), offer_of(11)):
        assert isinstance(*take(dedup, early), Refused)
    assert fresh_sequences(*take(dedup, offer_of(7, 9))) == [7, 9]
    assert fresh_sequences(*take(dedup, offer_of(11))) == [11]


def test_refused_batch_that_overlaps_the_mark_leaves_its_gap_at_its_first_new_change():
    dedup = Dedup()
    take(dedup, offer_of(0))
    dedup.block([offer_of(0, 1)])
    assert isinstance(*take(dedup, offer_of(2)), Refused)
    assert fresh_sequences(*take(dedup, offer_of(1, 2))) == [1, 2]


def test_refused_batch_without_anything_new_leaves_no_gap():
    dedup = Dedup()
    take(dedup, offer_of(5))
    dedup.block([offer_of(4, 5)])
    assert not dedup.unblock(SHOP)


def test_gap_of_one_source_does_not_hold_another():
    dedup = Dedup()
    dedup.block([offer_of(5, source="a")])
    assert fresh_sequences(*take(dedup, offer_of(9, source="b"))) == [9]


def test_batch_taken_before_is_a_duplicate_despite_a_gap():
    dedup = Dedup()
    take(dedup, offer_of(1, 2))
    dedup.block([offer_of(5)])
    assert take(dedup, offer_of(1, 2)) == [Duplicate(2)]


def test_source_that_started_over_is_not_held_by_what_it_left_behind():
    dedup = Dedup()
    dedup.block([offer_of(5)])
    assert fresh_sequences(*take(dedup, offer_of(1, 2, epoch=1))) == [1, 2]
    assert fresh_sequences(*take(dedup, offer_of(9, epoch=1))) == [9]


def test_connecting_anew_releases_the_gaps_and_says_whether_there_were_any():
    dedup = Dedup()
    assert not dedup.unblock(SHOP)
    dedup.block([offer_of(5), offer_of(7)])
    assert dedup.unblock(SHOP)
    assert fresh_sequences(*take(dedup, offer_of(9))) == [9]


def test_part_of_a_refused_batch_does_not_close_its_gap():
    dedup = Dedup()
    dedup.block([offer_of(5, 6, 7, 8)])
    assert fresh_sequences(*take(dedup, offer_of(5, 6))) == [5, 6]
    (decision,) = take(dedup, offer_of(9, 10))
    assert isinstance(decision, Refused)
    assert decision.message.endswith("expected_sequence=7 refused_to=8 first_sequence=9")
    assert fresh_sequences(*take(dedup, offer_of(7, 8, 9))) == [7, 8, 9]
    assert not dedup.is_blocked(SHOP)


def test_repeat_that_overlaps_a_refused_batch_does_not_close_its_gap_early():
    dedup = Dedup()
    take(dedup, offer_of(3, 4))
    dedup.block([offer_of(5, 6, 7)])
    assert fresh_sequences(*take(dedup, offer_of(3, 4, 5))) == [5]
    assert isinstance(*take(dedup, offer_of(8)), Refused)
    assert fresh_sequences(*take(dedup, offer_of(6, 7, 8))) == [6, 7, 8]


def test_refused_batch_that_left_numbers_out_has_to_return_from_its_beginning():
    dedup = Dedup()
    dedup.block([offer_of(10, 20, 30)])
    assert fresh_sequences(*take(dedup, offer_of(10, 20))) == [10, 20]
    (decision,) = take(dedup, offer_of(30))
    assert isinstance(decision, Refused), "25 may have been in the batch, for all that is known"
    assert "expected_sequence=10 refused_to=30" in decision.message
    assert fresh_sequences(*take(dedup, offer_of(10, 20, 30))) == [30]
    assert fresh_sequences(*take(dedup, offer_of(40))) == [40]


# -- against a model


def test_batch_refused_in_a_group_holds_those_behind_it_in_the_same_group():
    dedup = Dedup()
    take(dedup, offer_of(0, 3))
    dedup.block([offer_of(6)])
    decisions = take(dedup, offer_of(9, 12, 15, 18), offer_of(6, 9, 12, 15), offer_of(33))
    assert [type(decision) for decision in decisions] == [Refused, Fresh, Refused]


class Client:
    """A sender of one source that numbers its changes 0, 1, 2 ... and has many batches in flight.

    It goes back to the first change of a batch that it hears was refused, as the protocol asks, and to the durable
    position when it connects. Its truth is a set: the changes that it holds an ack for.
    """

    def __init__(self, source: str) -> None:
        self.source = SourceId(source)
        self.epoch = 0
        self.next = 0
        self.acked: set[tuple[int, int]] = set()
        self.inbox: list[tuple[Offer, Fresh | Duplicate | Refused]] = []

    def batch(self, *, back: int, size: int) -> Offer:
        start = max(0, self.next - back)  # overlaps and repeats
        self.next = max(self.next, start + size)
        return offer_of(*range(start, start + size), source=self.source, epoch=self.epoch)

    def hear(self, count: int) -> None:
        heard, self.inbox = self.inbox[:count], self.inbox[count:]
        for offer, answer in heard:
            if isinstance(answer, Refused):
                self.next = min(self.next, offer.first_sequence)
            else:
                self.acked |= {(offer.epoch, sequence) for sequence in offer.sequences}

    def connect(self, mark: Position | None, *, new_epoch: bool) -> None:
        self.inbox = []  # answers on the way are lost with the connection
        self.epoch += new_epoch
        self.next = mark.sequence + 1 if mark is not None and mark.epoch == self.epoch else 0


class Server:
    """What the intake does, without a log: groups are taken off the queue, and recorded or refused as a whole."""

    def __init__(self) -> None:
        self.dedup = Dedup()
        self.queue: list[tuple[Client, Offer]] = []
        self.recorded: list[tuple[SourceId, int, int]] = []

    def connect(self, client: Client, *, new_epoch: bool) -> None:
        if self.dedup.unblock(client.source):
            self.queue = [item for item in self.queue if item[0] is not client]
        client.connect(self.dedup.mark(client.source), new_epoch=new_epoch)

    def admit(self, count: int, *, log_is_full: bool) -> None:
        group, self.queue = self.queue[:count], self.queue[count:]
        offers = [offer for _, offer in group]
        decisions = self.dedup.decide(offers)
        fresh = [decision for decision in decisions if isinstance(decision, Fresh)]
        if fresh and log_is_full:
            full = Refused(NackReason.BUFFER_FULL, "log has used up its budget", retry=True)
            alone = [self.dedup.decide([offer])[0] for offer in offers]
            decisions = [full if isinstance(item, Fresh) else item for item in alone]
        else:
            self.dedup.record(fresh)
            self.recorded += [
                (item.offer.source, item.offer.epoch, sequence) for item in fresh for sequence in fresh_sequences(item)
            ]
        self.dedup.block(
            offer for offer, item in zip(offers, decisions, strict=True) if isinstance(item, Refused) and item.retry
        )
        for (client, offer), decision in zip(group, decisions, strict=True):
            if offer.epoch == client.epoch:
                client.inbox.append((offer, decision))

    def restart(self, clients: list[Client]) -> None:
        self.queue = []
        marks, _ = decode_head(encode_head(self.dedup.marks(), {}))
        self.dedup = Dedup()
        for source, position in marks.items():
            self.dedup.restore(source, position)
        for client in clients:
            self.connect(client, new_epoch=False)


ACTIONS = st.one_of(
    st.tuples(st.just("send"), st.integers(0, 1), st.sampled_from([0, 0, 0, 1, 3]), st.integers(1, 4)),
    st.tuples(st.just("send"), st.integers(0, 1), st.sampled_from([0, 0, 0, 1, 3]), st.integers(1, 4)),
    st.tuples(st.just("admit"), st.integers(1, 4), st.sampled_from([False, False, True])),
    st.tuples(st.just("hear"), st.integers(0, 1), st.integers(1, 4)),
    st.tuples(st.just("connect"), st.integers(0, 1), st.sampled_from([False, False, False, True])),
    st.tuples(st.just("restart")),
)


def play(actions) -> tuple[Server, list[Client]]:
    server, clients = Server(), [Client("a"), Client("b")]
    for action in actions:
        match action:
            case "send", who, back, size:
                server.queue.append((clients[who], clients[who].batch(back=back, size=size)))
            case "admit", count, log_is_full:
                server.admit(count, log_is_full=log_is_full)
            case "hear", who, count:
                clients[who].hear(count)
            case "connect", who, new_epoch:
                server.connect(clients[who], new_epoch=new_epoch)
            case ("restart",):
                server.restart(clients)
    return server, clients


@settings(max_examples=2_000, deadline=None)
@given(actions=st.lists(ACTIONS, max_size=40))
def test_what_was_acked_is_recorded_once_in_order_and_nothing_passes_a_gap(actions):
    server, clients = play(actions)
    for client in clients:
        client.hear(len(client.inbox))
        own = [(epoch, sequence) for source, epoch, sequence in server.recorded if source == client.source]
        assert own == sorted(set(own)), "each change once, in order"
        assert client.acked <= set(own), "what was acked is recorded"
        for epoch in {epoch for epoch, _ in own}:
            sequences = [sequence for each, sequence in own if each == epoch]
            assert sequences == list(range(len(sequences))), "nothing was accepted over a gap"


@settings(max_examples=300, deadline=None)
@given(actions=st.lists(ACTIONS, max_size=30))
def test_whatever_was_refused_the_source_can_always_go_on(actions):
    server, clients = play(actions)
    server.admit(len(server.queue), log_is_full=False)
    for client in clients:
        client.hear(len(client.inbox))
        last = client.batch(back=0, size=3)
        (decision,) = server.dedup.decide([last])
        assert not isinstance(decision, Refused)
