"""Which changes are new: examples first, then random conversations against a model made of sets."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import given, settings
from hypothesis import strategies as st

from ingest.dedup import GAPS_MAX_PER_SOURCE, Dedup, Fresh, decode_marks
from ingest.offers import Duplicate, NackReason, Offer, Refused
from tests.ingest.offered import offer_of
from writer.changes import Position, SourceId

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


def test_marks_survive_being_written_and_read():
    dedup = Dedup()
    take(dedup, offer_of(7, source='quo"te'), offer_of(2**63 - 1, source="größe", epoch=9))
    assert decode_marks(dedup.encode_marks()) == dedup.marks()
    assert decode_marks(Dedup().encode_marks()) == {}


def test_restoring_never_moves_a_mark_back():
    dedup = Dedup()
    for position in (Position(0, 5), Position(1, 2), Position(0, 9), Position(1, 1)):
        dedup.restore(SHOP, position)
    assert dedup.mark(SHOP) == Position(1, 2)


# -- gaps


def test_nothing_overtakes_a_refused_batch():
    dedup = Dedup()
    dedup.hold([offer_of(5, 6)])
    (decision,) = take(dedup, offer_of(7, 8))
    assert isinstance(decision, Refused)
    assert (decision.reason, decision.retry) == (NackReason.INVALID_SEQUENCE, True)
    assert "expected_sequence=5 first_sequence=7" in decision.message
    assert dedup.mark(SHOP) is None


def test_refused_batch_is_still_new_when_it_returns_and_lets_the_next_ones_pass():
    dedup = Dedup()
    dedup.hold([offer_of(5, 6), offer_of(7, 8)])
    assert fresh_sequences(*take(dedup, offer_of(5, 6))) == [5, 6]
    assert fresh_sequences(*take(dedup, offer_of(7, 8))) == [7, 8]
    assert fresh_sequences(*take(dedup, offer_of(9))) == [9]


def test_refused_batch_and_the_next_may_return_in_one_group():
    dedup = Dedup()
    dedup.hold([offer_of(5, 6), offer_of(7, 8)])
    decisions = take(dedup, offer_of(5, 6), offer_of(7, 8), offer_of(9))
    assert [fresh_sequences(decision) for decision in decisions] == [[5, 6], [7, 8], [9]]


def test_every_refused_batch_has_to_return_not_the_first_alone():
    dedup = Dedup()
    dedup.hold([offer_of(5), offer_of(7), offer_of(9)])
    assert fresh_sequences(*take(dedup, offer_of(5))) == [5]
    for early in (offer_of(9), offer_of(11)):
        assert isinstance(*take(dedup, early), Refused)
    assert fresh_sequences(*take(dedup, offer_of(7, 9))) == [7, 9]
    assert fresh_sequences(*take(dedup, offer_of(11))) == [11]


def test_gap_of_one_source_does_not_hold_another():
    dedup = Dedup()
    dedup.hold([offer_of(5, source="a")])
    assert fresh_sequences(*take(dedup, offer_of(9, source="b"))) == [9]


def test_batch_taken_before_is_a_duplicate_despite_a_gap():
    dedup = Dedup()
    take(dedup, offer_of(1, 2))
    dedup.hold([offer_of(5)])
    assert take(dedup, offer_of(1, 2)) == [Duplicate(2)]


def test_connecting_anew_releases_the_gaps_and_says_whether_there_were_any():
    dedup = Dedup()
    assert not dedup.release(SHOP)
    dedup.hold([offer_of(5), offer_of(7)])
    assert dedup.release(SHOP)
    assert fresh_sequences(*take(dedup, offer_of(9))) == [9]


def test_gaps_kept_for_one_source_are_bounded_and_the_first_ones_stay():
    dedup = Dedup()
    dedup.hold(offer_of(sequence) for sequence in range(GAPS_MAX_PER_SOURCE + 100, 0, -1))
    assert len(dedup._gaps[SHOP]) == GAPS_MAX_PER_SOURCE
    decision = take(dedup, offer_of(2))[0]
    assert isinstance(decision, Refused)
    assert "expected_sequence=1 " in decision.message


# -- against a model


class Client:
    """A well-behaved sender of one source: numbered changes in batches, many in flight, resends what was refused.

    Its truth is a set: which positions it holds an ack for. It sends nothing above a change that it knows to be
    refused before it has sent that change again, which is all that the protocol asks of it.
    """

    def __init__(self, source: str) -> None:
        self.source = source
        self.epoch = 0
        self.next = 0
        self.acked: set[tuple[int, int]] = set()

    def batches(self, draw: Callable[[st.SearchStrategy], object]) -> list[Offer]:
        made = []
        for _ in range(draw(st.integers(1, 4))):
            start = max(0, self.next - draw(st.sampled_from([0, 0, 0, 1, 3])))  # overlaps and repeats
            stop = start + draw(st.integers(1, 4))
            step = draw(st.sampled_from([1, 1, 2]))  # sequences may have holes, but always the same ones
            sequences = [each * step for each in range(start, stop)] if step == 1 else list(range(start, stop))
            made.append(offer_of(*sequences, source=self.source, epoch=self.epoch))
            self.next = max(self.next, stop)
        return made

    def on_answer(self, offer: Offer, answer: Fresh | Duplicate | Refused) -> None:
        if isinstance(answer, Refused):
            self.next = min(self.next, offer.first_sequence)
        else:
            self.acked |= {(offer.epoch, sequence) for sequence in offer.sequences}


@settings(max_examples=2_000, deadline=None)
@given(data=st.data())
def test_what_was_acked_is_recorded_once_in_order_and_nothing_passes_a_gap(data):
    dedup = Dedup()
    clients = [Client(name) for name in ("a", "b")]
    recorded: dict[str, list[tuple[int, int]]] = {client.source: [] for client in clients}

    for _ in range(data.draw(st.integers(1, 12))):
        action = data.draw(st.sampled_from(["send", "send", "send", "send", "connect", "new_epoch", "restart"]))
        client = data.draw(st.sampled_from(clients))
        if action == "restart":
            restarted = Dedup()
            for source, position in decode_marks(dedup.encode_marks()).items():
                restarted.restore(source, position)
            dedup = restarted
        if action in ("connect", "restart", "new_epoch"):
            for each in clients if action == "restart" else [client]:
                client_connects(dedup, each, new_epoch=action == "new_epoch")
        if action == "send":
            group = [offer for each in {client, data.draw(st.sampled_from(clients))} for offer in each.batches(data.draw)]
            admit(dedup, group, clients, recorded, log_is_full=data.draw(st.sampled_from([False, False, True])))

    for client in clients:
        log = recorded[client.source]
        assert log == sorted(set(log)), "once each, and in order"
        assert client.acked <= set(log), "what was acked is there"
        for epoch in range(client.epoch + 1):
            sequences = [sequence for known, sequence in log if known == epoch]
            assert sequences == list(range(len(sequences))), "nothing was accepted over a gap"


def client_connects(dedup: Dedup, client: Client, *, new_epoch: bool) -> None:
    """Let a client start from what it is told is durable, or from nothing in a new epoch."""
    dedup.release(SourceId(client.source))
    mark = dedup.mark(SourceId(client.source))
    if new_epoch:
        client.epoch += 1
    client.next = mark.sequence + 1 if mark is not None and mark.epoch == client.epoch else 0


def admit(dedup, group, clients, recorded, *, log_is_full) -> None:
    """Do what the intake does with a group; a client hears its answers after the whole group was sent."""
    decisions = dedup.decide(group)
    fresh = [decision for decision in decisions if isinstance(decision, Fresh)]
    if log_is_full and fresh:
        dedup.hold(item.offer for item in fresh)
        full = Refused(NackReason.BUFFER_FULL, "full", retry=True)
        alone = [dedup.decide([offer])[0] for offer in group]
        decisions = [full if isinstance(item, Fresh) else item for item in alone]
    else:
        dedup.record(fresh)
        for item in fresh:
            recorded[item.offer.source] += [(item.offer.epoch, each) for each in fresh_sequences(item)]
    for offer, decision in zip(group, decisions, strict=True):
        if isinstance(decision, Refused):
            assert decision.retry
            dedup.hold([offer])
        next(client for client in clients if client.source == offer.source).on_answer(offer, decision)
