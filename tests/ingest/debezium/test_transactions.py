"""A transaction of which something did not arrive is noticed, and no other is."""

from __future__ import annotations

import msgspec

from lakefeed.ingest.debezium.positions import Positions
from lakefeed.ingest.debezium.transactions import OPEN_MAX, IncompleteReason, TransactionTally
from tests.ingest.debezium.envelopes import mark, read, streamed
from tests.ingest.debezium.recordings import FAULTS


def change(row: int, transaction: str = "5", table: str = "t") -> dict:
    document = streamed(90, 100 + row, row, table=table)
    document["transaction"] = {"id": f"{transaction}:{100 + row}", "total_order": row, "data_collection_order": row}
    return document


def reports(*documents: dict) -> list:
    """Judge and count events one request at a time, each by a service that has just been restarted."""
    tally, positions, found = TransactionTally(), Positions(), []
    for document in documents:
        (event,) = read(document)
        plan = positions.plan([event])
        found.append(tally.observe(event, repeat=bool(plan.repeated)))
        positions, tally = plan.after, msgspec.json.decode(msgspec.json.encode(tally), type=TransactionTally)
    return [(report.reason, report.arrived, report.expected) for report in found if report]


def test_transaction_that_arrived_whole_is_not_reported():
    assert reports(mark("BEGIN", "5:101"), change(1), change(2), mark("END", "5:200", 2, t=2)) == []


def test_changes_that_are_missing_are_counted_by_table():
    tally = TransactionTally()
    events = read(
        mark("BEGIN", "5:101"), change(1), change(2, table="u"), mark("END", "5:200", 5, t=3, u=1, never_seen=1)
    )

    found = [tally.observe(event) for event in events][-1]

    assert (found.reason, found.transaction, found.arrived, found.expected) == (IncompleteReason.MISSING, "5", 2, 5)
    assert found.missing == {"public.t": 2, "public.never_seen": 1}


def test_transaction_cut_by_a_kill_is_whole_if_what_came_again_overlaps():
    documents = []
    for run in ("kill_9_in_transaction_first_run", "kill_9_in_transaction_second_run"):
        for entry in FAULTS[run]:
            if isinstance(entry[0], str):
                documents.append(mark(*entry))
            else:
                row, (commit, lsn), tx_id, transaction, order = entry
                document = streamed(commit, int(lsn), row, txId=tx_id)
                document["transaction"] = {"id": transaction, "total_order": order, "data_collection_order": order}
                documents.append(document)

    assert reports(*documents) == []


def test_copy_whose_rest_was_never_sent_is_reported_when_the_server_ends_it_with_nothing():
    found = reports(mark("BEGIN", "5:101"), change(1), change(2), mark("BEGIN", "5:101"), mark("END", "5:200", 0))

    assert found == [(IncompleteReason.INTERRUPTED, 0, 0)]


def test_copy_whose_end_never_came_is_reported_when_the_next_transaction_begins():
    found = reports(mark("BEGIN", "5:101"), change(1), mark("BEGIN", "6:300"), change(99, "6"), mark("END", "6:301", 1))

    assert found == [(IncompleteReason.UNFINISHED, 1, None)]


def test_rest_of_a_transaction_that_does_not_overlap_is_reported():
    found = reports(mark("BEGIN", "5:101"), change(1), mark("BEGIN", "5:101"), change(4), mark("END", "5:200", 1))

    assert found == [(IncompleteReason.INTERRUPTED, 1, 1)]


def test_transaction_that_is_sent_again_as_a_whole_is_not_reported():
    whole = (mark("BEGIN", "5:101"), change(1), change(2), mark("END", "5:200", 2, t=2))

    assert reports(*whole, *whole) == []


def test_end_of_a_transaction_whose_begin_was_not_seen_is_reported_only_if_changes_are_missing():
    assert reports(change(2), mark("END", "5:200", 1, t=1)) == []
    assert reports(change(2), mark("END", "5:200", 2, t=2)) == [(IncompleteReason.INTERRUPTED, 1, 2)]


