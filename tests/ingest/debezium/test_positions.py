"""What comes again is told from what is new, and nothing that is new is ever told to be a repeat."""

from __future__ import annotations

import itertools
import random

import msgspec
import pytest

from lakefeed.ingest.debezium.events import Change, DebeziumEvent, SourceOperation, TransactionMark, TransactionStatus
from lakefeed.ingest.debezium.positions import Positions, key_of
from tests.ingest.debezium.envelopes import envelope, mark, read, streamed
from tests.ingest.debezium.recordings import FAULTS, load_events

SEED = 20261116


def flat(variant: str) -> list[DebeziumEvent]:
    return list(itertools.chain.from_iterable(load_events(variant)))


def resume_points(events: list[DebeziumEvent]) -> list[int]:
    """Find where a restarted server can begin: a run of equal keys is sent again from its start or not at all."""
    points, last = [], None
    for index, event in enumerate(events):
        key = key_of(event) if isinstance(event, Change) else None
        if key is not None and key != last:
            points.append(index)
            last = key
    return points


def resent_from(events: list[DebeziumEvent], start: int, stop: int, *, marks: bool) -> list[DebeziumEvent]:
    """What a restarted server sends again: reads are not among it, and a transaction begins anew where it is cut."""
    again = [event for event in events[start:stop] if getattr(event, "operation", None) is not SourceOperation.READ]
    transaction = events[start].transaction
    return [TransactionMark(TransactionStatus.BEGIN, transaction), *again] if marks and transaction else again


def in_batches(events: list[DebeziumEvent], rng: random.Random) -> list[list[DebeziumEvent]]:
    batches, start = [], 0
    while start < len(events):
        size = rng.randint(1, 9)
        batches.append(events[start : start + size])
        start += size
    return batches


class Receiver:
    """Takes what is new and, like a service that is killed all the time, lives from its stored state alone."""

    def __init__(self) -> None:
        self.state = msgspec.json.encode(Positions())
        self.taken: list[Change] = []
        self.requests = 0

    def receive(self, events: list[DebeziumEvent], *, run_id: str = "", digest: str = "") -> None:
        self.requests += 1
        plan = msgspec.json.decode(self.state, type=Positions).plan(
            events, run_id=run_id, digest=digest or str(self.requests)
        )
        self.taken += [events[index] for index in plan.fresh]
        self.state = msgspec.json.encode(plan.after)


@pytest.mark.parametrize("variant", ["v1", "v2", "v3b", "v5"])
@pytest.mark.parametrize(("run_ids", "marks"), [(True, True), (True, False), (False, True)])
def test_recording_is_taken_once_through_many_kills(variant, run_ids, marks):
    rng = random.Random(f"{SEED} {variant} {run_ids} {marks}")
    events = [event for event in flat(variant) if marks or isinstance(event, Change)]
    points = resume_points(events)
    receiver = Receiver()
    sent, run = 0, 1
    while sent < len(events):
        stop = min(sent + rng.randint(1, 40), len(events))
        for batch in in_batches(events[sent:stop], rng):
            receiver.receive(batch, run_id=f"run {run}" if run_ids else "")
        sent = stop
        before = [point for point in points if point <= sent and point > sent - 60]
        if before and sent > points[0]:
            run += 1
            again = resent_from(events, rng.choice(before), sent, marks=marks)
            for batch in in_batches(again, rng):
                receiver.receive(batch, run_id=f"run {run}" if run_ids else "")

    assert receiver.taken == [event for event in events if isinstance(event, Change)]
    assert run > 5


def test_keys_never_fall_where_lsn_does():
    changes = [event for event in flat("v2") if isinstance(event, Change) and key_of(event)]
    keys = [key_of(change) for change in changes]
    lsns = [change.origin.lsn for change in changes]

    assert keys == sorted(keys)
    assert lsns != sorted(lsns)


def test_transaction_cut_by_a_kill_is_taken_once_as_recorded():
    receiver = Receiver()
    ids = []

    for run in ("kill_9_in_transaction_first_run", "kill_9_in_transaction_second_run"):
        for entry in FAULTS[run]:
            if isinstance(entry[0], str):
                receiver.receive(read(mark(*entry)), run_id=run)
            else:
                row, (commit, lsn), tx_id, _, _ = entry
                receiver.receive(read(streamed(commit, int(lsn), row, txId=tx_id)), run_id=run)
    ids = [change.row_id for change in receiver.taken]

    assert ids == [str(number) for number in range(1, 17)]


def test_run_of_equal_keys_that_was_cut_goes_on_behind_what_came():
    receiver = Receiver()
    copied = [streamed(90, 100, row) for row in range(12)]

    receiver.receive(read(mark("BEGIN", "5:100"), *copied[:5]))
    receiver.receive(read(mark("BEGIN", "5:100"), *copied))

    assert [change.row_id for change in receiver.taken] == [str(row) for row in range(12)]


def test_equal_rows_of_one_copy_are_all_new():
    receiver = Receiver()

    receiver.receive(read(mark("BEGIN", "5:100"), *[streamed(90, 100)] * 3))
    receiver.receive(read(*[streamed(90, 100)] * 3))

    assert len(receiver.taken) == 6


