"""What a run of maintenance tells: as a table for people, as JSON for programs. Owns the words."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from lakefeed.pipeline.maintenance.plan import Sizes, TablePlan
from lakefeed.pipeline.maintenance.runner import TableReport
from lakefeed.pipeline.maintenance.settings import Step
from lakefeed.pipeline.maintenance.steps import StepResult

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def report_to_json(reports: Sequence[TableReport], *, is_dry_run: bool) -> dict[str, Any]:
    """Give a run as plain values."""
    return {"dryRun": is_dry_run, "tables": [_table_to_json(report) for report in reports]}


def _table_to_json(report: TableReport) -> dict[str, Any]:
    return {
        "table": str(report.table),
        "plan": _plan_to_json(report.plan) if report.plan else None,
        "before": report.before.to_json() if report.before else None,
        "after": report.after.to_json() if report.after else None,
        "steps": {
            result.step.value: {"seconds": round(result.seconds, 3), **result.told, "problem": result.problem}
            for result in report.results
        },
        "problems": report.problems,
    }


def _plan_to_json(plan: TablePlan) -> dict[str, Any]:
    return {
        "compact": dataclasses.asdict(plan.compaction) if plan.compaction else None,
        "deletes": plan.deletes,
        "manifests": plan.manifests,
        "expire": dataclasses.asdict(plan.expiry) if plan.expiry else None,
        "orphansBefore": plan.orphans_before_ms,
        "leftOut": {step.value: reason for step, reason in (plan.left_out or {}).items()},
    }


def print_reports(reports: Sequence[TableReport], console: Console, *, is_dry_run: bool) -> None:
    """Print a run: what each table was and is now, what was done, and what went wrong."""
    table = Table(
        "table", "data files", "small", "size", "deletes", "manifests", "snapshots", "to do" if is_dry_run else "done"
    )
    for report in reports:
        if report.before and report.after:
            done = planned_texts(report) if is_dry_run else done_texts(report.results)
            table.add_row(str(report.table), *_changes(report.before, report.after), "\n".join(done) or "nothing")
    console.print(table)
    for report in reports:
        for note in _notes(report):
            console.print(f"{report.table}: {note}", style="yellow", highlight=False, markup=False)
        for problem in report.problems:
            console.print(f"{report.table}: {problem}", style="red", highlight=False, markup=False)


def _changes(before: Sizes, after: Sizes) -> Iterator[str]:
    yield _change(before.data_files, after.data_files)
    yield _change(before.small_files, after.small_files)
    yield _change(before.data_bytes, after.data_bytes, as_bytes=True)
    yield _change(before.delete_files, after.delete_files)
    yield _change(before.manifests, after.manifests)
    yield _change(before.snapshots, after.snapshots)


def _change(before: int, after: int, *, as_bytes: bool = False) -> str:
    first, second = (size_text(each) if as_bytes else f"{each:,}" for each in (before, after))
    return first if first == second else f"{first} -> {second}"


def planned_texts(report: TableReport) -> list[str]:
    """Say what a run would do."""
    plan = report.plan
    if plan is None:
        return []
    said = []
    if plan.compaction:
        files = f"{plan.compaction.files:,} files, {size_text(plan.compaction.bytes)}"
        said.append(f"compact: {files} -> about {plan.compaction.files_after:,} files")
    said += ["deletes: join position deletes"] if plan.deletes else []
    said += ["manifests: rewrite"] if plan.manifests else []
    said += [f"expire: about {plan.expiry.snapshots:,} snapshots"] if plan.expiry else []
    return [*said, *(f"orphans: {result.told.get('orphans', 0):,} files" for result in report.results)]


def done_texts(results: Sequence[StepResult]) -> list[str]:
    """Say what a run did, a line for each step."""
    return [f"{result.step.value}: {_told_text(result)} in {result.seconds:.1f} s" for result in results]


def _told_text(result: StepResult) -> str:
    if result.problem:
        return "failed"
    told = {name: value for name, value in result.told.items() if value}
    if not told:
        return "nothing"
    return ", ".join(
        f"{size_text(value) if name.startswith('bytes') else format(value, ',')} {_words(name)}"
        for name, value in told.items()
    )


def _words(name: str) -> str:
    return name.removeprefix("bytes_").replace("_", " ")


def _notes(report: TableReport) -> Iterator[str]:
    """Say what else there is to know."""
    plan = report.plan
    if plan is None:
        return
    for step, reason in (plan.left_out or {}).items():
        yield f"{step.value} left out: {reason}"
    if plan.expiry and plan.expiry.held_by:
        yield f"snapshots stay for consumers: {', '.join(plan.expiry.held_by)}"
    if plan.expiry and plan.expiry.passed_over:
        yield f"consumers passed over, they were away too long: {', '.join(plan.expiry.passed_over)}"
    orphans = next((r.told.get("orphans", 0) for r in report.results if r.step is Step.ORPHANS), 0)
    if orphans:
        yield f"{orphans:,} files that nothing named"


def size_text(count: float) -> str:
    """Say a size in bytes."""
    for unit in _UNITS:
        if count < 1024 or unit == _UNITS[-1]:  # noqa: PLR2004 - of one unit to the next
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError("the last unit takes all")
