"""Command `lakefeed catalog`: the catalog without the service; backup, restore and validation of its database."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from lakefeed.catalog.app import build_store
from lakefeed.catalog.service.backup import decode_backup, encode_backup, find_problems
from lakefeed.catalog.store.store import Store, StoreContents
from lakefeed.command_line import config_option, log_level_option, progress_bar, readable_errors, with_options
from lakefeed.ingest.config import Config, load_config
from lakefeed.ingest.service import DATABASE_NAME, open_own_files, run_catalog
from lakefeed.logs import set_up_logging

_catalog_options = with_options(
    config_option(), click.option("--data-dir", help="Directory of the catalog's SQLite file  [data]")
)


@click.group(invoke_without_command=True)
@click.pass_context
def catalog(context: click.Context) -> None:
    """Run the catalog alone, back it up, validate it.

    \b
      lakefeed catalog                          # the same as: lakefeed catalog serve
      lakefeed catalog backup names.jsonl       # while it serves
      lakefeed catalog validate                 # does every table's metadata file exist and parse?

    The database is an SQLite file in the data directory, or the PostgreSQL that `catalog.database` names. Several
    catalog processes can share one PostgreSQL.
    """
    if context.invoked_subcommand is None:
        context.invoke(serve)


@catalog.command()
@_catalog_options
@click.option("--host", help="Address to listen on  [127.0.0.1]")
@click.option("--http-port", type=int, help="Port  [8181]")
@log_level_option
def serve(config_path: Path | None = None, log_level: str = "info", **flags: Any) -> None:
    """Serve the catalog alone: no log, no writer, no data plane."""
    set_up_logging(log_level)
    with readable_errors():
        config = _load(config_path, **flags)
        ready = "[bold]lakefeed catalog[/bold] is ready at {}   (clients add /v1)"
        console = Console(stderr=True, highlight=False)
        sys.exit(asyncio.run(run_catalog(config, announce=lambda url: console.print(ready.format(url)))))


@catalog.command()
@_catalog_options
def migrate(config_path: Path | None, data_dir: str | None) -> None:
    """Migrate the catalog's database to this version of Lakefeed. Stop the catalog first."""
    with readable_errors():
        before, after = asyncio.run(_store(_load(config_path, data_dir=data_dir)).migrate())
    click.echo(f"version {after}, nothing to do" if before == after else f"migrated from version {before} to {after}")


@catalog.command()
@_catalog_options
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
def backup(config_path: Path | None, data_dir: str | None, file: Path) -> None:
    """Write all names, properties and pointers to FILE, as JSON lines. The catalog may be running.

    Metadata and data files are not copied: back up the warehouse after this command.
    """

    async def run() -> StoreContents:
        async with _open(_load(config_path, data_dir=data_dir)) as store:
            return await store.export()

    with readable_errors():
        contents = asyncio.run(run())
        partial = file.with_name(file.name + ".partial")
        with partial.open("wb") as output:
            output.write(encode_backup(contents))
            output.flush()
            os.fsync(output.fileno())
        partial.replace(file)
    click.echo(f"wrote {len(contents.namespaces) + len(contents.entries):,} namespaces, tables and views to {file}")


@catalog.command()
@_catalog_options
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False, exists=True))
def restore(config_path: Path | None, data_dir: str | None, file: Path) -> None:
    """Fill an empty catalog from a FILE written by `backup`. The kind of database may differ."""

    async def run(contents: StoreContents) -> None:
        async with _open(_load(config_path, data_dir=data_dir)) as store:
            await store.restore(contents)

    with readable_errors():
        contents = decode_backup(file.read_bytes())
        asyncio.run(run(contents))
    click.echo(f"restored {len(contents.namespaces) + len(contents.entries):,} namespaces, tables and views")


@catalog.command()
@_catalog_options
def validate(config_path: Path | None, data_dir: str | None) -> None:
    """Check that the metadata of every table and view exists and can be read. The catalog may be running.

    Prints one line per problem. The exit code is 1 if there are any.
    """

    async def run(config: Config) -> list[str]:
        found: list[str] = []
        async with _open(config) as store, open_own_files(config) as files:
            contents = await store.export()
            with progress_bar("metadata files", len(contents.entries)) as bar:
                async for problem in find_problems(contents, files, config.catalog):
                    bar.advance()
                    found += [problem] if problem else []
        return sorted(found)

    with readable_errors():
        problems = asyncio.run(run(_load(config_path, data_dir=data_dir)))
    for problem in problems:
        click.echo(problem)
    click.echo(f"{len(problems):,} problems" if problems else "all metadata can be read")
    sys.exit(1 if problems else 0)


def _load(config_path: Path | None, **flags: Any) -> Config:
    return load_config(config_path, os.environ, {f"server.{name}": value for name, value in flags.items()}).config


def _store(config: Config) -> Store:
    return build_store(config.catalog, Path(config.server.data_dir).resolve() / DATABASE_NAME)


@asynccontextmanager
async def _open(config: Config) -> AsyncIterator[Store]:
    store = _store(config)
    try:
        await store.open()
        yield store
    finally:
        await store.close()
