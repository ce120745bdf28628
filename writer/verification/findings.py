"""What a verification found. Owns the kinds of findings, the report and the verdict; showing it is the command's.

Standard library only, for the Spark pipeline.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

from writer.changes import SourceId
from writer.verification.backfills import Backfilled
from writer.verification.ledger import Facts, RowFacts, SourceTotal, Totals

# Paths that a finding names; all are counted.
PATHS_MAX = 3


class Kind(enum.Enum):
    """What is wrong."""

    LOSS = "loss"  # rows that were recorded are not there
    SURPLUS = "surplus"  # there are rows that were not recorded
    DUPLICATE = "duplicate"  # a change is there more than once
    DIFFERENCE = "difference"  # as many rows as recorded, but not the same ones
    HISTORY = "history"  # the table's records contradict one another
    UNREADABLE = "unreadable"  # a file or a record cannot be read


class State(enum.Enum):
    """How a snapshot was checked."""

    VERIFIED = "verified"  # its files hold what its ledger says
    DIFFERENT = "different"
    REWRITTEN = "rewritten"  # its rows are in files of a later snapshot: checked in sum, by the totals
    NOT_RECORDED = "not recorded"  # it has no ledger
    REWRITE = "rewrite"  # it put rows into other files and added none
    FOREIGN = "foreign"  # somebody else's, with rows of its own


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong, with the facts for people."""

    kind: Kind
    text: str
    snapshot_id: int | None = None
    source: str | None = None
    file: str | None = None


@dataclass(slots=True)
class Report:
    """What was read and what was found."""

    table: str
    snapshot_id: int | None = None
    rows: int = 0
    files: int = 0
    snapshots: dict[int, State] = field(default_factory=dict)
    facts: Facts = field(default_factory=dict)
    # Whether all rows were compared with the totals of the table, and if not, why not.
    totals_compared: bool = False
    notes: list[str] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)

    @property
    def is_sound(self) -> bool:
        """Tell whether everything that was recorded is there, and nothing else."""
        return not self.findings

    def count(self, state: State) -> int:
        """Count the snapshots that were checked so."""
        return sum(each is state for each in self.snapshots.values())


def compare_ledger(recorded: Facts, found: Facts, *, snapshot_id: int) -> Iterator[Finding]:
    """Compare a snapshot's ledger with its files."""
    for source in sorted({*recorded, *found}):
        kind = _kind(_sums(recorded.get(source)), _sums(found.get(source)))
        texts = [_facts_text(facts.get(source)) for facts in (recorded, found)]
        if kind is None and texts[0] != texts[1]:
            kind = Kind.DIFFERENCE
        if kind is not None:
            yield Finding(kind, f"recorded {texts[0]}, found {texts[1]}", snapshot_id, str(source))


def compare_whole(report: Report, totals: Totals | None, backfilled: Backfilled, *, is_whole: bool) -> None:
    """Compare all rows with what the table has recorded in sum, or note why that cannot be done."""
    if not is_whole:
        report.notes.append("only a part of the table was asked for: the totals of the table are not compared")
    elif totals is None:
        report.notes.append("the table has no totals: rows of snapshots that are expired cannot be checked")
    elif not totals.is_complete:
        report.notes.append(
            "the totals of the table do not reach back to its start: rows of snapshots that are expired or were"
            " rewritten cannot be checked"
        )
    elif not backfilled.is_known:
        report.notes.append(
            "a backfill has not recorded its rows, or has not come to its end and snapshots since are expired (run it"
            " again): the totals of the table are not compared"
        )
    else:
        report.totals_compared = True
        expected = dict(totals.sources)
        for source, total in backfilled.sources.items():
            expected[source] = expected.get(source, SourceTotal()).plus(total)
        report.findings += compare_totals(expected, report.facts)


def describe_gone(paths: Collection[str], *, snapshot_id: int) -> Finding:
    """Tell of data files that are no longer in the table, and that no rewrite says it has replaced."""
    shown = ", ".join(sorted(paths)[:PATHS_MAX]) + (" ..." if len(paths) > PATHS_MAX else "")
    text = f"{len(paths)} data files are gone from the table, and no snapshot says that it has rewritten them: {shown}"
    return Finding(Kind.LOSS, text, snapshot_id)


def compare_totals(recorded: Mapping[SourceId, SourceTotal], found: Facts) -> Iterator[Finding]:
    """Compare the totals of a table with all its files."""
    for source in sorted({*recorded, *found}):
        kind = _kind(_sums(recorded.get(source)), _sums(found.get(source)))
        if kind is not None:
            texts = [_sums_text(_sums(sums.get(source))) for sums in (recorded, found)]
            yield Finding(kind, f"in all snapshots recorded {texts[0]}, found {texts[1]}", source=str(source))


def _sums(counted: RowFacts | SourceTotal | None) -> tuple[int, int]:
    return (counted.rows, counted.checksum) if counted else (0, 0)


def _kind(recorded: tuple[int, int], found: tuple[int, int]) -> Kind | None:
    if recorded == found:
        return None
    if recorded[0] == found[0]:
        return Kind.DIFFERENCE
    return Kind.LOSS if recorded[0] > found[0] else Kind.SURPLUS


def _sums_text(sums: tuple[int, int]) -> str:
    return f"{sums[0]:,} rows with checksum {sums[1]:016x}"


def _facts_text(facts: RowFacts | None) -> str:
    if facts is None:
        return "no rows"
    operations = ", ".join(f"{count:,} {name}" for name, count in sorted(facts.operations.items()))
    return f"{_sums_text(_sums(facts))}, sequences {facts.first} to {facts.last}, {operations}"
