"""Command `lakefeed quarantine`: list, show, replay and drop changes that their tables refused."""

from __future__ import annotations

import asyncio
import datetime as dt
import time
from collections.abc import AsyncIterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict
from typing import Any

import click
import msgspec
import pyarrow as pa
from prometheus_client import CollectorRegistry

from lakefeed.command_line import (
    json_option,
    print_json,
    print_table,
    progress_bar,
    readable_errors,
    time_text,
    with_options,
)
from lakefeed.contract import changes as cdc
from lakefeed.contract import properties
from lakefeed.contract.changes import TableName
from lakefeed.contract.errors import TableMissing
from lakefeed.contract.properties import Kind
from lakefeed.ingest.cli.lake import Lake, lake_options, load_lake
from lakefeed.storage.store import open_store
from lakefeed.writer.commit.committer import Committer
from lakefeed.writer.metrics import WriterMetrics
from lakefeed.writer.quarantine.replay import Replay, ReplayReport
from lakefeed.writer.quarantine.store import (
    ID,
    Contents,
    Filter,
    Quarantine,
    apply_filter,
    concat,
    files_with,
    find_id,
    once,
    summarise,
    with_ids,
)
from lakefeed.writer.tables.context import TableContext

LIST_LIMIT = 100

# Resolutions in one commit of `drop`.
DROP_MAX_ROWS = 100_000

# Exit code of `replay` when changes are still refused. click itself uses 1 and 2.
STILL_REFUSED = 3

# The node that commits, as snapshots name it.
NODE = "lakefeed-quarantine"

# Commands take any start of an id that names a single change.
ID_SHOWN_CHARS = 12

_IMAGES = (properties.ROW, properties.BEFORE, properties.METADATA)
_LISTED = (
    *(ID, properties.TABLE_NAME, properties.SOURCE, properties.EPOCH, properties.SEQUENCE),
    *(properties.REASON, properties.RECORDED_AT),
)

_TIME = click.DateTime(["%Y-%m-%d", "%Y-%m-%dT%H:%M:%S", "%Y-%m-%dT%H:%M:%S%z"])

_lake_options = with_options(lake_options, json_option)
_filter_options = with_options(
    click.option("--source", help="Only changes of this source."),
    click.option("--reason", help="Only changes refused for this reason, as `list` names it."),
    click.option(
        "--since",
        type=_TIME,
        metavar="TIME",
        help="Only changes quarantined at or after this time, as 2026-11-16T05:28:00 (UTC) or 2026-11-16.",
    ),
    click.option("--until", type=_TIME, metavar="TIME", help="Only changes quarantined before this time."),
)


@click.group()
def quarantine() -> None:
    """List, replay or drop refused changes.

    An acked change is never lost: if its table cannot take it, the whole change is kept in the table
    `lakefeed_quarantine` of the same namespace, with the reason. See docs/quarantine.md.

    \b
      lakefeed quarantine list                        # counts by table and reason
      lakefeed quarantine list --changes              # single changes with their ids
      lakefeed quarantine show 5f0c9a                 # one whole change; the start of its id is enough
      lakefeed quarantine replay default.users        # append to the table, after the cause is fixed
      lakefeed quarantine drop default.users --yes    # give up on them; they stay readable
    """


@quarantine.command("list")
@_lake_options
@_filter_options
@click.option("--table", help="Only changes of this table.")
@click.option("--changes", is_flag=True, help="List single changes instead of counts.")
@click.option("--limit", default=LIST_LIMIT, show_default=True, help="Maximum number of changes, with --changes.")
def list_command(*, as_json: bool, table: str | None, changes: bool, limit: int, **options: Any) -> None:
    """Show changes that were neither replayed nor dropped."""

    async def run() -> pa.Table:
        lake = _pop_lake(options)
        name = lake.table_name(table) if table else None
        async with _open(lake, name) as found:
            return apply_filter(concat([contents.entries for _, contents in found]), _filter(name, **options))

    with readable_errors():
        entries = asyncio.run(run())
    if changes:
        _print_changes(entries, limit=limit, as_json=as_json)
    else:
        _print_summaries(entries, as_json=as_json)


