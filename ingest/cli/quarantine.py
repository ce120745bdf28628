"""`lakefeed quarantine`: rows that their tables could not take. Owns options, questions and exit codes.

writer/quarantine does the work; quarantine_report.py prints. Both are imported where they are used: no other command
needs them.
"""

from __future__ import annotations

import asyncio
import datetime as dt
import functools
import os
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from lakefeed.contract.changes import TableName, table_name_of
from lakefeed.ingest.admission.auth import CLIENT_TOKEN_VARIABLE
from lakefeed.ingest.cli.output import readable_errors
from lakefeed.ingest.config import Config, load_config
from lakefeed.writer.config import IcebergConfig

if TYPE_CHECKING:
    from lakefeed.writer.quarantine.store import Contents, Filter, OpenLake, Quarantine


DEFAULT_URL = "http://127.0.0.1:8181"
LIST_LIMIT = 100

# Resolutions in one commit of `drop`.
DROP_MAX_ROWS = 100_000

# Exit code of `replay` when changes are still refused, apart from click's own 1 and 2.
STILL_REFUSED = 3

_F = TypeVar("_F", bound=Callable[..., Any])

_TIME = click.DateTime(["%Y-%m-%d", "%Y-%m-%dT%H:%M:%S", "%Y-%m-%dT%H:%M:%S%z"])


@dataclass(frozen=True, slots=True)
class Target:
    """Where a command looks: the catalog, and the settings for the store behind it."""

    iceberg: IcebergConfig
    config: Config


def _where(command: _F) -> _F:
    """Add the options that say where the quarantine is."""
    options = (
        click.option("--url", help=f"Iceberg REST catalog, before /v1  [iceberg.uri, or {DEFAULT_URL}]"),
        click.option(
            "--token",
            default="",
            envvar=CLIENT_TOKEN_VARIABLE,
            show_envvar=True,
            help="Bearer token, where the catalog asks for one.",
        ),
        click.option(
            "--config",
            "config_path",
            type=click.Path(path_type=Path),
            help="Settings file, for storage, tables and catalog  [lakefeed.toml if it exists]",
        ),
        click.option("--json", "as_json", is_flag=True, help="Print JSON."),
    )
    for option in reversed(options):
        command = option(command)
    return command


def _which(command: _F) -> _F:
    """Add the options that choose changes."""
    options = (
        click.option("--source", help="Only changes of this source."),
        click.option("--reason", help="Only changes refused for this reason, as `list` names it."),
        click.option(
            "--since",
            type=_TIME,
            metavar="TIME",
            help="Only those quarantined at or after, as 2026-11-16T05:28:00 (UTC), or a day.",
        ),
        click.option("--until", type=_TIME, metavar="TIME", help="Only those quarantined before this time."),
    )
    for option in reversed(options):
        command = option(command)
    return command


@click.group()
def quarantine() -> None:
    """Look at rows that their tables could not take, and replay or drop them.

    A change that was acked is never lost: what its table cannot take is kept whole in the table
    `lakefeed_quarantine` of the same namespace, with the reason. See docs/quarantine.md.

    \b
      lakefeed quarantine list                        # what is there, by table and reason
      lakefeed quarantine list --changes              # one by one, with their ids
      lakefeed quarantine show 5f0c9a                 # one change whole; the start of its id is enough
      lakefeed quarantine replay default.users        # append to the table, after the cause is gone
      lakefeed quarantine drop default.users --yes    # give up on them; they stay readable
    """


@quarantine.command("list")
@_where
@_which
@click.option("--table", help="Only changes of this table.")
@click.option("--changes", is_flag=True, help="List single changes instead of counts.")
@click.option("--limit", default=LIST_LIMIT, show_default=True, help="With --changes: at most so many.")
def list_command(*, as_json: bool, table: str | None, changes: bool, limit: int, **options: Any) -> None:
    """Show what is in quarantine and neither replayed nor dropped."""
    from lakefeed.ingest.cli import quarantine_report as show  # noqa: PLC0415  (see above)
    from lakefeed.writer.quarantine.store import apply_filter, concat, summarise  # noqa: PLC0415

    async def run() -> None:
        where, which = _split(options)
        target = _target(**where)
        name = _table_name(target, table) if table else None
        async with _open(target, name) as lake:
            loaded = [contents.entries for _, contents in await _load(lake)]
            entries = apply_filter(concat(loaded), _filter(name, **which))
        if changes:
            show.print_changes(entries, limit=limit, as_json=as_json)
        else:
            show.print_summaries(summarise(entries), as_json=as_json)

    with readable_errors():
        asyncio.run(run())


@quarantine.command()
@click.argument("id_", metavar="ID")
@_where
def show(id_: str, *, as_json: bool, **where: Any) -> None:
    """Show one change whole; ID is its id or the start of it."""
    from lakefeed.ingest.cli.quarantine_report import print_change  # noqa: PLC0415  (see above)
    from lakefeed.writer.quarantine.store import concat, files_with, find_id, with_ids  # noqa: PLC0415

    async def run() -> None:
        async with _open(_target(**where), None) as lake:
            found = await _load(lake)
            full_id = find_id(concat([contents.entries for _, contents in found]), id_)
            for store, contents in found:
                entries = with_ids(contents.entries, [full_id])
                for file in files_with(entries):
                    for row in (await store.read(contents, entries, file=file)).to_pylist():
                        print_change(row, as_json=as_json)

    with readable_errors():
        asyncio.run(run())


