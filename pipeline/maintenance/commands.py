"""`lakefeed maintain`. Owns options, progress and exit codes; runner.py does the work, report.py prints.

Exit codes: 0 all was done, 1 something failed (the rest was done), 2 wrong use.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from lakefeed.pipeline.maintenance.settings import MaintenanceConfig, Step
from lakefeed.pipeline.spark.options import opened_session, spark_options
from lakefeed.pipeline.spark.settings import JobKind
from lakefeed.pipeline.spark.tables import TableName, catalog_of, exists
from lakefeed.settings import SettingsError, load_section

if TYPE_CHECKING:
    from lakefeed.pipeline.maintenance.runner import Maintenance, OnStep, TableReport


FAILED = 1


@click.command()
@click.argument("tables", nargs=-1)
@click.option("--only", help=f"Only these steps, by commas: {', '.join(step.value for step in Step)}")
@click.option("--dry-run", is_flag=True, help="Show what would be done, and do nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
@spark_options
def maintain(tables: Sequence[str], *, only: str | None, dry_run: bool, as_json: bool, **options: Any) -> None:
    """Rewrite small files, expire snapshots, remove orphans: of change tables and mirrors, beside writers and readers.

    Without TABLE all of them are maintained. No snapshot goes that a registered consumer still needs, unless it was
    last heard of three days ago (its max_age) or is 10,000 snapshots behind (lakefeed.consumer-snapshots-max of the
    table); and no file that a write may be about to name. A running stream or writer is not disturbed.

    \b
    Examples:
      lakefeed maintain --dry-run
      lakefeed maintain sales.orders --only compact,manifests
      lakefeed maintain --json | jq '.tables[].problems'
    """
    config = load_section(options.get("config_path"), os.environ, "pipeline.maintenance", MaintenanceConfig)
    steps = read_steps(only)
    named = [_table_name(text) for text in tables]
    with opened_session(options, job_kind=JobKind.LONG, app_name="lakefeed-maintain") as spark:
        from lakefeed.pipeline.maintenance.runner import Maintenance  # noqa: PLC0415 - what help does not need

        catalog = catalog_of(spark)
        for name in named:
            if not exists(spark, name.sql(catalog)):
                raise SettingsError(f"no such table: {name}")
        maintenance = Maintenance(spark, catalog, config, only=steps, is_dry_run=dry_run)
        reports = _run(maintenance, named or maintenance.choose_tables())
    _show(reports, as_json=as_json, is_dry_run=dry_run)
    if any(report.problems for report in reports):
        sys.exit(FAILED)


def read_steps(text: str | None) -> frozenset[Step]:
    """Read the steps that --only names; all without it.

    Raises: SettingsError.
    """
    if text is None:
        return frozenset(Step)
    known = {step.value: step for step in Step}
    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        raise SettingsError(f"--only takes {', '.join(known)}: {text}")
    return frozenset(known[name] for name in names)


def _table_name(text: str) -> TableName:
    try:
        return TableName.parse(text)
    except ValueError as error:
        raise SettingsError(str(error)) from error


def _run(maintenance: Maintenance, names: Sequence[TableName]) -> list[TableReport]:
    with _progress(sum(len(maintenance.settings_of(name).run) for name in names)) as on_step:
        return maintenance.run(names, on_step=on_step)


@contextmanager
def _progress(steps: int) -> Iterator[OnStep]:
    """Show a bar of all steps of all tables, on a terminal only."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=steps)
        begun = iter(range(steps + 1))

        def on_step(name: TableName, step: Step) -> None:
            progress.update(task, description=f"{name}: {step.value}", completed=next(begun))

        yield on_step
        progress.update(task, completed=steps)


def _show(reports: Sequence[TableReport], *, as_json: bool, is_dry_run: bool) -> None:
    from lakefeed.pipeline.maintenance.report import print_reports, report_to_json  # noqa: PLC0415 - what help does not need

    if as_json:
        click.echo(json.dumps(report_to_json(reports, is_dry_run=is_dry_run), indent=2))
    elif not reports:
        click.echo("no tables to maintain")
    else:
        print_reports(reports, Console(width=None if sys.stdout.isatty() else 160), is_dry_run=is_dry_run)
