"""What a table records of its rows, source by source. Owns the two texts, and the sums that they are compared by.

    snapshot summary   lakefeed.ledger   {"shop":{"epoch":0,"first":8501,"last":9000,"rows":500,
                                                  "operations":{"INSERT":500},"checksum":"00c5...16 digits"}}
    table property     lakefeed.totals   {"complete":true,"sources":{"shop":{"rows":9000,"checksum":"9d0e..."}}}

The ledger is one flush's, and goes with its snapshot. The totals are those of all flushes so far, and stay when
snapshots expire or files are rewritten. Both move in the same act as the rows. A checksum is the sum of the hashes of
rows (writer/files/row_hash.py) modulo 2^64: in any order it is the same, and what comes twice counts twice.

A source without an epoch in a ledger came out of its order, by a replay from the quarantine. Totals also count how
often a source has started over (`restarts`) and its replayed rows, and are `complete` if no row was committed without
them. Standard library only, for the Spark pipeline.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from lakefeed.contract.changes import SourceId
from lakefeed.contract.errors import WriterError
from lakefeed.contract.progress import as_hex, as_number, as_numbers, as_object, decode_object, encode, member

# --- writer.verification.ledger ---------------------------------------------------------------------------------------


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
        return encode({source: _entry(facts, self.epochs.get(source)) for source, facts in self.facts.items()})


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

    def plus(self, other: SourceTotal) -> SourceTotal:
        """Count other rows of the source too, such as those of a backfill."""
        return replace(self, rows=self.rows + other.rows, checksum=(self.checksum + other.checksum) % _MODULUS)

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
        return encode({"complete": self.is_complete, "sources": {s: _total(each) for s, each in self.sources.items()}})


def ledger_from_text(text: str | None) -> Ledger | None:
    """Read a snapshot's ledger; None if it has none.

    Raises:
        LedgerUnreadable: the text is no ledger.
    """
    if text is None:
        return None
    try:
        entries = {SourceId(source): as_object(entry) for source, entry in decode_object(text).items()}
        facts = {source: _facts_from(entry) for source, entry in entries.items()}
        epochs = {source: as_number(entry["epoch"]) for source, entry in entries.items() if "epoch" in entry}
    except ValueError as error:
        raise LedgerUnreadable(f"ledger is damaged: {error}") from error
    return Ledger(facts, epochs)


def totals_from_text(text: str | None) -> Totals | None:
    """Read a table's totals; None if it has none.

    Raises:
        LedgerUnreadable: the text is no totals.
    """
    if text is None:
        return None
    try:
        document = decode_object(text)
        totals = as_object(member(document, "sources"))
        sources = {SourceId(source): _total_from(as_object(total)) for source, total in totals.items()}
        return Totals(member(document, "complete") is True, sources)
    except ValueError as error:
        raise LedgerUnreadable(f"totals are damaged: {error}") from error


def next_totals(text: str | None, *, is_new_table: bool, ledger: Ledger | None) -> str:
    """Count one more flush in a table property; what cannot be read starts anew, and is incomplete.

    Damaged totals stop no commit: rows are more than their sums, and the table says from then on that it lost them.
    """
    try:
        before = totals_from_text(text) or Totals(is_complete=is_new_table)
    except LedgerUnreadable:
        before = Totals(is_complete=False)
    return before.after(ledger).to_text()


def _entry(facts: RowFacts, epoch: int | None) -> dict[str, Any]:
    entry = {
        "rows": facts.rows,
        "first": facts.first,
        "last": facts.last,
        "operations": dict(facts.operations),
        "checksum": _to_hex(facts.checksum),
    }
    return entry if epoch is None else {**entry, "epoch": epoch}


def _facts_from(entry: Mapping[str, Any]) -> RowFacts:
    return RowFacts(
        rows=as_number(member(entry, "rows")),
        first=as_number(member(entry, "first")),
        last=as_number(member(entry, "last")),
        operations=as_numbers(member(entry, "operations")),
        checksum=as_hex(member(entry, "checksum")),
    )


def _total(total: SourceTotal) -> dict[str, Any]:
    numbers = {"epoch": total.epoch, "restarts": total.restarts or None, "replayed": total.replayed or None}
    known = {name: number for name, number in numbers.items() if number is not None}
    return {"rows": total.rows, "checksum": _to_hex(total.checksum), **known}


def _total_from(total: Mapping[str, Any]) -> SourceTotal:
    return SourceTotal(
        rows=as_number(member(total, "rows")),
        checksum=as_hex(member(total, "checksum")),
        epoch=as_number(total["epoch"]) if "epoch" in total else None,
        restarts=as_number(total.get("restarts", 0)),
        replayed=as_number(total.get("replayed", 0)),
    )


def _to_hex(checksum: int) -> str:
    return f"{checksum:016x}"


# --- writer.verification.backfills ------------------------------------------------------------------------------------
#
# What backfills leave in a table beside their rows. Owns the two texts; pipeline/backfill writes them.
#
#     snapshot summary   lakefeed.backfill          {"chunk":3,"chunks":10,"run":"orders-2026"}
#     table property     lakefeed.backfill.<run>    {"next":4,"source":"shop","rows":3000,"checksum":"9d0e...", and what
#                                                    the run itself needs to go on}
#
# A chunk is one snapshot, with a ledger of its own. Spark cannot move a property in the act that appends rows, so the
# property follows: it speaks of all chunks before `next`, and what is committed of later ones is in the snapshots.
# Where
# those that followed `after` are expired and the run is not `done`, nobody knows whether chunk `next` is in the table.
# Rows of backfills are not in the table's totals, which the service alone writes. Standard library only, for the
# pipeline.


BACKFILL_KEY = "lakefeed.backfill"
RUN_PROPERTY_PREFIX = "lakefeed.backfill."


@dataclass(frozen=True, slots=True)
class ChunkMark:
    """Which chunk of which run a snapshot is."""

    run: str
    chunk: int
    chunks: int

    def to_text(self) -> str:
        """Render the summary's value."""
        return encode({"run": self.run, "chunk": self.chunk, "chunks": self.chunks})


def chunk_mark_of(summary: Mapping[str, str]) -> ChunkMark | None:
    """Read which chunk a snapshot is; None if it is none, or its mark is not one of ours."""
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
    """Rows that backfills have appended, by source; `is_known` unless a run has not recorded all of them."""

    sources: dict[SourceId, SourceTotal] = field(default_factory=dict)
    is_known: bool = True

    def add(self, source: SourceId, total: SourceTotal) -> None:
        """Count rows of a source."""
        self.sources[source] = self.sources.get(source, SourceTotal()).plus(total)


@dataclass(frozen=True, slots=True)
class _Run:
    """A run speaks of its chunks before `next`. That one was begun after snapshot `after`, unless the run is done."""

    next: int = 0
    is_done: bool = True
    after: int | None = None


def count_backfilled(
    properties: Mapping[str, str],
    snapshots: Iterable[tuple[ChunkMark | None, Ledger | None]],
    *,
    known_after: Collection[int | None],
) -> Backfilled:
    """Add up what the runs of a table say of themselves, and their snapshots of which they do not speak yet.

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
    """Count what a run says of itself."""
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
