"""Which transactions of the sources are open at a place of the log. Owns where the log may be cut so that none is torn.

A frame's header names the transaction of its source that goes on behind it, if one does. A source's transactions come
one after the other. Between two records, then, each source has one open transaction or none, and where none has, all
before belongs together and nothing behind belongs to it:

    records    a1  b  a2  c |  d1  d2 |  e1      (x1, x2: parts of the transaction x)
    open       a   a  -   -    d   -     e
                     runs --> Gate: those up to a bar go on together, e1 waits

The wait is bounded by bytes and by time. A transaction that is still open then is given up: its parts go on as they
come, and it is not waited for again.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeAlias, TypeVar

from writer.changes import SourceId
from writer.frames import open_transaction_of
from writer.wal.record import Record

# Transactions that are open, by their source.
Open: TypeAlias = Mapping[SourceId, str]

NONE_OPEN: Open = {}

Run = TypeVar("Run")


class Split(enum.Enum):
    """Why changes of one transaction may not have become visible together."""

    TOO_LONG = "too_long"
    TOO_LARGE = "too_large"
    TABLE_LEFT = "table_left"
    TABLE_OUT = "table_out"
    CUT_SHORT = "cut_short"


@dataclass(slots=True)
class OpenTransactions:
    """The transactions that are open behind the records passed so far, without those that were given up."""

    _open: dict[SourceId, str] = field(default_factory=dict)
    _given_up: dict[SourceId, str] = field(default_factory=dict)

    def pass_records(self, records: Sequence[Record]) -> None:
        """Go on behind records."""
        for record in records:
            self._pass(record)

    def _pass(self, record: Record) -> None:
        source, transaction = open_transaction_of(record.payload)
        if transaction:
            self._open[source] = transaction
        else:
            self._open.pop(source, None)
        if self._given_up.get(source) != transaction:
            self._given_up.pop(source, None)

    def last_end(self, records: Sequence[Record]) -> int:
        """Tell behind how many of the next records no transaction was open last; 0 if there is no such place."""
        ahead = OpenTransactions(dict(self._open), dict(self._given_up))
        found = 0
        for index, record in enumerate(records, start=1):
            ahead._pass(record)
            if not ahead.awaited():
                found = index
        return found

    def awaited(self) -> Open:
        """Give those that are worth waiting for."""
        return self.without_given_up(self._open) if self._open else NONE_OPEN

    def without_given_up(self, transactions: Open) -> Open:
        """Leave out those that were given up."""
        return {source: each for source, each in transactions.items() if self._given_up.get(source) != each}

    def give_up(self, transactions: Open) -> None:
        """Wait for these no more."""
        self._given_up.update(transactions)


@dataclass(slots=True)
class Gate(Generic[Run]):
    """Runs of the log that wait for the end of a transaction, in order."""

    transactions: OpenTransactions
    max_bytes: int
    max_wait_s: float
    held_bytes: int = 0
    awaited: Open = field(default_factory=dict)
    held_since: float | None = None
    _held: list[Run] = field(default_factory=list)

    def take(self, run: Run, awaited: Open, *, size_bytes: int, now: float) -> list[Run]:
        """Take the next run and what is open behind it; gives the runs that may go on now."""
        self._held.append(run)
        self.held_bytes += size_bytes
        # What was given up since the run was cut is not waited for either.
        self.awaited = self.transactions.without_given_up(awaited)
        if not self.awaited:
            return self._release()
        self.held_since = now if self.held_since is None else self.held_since
        return []

    def limit_reached(self, *, now: float) -> Split | None:
        """Tell why the wait has to end now, or None."""
        if self.held_bytes > self.max_bytes:
            return Split.TOO_LARGE
        return Split.TOO_LONG if self.wait_s(now=now) == 0 else None

    def wait_s(self, *, now: float) -> float | None:
        """Tell how long the end of a transaction may take yet; None if none is waited for."""
        return None if self.held_since is None else max(0.0, self.held_since + self.max_wait_s - now)

    def give_up(self) -> list[Run]:
        """Wait no more for what is open; gives all that was held."""
        self.transactions.give_up(self.awaited)
        return self._release()

    def _release(self) -> list[Run]:
        released, self._held = self._held, []
        self.held_bytes = 0
        self.awaited = NONE_OPEN
        self.held_since = None
        return released