@quarantine.command()
@click.argument("table")
@click.argument("ids", nargs=-1)
@_where
@_which
@click.option(
    "--not-in-log",
    is_flag=True,
    help="For lakefeed_unreadable: the service's log has these records no more, see docs/quarantine.md.",
)
def replay(table: str, ids: tuple[str, ...], *, as_json: bool, not_in_log: bool, **options: Any) -> None:
    """Append changes to their TABLE: all that are open, those of the IDS, or those of the options.

    They go the way of every change, so columns may be added for them, and keep their source, sequence, operation and
    times. Each is appended once, even if the command is killed at any moment and run again. What the table still
    refuses stays in quarantine, is listed with the reason, and makes the exit code 3.

    Records of the log that could not be read whole are the table `lakefeed_unreadable`: a version that can read them
    takes them apart and appends their changes to their tables.
    """
    from lakefeed.ingest.cli import quarantine_report as show  # noqa: PLC0415  (see above)
    from lakefeed.writer.quarantine.replay import (  # noqa: PLC0415
        RecordReplay,
        Replay,
        ReplayReport,
    )
    from lakefeed.writer.quarantine.store import apply_filter, count_changes  # noqa: PLC0415
    from lakefeed.writer.rows.groups import UNREADABLE_TABLE  # noqa: PLC0415

    async def run() -> bool:
        where, which = _split(options)
        target = _target(**where)
        name = _table_name(target, table)
        is_of_records = name.name == UNREADABLE_TABLE
        make = functools.partial(RecordReplay, not_in_log=not_in_log) if is_of_records else Replay
        report = ReplayReport()
        async with _open(target, name) as lake:
            wanted = _filter(name, ids=ids, **which)
            for _, contents in await _load(lake):
                assert lake is not None
                total = count_changes(apply_filter(contents.entries, wanted))
                with show.progress("changes", total) as advance:
                    work = make(name, contents, lake.context, now_us=_now_us, on_changes=advance)
                    report = await work.run(wanted)
        show.print_replay(str(name), report, as_json=as_json)
        return report.failed > 0

    with readable_errors():
        is_refused = asyncio.run(run())
    if is_refused:
        click.get_current_context().exit(STILL_REFUSED)


@quarantine.command()
@click.argument("table")
@click.argument("ids", nargs=-1)
@_where
@_which
@click.option("--yes", is_flag=True, help="Do it without asking.")
def drop(table: str, ids: tuple[str, ...], *, as_json: bool, yes: bool, **options: Any) -> None:
    """Give up on changes of TABLE: all that are open, those of the IDS, or those of the options.

    Nothing is deleted: they stay readable in `lakefeed_quarantine`, with a row that says that they were dropped, and
    are neither listed nor replayed any more.
    """
    from lakefeed.contract.properties import Kind  # noqa: PLC0415
    from lakefeed.ingest.cli.quarantine_report import print_dropped, progress  # noqa: PLC0415  (see above)
    from lakefeed.writer.quarantine.store import apply_filter, change_ids  # noqa: PLC0415

    async def run() -> None:
        where, which = _split(options)
        target = _target(**where)
        name = _table_name(target, table)
        dropped = 0
        async with _open(target, name) as lake:
            for store, contents in await _load(lake):
                chosen = change_ids(apply_filter(contents.entries, _filter(name, ids=ids, **which)))
                if chosen and not yes:
                    click.confirm(f"drop {len(chosen):,} changes of {name}?", abort=True, err=True)
                with progress("changes", len(chosen)) as advance:
                    for start in range(0, len(chosen), DROP_MAX_ROWS):
                        part = chosen[start : start + DROP_MAX_ROWS]
                        await store.resolve(part, kind=Kind.DROPPED, table=name, now_us=_now_us())
                        advance(len(part))
                dropped += len(chosen)
        print_dropped(str(name), dropped, as_json=as_json)

    with readable_errors():
        asyncio.run(run())


def _split(options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Tell the options that say where from those that choose changes."""
    where = {name: options[name] for name in ("config_path", "url", "token")}
    return where, {name: value for name, value in options.items() if name not in where}


def _target(config_path: Path | None, *, url: str | None, token: str) -> Target:
    config = load_config(config_path, os.environ).config
    iceberg = replace(config.iceberg, uri=url or config.iceberg.uri or DEFAULT_URL)
    return Target(replace(iceberg, token=token, credential="") if token else iceberg, config)


def _table_name(target: Target, table: str) -> TableName:
    return table_name_of(table, target.config.writer.default_namespace)


def _filter(name: TableName | None, *, ids: tuple[str, ...] = (), **which: Any) -> Filter:
    from lakefeed.writer.quarantine.store import Filter  # noqa: PLC0415  (see above)

    since, until = (_with_zone(which.pop(key)) for key in ("since", "until"))
    return Filter(table=str(name) if name else None, since=since, until=until, ids=ids, **which)


def _with_zone(time_: dt.datetime | None) -> dt.datetime | None:
    return time_ if time_ is None or time_.tzinfo else time_.replace(tzinfo=dt.UTC)


def _now_us() -> int:
    return time.time_ns() // 1_000


@asynccontextmanager
async def _open(target: Target, table: TableName | None) -> AsyncIterator[OpenLake | None]:
    from lakefeed.writer.quarantine.store import open_quarantines  # noqa: PLC0415  (see above)

    namespace = table.namespace if table else None
    config = target.config
    opened = open_quarantines(
        target.iceberg, namespace=namespace, writer=config.writer, storage=config.storage, tables=config.tables
    )
    async with opened as lake:
        yield lake


async def _load(lake: OpenLake | None) -> Sequence[tuple[Quarantine, Contents]]:
    from lakefeed.ingest.cli.quarantine_report import progress  # noqa: PLC0415  (see above)

    found = []
    with progress("reading the quarantine", None) as advance:
        for store in lake.quarantines if lake else ():
            contents = await store.load(on_rows=advance)
            if contents is not None:
                found.append((store, contents))
    return found
