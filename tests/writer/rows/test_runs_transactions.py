"""Where the log may be cut so that no transaction is torn, and how long the end of one is waited for."""

from __future__ import annotations

import itertools
import random

import pytest

from lakefeed.contract.changes import SourceId
from lakefeed.writer.rows.runs import OpenTransactions, SplitReason, TransactionGate, cut_whole
from lakefeed.writer.wal.payload import Encoding, Frame, encode_frame
from lakefeed.writer.wal.records import Record

SHOP, BANK = SourceId("shop"), SourceId("bank")


def record(offset: int, source: str, transaction: str = "") -> Record:
    frame = Frame(SourceId(source), 0, -1, offset, 5, Encoding.JSON_BATCH, b"{}", open_transaction=transaction)
    return Record(offset, b"".join(encode_frame(frame)))


def records(*texts: str, first: int = 10) -> list[Record]:
    """Make records of words such as `shop` or `shop:t1`, which leaves transaction t1 open."""
    return [record(first + number, *text.split(":")) for number, text in enumerate(texts)]


def cut(transactions: OpenTransactions, *texts: str, max_bytes: int = 10_000):
    made = records(*texts)
    parts = cut_whole(made, transactions, max_bytes=max_bytes, next_offset=10 + len(made))
    return [([each.offset for each in part.records], part.next_offset, part.open_transactions) for part in parts]


def test_records_without_transactions_are_one_part():
    assert cut(OpenTransactions(), "shop", "bank", "shop") == [([10, 11, 12], 13, {})]


def test_nothing_read_is_one_empty_part():
    assert cut(OpenTransactions()) == [([], 10, {})]


def test_records_are_cut_after_the_last_record_without_an_open_transaction():
    assert cut(OpenTransactions(), "shop:a", "bank", "shop", "bank", "shop:b", "bank") == [
        ([10, 11, 12, 13], 14, {}),
        ([14, 15], 16, {SHOP: "b"}),
    ]


def test_place_counts_only_if_no_source_has_an_open_transaction():
    assert cut(OpenTransactions(), "shop:a", "bank:x", "shop", "bank") == [([10, 11, 12, 13], 14, {})]
    assert cut(OpenTransactions(), "shop:a", "bank:x", "shop") == [([10, 11, 12], 13, {BANK: "x"})]


def test_transaction_that_began_in_an_earlier_reading_is_still_open():
    transactions = OpenTransactions()
    assert cut(transactions, "shop:a") == [([10], 11, {SHOP: "a"})]
    assert cut(transactions, "bank", "shop:a", "shop", "shop:b") == [([10, 11, 12], 13, {}), ([13], 14, {SHOP: "b"})]


def test_parts_cut_by_size_name_the_transactions_open_after_them():
    size = len(records("shop:a")[0].payload)
    parts = cut(OpenTransactions(), "shop:a", "shop:a", "shop", max_bytes=size)
    assert [(offsets, awaited) for offsets, _, awaited in parts] == [
        ([10], {SHOP: "a"}),
        ([11], {SHOP: "a"}),
        ([12], {}),
    ]


def test_given_up_transaction_is_not_waited_for_until_another_begins():
    transactions = OpenTransactions()
    cut(transactions, "shop:a")
    transactions.give_up({SHOP: "a"})
    assert cut(transactions, "shop:a", "bank:x", "bank", "bank:y") == [([10, 11, 12], 13, {}), ([13], 14, {BANK: "y"})]
    assert cut(transactions, "bank", "shop:b") == [([10], 11, {}), ([11], 12, {SHOP: "b"})]


def test_transaction_of_a_name_that_was_given_up_once_is_waited_for_again():
    transactions = OpenTransactions()
    cut(transactions, "shop:a")
    transactions.give_up({SHOP: "a"})
    cut(transactions, "shop")
    assert cut(transactions, "shop:a") == [([10], 11, {SHOP: "a"})]


@pytest.fixture
def gate() -> TransactionGate[int]:
    return TransactionGate(OpenTransactions(), max_bytes=100, max_wait_s=10.0)


def test_gate_lets_runs_pass_together_once_nothing_is_open(gate):
    assert gate.take(1, {}, size_bytes=40, now=0.0) == [1]
    assert gate.take(2, {SHOP: "a"}, size_bytes=40, now=0.0) == []
    assert gate.take(3, {SHOP: "a"}, size_bytes=40, now=1.0) == []
    assert (gate.held_bytes, gate.wait_s(now=4.0)) == (80, 6.0)
    assert gate.take(4, {}, size_bytes=40, now=2.0) == [2, 3, 4]
    assert (gate.held_bytes, gate.wait_s(now=4.0), gate.limit_reached(now=99.0)) == (0, None, None)


def test_gate_waits_for_no_longer_than_it_may(gate):
    gate.take(1, {SHOP: "a"}, size_bytes=40, now=5.0)
    assert gate.limit_reached(now=14.9) is None
    assert gate.limit_reached(now=15.0) is SplitReason.TOO_LONG
    assert gate.give_up() == [1]
    assert gate.take(2, {SHOP: "a"}, size_bytes=40, now=16.0) == [2], "it is not waited for again"
    assert gate.take(3, {SHOP: "a", BANK: "x"}, size_bytes=40, now=16.0) == []


def test_gate_holds_no_more_than_it_may(gate):
    gate.take(1, {SHOP: "a"}, size_bytes=100, now=0.0)
    assert gate.limit_reached(now=0.0) is None
    gate.take(2, {SHOP: "a"}, size_bytes=1, now=0.0)
    assert gate.limit_reached(now=0.0) is SplitReason.TOO_LARGE
    assert gate.give_up() == [1, 2]


@pytest.mark.parametrize("seed", range(50))
def test_what_passes_the_gate_together_is_whole_transactions(seed):
    """Several sources send transactions in parts, in any interleaving, read in any cuts."""
    rng = random.Random(seed)
    log = random_log(rng)
    transactions = OpenTransactions()
    gate = TransactionGate(transactions, max_bytes=10**9, max_wait_s=10**9)
    passed = []
    position = 0
    while position < len(log):
        end = min(len(log), position + rng.randint(1, 6))
        made = [record(offset, *log[offset][:2]) for offset in range(position, end)]
        parts = cut_whole(made, transactions, max_bytes=rng.choice([1, 10_000]), next_offset=end)
        passed += [gate.take(part.records, part.open_transactions, size_bytes=1, now=0.0) for part in parts]
        position = end
    batches = [[each.offset for each in itertools.chain(*released)] for released in passed]
    assert [offset for batch in batches for offset in batch] == list(range(len(log))), "all, in order"
    where = {offset: number for number, batch in enumerate(batches) for offset in batch}
    parts_of: dict[str, set[int]] = {}
    for offset, (_, _, own) in enumerate(log):
        parts_of.setdefault(own, set()).add(where[offset])
    assert all(len(found) == 1 for found in parts_of.values())


def random_log(rng: random.Random) -> list[tuple[str, str, str]]:
    """Give (source, transaction open behind it, transaction it belongs to) of each record; all end."""
    left = {source: [rng.randint(1, 4) for _ in range(rng.randint(1, 8))] for source in ("a", "b", "c")}
    log = []
    while any(left.values()):
        source = rng.choice([each for each, sizes in left.items() if sizes])
        own = f"{source}{len(left[source])}"
        left[source][0] -= 1
        is_open = left[source][0] > 0
        if not is_open:
            left[source].pop(0)
        log.append((source, own if is_open else "", own))
    return log
