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
from lakefeed.catalog.names import Pointer
from lakefeed.catalog.service.backup import Problem, decode_backup, encode_backup, find_newest, find_problems
from lakefeed.catalog.service.metadata_files import Files
from lakefeed.catalog.store.store import Store, StoreContents
from lakefeed.command_line import (
    config_option,
    json_option,
    log_level_option,
    print_json,
    progress_bar,
    readable_errors,
    with_options,
)
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
      lakefeed catalog validate --backup names.jsonl

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
    """Fill an empty catalog from a FILE written by `backup`. The kind of database may differ.

    If a table's metadata file was deleted since, the newest one of the table is used, and the command says so. Tables
    and views without any are listed and not restored, and the exit code is 1.
    """

    async def run(config: Config, contents: StoreContents) -> StoreContents:
        async with _open(config) as store, open_own_files(config) as files:
            found = await _find_problems(contents, files, config)
            for problem, _ in found:
                if problem.is_outage:  # the command can be repeated, but only into an empty catalog
                    raise problem.error
            replaced = {problem.entry: newest for problem, newest in found}
            pointers = {entry: replaced.get(entry, pointer) for entry, pointer in contents.entries.items()}
            usable = {entry: pointer for entry, pointer in pointers.items() if pointer is not None}
            for problem, newest in found:
                click.echo(_describe(problem, newest, used="restored from"), err=newest is None)
            if contents.entries and not usable:
                raise click.ClickException("nothing was restored: check storage.warehouse, or use another backup")
            restored = StoreContents(contents.namespaces, usable)
            await store.restore(restored)
            return restored

    with readable_errors():
        contents = decode_backup(file.read_bytes())
        restored = asyncio.run(run(_load(config_path, data_dir=data_dir), contents))
    click.echo(f"restored {len(restored.namespaces) + len(restored.entries):,} namespaces, tables and views")
    missing = len(contents.entries) - len(restored.entries)
    if missing:
        raise click.ClickException(
            f"{missing:,} tables or views were not restored. Register them before the service starts, because it"
            " creates missing tables as new ones"
        )


@catalog.command()
@_catalog_options
@click.option(
    "--backup",
    "file",
    type=click.Path(path_type=Path, dir_okay=False, exists=True),
    help="Check this backup instead of the catalog: the file itself, and the metadata that it names.",
)
@json_option
def validate(config_path: Path | None, data_dir: str | None, file: Path | None, *, as_json: bool) -> None:
    """Check that the metadata of every table and view exists and can be read. The catalog may be running.

    Prints one line per problem. The exit code is 1 if there are any.
    """

    async def run(config: Config) -> list[tuple[Problem, Pointer | None]]:
        async with open_own_files(config) as files:
            if file is not None:
                contents = decode_backup(file.read_bytes())  # noqa: ASYNC240 - nothing else runs
            else:
                async with _open(config) as store:
                    contents = await store.export()
            return await _find_problems(contents, files, config)

    with readable_errors():
        found = asyncio.run(run(_load(config_path, data_dir=data_dir)))
    if as_json:
        print_json({"problems": [_to_json(*each) for each in found]})
    else:
        for problem, newest in found:
            click.echo(str(problem) if file is None else _describe(problem, newest, used="restore would use"))
        click.echo(f"{len(found):,} problems" if found else "all metadata can be read")
    sys.exit(1 if found else 0)


async def _find_problems(contents: StoreContents, files: Files, config: Config) -> list[tuple[Problem, Pointer | None]]:
    """Return every problem by name, each with the newest metadata file that can be used instead."""
    found: list[Problem] = []
    with progress_bar("metadata files", len(contents.entries)) as bar:
        async for problem in find_problems(contents, files, config.catalog):
            bar.advance()
            found += [problem] if problem else []
    found.sort(key=str)
    return [
        (each, None if each.is_outage else await find_newest(each.pointer, files, config.catalog)) for each in found
    ]


def _describe(problem: Problem, newest: Pointer | None, *, used: str) -> str:
    return f"{problem}: {f'{used} {newest.location}' if newest else 'no newer metadata file of it was found'}"


def _to_json(problem: Problem, newest: Pointer | None) -> dict[str, Any]:
    return {
        "kind": problem.entry.kind,
        "name": str(problem.entry),
        "metadataLocation": problem.pointer.location,
        "problem": str(problem.error),
        "newestLocation": newest.location if newest else None,
    }


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
