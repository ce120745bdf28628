"""Commands `lakefeed status` and `lakefeed flush`: requests to the control plane of a running service."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

import aiohttp
import click

from lakefeed.command_line import (
    DEFAULT_URL,
    json_option,
    print_json,
    print_table,
    readable_errors,
    token_option,
    with_options,
)
from lakefeed.ingest.admission.auth import bearer_headers
from lakefeed.ingest.errors import IngestError

# Longer than the service waits for a flush, so that its own answer arrives.
REQUEST_TIMEOUT_S = 150.0

_service_options = with_options(
    click.option("--url", default=DEFAULT_URL, show_default=True, help="Control plane of the service."), token_option
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
    else:
        _print_status(document)


def _print_status(document: Mapping[str, Any]) -> None:
    log = document["log"]
    click.echo(
        f"{document['state']}, {document['connections']} connections, up {document['uptimeSeconds']:.0f} s,"
        f" log {log['bytes']:,} of {log['maxBytes']:,} bytes, {log['uncommittedRecords']:,} records not committed"
    )
    sources = ("sourceDoId", "connected", "lastDurableSequence", "lastCommittedSequence")
    tables = ("table", "bufferedRows", "committedRows", "snapshotId", "problem")
    consumers = ("table", "name", "snapshotsBehind", "secondsBehind", "isPassedOver")
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
    except ValueError as error:
        raise IngestError(f"not a Lakefeed service: url={url}") from error
    if not isinstance(document, dict):
        raise IngestError(f"not a Lakefeed service: url={url}")
    return code, document
