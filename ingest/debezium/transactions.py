"""Completeness of source transactions: the changes that arrived, against the counts that END reports.

With `provide.transaction.metadata` a source sends BEGIN, the changes, then END with the number of changes, in all and
per table. Debezium can lose changes that share one position (the rows of a COPY) if it ends between them, and
only the counts reveal it.

    BEGIN ----> open ---- END: counts agree ----------------------------------------> forgotten
                 |  |---- END: fewer arrived ---------------------------------------> Report MISSING
                 |  |---- BEGIN again: the server restarted inside it;
                 |  |       END then counts the rest alone. If the rest began with a
                 |  |       change that had come before, nothing lies between; if not -> Report INTERRUPTED
                 |  `---- another begins: left open
                 |             |---- BEGIN again: a killed server had gone further back --> open
                 |             `---- a new change comes without it ---------------------> Report UNFINISHED
                 `------- a change without a BEGIN before it: counted, never reported as UNFINISHED

PostgreSQL's transactions arrive one after the other, so one is open at a time. A retried request must not be observed
again; a resent one must be, because END counts what was sent since BEGIN.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from lakefeed.ingest.debezium.events import Change, DebeziumEvent, TransactionMark, TransactionStatus

# Transactions that are remembered: the open one, and those that were left open. Each kill leaves one at most.
OPEN_MAX = 16
# Tables that are counted separately within one transaction; changes of further ones are counted in total only.
TABLES_MAX = 1_000
# The part of an open transaction's id that is kept. Ids of PostgreSQL have some twenty characters.
OPEN_ID_MAX_CHARS = 255


class IncompleteReason(enum.Enum):
    """Why a transaction may not be whole."""

    MISSING = "missing"
    INTERRUPTED = "interrupted"
    UNFINISHED = "unfinished"


@dataclass(frozen=True, slots=True)
class Report:
    """A transaction that may not be whole. `expected` is None if its end never came.

    `missing` has, per table as the source names it, how many changes END counted beyond those that arrived.
    """

    reason: IncompleteReason
    transaction: str
    arrived: int
    expected: int | None
    missing: Mapping[str, int]


@dataclass(slots=True)
class _Open:
    """A transaction whose end has not come. `arrived` counts since the last BEGIN; `is_new` if any change ever was."""

    begun: bool = False
    interrupted: bool = False
    is_new: bool = False
    arrived: int = 0
    tables: dict[str, int] = field(default_factory=dict)

    def restart(self) -> None:
        self.interrupted = self.interrupted or self.arrived > 0
        self.begun = True
        self.arrived = 0
        self.tables.clear()

    def count(self, change: Change, *, repeat: bool) -> None:
        if self.arrived == 0 and repeat:
            self.interrupted = False
        self.is_new = self.is_new or not repeat
        self.arrived += 1
        table = change.origin.collection
        if table in self.tables or len(self.tables) < TABLES_MAX:
            self.tables[table] = self.tables.get(table, 0) + 1

    def may_lack(self) -> bool:
        """Return whether its end is worth waiting for; one that was resent in part was complete before."""
        return self.begun and (self.is_new or self.arrived == 0)


@dataclass(slots=True)
class TransactionTally:
    """Counts the changes of transactions against what their ends say. The `current` one is open, others were left."""

    current: str = ""
    unended: dict[str, _Open] = field(default_factory=dict)

    @property
    def open_transaction(self) -> str:
        """Return the open transaction with changes so far; empty if its begin was not seen."""
        known = self.unended.get(self.current)
        return self.current[:OPEN_ID_MAX_CHARS] if known is not None and known.begun and known.arrived else ""

    def observe(self, event: DebeziumEvent, *, repeat: bool = False) -> Report | None:
        """Count an event; `repeat` says that the change was accepted before."""
        match event:
            case TransactionMark(TransactionStatus.BEGIN, transaction):
                self._enter(transaction).restart()
                return self._report_left() if len(self.unended) > OPEN_MAX else None
            case TransactionMark(TransactionStatus.END):
                return self._end(event)
            case Change(transaction=transaction) if transaction:
                self._enter(transaction).count(event, repeat=repeat)
                return None if repeat else self._report_left()
        return None

    def _enter(self, transaction: str) -> _Open:
        if transaction != self.current:
            displaced = self.unended.get(self.current)
            if displaced is not None and not displaced.may_lack():
                del self.unended[self.current]
            self.current = transaction
        return self.unended.setdefault(transaction, _Open())

    def _report_left(self) -> Report | None:
        """Report and forget the transaction that was left open longest."""
        left = next((transaction for transaction in self.unended if transaction != self.current), None)
        if left is None:
            return None
        return Report(IncompleteReason.UNFINISHED, left, self.unended.pop(left).arrived, None, {})

    def _end(self, mark: TransactionMark) -> Report | None:
        known = self.unended.pop(mark.transaction, None) or _Open()
        reason = _incomplete_reason(known, mark)
        if reason is None:
            return None
        counted = mark.collections or {}
        missing = {table: count - known.tables.get(table, 0) for table, count in counted.items()}
        missing = {table: count for table, count in missing.items() if count > 0} if known.begun else {}
        return Report(reason, mark.transaction, known.arrived, mark.event_count, missing)


def _incomplete_reason(known: _Open, mark: TransactionMark) -> IncompleteReason | None:
    if known.arrived < mark.event_count:
        return IncompleteReason.MISSING if known.begun else IncompleteReason.INTERRUPTED
    # A transaction that counts none was seen only where the rest of it had been lost.
    if known.interrupted or known.arrived > mark.event_count or mark.event_count == 0:
        return IncompleteReason.INTERRUPTED
    return None
