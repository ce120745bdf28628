"""plan() and compare() without files: which findings the facts of a scan lead to."""

from __future__ import annotations

from typing import Any

import pytest

from lakefeed.contract.changes import SourceId
from lakefeed.contract.errors import CatalogError
from lakefeed.contract.ledger import LEDGER_KEY, TOTALS_PROPERTY, Ledger, RowFacts, Totals
from lakefeed.contract.progress import FLUSH_ID_KEY, PROGRESS_PROPERTY
from lakefeed.contract.verification import (
    Duplicates,
    Finding,
    Kind,
    PlannedFile,
    Range,
    Report,
    Scanned,
    State,
    compare,
    compare_readers,
    plan,
    report_lines,
)

SHOP = SourceId("shop")


def facts(first: int, last: int) -> dict[SourceId, RowFacts]:
    rows = last - first + 1
    return {SHOP: RowFacts(rows, first, last, {"INSERT": rows}, checksum=sum(range(first, last + 1)))}


# Snapshot 1 adds sequences 1 to 3, snapshot 2 adds 4 and 5.
FACTS = {1: facts(1, 3), 2: facts(4, 5)}
LIVE_ROWS = {1: 3, 2: 2}


def document(**changes: Any) -> dict[str, Any]:
    ledgers = {number: Ledger(counted, {SHOP: 0}) for number, counted in FACTS.items()}
    totals = Totals(is_complete=True)
    for ledger in ledgers.values():
        totals = totals.after(ledger)
    snapshots = [
        {
            "snapshot-id": number,
            "parent-snapshot-id": number - 1 or None,
            "manifest-list": f"list-{number}",
            "summary": {"operation": "append", FLUSH_ID_KEY: "f", LEDGER_KEY: ledger.to_text()},
        }
        for number, ledger in ledgers.items()
    ]
    properties = {
        PROGRESS_PROPERTY: '{"complete":{},"generations":{},"nodes":{},"sources":{"shop":[0,5]}}',
        TOTALS_PROPERTY: totals.to_text(),
    }
    refs = {"main": {"snapshot-id": 2, "type": "branch"}}
    return {"snapshots": snapshots, "refs": refs, "properties": properties, **changes}


def compared(wanted: Range | None = None, **scanned: Any) -> Report:
    return compare(
        plan("t", document(), wanted or Range()), Scanned(**{"facts": FACTS, "live_rows": LIVE_ROWS, **scanned})
    )


def kinds(report: Report) -> list[Kind]:
    return [finding.kind for finding in report.findings]


def test_rows_as_recorded_are_sound() -> None:
    report = compared(rows=5, files=2)
    assert (report.findings, report.snapshots, report.totals_compared) == (
        [],
        {1: State.VERIFIED, 2: State.VERIFIED},
        True,
    )
    assert list(report_lines(report))[-1] == "everything is as it was recorded"


@pytest.mark.parametrize(
    ("found", "kind"),
    [(facts(4, 4), Kind.LOSS), (facts(4, 6), Kind.SURPLUS), (facts(5, 6), Kind.DIFFERENCE), ({}, Kind.LOSS)],
)
def test_other_rows_than_the_ledger_has_are_found_in_the_snapshot_and_in_the_totals(found: Any, kind: Kind) -> None:
    report = compared(facts={1: FACTS[1], 2: found})
    assert kinds(report) == [kind, kind]
    assert report.snapshots == {1: State.VERIFIED, 2: State.DIFFERENT}


def test_a_snapshot_without_live_files_is_rewritten_unless_files_are_gone() -> None:
    moved = {3: {SHOP: FACTS[1][SHOP].joined(FACTS[2][SHOP])}}
    assert compared(facts=moved, live_rows={3: 5}).snapshots == {1: State.REWRITTEN, 2: State.REWRITTEN}
    report = compared(facts={2: FACTS[2]}, live_rows={2: 2}, gone={1: {"a", "b", "c", "d"}})
    assert kinds(report) == [Kind.LOSS] * 3, "files that are gone, the snapshot's ledger, the totals"
    assert report.findings[0].text.endswith("rewritten them: a, b, c ...")


def test_a_scan_that_was_cut_short_reports_only_what_it_knows() -> None:
    report = compared(facts={}, is_cut_short=True, findings=[Finding(Kind.UNREADABLE, "damaged", file="f")])
    assert (kinds(report), report.snapshots, report.notes) == ([Kind.UNREADABLE], {}, [])


def test_duplicates_and_delete_files_are_findings() -> None:
    report = compared(delete_files=1, duplicates={"shop": Duplicates(2, [4, 5])})
    assert [finding.text for finding in report.findings] == [
        "delete files of another writer remove rows: delete_files=1",
        "2 duplicate rows, for example sequences 4, 5",
    ]


def test_a_part_of_the_table_is_not_compared_with_the_totals() -> None:
    chosen = plan("t", document(), Range(after_id=1))
    assert ([each.snapshot_id for each in chosen.snapshots], chosen.includes(1), chosen.includes(2)) == (
        [2],
        False,
        True,
    )
    report = compared(Range(after_id=1), facts={2: FACTS[2]}, live_rows={2: 2})
    assert (report.findings, report.totals_compared, len(report.notes)) == ([], False, 1)
    for wanted in (Range(to_id=7), Range(after_id=2, to_id=1)):
        with pytest.raises(CatalogError):
            plan("t", document(), wanted)


def test_a_scan_that_cannot_read_all_columns_does_not_compare_the_totals() -> None:
    report = compared(has_hidden_columns=True)
    assert (report.findings, report.totals_compared) == ([], False)
    assert "without --spark" in report.notes[0]


def test_readers_that_see_different_files_rows_or_partitions_disagree() -> None:
    own = {path: PlannedFile(1, "[1]") for path in "abc"}
    assert list(compare_readers(own, dict(own), reader="X")) == []
    other = {"b": PlannedFile(2, "[1]"), "c": PlannedFile(1, "[2]"), "d": PlannedFile(1, "[1]")}
    assert [finding.text for finding in compare_readers(own, other, reader="X")] == [
        "1 data files that X does not find: a",
        "1 data files that only X finds: d",
        "1 data files with other rows in X: b",
        "1 data files with another partition in X: c",
    ]
