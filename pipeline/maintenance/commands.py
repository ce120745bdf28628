"""`lakefeed maintain`: options, progress, and the report as a table or as JSON.

Exit codes: 0 everything was done, 1 something failed and the rest was done, 2 wrong use.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import click

from lakefeed.command_line import json_option, print_json, print_table, progress_bar
from lakefeed.pipeline.maintenance.plan import MaintenanceConfig, Step
from lakefeed.pipeline.spark.options import opened_session, spark_options
from lakefeed.pipeline.spark.session import JobKind
from lakefeed.pipeline.spark.tables import TableIdentifier, catalog_of, exists
from lakefeed.settings import SettingsError, load_section

if TYPE_CHECKING:
    from lakefeed.pipeline.maintenance.runner import StepResult, TableReport


FAILED = 1

# Headings of the table, and the sizes under them.
_SIZES = {
    "data files": "data_files",
    "small": "small_files",
    "size": "data_bytes",
    "deletes": "delete_files",
    "manifests": "manifests",
    "snapshots": "snapshots",
}
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


@click.command()
@click.argument("tables", nargs=-1)
@click.option("--only", help=f"Only these steps, separated by commas: {', '.join(step.value for step in Step)}")
@click.option("--dry-run", is_flag=True, help="Print what would be done, and change nothing.")
@json_option
@spark_options
def maintain(tables: Sequence[str], *, only: str | None, dry_run: bool, as_json: bool, **options: Any) -> None:
    """Compact small files, expire snapshots and remove orphan files of change tables and mirrors.

    Without TABLE all of them are maintained. Snapshots that a registered consumer still needs are kept, unless its
    last registration is three days old (its max_age) or it is 10,000 snapshots behind (the table property
    lakefeed.consumer-snapshots-max). Files that a running write may still reference are kept. Running streams and
    writers are not disturbed.

    \b
    Examples:
      lakefeed maintain --dry-run
      lakefeed maintain sales.orders --only compact,manifests
      lakefeed maintain --json | jq '.tables[].problems'
    """
    config = load_section(options.get("config_path"), os.environ, "pipeline.maintenance", MaintenanceConfig)
    steps = parse_steps(only)
    named = [TableIdentifier.parse(text) for text in tables]
    with opened_session(options, job_kind=JobKind.LONG, app_name="lakefeed-maintain") as spark:
        from lakefeed.pipeline.maintenance.runner import Maintenance  # noqa: PLC0415 - not needed for --help

        catalog = catalog_of(spark)
        for name in named:
            if not exists(spark, name.sql(catalog)):
                raise SettingsError(f"no such table: {name}")
        maintenance = Maintenance(spark, catalog, config, only=steps, is_dry_run=dry_run)
        chosen = named or maintenance.choose_tables()
        with progress_bar("", sum(len(maintenance.settings_of(name).run) for name in chosen)) as bar:
            reports = maintenance.run(
                chosen, on_step=lambda name, step: bar.advance(description=f"{name}: {step.value}")
            )
    if as_json:
        print_json({"dryRun": dry_run, "tables": [_table_to_json(report) for report in reports]})
    elif not reports:
        click.echo("no tables to maintain")
    else:
        _print_reports(reports, is_dry_run=dry_run)
    if any(report.problems for report in reports):
        sys.exit(FAILED)


def parse_steps(text: str | None) -> frozenset[Step]:
    """Read the steps that --only names; all without it. Raise SettingsError for other names."""
    if text is None:
        return frozenset(Step)
    known = {step.value: step for step in Step}
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names or not known.keys() >= set(names):
        raise SettingsError(f"--only takes {', '.join(known)}: {text}")
    return frozenset(known[name] for name in names)


# -- the report as JSON


def _table_to_json(report: TableReport) -> dict[str, Any]:
    plan = report.plan
    return {
        "table": str(report.table),
        "plan": plan
        and {
            "compact": dataclasses.asdict(plan.compaction) if plan.compaction else None,
            "deletes": plan.deletes,
            "manifests": plan.manifests,
            "expire": dataclasses.asdict(plan.expiry) if plan.expiry else None,
            "orphansBefore": plan.orphans_before_ms,
            "skipped": {step.value: reason for step, reason in plan.skipped.items()},
        },
        "before": dataclasses.asdict(report.before) if report.before else None,
        "after": dataclasses.asdict(report.after) if report.after else None,
        "steps": {
            result.step.value: {"seconds": round(result.seconds, 3), **result.counts, "problem": result.problem}
            for result in report.results
        },
        "problems": report.problems,
    }


# -- the report as text


def _print_reports(reports: Sequence[TableReport], *, is_dry_run: bool) -> None:
    """Print each table before and after, what was done, and what went wrong."""
    done = "to do" if is_dry_run else "done"
    rows = []
    for report in reports:
        if report.before and report.after:
            lines = _planned_lines(report) if is_dry_run else [_done_line(result) for result in report.results]
            before, after = dataclasses.asdict(report.before), dataclasses.asdict(report.after)
            sizes = {
                heading: " -> ".join(dict.fromkeys(_shown(name, each[name]) for each in (before, after)))
                for heading, name in _SIZES.items()
            }
            rows.append({"table": str(report.table), **sizes, done: "\n".join(lines) or "nothing"})
    print_table(rows, ("table", *_SIZES, done))
    for report in reports:
        for note in _notes(report):
            click.secho(f"{report.table}: {note}", fg="yellow")
        for problem in report.problems:
            click.secho(f"{report.table}: {problem}", fg="red")


def _shown(name: str, count: int) -> str:
    return size_text(count) if "bytes" in name else f"{count:,}"


def _planned_lines(report: TableReport) -> list[str]:
    plan = report.plan
    if plan is None:
        return []
    lines = []
    if plan.compaction:
        files = f"{plan.compaction.files:,} files, {size_text(plan.compaction.bytes)}"
        lines.append(f"compact: {files} -> about {plan.compaction.files_after:,} files")
    lines += ["deletes: rewrite position deletes"] if plan.deletes else []
    lines += ["manifests: rewrite"] if plan.manifests else []
    lines += [f"expire: about {plan.expiry.snapshots:,} snapshots"] if plan.expiry else []
    return [*lines, *(f"orphans: {result.counts.get('orphans', 0):,} files" for result in report.results)]


def _done_line(result: StepResult) -> str:
    counts = (
        f"{_shown(name, value)} {name.removeprefix('bytes_').replace('_', ' ')}"
        for name, value in result.counts.items()
        if value
    )
    done = "failed" if result.problem else ", ".join(counts) or "nothing"
    return f"{result.step.value}: {done} in {result.seconds:.1f} s"


def _notes(report: TableReport) -> Iterator[str]:
    plan = report.plan
    if plan is None:
        return
    for step, reason in plan.skipped.items():
        yield f"{step.value} skipped: {reason}"
    if plan.expiry and plan.expiry.held_by:
        yield f"snapshots kept for consumers: {', '.join(plan.expiry.held_by)}"
    if plan.expiry and plan.expiry.expired_consumers:
        yield f"consumers ignored, their registration has expired: {', '.join(plan.expiry.expired_consumers)}"
    orphans = next((result.counts.get("orphans", 0) for result in report.results if result.step is Step.ORPHANS), 0)
    if orphans:
        yield f"{orphans:,} orphan files"


def size_text(count: float) -> str:
    """Write a number of bytes with its unit."""
    for unit in _UNITS:
        if count < 1024 or unit == _UNITS[-1]:  # noqa: PLR2004 - from one unit to the next
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError("the last unit takes all")
