"""Command `lakefeed serve`: the whole service in one process."""

from __future__ import annotations

import asyncio
import os
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from lakefeed.command_line import config_option, log_level_option, readable_errors
from lakefeed.ingest.cli.push import DEFAULT_WS_URL
from lakefeed.ingest.config import load_config
from lakefeed.ingest.service import run_service
from lakefeed.logs import set_up_logging


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