def test_transaction_that_a_killed_server_left_open_is_not_reported_when_it_goes_back_to_an_earlier_one():
    earlier = (mark("BEGIN", "5:101"), change(1), mark("END", "5:200", 1))
    later = (mark("BEGIN", "6:300"), change(201, "6"), change(202, "6"))

    assert reports(*earlier, *later[:2], *earlier, *later, mark("END", "6:400", 2)) == []
    assert reports(*earlier, *later[:1], *earlier, *later, mark("END", "6:400", 2)) == []
    assert reports(*earlier, *later[:2], *earlier[:2], *earlier, *later, mark("END", "6:400", 2)) == []


def test_transaction_that_was_left_open_is_reported_once_something_newer_comes_without_it():
    earlier = (mark("BEGIN", "5:101"), change(1), mark("END", "5:200", 1))
    newest = (mark("BEGIN", "7:500"), change(401, "7"), mark("END", "7:600", 1))

    found = reports(*earlier, mark("BEGIN", "6:300"), change(201, "6"), *earlier, *newest)

    assert found == [(IncompleteReason.UNFINISHED, 1, None)]


def test_transaction_that_was_left_open_and_misses_changes_when_it_returns_is_reported():
    earlier = (mark("BEGIN", "5:101"), change(1), mark("END", "5:200", 1))
    first = (mark("BEGIN", "6:300"), change(201, "6"), change(202, "6"))
    second = (mark("BEGIN", "6:300"), change(204, "6"), mark("END", "6:400", 1))

    assert reports(*earlier, *first, *earlier, *second) == [(IncompleteReason.INTERRUPTED, 1, 1)]


def test_open_transactions_are_bounded_and_none_is_given_up_in_silence():
    tally = TransactionTally()
    begins = [mark("BEGIN", f"{number}:1") for number in range(OPEN_MAX + 5)]

    assert reports(*begins) == [(IncompleteReason.UNFINISHED, 0, None)] * 5
    for event in read(*begins):
        tally.observe(event)
    assert len(tally.unended) == OPEN_MAX


def test_all_transactions_that_were_left_open_are_reported_one_change_at_a_time():
    left = [mark("BEGIN", f"{number}:1") for number in range(3)]
    newest = (mark("BEGIN", "7:500"), change(1, "7"), change(2, "7"), change(3, "7"), change(4, "7"))

    assert reports(*left, *newest, mark("END", "7:600", 4)) == [(IncompleteReason.UNFINISHED, 0, None)] * 3


def test_tables_of_one_transaction_are_bounded_and_all_changes_counted():
    tally = TransactionTally()
    events = read(mark("BEGIN", "5:1"), *[change(row, table=f"t{row}") for row in range(1_500)])
    for event in events:
        tally.observe(event)

    assert len(tally.unended["5"].tables) == 1_000
    assert tally.observe(read(mark("END", "5:9", 1_500))[0]) is None


def open_behind(*documents: dict) -> list[str]:
    """Tell which transaction is open behind each event."""
    tally = TransactionTally()
    found = []
    for event in read(*documents):
        tally.observe(event)
        found.append(tally.open_transaction)
    return found


def test_transaction_is_open_from_its_first_change_to_its_end():
    documents = [mark("BEGIN", "5:101"), change(1), change(2), mark("END", "5:200", 2, t=2), change(3, "")]
    assert open_behind(*documents) == ["", "5", "5", "", ""]


def test_transaction_whose_begin_was_not_seen_is_not_known_to_be_open():
    assert open_behind(change(1), change(2)) == ["", ""]


def test_transaction_that_another_follows_is_open_no_more():
    documents = [mark("BEGIN", "5:101"), change(1), mark("BEGIN", "6:110"), change(2, "6"), mark("END", "6:120", 1)]
    assert open_behind(*documents) == ["", "5", "", "6", ""]
