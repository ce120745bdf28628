"""What a table records of its rows, source by source. Owns the two texts, and the sums that they are compared by.

    snapshot summary   lakefeed.ledger   {"shop":{"epoch":0,"first":8501,"last":9000,"rows":500,
                                                  "operations":{"INSERT":500},"checksum":"00c5...16 digits"}}
    table property     lakefeed.totals   {"complete":true,"sources":{"shop":{"rows":9000,"checksum":"9d0e..."}}}

The ledger is one flush's, and goes with its snapshot. The totals are those of all flushes so far, and stay when
snapshots expire or files are rewritten. Both move in the same act as the rows. A checksum is the sum of the hashes of
rows (row_hash.py) modulo 2^64: in any order it is the same, and what comes twice counts twice.

A source without an epoch in a ledger came out of its order, by a replay from the quarantine. Totals also count how
often a source has started over (`restarts`) and its replayed rows, and are `complete` if no row was committed without
them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import msgspec

from writer.changes import SourceId
from writer.errors import WriterError

LEDGER_KEY = "lakefeed.ledger"
TOTALS_PROPERTY = "lakefeed.totals"

_MODULUS = 1 << 64


class LedgerUnreadable(WriterError):
    """A ledger's or the totals' text is damaged: what they said of the rows is lost."""


@dataclass(frozen=True, slots=True)
class RowFacts:
    """What is counted of some rows of one source."""

    rows: int
    first: int
    last: int
    operations: Mapping[str, int]
    checksum: int

    def joined(self, other: RowFacts) -> RowFacts:
        """Count other rows of the source too."""
        names = {*self.operations, *other.operations}
        return RowFacts(
            rows=self.rows + other.rows,
            first=min(self.first, other.first),
            last=max(self.last, other.last),
            operations={name: self.operations.get(name, 0) + other.operations.get(name, 0) for name in sorted(names)},
            checksum=(self.checksum + other.checksum) % _MODULUS,
        )


Facts = Mapping[SourceId, RowFacts]


def join_facts(parts: Iterable[Facts]) -> dict[SourceId, RowFacts]:
    """Count rows together that were counted in parts."""
    joined: dict[SourceId, RowFacts] = {}
    for part in parts:
        for source, facts in part.items():
            joined[source] = joined[source].joined(facts) if source in joined else facts
    return joined


@dataclass(frozen=True, slots=True)
class Ledger:
    """The rows of one flush; the epochs are those of the sources that are in order there."""

    facts: Facts
    epochs: Mapping[SourceId, int]

    @property
    def rows(self) -> int:
        """Count all rows."""
        return sum(facts.rows for facts in self.facts.values())

    def to_text(self) -> str:
        """Render the summary's value."""
        entries = {source: _entry(facts, self.epochs.get(source)) for source, facts in self.facts.items()}
        return _encode(entries).decode()


@dataclass(frozen=True, slots=True)
class SourceTotal:
    """All rows of one source so far."""

    rows: int = 0
    checksum: int = 0
    epoch: int | None = None
    restarts: int = 0
    replayed: int = 0

    @property
    def has_one_epoch(self) -> bool:
        """Tell whether a sequence can be there only once."""
        return self.restarts == 0 and self.replayed == 0

    def after(self, facts: RowFacts, epoch: int | None) -> SourceTotal:
        """Count the rows of one more flush."""
        counted = replace(self, rows=self.rows + facts.rows, checksum=(self.checksum + facts.checksum) % _MODULUS)
        if epoch is None:
            return replace(counted, replayed=self.replayed + facts.rows)
        return replace(counted, epoch=epoch, restarts=self.restarts + (self.epoch not in (None, epoch)))


@dataclass(frozen=True, slots=True)
class Totals:
    """All rows of a table so far, or, if they are not complete, of those flushes that counted."""

    is_complete: bool
    sources: Mapping[SourceId, SourceTotal] = field(default_factory=dict)

    def after(self, ledger: Ledger | None) -> Totals:
        """Count one more flush; one without a ledger leaves the totals incomplete."""
        if ledger is None:
            return replace(self, is_complete=False)
        moved = {
            source: self.sources.get(source, SourceTotal()).after(facts, ledger.epochs.get(source))
            for source, facts in ledger.facts.items()
        }
        return replace(self, sources={**self.sources, **moved})

    def to_text(self) -> str:
        """Render the table property."""
        entries = {
            str(source): _Total(total.rows, _to_hex(total.checksum), total.epoch, total.restarts, total.replayed)
            for source, total in self.sources.items()
        }
        return _encode(_Totals(self.is_complete, entries)).decode()


class _Entry(msgspec.Struct, omit_defaults=True):
    rows: int
    first: int
    last: int
    operations: dict[str, int]
    checksum: str
    epoch: int | None = None


class _Total(msgspec.Struct, omit_defaults=True):
    rows: int
    checksum: str
    epoch: int | None = None
    restarts: int = 0
    replayed: int = 0


class _Totals(msgspec.Struct):
    complete: bool
    sources: dict[str, _Total]


_encode = msgspec.json.Encoder(order="sorted").encode
_decode_ledger = msgspec.json.Decoder(dict[str, _Entry]).decode
_decode_totals = msgspec.json.Decoder(_Totals).decode


def ledger_from_text(text: str | None) -> Ledger | None:
    """Read a snapshot's ledger; None if it has none.

    Raises:
        LedgerUnreadable: the text is no ledger.
    """
    if text is None:
        return None
    try:
        entries = _decode_ledger(text)
        facts = {
            SourceId(source): RowFacts(e.rows, e.first, e.last, e.operations, int(e.checksum, 16))
            for source, e in entries.items()
        }
    except (msgspec.MsgspecError, ValueError) as error:
        raise LedgerUnreadable(f"ledger is damaged: {error}") from error
    return Ledger(facts, {SourceId(source): e.epoch for source, e in entries.items() if e.epoch is not None})


def totals_from_text(text: str | None) -> Totals | None:
    """Read a table's totals; None if it has none.

    Raises:
        LedgerUnreadable: the text is no totals.
    """
    if text is None:
        return None
    try:
        document = _decode_totals(text)
        sources = {
            SourceId(source): SourceTotal(t.rows, int(t.checksum, 16), t.epoch, t.restarts, t.replayed)
            for source, t in document.sources.items()
        }
    except (msgspec.MsgspecError, ValueError) as error:
        raise LedgerUnreadable(f"totals are damaged: {error}") from error
    return Totals(document.complete, sources)


def next_totals(text: str | None, *, is_new_table: bool, ledger: Ledger | None) -> str:
    """Count one more flush in a table property; what cannot be read starts anew, and is incomplete.

    Damaged totals stop no commit: rows are more than their sums, and the table says from then on that it lost them.
    """
    try:
        before = totals_from_text(text) or Totals(is_complete=is_new_table)
    except LedgerUnreadable:
        before = Totals(is_complete=False)
    return before.after(ledger).to_text()


def _entry(facts: RowFacts, epoch: int | None) -> _Entry:
    return _Entry(facts.rows, facts.first, facts.last, dict(facts.operations), _to_hex(facts.checksum), epoch)


def _to_hex(checksum: int) -> str:
    return f"{checksum:016x}"
