"""The command line. Owns arguments, help texts and what is printed; work is done by the modules it calls."""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import os
import platform
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any, BinaryIO

import aiohttp
import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TransferSpeedColumn
from rich.table import Table

from lakefeed.ingest.admission.auth import CLIENT_TOKEN_VARIABLE, bearer_headers
from lakefeed.ingest.cli.catalog import catalog
from lakefeed.ingest.cli.output import readable_errors
from lakefeed.ingest.cli.push import PushReport, PushRequest, push
from lakefeed.ingest.cli.quarantine import quarantine
from lakefeed.ingest.cli.verify import verify
from lakefeed.ingest.cli.wal import wal
from lakefeed.ingest.config import Loaded, load_config, section_types
from lakefeed.ingest.errors import IngestError
from lakefeed.ingest.logs import set_up_logging
from lakefeed.pipeline.cli import WithPipeline

DEFAULT_URL = "http://127.0.0.1:8181"
DEFAULT_WS_URL = "ws://127.0.0.1:8182/ws"
REQUEST_TIMEOUT_S = 150.0

_token_option = click.option(
    "--token",
    default="",
    envvar=CLIENT_TOKEN_VARIABLE,
    show_envvar=True,
    help="Bearer token, where the service asks for one.",
)


@click.group(cls=WithPipeline, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
def main() -> None:
    """Lakefeed: database changes over WebSocket into Apache Iceberg tables, exactly once.

    \b
    A first tour, in two terminals:
      lakefeed serve
      echo '{"id": 1, "name": "Ada"}' | lakefeed push - --table users
    """


@main.command()
@click.option(
    "--config", "config_path", type=click.Path(path_type=Path), help="Settings file  [lakefeed.toml if it exists]"
)
@click.option("--data-dir", help="Where log, catalog and tables live  [data]")
@click.option("--host", help="Address to listen on  [127.0.0.1]")
@click.option("--http-port", type=int, help="Catalog, status, flush, health, metrics  [8181]")
@click.option("--ws-port", type=int, help="WebSocket data plane  [8182]")
@click.option(
    "--log-level", default="info", type=click.Choice(["debug", "info", "warning", "error"]), show_default=True
)
def serve(config_path: Path | None, log_level: str, **flags: Any) -> None:
    """Start the service: WebSocket ingest, writer, Iceberg REST catalog and control plane in one process.

    Every setting can stand in the file, in the environment as LAKEFEED_<SECTION>_<KEY>, or (these) as a flag;
    `lakefeed config` lists them all. SIGTERM or Ctrl-C flushes what is buffered and stops; what could not be
    flushed in time stays in the log for the next start.
    """
    from lakefeed.ingest.service import run_service  # noqa: PLC0415  (pyarrow and the servers: not needed by the other commands)

    set_up_logging(log_level)
    with readable_errors():
        loaded = load_config(config_path, os.environ, {f"server.{name}": value for name, value in flags.items()})
        sys.exit(asyncio.run(run_service(loaded.config, announce=_announce)))


def _announce(ws_url: str, http_url: str) -> None:
    console = Console(stderr=True, highlight=False)
    console.print(
        f"[bold]lakefeed {_version()}[/bold] is ready\n"
        f"  push changes to   {ws_url}\n"
        f"  Iceberg catalog   {http_url}   (clients add /v1)\n"
        f"  status            {http_url}/status\n"
        "\nFirst step, in another terminal:\n"
        f'  echo \'{{"id": 1, "name": "Ada"}}\' | {_own_command()} push - --table users{_url_option(ws_url)}\n'
    )


def _own_command() -> str:
    program = Path(sys.argv[0]).absolute()
    return str(program.relative_to(Path.cwd()) if program.is_relative_to(Path.cwd()) else program)


def _url_option(ws_url: str) -> str:
    return "" if ws_url == DEFAULT_WS_URL else f" --url {ws_url}"


@main.command("push")
@click.argument("file", type=click.File("rb"))
@click.option("--table", help="Table of every line that does not name one itself.")
@click.option("--source", help="Name of this source. Pushing again under the same name sends only new lines.")
@click.option("--key", default="id", show_default=True, help="Column that identifies a row, for `_cdc_row_id`.")
@click.option("--url", default=DEFAULT_WS_URL, show_default=True, help="WebSocket address of the service.")
@_token_option
@click.option("--flush/--no-flush", default=True, show_default=True, help="Wait until everything is committed.")
def push_command(file: BinaryIO, *, source: str | None, **options: Any) -> None:
    """Send a file of JSON lines (- for standard input), rows or changes, over the WebSocket.

    A line with an `operation` and an `after` or `before` is a change; any other object is a row to insert.
    Ends when every line is durable and, with --flush, committed.

    \b
      lakefeed push users.ndjson --table users
      lakefeed push changes.ndjson --source shop-db     # run it again: only new lines are sent
    """
    request = PushRequest(source=source or f"push-{uuid.uuid4()}", **options)
    with readable_errors(), _progress(file) as advance:
        report = asyncio.run(push(request, file, advance))
    _print_push(report)
    if request.flush and not report.committed:
        raise click.ClickException("durable, but not all committed yet: see `lakefeed status`")


def _print_push(report: PushReport) -> None:
    click.echo(f"acked {report.acked:,} changes ({report.duplicates:,} duplicates, {report.skipped:,} lines skipped)")
    _print_flushed(report.tables)


def _print_flushed(tables: Mapping[str, Any]) -> None:
    for name, flushed in tables.items():
        if flushed["snapshotId"] is None:
            click.echo(f"{name}: the table has taken no row, see `lakefeed quarantine list`")
        else:
            click.echo(f"committed {name}: snapshot {flushed['snapshotId']}, {flushed['rows']:,} rows in this flush")


@contextmanager
def _progress(file: BinaryIO) -> Iterator[Callable[[int, int], None]]:
    """Show a bar on a terminal, nothing elsewhere."""
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TransferSpeedColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("pushing", total=_size_of(file))
        changes = 0

        def advance(new_changes: int, input_bytes: int) -> None:
            nonlocal changes
            changes += new_changes
            bar.update(task, advance=input_bytes, description=f"{changes:,} changes acked")

        yield advance


def _size_of(file: BinaryIO) -> int | None:
    try:
        return os.fstat(file.fileno()).st_size or None
    except OSError:
        return None


@main.command()
@click.option("--url", default=DEFAULT_URL, show_default=True, help="Control plane of the service.")
@_token_option
@click.option("--json", "as_json", is_flag=True, help="Print the whole answer as JSON.")
def status(url: str, *, token: str, as_json: bool) -> None:
    """Show sources, tables, log and problems of a running service."""
    with readable_errors():
        code, answer = asyncio.run(_request("GET", f"{url}/status", token=token))
    if code != 200:  # noqa: PLR2004
        raise click.ClickException(f"the service answered {code}: {answer}")
    if as_json:
        click.echo(json.dumps(answer, indent=2))
        return
    _print_status(answer)


def _print_status(answer: dict[str, Any]) -> None:
    console = Console()
    log = answer["log"]
    console.print(
        f"{answer['state']}, {answer['connections']} connections, up {answer['uptimeSeconds']:.0f} s, "
        f"log {log['bytes']:,} of {log['maxBytes']:,} bytes, {log['uncommittedRecords']:,} records not committed"
    )
    _print_rows(
        console,
        "sources",
        answer["sources"],
        ["sourceDoId", "connected", "lastDurableSequence", "lastCommittedSequence"],
    )
    _print_rows(
        console, "tables", answer["tables"], ["table", "bufferedRows", "committedRows", "snapshotId", "problem"]
    )
    if answer["consumers"]:
        columns = ["table", "name", "snapshotsBehind", "secondsBehind", "isPassedOver"]
        _print_rows(console, "consumers", answer["consumers"], columns)
    for problem in answer["problems"]:
        console.print(f"problem: {problem}", style="red")


def _print_rows(console: Console, title: str, rows: list[dict[str, Any]], names: list[str]) -> None:
    table = Table(*names, title=title, title_justify="left")
    for row in rows:
        table.add_row(*(str(row.get(name)) if row.get(name) is not None else "" for name in names))
    console.print(table)


@main.command()
@click.option("--table", help="Only this table (namespace.name); all without it.")
@click.option("--url", default=DEFAULT_URL, show_default=True, help="Control plane of the service.")
@_token_option
def flush(table: str | None, url: str, *, token: str) -> None:
    """Commit everything that is durable now, and wait for it."""
    query = {"table": table} if table else {}
    with readable_errors():
        code, answer = asyncio.run(_request("POST", f"{url}/flush", token=token, params=query))
    if code != 200 or not answer.get("success"):  # noqa: PLR2004
        raise click.ClickException(answer.get("error", f"the service answered {code}"))
    _print_flushed(answer["tables"])
    if not answer["tables"]:
        click.echo("nothing to commit")


@main.command()
@click.option(
    "--config", "config_path", type=click.Path(path_type=Path), help="Settings file  [lakefeed.toml if it exists]"
)
@click.option("--json", "as_json", is_flag=True, help="Print values only, as JSON.")
def config(config_path: Path | None, *, as_json: bool) -> None:
    """Print every setting: its effective value, where it came from, and why it is there."""
    with readable_errors():
        loaded = load_config(config_path, os.environ)
    rows = list(_settings(loaded))
    if as_json:
        click.echo(json.dumps({key: value for key, value, _, _ in rows}, indent=2))
        return
    table = Table("setting", "value", "from", "why")
    for key, value, origin, why in rows:
        table.add_row(key, str(value), origin, why)
    Console(width=None if sys.stdout.isatty() else 200).print(table)


def _settings(loaded: Loaded) -> Iterator[tuple[str, Any, str, str]]:
    for section, cls in section_types().items():
        for item in fields(cls):
            key = f"{section}.{item.name}"
            value = getattr(getattr(loaded.config, section), item.name)
            shown = "(set)" if item.metadata.get("secret") and value else value
            yield key, shown, loaded.origins.get(key, "default"), item.metadata["why"]
    for pattern, values in loaded.config.tables.sections.items():
        for name, value in values.items():
            key = f'tables."{pattern}".{name}'
            yield key, value, loaded.origins[key], f"{name} of the tables that this matches"


main.add_command(catalog)
main.add_command(wal)
main.add_command(quarantine)
main.add_command(verify)


@main.command()
def version() -> None:
    """Print the version of Lakefeed and of the Python it runs on."""
    click.echo(f"lakefeed {_version()} (Python {platform.python_version()})")


def _version() -> str:
    return importlib.metadata.version("lakefeed")


async def _request(
    method: str, url: str, *, token: str, params: dict[str, str] | None = None
) -> tuple[int, dict[str, Any]]:
    timeout = aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout, headers=bearer_headers(token)) as session,
            session.request(method, url, params=params) as answer,
        ):
            code, document = answer.status, await answer.json(content_type=None)
    except (aiohttp.ClientError, TimeoutError) as error:
        raise IngestError(f"cannot reach the service, is `lakefeed serve` running? url={url} error={error}") from error
    except ValueError as error:
        raise IngestError(f"not a Lakefeed service: url={url}") from error
    if not isinstance(document, dict):
        raise IngestError(f"not a Lakefeed service: url={url}")
    return code, document
