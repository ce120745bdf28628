"""The texts of ledgers and totals, and how they add up."""

from __future__ import annotations

import pytest

from lakefeed.contract.changes import SourceId
from lakefeed.contract.ledger import (
    Ledger,
    LedgerUnreadable,
    RowFacts,
    SourceTotal,
    Totals,
    join_facts,
    ledger_from_text,
    next_totals,
    totals_from_text,
)

SHOP, DEPOT = SourceId("shop"), SourceId("depot\x1fsales.orders")


def facts(first: int, last: int, checksum: int, **operations: int) -> RowFacts:
    return RowFacts(sum(operations.values()), first, last, operations, checksum)


LEDGER = Ledger({SHOP: facts(1, 9, 2**64 - 1, INSERT=3), DEPOT: facts(2, 2, 5, DELETE=1)}, {SHOP: 0})


def test_a_ledger_is_read_back_as_it_was() -> None:
    assert ledger_from_text(LEDGER.to_text()) == LEDGER
    assert ledger_from_text(None) is None


def test_totals_are_read_back_as_they_were() -> None:
    totals = Totals(is_complete=True).after(LEDGER)
    assert totals_from_text(totals.to_text()) == totals
    assert totals_from_text(None) is None


@pytest.mark.parametrize("text", ["", "{", "[]", '{"shop":{"rows":1}}', '{"shop":{"checksum":"xyz"}}'])
def test_damaged_text_is_reported(text: str) -> None:
    with pytest.raises(LedgerUnreadable):
        ledger_from_text(text)
    with pytest.raises(LedgerUnreadable):
        totals_from_text(text)


def test_facts_of_parts_add_up_modulo_two_to_the_64() -> None:
    joined = join_facts([{SHOP: facts(5, 9, 2**64 - 1, INSERT=2)}, {SHOP: facts(1, 6, 3, INSERT=1, DELETE=4)}])
    assert joined == {SHOP: facts(1, 9, 2, INSERT=3, DELETE=4)}


def test_totals_count_rows_restarts_and_replays() -> None:
    totals = Totals(is_complete=True)
    for epoch in (0, 0, 7, None):
        epochs = {} if epoch is None else {SHOP: epoch}
        totals = totals.after(Ledger({SHOP: facts(1, 2, 2**63, INSERT=2)}, epochs))
    assert totals == Totals(True, {SHOP: SourceTotal(rows=8, checksum=0, epoch=7, restarts=1, replayed=2)})
    assert not totals.sources[SHOP].has_one_epoch


def test_a_flush_without_a_ledger_leaves_totals_incomplete_for_good() -> None:
    text = next_totals(None, is_new_table=True, ledger=LEDGER)
    assert totals_from_text(text) == Totals(True, Totals(True).after(LEDGER).sources)
    text = next_totals(text, is_new_table=False, ledger=None)
    text = next_totals(text, is_new_table=False, ledger=LEDGER)
    after = totals_from_text(text)
    assert after is not None
    assert (after.is_complete, after.sources[SHOP].rows) == (False, 6)


def test_totals_that_begin_later_or_were_damaged_are_incomplete() -> None:
    for text in (None, "{"):
        totals = totals_from_text(next_totals(text, is_new_table=False, ledger=LEDGER))
        assert totals is not None
        assert not totals.is_complete
