"""How `lakefeed quarantine` shows changes, as tables for people and as JSON. Owns the printing and nothing else."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import click
import msgspec
import pyarrow as pa
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from lakefeed.contract import changes as cdc
from lakefeed.contract import properties
from lakefeed.writer.quarantine import store as core
from lakefeed.writer.quarantine.replay import ReplayReport
from lakefeed.writer.quarantine.store import Summary

# As much of an id as people need; commands take any part of one that names a single change.
ID_SHOWN_CHARS = 12

_IMAGES = (properties.ROW, properties.BEFORE, properties.METADATA)


def print_summaries(summaries: Sequence[Summary], *, as_json: bool) -> None:
    """Show what is open, by table and reason."""
    if as_json:
        _print_json([asdict(each) for each in summaries])
        return
    if not summaries:
        click.echo("nothing is in quarantine")
        return
    table = Table("table", "reason", "changes", "sources", "oldest", "newest", "newest one's reason")
    for each in summaries:
        counts = (f"{each.changes:,}", f"{each.sources:,}")
        table.add_row(each.table, each.reason, *counts, _time(each.oldest), _time(each.newest), each.text)
    _console().print(table)


def print_changes(entries: pa.Table, *, limit: int, as_json: bool) -> None:
    """Show single changes, without their rows."""
    columns = [
        core.ID,
        properties.TABLE_NAME,
        properties.SOURCE,
        properties.EPOCH,
        properties.SEQUENCE,
        properties.REASON,
        properties.RECORDED_AT,
    ]
    shown = entries.select(columns).slice(0, limit).to_pylist()
    if as_json:
        _print_json(shown)
        return
    table = Table(*columns)
    for row in shown:
        texts = [_time(value) if isinstance(value, dt.datetime) else str(value) for value in row.values()]
        table.add_row(texts[0][:ID_SHOWN_CHARS], *texts[1:])
    _console().print(table)
    if entries.num_rows > limit:
        click.echo(f"and {entries.num_rows - limit:,} more: see --limit")


def print_change(row: Mapping[str, Any], *, as_json: bool) -> None:
    """Show one change whole: what is known of it, then its row as it came."""
    if as_json:
        raw = {name: msgspec.Raw(row[name].encode()) for name in _IMAGES if row[name] is not None}
        _print_json({**_renamed(row), **raw})
        return
    for name, value in _renamed(row).items():
        if name not in _IMAGES and value is not None:
            click.echo(f"{name:>14}  {_time(value) if isinstance(value, dt.datetime) else value}")
    for name in _IMAGES:
        if row[name] is not None:
            click.echo(f"{name:>14}  {row[name]}")


def _renamed(row: Mapping[str, Any]) -> dict[str, Any]:
    known = {cdc.ROW_ID: "id", cdc.TIMESTAMP: "changed_at", cdc.INGESTED_AT: "received_at"}
    return {known.get(name, name): value for name, value in row.items()}


def print_replay(table: str, report: ReplayReport, *, as_json: bool) -> None:
    """Show what a replay did, and what is still refused."""
    if as_json:
        _print_json({"table": table, **asdict(report)})
        return
    found = f", {report.found:,} were there already" if report.found else ""
    click.echo(f"{table}: replayed {report.replayed:,} changes{found}, {report.failed:,} are still refused")
    for failure in report.failures:
        click.echo(f"  {failure.id[:ID_SHOWN_CHARS]}  {failure.reason}")
    if report.failed > len(report.failures):
        click.echo(f"  and {report.failed - len(report.failures):,} more")


def print_dropped(table: str, changes: int, *, as_json: bool) -> None:
    """Show how many changes were given up."""
    if as_json:
        _print_json({"table": table, "dropped": changes})
        return
    click.echo(f"{table}: dropped {changes:,} changes")


def _print_json(document: Any) -> None:
    click.echo(msgspec.json.format(msgspec.json.encode(document), indent=2).decode())


def _console() -> Console:
    console = Console()
    return console if console.is_terminal else Console(width=200)


def _time(time: dt.datetime) -> str:
    return f"{time:%Y-%m-%d %H:%M:%S}Z"


@contextmanager
def progress(what: str, total: int | None) -> Iterator[Any]:
    """Show a bar on a terminal, nothing elsewhere; gives what to call with each number of changes done."""
    console = Console(stderr=True)
    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=total)
        yield lambda changes: bar.advance(task, changes)
