"""Command line: the options, errors, tables, JSON and progress bars that all commands share.

    foreseen error     one line on standard error; exit code 2 for a wrong setting (as for a wrong option), else 1
    result             standard output: a table or lines for people, with --json one document for programs
    progress           standard error, on a terminal only

Imports click and rich, no other package: commands import what they run when they run it, so that --help is fast.
"""

from __future__ import annotations

import datetime as dt
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import click
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TransferSpeedColumn,
)
from rich.table import Table

from lakefeed.contract.errors import LakefeedError
from lakefeed.settings import SettingsError

DEFAULT_URL = "http://127.0.0.1:8181"
TOKEN_VARIABLE = "LAKEFEED_TOKEN"  # noqa: S105 - the name of a variable, not its value

# Wide enough for every column where the output is no terminal and its width would be guessed.
PLAIN_WIDTH = 200

_F = TypeVar("_F", bound=Callable[..., Any])

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
token_option = click.option(
    "--token",
    default="",
    envvar=TOKEN_VARIABLE,
    show_envvar=True,
    help="Bearer token, if the service requires one.",
)
log_level_option = click.option(
    "--log-level", default="info", type=click.Choice(["debug", "info", "warning", "error"]), show_default=True
)


def config_option(reads: str = "") -> Callable[[_F], _F]:
    """Return the option for the settings file; `reads` names the sections that the command reads."""
    text = f"Settings file{f', for {reads}' if reads else ''}  [lakefeed.toml if it exists]"
    return click.option("--config", "config_path", type=click.Path(path_type=Path), help=text)


def with_options(*options: Callable[[Any], Any]) -> Callable[[_F], _F]:
    """Return a decorator that adds options, shown by --help in this order."""

    def decorate(command: _F) -> _F:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


@contextmanager
def readable_errors() -> Iterator[None]:
    """Show errors that a user can act on as one line, without a traceback."""
    try:
        yield
    except SettingsError as error:
        raise click.UsageError(str(error)) from error
    except LakefeedError as error:
        raise click.ClickException(str(error)) from error
    except PermissionError as error:
        raise click.ClickException(f"permission denied, run this as the service's user: {error}") from error


def print_json(document: Any) -> None:
    """Print one document; values that JSON has no form for are printed as text."""
    click.echo(json.dumps(document, indent=2, default=str, ensure_ascii=False))


def print_table(
    rows: Iterable[Mapping[str, Any]], columns: Sequence[str] | Mapping[str, str], *, title: str | None = None
) -> None:
    """Print rows as a table. `columns` lists the keys to show, or maps each to its heading."""
    headings = columns if isinstance(columns, Mapping) else {name: name for name in columns}
    table = Table(*headings.values(), title=title, title_justify="left")
    for row in rows:
        table.add_row(*(_cell(row.get(name)) for name in headings))
    Console(width=None if sys.stdout.isatty() else PLAIN_WIDTH, markup=False, highlight=False).print(table)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return time_text(value) if isinstance(value, dt.datetime) else str(value)


def time_text(time: dt.datetime) -> str:
    """Return a time in UTC, to the second."""
    return f"{time.astimezone(dt.UTC):%Y-%m-%d %H:%M:%S}Z"


class Bar:
    """One progress bar on standard error. It shows nothing where that is no terminal."""

    def __init__(self, progress: Progress, description: str, total: int | None) -> None:
        self._progress = progress
        self._task = progress.add_task(description, total=total)

    def advance(self, steps: int = 1, *, description: str | None = None) -> None:
        """Count work that is done."""
        self._progress.update(self._task, advance=steps, description=description)

    def set_total(self, total: int) -> None:
        """Set how much work there is, once it is known."""
        self._progress.update(self._task, total=total)


@contextmanager
def progress_bar(
    description: str, total: int | None = None, *, in_bytes: bool = False, keep: bool = False, hidden: bool = False
) -> Iterator[Bar]:
    """Show a bar while the block runs; `keep` leaves it on the screen."""
    console = Console(stderr=True)
    counts: tuple[ProgressColumn, ...] = (
        (TaskProgressColumn(), TransferSpeedColumn()) if in_bytes else (MofNCompleteColumn(),)
    )
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), *counts, TimeElapsedColumn())
    is_disabled = hidden or not console.is_terminal
    with Progress(*columns, console=console, transient=not keep, disable=is_disabled) as progress:
        yield Bar(progress, description, total)