@quarantine.command()
@click.argument("id_", metavar="ID")
@_lake_options
def show(id_: str, *, as_json: bool, **options: Any) -> None:
    """Show one whole change. ID is its id or the start of it."""

    async def run() -> None:
        async with _open(load_lake(**options), None) as found:
            full_id = find_id(concat([contents.entries for _, contents in found]), id_)
            for opened, contents in found:
                entries = with_ids(contents.entries, [full_id])
                for file in files_with(entries):
                    for row in (await opened.read(contents, entries, file=file)).to_pylist():
                        _print_change(row, as_json=as_json)

    with readable_errors():
        asyncio.run(run())


@quarantine.command()
@click.argument("table")
@click.argument("ids", nargs=-1)
@_lake_options
@_filter_options
@click.option(
    "--not-in-log",
    is_flag=True,
    help="For lakefeed_unreadable: confirm that the service's log no longer has these records, see docs/quarantine.md.",
)
def replay(table: str, ids: tuple[str, ...], *, as_json: bool, not_in_log: bool, **options: Any) -> None:
    """Append quarantined changes to TABLE: all of them, those of the IDS, or those that the options select.

    The changes are handled like new ones, so columns may be added for them. They keep their source, sequence, operation
    and times. Each is appended once, even if the command is killed and run again. Changes that the table still refuses
    stay in quarantine and are listed with the reason; the exit code is then 3.

    Records of the log that could not be read are in the table `lakefeed_unreadable`. A version that can read them
    appends their changes to their tables.
    """

    async def run() -> tuple[TableName, ReplayReport]:
        lake = _pop_lake(options)
        name = lake.table_name(table)
        chosen = _filter(name, ids=ids, **options)
        report = ReplayReport()
        async with _open(lake, name) as found:
            for opened, contents in found:
                entries = once(apply_filter(contents.entries, chosen), ID)
                with progress_bar("changes", entries.num_rows) as bar:
                    work = Replay(name, opened, now_us=_now_us, on_entries=bar.advance, not_in_log=not_in_log)
                    report = await work.run(contents, chosen)
        return name, report

    with readable_errors():
        name, report = asyncio.run(run())
    _print_replay(str(name), report, as_json=as_json)
    if report.failed:
        click.get_current_context().exit(STILL_REFUSED)


@quarantine.command()
@click.argument("table")
@click.argument("ids", nargs=-1)
@_lake_options
@_filter_options
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
def drop(table: str, ids: tuple[str, ...], *, as_json: bool, yes: bool, **options: Any) -> None:
    """Drop quarantined changes of TABLE: all of them, those of the IDS, or those that the options select.

    Nothing is deleted. The changes stay readable in `lakefeed_quarantine`, with a row that records the drop, and are no
    longer listed or replayed.
    """

    async def run() -> tuple[TableName, int]:
        lake = _pop_lake(options)
        name = lake.table_name(table)
        dropped = 0
        async with _open(lake, name) as found:
            for opened, contents in found:
                entries = apply_filter(contents.entries, _filter(name, ids=ids, **options))
                chosen = once(entries, ID).column(ID).to_pylist()
                if chosen and not yes:
                    click.confirm(f"drop {len(chosen):,} changes of {name}?", abort=True, err=True)
                with progress_bar("changes", len(chosen)) as bar:
                    for start in range(0, len(chosen), DROP_MAX_ROWS):
                        part = chosen[start : start + DROP_MAX_ROWS]
                        await opened.resolve(part, kind=Kind.DROPPED, table=name, now_us=_now_us())
                        bar.advance(len(part))
                dropped += len(chosen)
        return name, dropped

    with readable_errors():
        name, dropped = asyncio.run(run())
    if as_json:
        print_json({"table": str(name), "dropped": dropped})
    else:
        click.echo(f"{name}: dropped {dropped:,} changes")


def _pop_lake(options: dict[str, Any]) -> Lake:
    """Load the lake from its options; those that select changes are left."""
    return load_lake(options.pop("config_path"), url=options.pop("url"), token=options.pop("token"))


