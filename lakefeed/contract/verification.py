"""A table's snapshots as a verification sees them: who made each, and what it recorded. Owns the checks among records.

    oldest known --> ... --> snapshot that is verified      along the parents, so other branches are not looked at

The records must agree before any file is read: a source's ledgers follow one another, its mark is not behind them, and
the totals are their sum. Chunks of backfills are ours too, but no part of marks and totals. Standard library only, for
the Spark pipeline.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from lakefeed.contract.changes import Position, SourceId
from lakefeed.contract.errors import CatalogError
from lakefeed.contract.ledger import (
    BACKFILL_KEY,
    LEDGER_KEY,
    Backfilled,
    ChunkMark,
    Facts,
    Ledger,
    LedgerUnreadable,
    RowFacts,
    SourceTotal,
    Totals,
    chunk_mark_of,
    join_facts,
    ledger_from_text,
)
from lakefeed.contract.progress import FLUSH_ID_KEY, Progress

# --- writer.verification.findings -------------------------------------------------------------------------------------
#
# What a verification found. Owns the kinds of findings, the report and the verdict; showing it is the command's.
#
# Standard library only, for the Spark pipeline.


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


# --- writer.verification.history --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Recorded:
    """A snapshot and its ledger; `problem` tells why it has none that can be read."""

    snapshot_id: int
    operation: str
    manifest_list: str
    is_own: bool
    ledger: Ledger | None
    problem: str | None = None
    chunk: ChunkMark | None = None

    @property
    def is_rewrite(self) -> bool:
        """Tell whether it only put rows into other files."""
        return self.operation == "replace"

    @property
    def is_append(self) -> bool:
        """Tell whether it only added rows."""
        return self.operation == "append"


@dataclass(frozen=True, slots=True)
class History:
    """The snapshots that lead to one, the oldest first. `before_id` is the expired one before them, None if none is."""

    snapshots: Sequence[Recorded]
    before_id: int | None = None

    @property
    def reaches_start(self) -> bool:
        """Tell whether none is expired."""
        return self.before_id is None

    @property
    def known_after(self) -> set[int | None]:
        """Give the snapshots after which none is expired; None stands for the start."""
        return {self.before_id, *(snapshot.snapshot_id for snapshot in self.snapshots)}


def read_history(document: Mapping[str, Any], head_id: int) -> History:
    """Follow a snapshot to its oldest known ancestor.

    Raises:
        CatalogError: the table has no such snapshot.
    """
    by_id = {snapshot["snapshot-id"]: snapshot for snapshot in document.get("snapshots") or ()}
    if head_id not in by_id:
        raise CatalogError(f"table has no such snapshot, it may be expired: snapshot={head_id}")
    chain: list[Mapping[str, Any]] = []
    at: int | None = head_id
    while at in by_id and len(chain) < len(by_id):
        chain.append(by_id[at])
        at = by_id[at].get("parent-snapshot-id")
    return History([_recorded(snapshot) for snapshot in reversed(chain)], before_id=at)


def _recorded(snapshot: Mapping[str, Any]) -> Recorded:
    summary = snapshot.get("summary") or {}
    ledger, problem = None, None
    try:
        ledger = ledger_from_text(summary.get(LEDGER_KEY))
    except LedgerUnreadable as error:
        problem = str(error)
    return Recorded(
        snapshot_id=snapshot["snapshot-id"],
        operation=summary.get("operation", ""),
        manifest_list=snapshot["manifest-list"],
        is_own=FLUSH_ID_KEY in summary or BACKFILL_KEY in summary,
        ledger=ledger,
        problem=problem,
        chunk=chunk_mark_of(summary),
    )


def choose_after(history: History, after_id: int | None) -> Sequence[Recorded]:
    """Leave out what led to a snapshot; nothing if none is given.

    Raises:
        CatalogError: it is not among them.
    """
    if after_id is None:
        return history.snapshots
    ids = [snapshot.snapshot_id for snapshot in history.snapshots]
    if after_id not in ids:
        raise CatalogError(f"snapshot does not lead to the one that is verified: snapshot={after_id}")
    return history.snapshots[ids.index(after_id) + 1 :]


def sources_of_one_epoch(progress: Progress, totals: Totals | None) -> set[str]:
    """Find the sources of which a sequence can be there only once."""
    totals = totals or Totals(is_complete=False)
    return {
        str(source)
        for source, mark in progress.sources.items()
        if totals.sources.get(source, SourceTotal()).has_one_epoch and (totals.is_complete or mark.epoch == 0)
    }


def check_history(history: History, progress: Progress, totals: Totals | None) -> Iterator[Finding]:
    """Find contradictions among the records of a table; give the totals only with the table's newest snapshot."""
    lasts: dict[SourceId, Position] = {}
    for snapshot in history.snapshots:
        if snapshot.problem:
            yield Finding(Kind.UNREADABLE, snapshot.problem, snapshot.snapshot_id)
        if snapshot.operation not in ("append", "replace"):
            text = f"somebody else removed or replaced rows: operation={snapshot.operation}"
            yield Finding(Kind.LOSS, text, snapshot.snapshot_id)
        if snapshot.ledger is not None:
            yield from _check_order(snapshot, snapshot.ledger, lasts)
    for source, last in sorted(lasts.items()):
        mark = progress.position_of(source)
        if mark is None or mark < last:
            text = f"the source's mark is behind its rows: mark={_shown(mark)} rows={_shown(last)}"
            yield Finding(Kind.HISTORY, text, source=str(source))
    if totals is not None and totals.is_complete:
        yield from _check_sum(history, totals)


