"""`lakefeed catalog`: the catalog by itself, and the care of its database. Owns options, files and exit codes."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from rich.console import Console
from rich.progress import Progress

from lakefeed.ingest.cli.output import readable_errors
from lakefeed.ingest.config import Config, load_config
from lakefeed.ingest.logs import set_up_logging

if TYPE_CHECKING:
    from lakefeed.catalog.store.protocol import Contents, Store


_F = TypeVar("_F", bound=Callable[..., Any])


@contextmanager
def _readable_errors() -> Iterator[None]:
    """Show errors that a user can act on without a traceback, those of the catalog too."""
    from lakefeed.contract.errors import LakefeedError  # noqa: PLC0415

    with readable_errors():
        try:
            yield
        except LakefeedError as error:
            raise click.ClickException(str(error)) from error


def _where(command: _F) -> _F:
    """Add the options that say which catalog is meant."""
    command = click.option("--data-dir", help="Where the catalog's SQLite file lies  [data]")(command)
    return click.option(
        "--config", "config_path", type=click.Path(path_type=Path), help="Settings file  [lakefeed.toml if it exists]"
    )(command)


@click.group(invoke_without_command=True)
@click.pass_context
def catalog(context: click.Context) -> None:
    """Run the Iceberg REST catalog by itself, and look after its database.

    \b
      lakefeed catalog                          # the same as: lakefeed catalog serve
      lakefeed catalog backup names.jsonl       # while it serves
      lakefeed catalog validate                 # does every table's metadata file exist and parse?

    Names and pointers live in SQLite in the data directory, or where `catalog.database` says: several catalog
    processes can share one PostgreSQL.
    """
    if context.invoked_subcommand is None:
        context.invoke(serve)


@catalog.command()
@_where
@click.option("--host", help="Address to listen on  [127.0.0.1]")
@click.option("--http-port", type=int, help="Port  [8181]")
@click.option(
    "--log-level", default="info", type=click.Choice(["debug", "info", "warning", "error"]), show_default=True
)
def serve(config_path: Path | None = None, log_level: str = "info", **flags: Any) -> None:
    """Serve the catalog alone: no log, no writer, no data plane."""
    from lakefeed.ingest.service import run_catalog  # noqa: PLC0415 - the server: not needed by the other commands

    set_up_logging(log_level)
    with _readable_errors():
        config = _load(config_path, **flags)
        sys.exit(asyncio.run(run_catalog(config, announce=_announce)))


@catalog.command()
@_where
def migrate(config_path: Path | None, data_dir: str | None) -> None:
    """Bring the catalog's database up to date with this version of lakefeed. Stop the catalog first."""
    with _readable_errors():
        before, after = asyncio.run(_store(_load(config_path, data_dir=data_dir)).migrate())
    click.echo(f"version {after}, nothing to do" if before == after else f"migrated from version {before} to {after}")


@catalog.command()
@_where
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
def backup(config_path: Path | None, data_dir: str | None, file: Path) -> None:
    """Write all names, properties and pointers to FILE, as JSON lines. Works while the catalog serves.

    Metadata and data files are not copied: back up the warehouse for these, after this.
    """
    from lakefeed.catalog.service.backup import encode_backup  # noqa: PLC0415

    async def run() -> Contents:
        async with _open(_load(config_path, data_dir=data_dir)) as store:
            return await store.export()

    with _readable_errors():
        contents = asyncio.run(run())
        partial = file.with_name(file.name + ".partial")
        with partial.open("wb") as output:
            output.write(encode_backup(contents))
            output.flush()
            os.fsync(output.fileno())
        partial.replace(file)
    click.echo(f"wrote {len(contents.namespaces) + len(contents.entries):,} namespaces, tables and views to {file}")


@catalog.command()
@_where
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False, exists=True))
def restore(config_path: Path | None, data_dir: str | None, file: Path) -> None:
    """Fill an empty catalog from a FILE that `backup` wrote, also one of another kind of database."""
    from lakefeed.catalog.service.backup import decode_backup  # noqa: PLC0415

    async def run(contents: Contents) -> None:
        async with _open(_load(config_path, data_dir=data_dir)) as store:
            await store.restore(contents)

    with _readable_errors():
        contents = decode_backup(file.read_bytes())
        asyncio.run(run(contents))
    click.echo(f"restored {len(contents.namespaces) + len(contents.entries):,} namespaces, tables and views")


@catalog.command()
@_where
def validate(config_path: Path | None, data_dir: str | None) -> None:
    """Check that the metadata of every table and view exists and can be read. Works while the catalog serves.

    Exit code 1 if something is wrong; each problem is one line.
    """
    with _readable_errors():
        problems = asyncio.run(_validate(_load(config_path, data_dir=data_dir)))
    for problem in problems:
        click.echo(problem)
    click.echo(f"{len(problems):,} problems" if problems else "all metadata can be read")
    sys.exit(1 if problems else 0)


async def _validate(config: Config) -> list[str]:
    from lakefeed.catalog.service.backup import find_problems  # noqa: PLC0415
    from lakefeed.ingest.service import open_own_files  # noqa: PLC0415

    found: list[str] = []
    async with _open(config) as store, open_own_files(config) as files:
        contents = await store.export()
        with Progress(console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task("metadata files", total=len(contents.entries))
            async for problem in find_problems(contents, files, config.catalog):
                bar.advance(task)
                found += [problem] if problem else []
    return sorted(found)


def _load(config_path: Path | None, **flags: Any) -> Config:
    return load_config(config_path, os.environ, {f"server.{name}": value for name, value in flags.items()}).config


def _store(config: Config) -> Store:
    from lakefeed.catalog.app import build_store  # noqa: PLC0415
    from lakefeed.ingest.service import DATABASE_NAME  # noqa: PLC0415

    return build_store(config.catalog, Path(config.server.data_dir).resolve() / DATABASE_NAME)


@asynccontextmanager
async def _open(config: Config) -> AsyncIterator[Store]:
    store = _store(config)
    try:
        await store.open()
        yield store
    finally:
        await store.close()


def _announce(url: str) -> None:
    Console(stderr=True, highlight=False).print(f"[bold]lakefeed catalog[/bold] is ready at {url}   (clients add /v1)")
