"""Ledgers, totals and backfill markers: what a table records of its rows, source by source.

    snapshot summary   lakefeed.ledger           {"shop":{"epoch":0,"first":8501,"last":9000,"rows":500,
                                                          "operations":{"INSERT":500},"checksum":"00c5...16 digits"}}
    table property     lakefeed.totals           {"complete":true,"sources":{"shop":{"rows":9000,"checksum":"9d0e..."}}}
    snapshot summary   lakefeed.backfill         {"chunk":3,"chunks":10,"run":"orders-2026"}
    table property     lakefeed.backfill.<run>   {"next":4,"source":"shop","rows":3000,"checksum":"9d0e...", and what
                                                  the run itself needs to continue}

A ledger belongs to one flush, and expires with its snapshot. Totals are the sum of all flushes so far, and stay when
snapshots expire or files are rewritten. Both are committed together with the rows. A checksum is the sum of the hashes
of rows (writer/files/row_hash.py) modulo 2^64: it does not depend on their order, and a row that exists twice counts
twice. A source without an epoch in a ledger came out of its order, by a replay from quarantine. Totals also count how
often a source has started over (`restarts`) and its replayed rows, and are `complete` if every flush was counted.

A chunk of a backfill is one snapshot with a ledger of its own. Its rows are not in the totals, which only the service
writes. Spark cannot set a property in the commit that appends rows, so a run's property follows later: it covers all
chunks before `next`, and the snapshots cover the chunks after them. If the snapshots after `after` are expired and the
run is not `done`, it is unknown whether chunk `next` is in the table.

Standard library only: Spark jobs import this on clusters.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from lakefeed.contract.changes import SourceId
from lakefeed.contract.errors import WriterError
from lakefeed.contract.progress import as_hex, as_number, as_numbers, as_object, decode_object, encode, member

LEDGER_KEY = "lakefeed.ledger"
TOTALS_PROPERTY = "lakefeed.totals"
BACKFILL_KEY = "lakefeed.backfill"
RUN_PROPERTY_PREFIX = "lakefeed.backfill."

CHECKSUM_MODULUS = 1 << 64


class LedgerUnreadable(WriterError):
    """The text of a ledger or of totals is damaged: what it recorded of the rows is lost."""


@dataclass(frozen=True, slots=True)
class RowFacts:
    """Counts and checksum of some rows of one source."""

    rows: int
    first: int
    last: int
    operations: Mapping[str, int]
    checksum: int

    def joined(self, other: RowFacts) -> RowFacts:
        """Return the facts of these and other rows of the source together."""
        names = {*self.operations, *other.operations}
        return RowFacts(
            rows=self.rows + other.rows,
            first=min(self.first, other.first),
            last=max(self.last, other.last),
            operations={name: self.operations.get(name, 0) + other.operations.get(name, 0) for name in sorted(names)},
            checksum=(self.checksum + other.checksum) % CHECKSUM_MODULUS,
        )


Facts = Mapping[SourceId, RowFacts]


def join_facts(parts: Iterable[Facts]) -> dict[SourceId, RowFacts]:
    """Add up facts that were counted in parts."""
    joined: dict[SourceId, RowFacts] = {}
    for part in parts:
        for source, facts in part.items():
            joined[source] = joined[source].joined(facts) if source in joined else facts
    return joined


@dataclass(frozen=True, slots=True)
class Ledger:
    """The rows of one flush. `epochs` has the sources whose rows are in their order."""

    facts: Facts
    epochs: Mapping[SourceId, int]

    @property
    def rows(self) -> int:
        """Return the number of rows of all sources."""
        return sum(facts.rows for facts in self.facts.values())

    def to_text(self) -> str:
        """Return the value for the snapshot summary."""
        entries: dict[str, Any] = {}
        for source, facts in self.facts.items():
            epoch = {"epoch": self.epochs[source]} if source in self.epochs else {}
            entries[source] = {**asdict(facts), "checksum": _to_hex(facts.checksum), **epoch}
        return encode(entries)


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
        """Return whether each sequence can exist only once."""
        return self.restarts == 0 and self.replayed == 0

    def plus(self, other: SourceTotal) -> SourceTotal:
        """Return the total with other rows of the source added, such as those of a backfill."""
        return replace(self, rows=self.rows + other.rows, checksum=(self.checksum + other.checksum) % CHECKSUM_MODULUS)

    def after(self, facts: RowFacts, epoch: int | None) -> SourceTotal:
        """Return the total after one more flush."""
        counted = self.plus(SourceTotal(facts.rows, facts.checksum))
        if epoch is None:
            return replace(counted, replayed=self.replayed + facts.rows)
        return replace(counted, epoch=epoch, restarts=self.restarts + (self.epoch not in (None, epoch)))


@dataclass(frozen=True, slots=True)
class Totals:
    """All rows of a table so far; if not complete, those of the flushes that were counted."""

    is_complete: bool
    sources: Mapping[SourceId, SourceTotal] = field(default_factory=dict)

    def after(self, ledger: Ledger | None) -> Totals:
        """Return the totals after one more flush; without a ledger they are incomplete from then on."""
        if ledger is None:
            return replace(self, is_complete=False)
        moved = {
            source: self.sources.get(source, SourceTotal()).after(facts, ledger.epochs.get(source))
            for source, facts in ledger.facts.items()
        }
        return replace(self, sources={**self.sources, **moved})

    def to_text(self) -> str:
        """Return the value of the table property."""
        sources = {}
        for source, total in self.sources.items():
            numbers = {"epoch": total.epoch, "restarts": total.restarts or None, "replayed": total.replayed or None}
            known = {name: number for name, number in numbers.items() if number is not None}
            sources[source] = {"rows": total.rows, "checksum": _to_hex(total.checksum), **known}
        return encode({"complete": self.is_complete, "sources": sources})


def ledger_from_text(text: str | None) -> Ledger | None:
    """Read a snapshot's ledger; None if it has none. Raise LedgerUnreadable if it is damaged."""
    if text is None:
        return None
    try:
        entries = {SourceId(source): as_object(entry) for source, entry in decode_object(text).items()}
        facts = {
            source: RowFacts(
                rows=as_number(member(entry, "rows")),
                first=as_number(member(entry, "first")),
                last=as_number(member(entry, "last")),
                operations=as_numbers(member(entry, "operations")),
                checksum=as_hex(member(entry, "checksum")),
            )
            for source, entry in entries.items()
        }
        epochs = {source: as_number(entry["epoch"]) for source, entry in entries.items() if "epoch" in entry}
    except ValueError as error:
        raise LedgerUnreadable(f"ledger is damaged: {error}") from error
    return Ledger(facts, epochs)


