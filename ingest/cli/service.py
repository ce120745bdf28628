"""Commands `lakefeed serve`, `status`, `flush` and `config`: the service, and requests to a running one.

The settings and the service are imported by the commands that need them, because importing them is slow.
"""

from __future__ import annotations

import asyncio
import enum
import os
import sys
from collections.abc import Mapping
from dataclasses import fields
from http import HTTPStatus
from importlib.metadata import version
from pathlib import Path
from typing import Any

import aiohttp
import click
from rich.console import Console

from lakefeed.command_line import (
    DEFAULT_URL,
    config_option,
    json_option,
    log_level_option,
    print_json,
    print_table,
    readable_errors,
    token_option,
    with_options,
)
from lakefeed.ingest.admission.auth import bearer_headers
from lakefeed.ingest.errors import IngestError
from lakefeed.logs import set_up_logging

DEFAULT_WS_URL = "ws://127.0.0.1:8182/ws"

# Longer than the service waits for a flush, so that its own answer arrives.
REQUEST_TIMEOUT_S = 150.0

_service_options = with_options(
    click.option("--url", default=DEFAULT_URL, show_default=True, help="Control plane of the service."), token_option
)


@click.command()
@config_option()
@click.option("--data-dir", help="Directory of the log, the catalog and the tables  [data]")
@click.option("--host", help="Address to listen on  [127.0.0.1]")
@click.option("--http-port", type=int, help="Port of catalog, status, flush, health and metrics  [8181]")
@click.option("--ws-port", type=int, help="Port of the WebSocket data plane  [8182]")
@log_level_option
def serve(config_path: Path | None, log_level: str, **flags: Any) -> None:
    """Start the service.

    WebSocket ingest, writer, Iceberg REST catalog and control plane run in one process. Every setting can be given in
    the settings file, in the environment as LAKEFEED_<SECTION>_<KEY>, or (those below) as an option; `lakefeed config`
    lists them all. SIGTERM or Ctrl-C commits what is buffered and stops. Changes that could not be committed in time
    stay in the log and are committed after the next start.
    """
    from lakefeed.ingest.config import load_config  # noqa: PLC0415 - see above
    from lakefeed.ingest.service import run_service  # noqa: PLC0415

    set_up_logging(log_level)
    with readable_errors():
        loaded = load_config(config_path, os.environ, {f"server.{name}": value for name, value in flags.items()})
        sys.exit(asyncio.run(run_service(loaded.config, announce=_announce)))


def _announce(ws_url: str, http_url: str) -> None:
    program = Path(sys.argv[0]).absolute()
    command = program.relative_to(Path.cwd()) if program.is_relative_to(Path.cwd()) else program
    url = "" if ws_url == DEFAULT_WS_URL else f" --url {ws_url}"
    Console(stderr=True, highlight=False).print(
        f"[bold]lakefeed {version('lakefeed')}[/bold] is ready\n"
        f"  push changes to   {ws_url}\n"
        f"  Iceberg catalog   {http_url}   (clients add /v1)\n"
        f"  status            {http_url}/status\n"
        "\nFirst step, in another terminal:\n"
        f'  echo \'{{"id": 1, "name": "Ada"}}\' | {command} push - --table users{url}\n'
    )


@click.command()
@_service_options
@json_option
def status(url: str, *, token: str, as_json: bool) -> None:
    """Show the state of a running service.

    Lists sources, tables, consumers, the log and current problems.
    """
    with readable_errors():
        code, document = asyncio.run(_request("GET", f"{url}/status", token=token))
    if code != HTTPStatus.OK:
        raise click.ClickException(f"the service answered {code}: {document}")
    if as_json:
        print_json(document)
        return
    log = document["log"]
    click.echo(
        f"{document['state']}, {document['connections']} connections, up {document['uptimeSeconds']:.0f} s,"
        f" log {log['bytes']:,} of {log['maxBytes']:,} bytes, {log['uncommittedRecords']:,} records not committed"
    )
    sources = ("sourceDoId", "connected", "lastDurableSequence", "lastCommittedSequence")
    tables = ("table", "bufferedRows", "committedRows", "snapshotId", "problem")
    consumers = ("table", "name", "snapshotsBehind", "secondsBehind", "isExpired")
    print_table(document["sources"], sources, title="sources")
    print_table(document["tables"], tables, title="tables")
    if document["consumers"]:
        print_table(document["consumers"], consumers, title="consumers")
    for problem in document["problems"]:
        click.secho(f"problem: {problem}", fg="red")


@click.command()
@click.option("--table", help="Commit only this table (namespace.name).")
@_service_options
def flush(table: str | None, url: str, *, token: str) -> None:
    """Commit everything that is durable, and wait for it."""
    query = {"table": table} if table else {}
    with readable_errors():
        code, document = asyncio.run(_request("POST", f"{url}/flush", token=token, params=query))
    if code != HTTPStatus.OK or not document.get("success"):
        raise click.ClickException(document.get("error", f"the service answered {code}"))
    print_flushed(document["tables"])
    if not document["tables"]:
        click.echo("nothing to commit")


def print_flushed(tables: Mapping[str, Any]) -> None:
    """Print what a flush committed, one line per table."""
    for name, flushed in tables.items():
        if flushed["snapshotId"] is None:
            click.echo(f"{name}: all rows were refused, see `lakefeed quarantine list`")
        else:
            click.echo(f"committed {name}: snapshot {flushed['snapshotId']}, {flushed['rows']:,} rows in this flush")


async def _request(
    method: str, url: str, *, token: str, params: dict[str, str] | None = None
) -> tuple[int, dict[str, Any]]:
    timeout = aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout, headers=bearer_headers(token)) as session,
            session.request(method, url, params=params) as response,
        ):
            code, document = response.status, await response.json(content_type=None)
    except (aiohttp.ClientError, TimeoutError) as error:
        raise IngestError(f"cannot reach the service, is `lakefeed serve` running? url={url} error={error}") from error
    except ValueError:
        document = None
    if not isinstance(document, dict):
        raise IngestError(f"not a Lakefeed service: url={url}")
    return code, document


@click.command()
@config_option()
@click.option("--json", "as_json", is_flag=True, help="Print the values only, as JSON.")
def config(config_path: Path | None, *, as_json: bool) -> None:
    """Print every setting, its value and its origin.

    The origin is the settings file, an environment variable, or the default. Secrets are shown as (set).
    """
    from lakefeed.ingest.config import TABLES, load_config  # noqa: PLC0415 - see above

    with readable_errors():
        loaded = load_config(config_path, os.environ)
    rows = []
    for name, section in loaded.sections.items():
        for item in fields(section) if name != TABLES else ():
            key = f"{name}.{item.name}"
            value = _shown(getattr(section, item.name))
            shown = "(set)" if item.metadata.get("secret") and value else value
            origin = loaded.origins.get(key, "default")
            rows.append({"setting": key, "value": shown, "from": origin, "what it does": item.metadata["help"]})
    for pattern, values in loaded.sections[TABLES].items():
        for name, value in values.items():
            key = f'tables."{pattern}".{name}'
            what = f"{name} of the tables that match this pattern"
            rows.append({"setting": key, "value": value, "from": loaded.origins[key], "what it does": what})
    if as_json:
        print_json({row["setting"]: row["value"] for row in rows})
    else:
        print_table(rows, ("setting", "value", "from", "what it does"))


def _shown(value: Any) -> Any:
    if isinstance(value, enum.Enum):
        return value.value
    return [_shown(each) for each in value] if isinstance(value, tuple) else value
