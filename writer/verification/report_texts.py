"""A verification's report as lines for people and as a JSON document. Owns both; printing is the commands'.

Standard library only, for the Spark pipeline.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from writer.verification.findings import Finding, Report, State

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
