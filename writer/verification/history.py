"""A table's snapshots as a verification sees them: who made each, and what it recorded. Owns the checks among records.

    oldest known --> ... --> snapshot that is verified      along the parents, so other branches are not looked at

The records must agree before any file is read: a source's ledgers follow one another, its mark is not behind them, and
the totals are their sum. Chunks of backfills are ours too, but no part of marks and totals. Standard library only, for
the Spark pipeline.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from writer.changes import Position, SourceId
from writer.errors import CatalogError
from writer.iceberg.progress import FLUSH_ID_KEY, Progress
from writer.verification.backfills import BACKFILL_KEY, ChunkMark, chunk_mark_of
from writer.verification.findings import Finding, Kind
from writer.verification.ledger import (
    LEDGER_KEY,
    Ledger,
    LedgerUnreadable,
    SourceTotal,
    Totals,
    join_facts,
    ledger_from_text,
)


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
