"""`lakefeed wal`: looking at a log and repairing it. Owns options, questions and exit codes; writer/wal does the work.

What is printed belongs to wal_report.py. It and the log are imported where they are used: no other command needs them.
"""

from __future__ import annotations

import datetime as dt
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TransferSpeedColumn

from lakefeed.ingest.cli.output import readable_errors
from lakefeed.ingest.config import load_config

LOG_NAME = "log"

# Exit code of `inspect` when something needs repair, apart from click's own 1 and 2.
DAMAGED = 3

_config = click.option(
    "--config", "config_path", type=click.Path(path_type=Path), help="Settings file  [lakefeed.toml if it exists]"
)
_data_dir = click.option("--data-dir", help="Where the service keeps its log and catalog  [data]")


@click.group()
def wal() -> None:
    """Look at the write-ahead log, and repair a damaged one."""


@wal.command()
@_config
@_data_dir
@click.option("--json", "as_json", is_flag=True, help="Print JSON; with --records one line each, the summary last.")
@click.option("--records", is_flag=True, help="List every record: who sent it and which sequences, never its rows.")
def inspect(config_path: Path | None, data_dir: str | None, *, as_json: bool, records: bool) -> None:
    """Show what the log holds, and what is damaged.

    Also tells which changes of which sources are missing. Reads everything and changes nothing, so it may run beside
    the service. Ends with exit code 3 if the log needs repair.
    """
    from lakefeed.ingest.cli import wal_report as show  # noqa: PLC0415  (see above)
    from lakefeed.writer.wal.inspect import ignore, inspect_log  # noqa: PLC0415

    print_record = show.print_record_json if as_json else show.print_record
    with readable_errors():
        directory = _log_directory(config_path, data_dir)
        with _progress(directory, hidden=records) as on_bytes:
            report = inspect_log(
                directory, show.HEADS, on_record=print_record if records else ignore, on_bytes=on_bytes
            )
    if as_json:
        document = show.log_document(report)
        click.echo(json.dumps(document, indent=None if records else 2))
    else:
        show.print_log(report)
    if report.needs_repair:
        click.get_current_context().exit(DAMAGED)


@wal.command()
@_config
@_data_dir
@click.option("--dry-run", is_flag=True, help="Only say what would be done; may run beside the service.")
@click.option("--yes", is_flag=True, help="Do it without asking.")
def repair(config_path: Path | None, data_dir: str | None, *, dry_run: bool, yes: bool) -> None:
    """Make a damaged log open again.

    Goes on without the records that are damaged, keeps every good one and deletes nothing: damaged files move to
    log/damaged/, with a report of what is missing and which sources have to send it again. A torn end needs no repair,
    the next start cuts it off.
    """
    from lakefeed.writer.wal.repair import locked  # noqa: PLC0415  (see above)

    with readable_errors():
        directory = _log_directory(config_path, data_dir)
        if dry_run:
            _repair(directory, ask=_never)
            return
        with locked(directory):
            _repair(directory, ask=_always if yes else _ask)


def _repair(directory: Path, *, ask: Callable[[], bool]) -> None:
    from lakefeed.ingest.cli import wal_report as show  # noqa: PLC0415  (see above)
    from lakefeed.writer.wal.inspect import inspect_log  # noqa: PLC0415
    from lakefeed.writer.wal.repair import apply_repair, plan_repair  # noqa: PLC0415

    with _progress(directory) as on_bytes:
        report = inspect_log(directory, show.HEADS, on_bytes=on_bytes)
    plan = plan_repair(report, name=f"{dt.datetime.now(dt.UTC):%Y%m%dT%H%M%S.%fZ}")
    show.print_plan(plan)
    if not plan.rewrites or not ask():
        return
    try:
        apply_repair(plan, show.HEADS)
    except OSError as error:
        raise click.ClickException(f"repair was interrupted, start it again: {error}") from error
    click.echo(f"repaired; damaged files and the report are in {plan.target}")


def _never() -> bool:
    click.echo("dry run: nothing was changed")
    return False


def _always() -> bool:
    return True


def _ask() -> bool:
    click.confirm("repair the log?", abort=True)
    return True


def _log_directory(config_path: Path | None, data_dir: str | None) -> Path:
    loaded = load_config(config_path, os.environ, {"server.data_dir": data_dir})
    return Path(loaded.config.server.data_dir).resolve() / LOG_NAME


@contextmanager
def _progress(directory: Path, *, hidden: bool = False) -> Iterator[Callable[[int], Any]]:
    """Show a bar on a terminal, nothing elsewhere or where a listing runs over it."""
    from lakefeed.writer.wal.inspect import log_bytes  # noqa: PLC0415  (see above)

    console = Console(stderr=True)
    columns = (
        TextColumn("reading the log"),
        BarColumn(),
        TaskProgressColumn(),
        TransferSpeedColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=hidden or not console.is_terminal) as bar:
        task = bar.add_task("", total=log_bytes(directory))
        yield lambda size_bytes: bar.advance(task, size_bytes)
