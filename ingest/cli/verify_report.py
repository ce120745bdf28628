"""How `lakefeed verify` shows what it found, for people and as JSON. Owns the printing and nothing else."""

from __future__ import annotations

import json
from types import TracebackType
from typing import Self

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from lakefeed.contract.verification import Report, report_document, report_lines


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
        click.echo(json.dumps(report_document(report), indent=2, ensure_ascii=False))
        return
    for line in report_lines(report):
        click.echo(line)