def test_run_that_a_new_server_continues_in_its_middle_is_not_taken_for_its_start():
    receiver = Receiver()

    receiver.receive(read(streamed(90, 100, 1), streamed(90, 100, 2)), run_id="a")
    receiver.receive(read(streamed(90, 100, 3), streamed(90, 100, 4)), run_id="b")

    assert [change.row_id for change in receiver.taken] == ["1", "2", "3", "4"]


def test_first_transaction_after_a_snapshot_is_below_what_follows_it():
    receiver = Receiver()
    first, second = streamed(None, 100, 1), streamed(120, 130, 2)

    receiver.receive(read(first, second), run_id="a")
    receiver.receive(read(first, second), run_id="b")

    assert [change.row_id for change in receiver.taken] == ["1", "2"]


def test_stream_after_a_new_snapshot_is_new_although_it_starts_without_a_commit():
    receiver = Receiver()

    receiver.receive(read(streamed(120, 130, 1)), run_id="a")
    receiver.receive(read(streamed(None, 200, 2), streamed(210, 215, 3)), run_id="b")

    assert [change.row_id for change in receiver.taken] == ["1", "2", "3"]


def test_transaction_that_was_open_during_a_message_outside_of_it_is_new():
    receiver = Receiver()
    message = envelope("m", sequence='["110","110"]', lsn=110, txId=None, schema="", table="")
    message["message"] = {"prefix": "p", "content": ""}

    receiver.receive(read(streamed(90, 95, 1)), run_id="a")
    receiver.receive(read(message), run_id="a")
    receiver.receive(read(streamed(110, 100, 2)), run_id="a")
    receiver.receive(read(message, streamed(110, 100, 2)), run_id="b")

    assert [change.operation.value for change in receiver.taken] == ["INSERT", "MESSAGE", "INSERT"]


def test_snapshot_that_starts_over_is_read_again():
    receiver = Receiver()
    rows = {}

    for run in ("snapshot_interrupted_first_run", "snapshot_interrupted_second_run"):
        for table, row, snapshot, lsn, status in FAULTS[run]:
            document = envelope(
                "r", after={"id": row}, table=table, snapshot=snapshot, lsn=lsn, sequence=f'[null,"{lsn}"]'
            )
            if status == 200:
                receiver.receive(read(document), run_id=run)
    for change in receiver.taken:
        rows.setdefault(change.table, []).append(change.origin.lsn)

    assert len(rows["public.a"]) == 12
    assert len(rows["public.b"]) == 8


def test_incremental_reads_between_streamed_changes_of_the_same_key_are_new():
    receiver = Receiver()
    reads = [
        envelope("r", after={"id": row}, snapshot="incremental", lsn=None, sequence='["90","100"]') for row in (1, 2, 3)
    ]

    receiver.receive(read(streamed(90, 100, 9)), run_id="a")
    receiver.receive(read(*reads, streamed(90, 100, 9)), run_id="b")

    assert [change.operation.value for change in receiver.taken] == ["INSERT", "READ", "READ", "READ"]


def test_changes_without_a_sequence_are_always_new():
    receiver = Receiver()
    change = envelope("c", after={"id": 1})

    receiver.receive(read(change, change), run_id="a")
    receiver.receive(read(change), run_id="b")

    assert len(receiver.taken) == 3


def test_same_request_from_another_run_is_no_retry():
    receiver = Receiver()

    receiver.receive(read(envelope("c", after={"id": 1})), run_id="a", digest="same")
    receiver.receive(read(envelope("c", after={"id": 1})), run_id="a", digest="same")
    receiver.receive(read(envelope("c", after={"id": 1})), run_id="b", digest="same")

    assert len(receiver.taken) == 2


def test_database_that_was_restored_from_a_backup_is_not_taken_for_a_resend():
    receiver = Receiver()
    restored = [streamed(50, 60, 3, ts_ms=2_000), streamed(50, 65, 4, ts_ms=2_000), streamed(70, 75, 5, ts_ms=2_001)]

    receiver.receive(read(streamed(90, 100, 1, ts_ms=1_000), streamed(90, 105, 2, ts_ms=1_000)), run_id="a")
    receiver.receive(read(*restored), run_id="b")
    receiver.receive(read(*restored), run_id="c")

    assert [change.row_id for change in receiver.taken] == ["1", "2", "3", "4", "5"]


def test_new_changes_are_numbered_without_holes():
    first = Positions().plan(read(streamed(90, 100, 1), streamed(90, 105, 2)))
    second = first.after.plan(read(mark("BEGIN", "5:105"), streamed(90, 105, 2), streamed(90, 110, 3)))

    assert (first.after.taken, second.after.taken) == (2, 3)
    assert (second.repeated, second.fresh) == ((1,), (2,))


def test_deciding_changes_nothing():
    positions = Positions()
    events = read(streamed(90, 100))

    assert positions.plan(events) == positions.plan(events)
    assert positions == Positions()
