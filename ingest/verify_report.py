"""How `lakefeed verify` shows what it found, for people and as JSON. Owns the printing and nothing else."""

from __future__ import annotations

from dataclasses import asdict
from types import TracebackType
from typing import Any, Self

import click
import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from writer.verification.findings import Finding, Report, State

# Findings that people are shown; JSON has them all.
SHOWN_MAX = 50


class RowsBar:
    """A bar of the rows read, on a terminal; nothing elsewhere."""

    def __init__(self) -> None:
        console = Console(stderr=True)
        columns = (TextColumn("rows"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._task = self._bar.add_task("rows", total=None)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._bar.stop()

    def set_total(self, rows: int) -> None:
        """Tell how many rows there are to read."""
        self._bar.update(self._task, total=rows)

    def advance(self, rows: int) -> None:
        """Note rows that were read."""
        self._bar.advance(self._task, rows)


def print_report(report: Report, *, as_json: bool) -> None:
    """Show what was read, how it was checked and what is wrong."""
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(_document(report)), indent=2).decode())
        return
    click.echo(f"{report.table} at snapshot {report.snapshot_id}: read {report.rows:,} rows in {report.files:,} files")
    states = ", ".join(f"{count:,} {state.value}" for state in State if (count := report.count(state)))
    click.echo(f"  snapshots: {states or 'none'}")
    if report.totals_compared:
        click.echo(f"  totals of the table: compared, {len(report.facts):,} sources")
    for note in report.notes:
        click.echo(f"  note: {note}")
    for finding in report.findings[:SHOWN_MAX]:
        click.echo(f"  {finding.kind.value}: {_finding(finding)}")
    if len(report.findings) > SHOWN_MAX:
        click.echo(f"  and {len(report.findings) - SHOWN_MAX:,} more: see --json")
    click.echo("everything is as it was recorded" if report.is_sound else f"findings: {len(report.findings):,}")


def _finding(finding: Finding) -> str:
    where = {"snapshot": finding.snapshot_id, "source": finding.source, "file": finding.file}
    shown = " ".join(f"{name}={_plain(value)}" for name, value in where.items() if value is not None)
    return f"{shown}: {finding.text}" if shown else finding.text


def _plain(value: object) -> str:
    """Show a mark of the quarantine, whose parts a control character keeps apart, as text."""
    return str(value).replace("\x1f", "/")


def _document(report: Report) -> dict[str, Any]:
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
