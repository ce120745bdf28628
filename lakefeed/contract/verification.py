"""Verification of a table: what is compared, what a scan must deliver, and what the differences mean. Pure.

    metadata -- plan() --> Plan -- a scan of the files --> Scanned -- compare() --> Report

    1. records      the ledgers of a source follow one another, its mark is not behind them, totals are their sum
    2. files        a scan reads the live files and counts their rows by the snapshot that added them
    3. snapshots    of each append whose files are all live: ledger = files
    4. totals       of the newest snapshot: totals = all files; this still holds after rewrites and expiry
    5. duplicates   no change is in the table twice
    6. readers      a second reader of the metadata finds the same files, rows and partitions

There are two scans: writer/verify.py reads the files in one process, pipeline/verification/scan.py reads them in Spark.
A verification follows the parents of one snapshot, so it does not look at other branches. Snapshots of backfills are
Lakefeed's own, but are no part of marks and totals. Standard library only: Spark jobs import this on clusters.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from lakefeed.contract.changes import Position, SourceId
from lakefeed.contract.errors import CatalogError
from lakefeed.contract.ledger import (
    BACKFILL_KEY,
    LEDGER_KEY,
    TOTALS_PROPERTY,
    ChunkMark,
    Facts,
    Ledger,
    LedgerUnreadable,
    RowFacts,
    SourceTotal,
    Totals,
    chunk_mark_of,
    count_backfilled,
    join_facts,
    ledger_from_text,
    totals_from_text,
)
from lakefeed.contract.progress import FLUSH_ID_KEY, PROGRESS_PROPERTY, Progress, progress_from_text
from lakefeed.contract.properties import MAIN_BRANCH

# Paths that one finding names; all are counted.
PATHS_MAX = 3
# Sequences of duplicates that one finding names; all are counted.
EXAMPLES_MAX = 10
# Findings that the text shows; JSON has them all.
SHOWN_MAX = 50


class Kind(enum.Enum):
    """What is wrong."""

    LOSS = "loss"  # rows that were recorded are missing
    SURPLUS = "surplus"  # rows exist that were not recorded
    DUPLICATE = "duplicate"  # a change exists more than once
    DIFFERENCE = "difference"  # as many rows as recorded, but not the same ones
    HISTORY = "history"  # the table's records contradict one another
    UNREADABLE = "unreadable"  # a file or a record cannot be read
    READERS = "readers"  # two readers of the metadata find different files


class State(enum.Enum):
    """How a snapshot was checked."""

    VERIFIED = "verified"  # its files hold what its ledger says
    DIFFERENT = "different"
    REWRITTEN = "rewritten"  # its rows are in files of a later snapshot, and are checked by the totals
    NOT_RECORDED = "not recorded"  # it has no ledger
    REWRITE = "rewrite"  # it moved rows into other files and added none
    FOREIGN = "foreign"  # another writer's, with rows of its own


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
    totals_compared: bool = False  # if not, a note gives the reason
    notes: list[str] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)

    @property
    def is_sound(self) -> bool:
        """Return whether everything that was recorded is in the table, and nothing else."""
        return not self.findings


# -- plan: the records


@dataclass(frozen=True, slots=True)
class Range:
    """What to verify: the table as of snapshot `to_id`, or only what was added after `after_id`; None is no limit."""

    after_id: int | None = None
    to_id: int | None = None


@dataclass(frozen=True, slots=True)
class SnapshotRecord:
    """A snapshot and its ledger. `problem` is why the ledger cannot be read."""

    snapshot_id: int
    operation: str
    manifest_list: str
    is_own: bool
    ledger: Ledger | None = None
    problem: str | None = None
    chunk: ChunkMark | None = None

    @property
    def is_rewrite(self) -> bool:
        """Return whether it only moved rows into other files."""
        return self.operation == "replace"

    @property
    def is_append(self) -> bool:
        """Return whether it only added rows."""
        return self.operation == "append"


@dataclass(frozen=True, slots=True)
class Plan:
    """What one verification reads and compares. `history` leads from the oldest known snapshot to the verified one."""

    table: str
    properties: Mapping[str, str]
    progress: Progress
    totals: Totals | None
    history: Sequence[SnapshotRecord] = ()
    expired_id: int | None = None  # the snapshot before the history; None if the history begins with the table
    snapshots: Sequence[SnapshotRecord] = ()  # the part of the history whose files are read
    is_part: bool = False  # files of earlier snapshots are not read
    is_newest: bool = True  # the verified snapshot is the table's current one
    findings: Sequence[Finding] = ()  # contradictions among the records

    @property
    def head(self) -> SnapshotRecord | None:
        """Return the snapshot that is verified; None if the table has none."""
        return self.history[-1] if self.history else None

    @property
    def is_whole(self) -> bool:
        """Return whether all rows of the table as it is now are read."""
        return self.is_newest and not self.is_part

    @property
    def foreign_ids(self) -> set[int]:
        """Return the snapshots of other writers, whose rows no ledger records."""
        return {each.snapshot_id for each in self.history if each.is_append and not each.is_own}

    @property
    def rewrites(self) -> list[SnapshotRecord]:
        """Return the snapshots that only moved rows."""
        return [each for each in self.history if each.is_rewrite]

    @property
    def one_epoch(self) -> set[str]:
        """Return the sources that never started over: each of their sequences can exist only once."""
        totals = self.totals or Totals(is_complete=False)
        return {
            str(source)
            for source, mark in self.progress.sources.items()
            if totals.sources.get(source, SourceTotal()).has_one_epoch and (totals.is_complete or mark.epoch == 0)
        }

    def includes(self, snapshot_id: int) -> bool:
        """Return whether files that this snapshot added are read."""
        return not self.is_part or any(each.snapshot_id == snapshot_id for each in self.snapshots)

    def short_of_rows(self, live_rows: Mapping[int, int]) -> list[SnapshotRecord]:
        """Return the snapshots that recorded more rows than their live files have, by the manifests."""
        return [
            each
            for each in self.snapshots
            if each.ledger is not None and live_rows.get(each.snapshot_id, 0) < each.ledger.rows
        ]


def plan(table: str, document: Mapping[str, Any], wanted: Range) -> Plan:
    """Choose what to verify of a table from its metadata, and check its records against one another.

    Raises: CatalogError if the table has no such snapshot.
    """
    properties: Mapping[str, str] = document.get("properties") or {}
    progress = progress_from_text(properties.get(PROGRESS_PROPERTY))
    findings: list[Finding] = []
    totals = None
    try:
        totals = totals_from_text(properties.get(TOTALS_PROPERTY))
    except LedgerUnreadable as error:
        findings.append(Finding(Kind.UNREADABLE, str(error)))
    main_id = ((document.get("refs") or {}).get(MAIN_BRANCH) or {}).get("snapshot-id")
    head_id = wanted.to_id if wanted.to_id is not None else main_id
    if head_id is None:
        return Plan(table, properties, progress, totals, findings=findings)
    history, expired_id = _read_history(document, head_id)
    snapshots: Sequence[SnapshotRecord] = history
    if wanted.after_id is not None:
        ids = [each.snapshot_id for each in history]
        if wanted.after_id not in ids:
            raise CatalogError(f"snapshot is no ancestor of the one that is verified: snapshot={wanted.after_id}")
        snapshots = history[ids.index(wanted.after_id) + 1 :]
    chosen = Plan(
        table,
        properties,
        progress,
        totals,
        history=history,
        expired_id=expired_id,
        snapshots=snapshots,
        is_part=wanted.after_id is not None,
        is_newest=head_id == main_id,
        findings=findings,
    )
    findings += _check_ledgers(chosen)
    if chosen.is_whole and totals is not None and totals.is_complete:
        findings += _check_sum(chosen, totals)
    return chosen


def _read_history(document: Mapping[str, Any], head_id: int) -> tuple[list[SnapshotRecord], int | None]:
    """Follow a snapshot to its oldest known ancestor. Return them, the oldest first, and the expired one before."""
    by_id = {snapshot["snapshot-id"]: snapshot for snapshot in document.get("snapshots") or ()}
    if head_id not in by_id:
        raise CatalogError(f"table has no such snapshot, it may be expired: snapshot={head_id}")
    history: list[SnapshotRecord] = []
    at: int | None = head_id
    while at in by_id and len(history) < len(by_id):
        snapshot = by_id[at]
        summary = snapshot.get("summary") or {}
        record = SnapshotRecord(
            snapshot_id=snapshot["snapshot-id"],
            operation=summary.get("operation", ""),
            manifest_list=snapshot["manifest-list"],
            is_own=FLUSH_ID_KEY in summary or BACKFILL_KEY in summary,
            chunk=chunk_mark_of(summary),
        )
        try:
            record = replace(record, ledger=ledger_from_text(summary.get(LEDGER_KEY)))
        except LedgerUnreadable as error:
            record = replace(record, problem=str(error))
        history.append(record)
        at = snapshot.get("parent-snapshot-id")
    return history[::-1], at


def _check_ledgers(chosen: Plan) -> Iterator[Finding]:
    """Find ledgers that are unreadable or overlap, and marks that are behind them."""
    lasts: dict[SourceId, Position] = {}
    for snapshot in chosen.history:
        if snapshot.problem:
            yield Finding(Kind.UNREADABLE, snapshot.problem, snapshot.snapshot_id)
        if not snapshot.is_append and not snapshot.is_rewrite:
            text = f"another writer removed or replaced rows: operation={snapshot.operation}"
            yield Finding(Kind.LOSS, text, snapshot.snapshot_id)
        for source, epoch in snapshot.ledger.epochs.items() if snapshot.ledger else ():
            assert snapshot.ledger is not None
            facts = snapshot.ledger.facts[source]
            first, before = Position(epoch, facts.first), lasts.get(source)
            if before is not None and first <= before:
                text = (
                    "ledger begins at or before the end of an earlier snapshot:"
                    f" first={_shown(first)} earlier={_shown(before)}"
                )
                yield Finding(Kind.HISTORY, text, snapshot.snapshot_id, str(source))
            lasts[source] = max(Position(epoch, facts.last), before or first)
    for source, last in sorted(lasts.items()):
        mark = chosen.progress.sources.get(source)
        if mark is None or mark < last:
            text = f"the source's mark is behind its rows: mark={_shown(mark)} rows={_shown(last)}"
            yield Finding(Kind.HISTORY, text, source=str(source))


def _check_sum(chosen: Plan, totals: Totals) -> Iterator[Finding]:
    """Compare the totals with the ledgers of flushes that are left: their sum, or more if some are expired."""
    flushes = (each for each in chosen.history if each.chunk is None)
    sums = join_facts(flush.ledger.facts for flush in flushes if flush.ledger is not None)
    for source in sorted({*sums, *totals.sources}):
        ledgers, total = _sums(sums.get(source)), _sums(totals.sources.get(source))
        if ledgers[0] > total[0] or (chosen.expired_id is None and ledgers != total):
            text = f"ledgers and totals do not agree: rows_in_ledgers={ledgers[0]} rows_in_totals={total[0]}"
            yield Finding(Kind.HISTORY, text, source=str(source))


def _shown(position: Position | None) -> str:
    return "none" if position is None else f"{position.epoch}:{position.sequence}"


# -- compare: the files


@dataclass(frozen=True, slots=True)
class PlannedFile:
    """A data file as one reader of the metadata sees it. `partition` is text that is equal for equal values."""

    rows: int
    partition: str


@dataclass(slots=True)
class Duplicates:
    """Rows of one source that exist again, and some of their sequences."""

    rows: int = 0
    examples: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Scanned:
    """What a scan delivers. Snapshots are those that added the files."""

    rows: int = 0
    files: int = 0
    delete_files: int = 0
    facts: Mapping[int, Facts] = field(default_factory=dict)  # by snapshot
    live_rows: Mapping[int, int] = field(default_factory=dict)  # by snapshot, as the manifests say
    # Of each snapshot that is short of rows: files that it added, that are not live, and that no rewrite replaced.
    gone: Mapping[int, Collection[str]] = field(default_factory=dict)
    duplicates: Mapping[str, Duplicates] = field(default_factory=dict)  # by source
    findings: list[Finding] = field(default_factory=list)  # of single files: UNREADABLE, and see file_miscounted
    is_cut_short: bool = False  # a file could not be read, and nothing of the others is known
    has_hidden_columns: bool = False  # some files have columns that the scan could not read


def file_miscounted(location: str, *, rows: int, recorded: int, snapshot_id: int) -> Finding:
    """Return the finding of a file that has another number of rows than its manifest says."""
    kind = Kind.LOSS if rows < recorded else Kind.SURPLUS
    return Finding(kind, f"file has {rows:,} rows, its manifest says {recorded:,}", snapshot_id, file=location)


def compare(planned: Plan, scanned: Scanned) -> Report:
    """Compare what a scan found with what the table recorded."""
    head = planned.head
    report = Report(planned.table, head.snapshot_id if head else None, rows=scanned.rows, files=scanned.files)
    report.findings += planned.findings
    if scanned.delete_files:
        text = f"delete files of another writer remove rows: delete_files={scanned.delete_files}"
        report.findings.append(Finding(Kind.LOSS, text, report.snapshot_id))
    report.findings += scanned.findings
    if scanned.is_cut_short:
        return report
    for source, found in sorted(scanned.duplicates.items()):
        text = f"{found.rows:,} duplicate rows, for example sequences {', '.join(map(str, found.examples))}"
        report.findings.append(Finding(Kind.DUPLICATE, text, source=source))
    short_ids = {each.snapshot_id for each in planned.short_of_rows(scanned.live_rows)}
    for snapshot in planned.snapshots:
        is_short = snapshot.snapshot_id in short_ids
        report.snapshots[snapshot.snapshot_id] = _compare_snapshot(snapshot, scanned, report, is_short=is_short)
    report.facts = join_facts(facts for each, facts in scanned.facts.items() if each not in planned.foreign_ids)
    _compare_totals(planned, report, has_hidden_columns=scanned.has_hidden_columns)
    return report


def _compare_snapshot(snapshot: SnapshotRecord, scanned: Scanned, report: Report, *, is_short: bool) -> State:
    if not snapshot.is_own or not snapshot.is_append:
        return State.REWRITE if snapshot.is_rewrite else State.FOREIGN
    if snapshot.ledger is None:
        return State.NOT_RECORDED
    if gone := scanned.gone.get(snapshot.snapshot_id, ()):
        text = f"{len(gone)} data files are gone from the table, and no snapshot says that it has rewritten them:"
        report.findings.append(Finding(Kind.LOSS, f"{text} {_some(gone)}", snapshot.snapshot_id))
    elif is_short:
        return State.REWRITTEN
    recorded, found = snapshot.ledger.facts, scanned.facts.get(snapshot.snapshot_id, {})
    state = State.VERIFIED
    for source in sorted({*recorded, *found}):
        texts = [_facts_text(facts.get(source)) for facts in (recorded, found)]
        kind = _kind(_sums(recorded.get(source)), _sums(found.get(source)))
        if kind is None and texts[0] == texts[1]:
            continue
        state = State.DIFFERENT
        text = f"recorded {texts[0]}, found {texts[1]}"
        report.findings.append(Finding(kind or Kind.DIFFERENCE, text, snapshot.snapshot_id, str(source)))
    return state


def _compare_totals(planned: Plan, report: Report, *, has_hidden_columns: bool) -> None:
    """Compare all rows with the totals of the table, or note why they cannot be compared."""
    backfilled = count_backfilled(
        planned.properties,
        ((each.chunk, each.ledger) for each in planned.history),
        known_after={planned.expired_id, *(each.snapshot_id for each in planned.history)},
    )
    if not planned.is_whole:
        report.notes.append("only a part of the table was asked for: the totals of the table are not compared")
    elif has_hidden_columns:
        report.notes.append(
            "columns were dropped, and snapshots from before are expired: verify the table without --spark, rows are"
            " not compared with the totals"
        )
    elif planned.totals is None:
        report.notes.append("the table has no totals: rows of snapshots that are expired cannot be checked")
    elif not planned.totals.is_complete:
        report.notes.append(
            "the totals of the table do not reach back to its start: rows of snapshots that are expired or were"
            " rewritten cannot be checked"
        )
    elif not backfilled.is_known:
        report.notes.append(
            "a backfill has not recorded its rows, or has not finished and snapshots since then are expired (run it"
            " again): the totals of the table are not compared"
        )
    else:
        report.totals_compared = True
        expected = dict(planned.totals.sources)
        for source, total in backfilled.sources.items():
            expected[source] = expected.get(source, SourceTotal()).plus(total)
        for source in sorted({*expected, *report.facts}):
            recorded, found = _sums(expected.get(source)), _sums(report.facts.get(source))
            if kind := _kind(recorded, found):
                text = f"in all snapshots recorded {_sums_text(recorded)}, found {_sums_text(found)}"
                report.findings.append(Finding(kind, text, source=str(source)))


def compare_readers(
    own: Mapping[str, PlannedFile], other: Mapping[str, PlannedFile], *, reader: str
) -> Iterator[Finding]:
    """Compare which files two readers find in the same metadata: paths, rows and partitions."""
    both = own.keys() & other.keys()
    for paths, text in (
        (own.keys() - other.keys(), f"data files that {reader} does not find"),
        (other.keys() - own.keys(), f"data files that only {reader} finds"),
        ({path for path in both if own[path].rows != other[path].rows}, f"data files with other rows in {reader}"),
        (
            {path for path in both if own[path].partition != other[path].partition},
            f"data files with another partition in {reader}",
        ),
    ):
        if paths:
            yield Finding(Kind.READERS, f"{len(paths)} {text}: {_some(paths)}")


def _some(paths: Collection[str]) -> str:
    return ", ".join(sorted(paths)[:PATHS_MAX]) + (" ..." if len(paths) > PATHS_MAX else "")


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


# -- report


def report_lines(report: Report) -> Iterator[str]:
    """Render a report as text."""
    yield f"{report.table} at snapshot {report.snapshot_id}: read {report.rows:,} rows in {report.files:,} files"
    counts = Counter(report.snapshots.values())
    states = ", ".join(f"{counts[state]:,} {state.value}" for state in State if state in counts)
    yield f"  snapshots: {states or 'none'}"
    if report.totals_compared:
        yield f"  totals of the table: compared, {len(report.facts):,} sources"
    for note in report.notes:
        yield f"  note: {note}"
    for finding in report.findings[:SHOWN_MAX]:
        where = {"snapshot": finding.snapshot_id, "source": finding.source, "file": finding.file}
        # The parts of a quarantine mark are separated by a control character.
        facts = (f"{name}={value}".replace("\x1f", "/") for name, value in where.items() if value is not None)
        yield f"  {finding.kind.value}: " + ": ".join(filter(None, (" ".join(facts), finding.text)))
    if len(report.findings) > SHOWN_MAX:
        yield f"  and {len(report.findings) - SHOWN_MAX:,} more: see --json"
    yield "everything is as it was recorded" if report.is_sound else f"findings: {len(report.findings):,}"


def report_document(report: Report) -> dict[str, Any]:
    """Render a report as a JSON document."""
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
            {
                "kind": each.kind.value,
                "text": each.text,
                "snapshotId": each.snapshot_id,
                "source": each.source,
                "file": each.file,
            }
            for each in report.findings
        ],
    }