def _filter(name: TableName | None, *, ids: tuple[str, ...] = (), **wanted: Any) -> Filter:
    for key in ("since", "until"):
        if wanted[key] is not None and wanted[key].tzinfo is None:
            wanted[key] = wanted[key].replace(tzinfo=dt.UTC)
    return Filter(table=str(name) if name else None, ids=ids, **wanted)


def _now_us() -> int:
    return time.time_ns() // 1_000


@asynccontextmanager
async def _open(lake: Lake, table: TableName | None) -> AsyncIterator[list[tuple[Quarantine, Contents]]]:
    """Open the quarantine of a table's namespace, or of all namespaces, and read what is open in each."""
    async with lake.open_catalog() as catalog:
        documents = {}
        for namespace in [table.namespace] if table else await catalog.list_namespaces():
            with suppress(TableMissing):
                name = TableName(namespace, properties.TABLE)
                documents[namespace] = await catalog.load_table(name)
        if not documents:
            yield []
            return
        storage = lake.storage_of(next(iter(documents.values())))
        with ThreadPoolExecutor(1) as decoders, ThreadPoolExecutor(1) as encoders:
            async with open_store(storage) as store:
                context = TableContext(
                    node=NODE,
                    config=lake.config.writer,
                    committer=Committer(catalog, store),
                    store=store,
                    decoders=decoders,
                    encoders=encoders,
                    metrics=WriterMetrics(CollectorRegistry()),
                    clock=time.monotonic,
                    tables=lake.config.tables,
                )
                found = []
                with progress_bar("reading the quarantine") as bar:
                    for quarantine in (Quarantine(namespace, context) for namespace in documents):
                        contents = await quarantine.load(on_rows=bar.advance)
                        if contents is not None:
                            found.append((quarantine, contents))
                yield found


def _print_summaries(entries: pa.Table, *, as_json: bool) -> None:
    rows = summarise(entries)
    if as_json:
        print_json(rows)
    elif not rows:
        click.echo("nothing is in quarantine")
    else:
        columns = {name: name for name in ("table", "reason", "changes", "sources", "oldest", "newest")}
        counted = [row | {name: f"{row[name]:,}" for name in ("changes", "sources")} for row in rows]
        print_table(counted, columns | {"text": "newest reason"})


def _print_changes(entries: pa.Table, *, limit: int, as_json: bool) -> None:
    rows = entries.select(_LISTED).slice(0, limit).to_pylist()
    if as_json:
        print_json(rows)
        return
    print_table([row | {ID: row[ID][:ID_SHOWN_CHARS]} for row in rows], _LISTED)
    if entries.num_rows > limit:
        click.echo(f"and {entries.num_rows - limit:,} more: see --limit")


def _print_change(row: Mapping[str, Any], *, as_json: bool) -> None:
    renamed = {cdc.ROW_ID: "id", cdc.TIMESTAMP: "changed_at", cdc.INGESTED_AT: "received_at"}
    shown = {renamed.get(name, name): value for name, value in row.items()}
    if as_json:
        # The images are JSON texts already, with numbers that a decoder might round.
        images = {name: msgspec.Raw(row[name].encode()) for name in _IMAGES if row[name] is not None}
        click.echo(msgspec.json.format(msgspec.json.encode(shown | images), indent=2).decode())
        return
    for name in [*(name for name in shown if name not in _IMAGES), *_IMAGES]:
        if (value := shown[name]) is not None:
            click.echo(f"{name:>14}  {time_text(value) if isinstance(value, dt.datetime) else value}")


def _print_replay(table: str, report: ReplayReport, *, as_json: bool) -> None:
    if as_json:
        print_json({"table": table, **asdict(report)})
        return
    found = f", {report.found:,} were there already" if report.found else ""
    click.echo(f"{table}: replayed {report.replayed:,} changes{found}, {report.failed:,} are still refused")
    for failure in report.failures:
        click.echo(f"  {failure.id[:ID_SHOWN_CHARS]}  {failure.reason}")
    if report.failed > len(report.failures):
        click.echo(f"  and {report.failed - len(report.failures):,} more")