def _check_order(snapshot: Recorded, ledger: Ledger, lasts: dict[SourceId, Position]) -> Iterator[Finding]:
    """Hold a ledger against those before it, and move on to its end."""
    for source, epoch in ledger.epochs.items():
        facts = ledger.facts[source]
        first, before = Position(epoch, facts.first), lasts.get(source)
        if before is not None and first <= before:
            text = f"begins at or before the end of an earlier snapshot: first={_shown(first)} earlier={_shown(before)}"
            yield Finding(Kind.HISTORY, text, snapshot.snapshot_id, str(source))
        lasts[source] = max(Position(epoch, facts.last), before or first)


def _check_sum(history: History, totals: Totals) -> Iterator[Finding]:
    """Hold the flushes' ledgers that are left against the totals: they are their sum, or a part of it."""
    flushes = (snapshot for snapshot in history.snapshots if snapshot.chunk is None)
    sums = join_facts(flush.ledger.facts for flush in flushes if flush.ledger is not None)
    for source in sorted({*sums, *totals.sources}):
        ledgers = sums[source].rows if source in sums else 0
        total = totals.sources[source].rows if source in totals.sources else 0
        is_same = ledgers == total and (source not in sums or sums[source].checksum == totals.sources[source].checksum)
        if ledgers > total or (history.reaches_start and not is_same):
            text = f"ledgers and totals do not agree: rows_in_ledgers={ledgers} rows_in_totals={total}"
            yield Finding(Kind.HISTORY, text, source=str(source))


def _shown(position: Position | None) -> str:
    return "none" if position is None else f"{position.epoch}:{position.sequence}"


# --- writer.verification.report_texts ---------------------------------------------------------------------------------
#
# A verification's report as lines for people and as a JSON document. Owns both; printing is the commands'.
#
# Standard library only, for the Spark pipeline.


# Findings that people are shown; JSON has them all.
SHOWN_MAX = 50


def report_lines(report: Report) -> Iterator[str]:
    """Say what was read, how it was checked and what is wrong."""
    yield f"{report.table} at snapshot {report.snapshot_id}: read {report.rows:,} rows in {report.files:,} files"
    states = ", ".join(f"{count:,} {state.value}" for state in State if (count := report.count(state)))
    yield f"  snapshots: {states or 'none'}"
    if report.totals_compared:
        yield f"  totals of the table: compared, {len(report.facts):,} sources"
    for note in report.notes:
        yield f"  note: {note}"
    for finding in report.findings[:SHOWN_MAX]:
        yield f"  {finding.kind.value}: {_finding(finding)}"
    if len(report.findings) > SHOWN_MAX:
        yield f"  and {len(report.findings) - SHOWN_MAX:,} more: see --json"
    yield "everything is as it was recorded" if report.is_sound else f"findings: {len(report.findings):,}"


def _finding(finding: Finding) -> str:
    where = {"snapshot": finding.snapshot_id, "source": finding.source, "file": finding.file}
    shown = " ".join(f"{name}={_plain(value)}" for name, value in where.items() if value is not None)
    return f"{shown}: {finding.text}" if shown else finding.text


def _plain(value: object) -> str:
    """Show a mark of the quarantine, whose parts a control character keeps apart, as text."""
    return str(value).replace("\x1f", "/")


def report_document(report: Report) -> dict[str, Any]:
    """Give all of it as JSON has it."""
    return {
        "table": report.table,
        "snapshotId": report.snapshot_id,
        "isSound": report.is_sound,
        "rows": report.rows,
        "files": report.files,
        "totalsCompared": report.totals_compared,
        "snapshots": [{"snapshotId": each, "state": state.value} for each, state in report.snapshots.items()],
        "sources": {
            str(source): {**asdict(facts), "checksum": f"{facts.checksum:016x}"}
            for source, facts in sorted(report.facts.items())
        },
        "notes": report.notes,
        "findings": [
            {"kind": each.kind.value, "text": each.text, "snapshotId": each.snapshot_id}
            | {"source": each.source, "file": each.file}
            for each in report.findings
        ],
    }