def totals_from_text(text: str | None) -> Totals | None:
    """Read a table's totals; None if it has none. Raise LedgerUnreadable if they are damaged."""
    if text is None:
        return None
    try:
        document = decode_object(text)
        totals = {name: as_object(total) for name, total in as_object(member(document, "sources")).items()}
        sources = {
            SourceId(source): SourceTotal(
                rows=as_number(member(total, "rows")),
                checksum=as_hex(member(total, "checksum")),
                epoch=as_number(total["epoch"]) if "epoch" in total else None,
                restarts=as_number(total.get("restarts", 0)),
                replayed=as_number(total.get("replayed", 0)),
            )
            for source, total in totals.items()
        }
        return Totals(member(document, "complete") is True, sources)
    except ValueError as error:
        raise LedgerUnreadable(f"totals are damaged: {error}") from error


def next_totals(text: str | None, *, is_new_table: bool, ledger: Ledger | None) -> str:
    """Return the table property after one more flush. Damaged totals start anew, and are incomplete.

    They do not stop a commit: rows matter more than their sums, and the property says that the sums are incomplete.
    """
    try:
        before = totals_from_text(text) or Totals(is_complete=is_new_table)
    except LedgerUnreadable:
        before = Totals(is_complete=False)
    return before.after(ledger).to_text()


def _to_hex(checksum: int) -> str:
    return f"{checksum:016x}"


@dataclass(frozen=True, slots=True)
class ChunkMark:
    """The chunk and run of a backfill that a snapshot belongs to."""

    run: str
    chunk: int
    chunks: int

    def to_text(self) -> str:
        """Return the value for the snapshot summary."""
        return encode({"run": self.run, "chunk": self.chunk, "chunks": self.chunks})


def chunk_mark_of(summary: Mapping[str, str]) -> ChunkMark | None:
    """Read which chunk a snapshot is; None if it is none, or its mark cannot be read."""
    text = summary.get(BACKFILL_KEY)
    if text is None:
        return None
    try:
        document = decode_object(text)
        run = member(document, "run")
        return ChunkMark(str(run), as_number(member(document, "chunk")), as_number(member(document, "chunks")))
    except ValueError:
        return None


@dataclass(slots=True)
class Backfilled:
    """Rows that backfills have appended, by source. `is_known` is false if a run has not recorded all of them."""

    sources: dict[SourceId, SourceTotal] = field(default_factory=dict)
    is_known: bool = True

    def add(self, source: SourceId, total: SourceTotal) -> None:
        """Add rows of a source."""
        self.sources[source] = self.sources.get(source, SourceTotal()).plus(total)


@dataclass(frozen=True, slots=True)
class _Run:
    """A run's property covers chunks before `next`. That one began after snapshot `after`, unless the run is done."""

    next: int = 0
    is_done: bool = True
    after: int | None = None


def count_backfilled(
    properties: Mapping[str, str],
    snapshots: Iterable[tuple[ChunkMark | None, Ledger | None]],
    *,
    known_after: Collection[int | None],
) -> Backfilled:
    """Add up what the runs of a table recorded, and the snapshots that their properties do not cover yet.

    `known_after` are the snapshots after which none is expired; None stands for the table's start.
    """
    counted = Backfilled()
    runs = {
        name.removeprefix(RUN_PROPERTY_PREFIX): _count_run(text, counted)
        for name, text in properties.items()
        if name.startswith(RUN_PROPERTY_PREFIX)
    }
    found = set()
    for mark, ledger in snapshots:
        if mark is None or mark.chunk < runs.get(mark.run, _Run()).next:
            continue
        found.add((mark.run, mark.chunk))
        counted.is_known = counted.is_known and ledger is not None
        for source, facts in (ledger.facts if ledger else {}).items():
            counted.add(source, SourceTotal(facts.rows, facts.checksum))
    for name, run in runs.items():
        is_seen = None in known_after or run.after in known_after
        if not (run.is_done or is_seen or (name, run.next) in found):
            counted.is_known = False
    return counted


def _count_run(text: str, counted: Backfilled) -> _Run:
    """Add what a run's property records, and return how far it covers the run."""
    try:
        document = decode_object(text)
        rows, checksum, after = as_number(member(document, "rows")), document.get("checksum"), document.get("after")
        run = _Run(
            next=as_number(member(document, "next")),
            is_done=document.get("done") is True,
            after=None if after is None else as_number(after),
        )
        if checksum is not None:
            counted.add(SourceId(str(member(document, "source"))), SourceTotal(rows, as_hex(checksum)))
        elif rows:
            counted.is_known = False
    except ValueError:
        counted.is_known = False
        return _Run()
    return run
