"""Command `lakefeed`: the list of all commands. A command's module is imported when the command is called."""

from __future__ import annotations

import importlib
from typing import NamedTuple

import click


class _Place(NamedTuple):
    module: str
    attribute: str
    help: str


# The help texts repeat the first sentence of each command, so that `lakefeed --help` imports none of them.
COMMANDS = {
    "serve": _Place("lakefeed.ingest.cli.serve", "serve", "Start the service."),
    "push": _Place("lakefeed.ingest.cli.push", "push", "Send a file of JSON lines to the service."),
    "status": _Place("lakefeed.ingest.cli.control", "status", "Show the state of a running service."),
    "flush": _Place("lakefeed.ingest.cli.control", "flush", "Commit everything that is durable, and wait for it."),
    "config": _Place("lakefeed.ingest.cli.config", "config", "Print every setting, its value and its origin."),
    "catalog": _Place("lakefeed.ingest.cli.catalog", "catalog", "Run the catalog alone, back it up, validate it."),
    "wal": _Place("lakefeed.ingest.cli.wal", "wal", "Inspect the write-ahead log, and repair a damaged one."),
    "quarantine": _Place("lakefeed.ingest.cli.quarantine", "quarantine", "List, replay or drop refused changes."),
    "verify": _Place("lakefeed.ingest.cli.verify", "verify", "Check that a table holds exactly the recorded rows."),
    "spark": _Place("lakefeed.pipeline.spark.commands", "spark", "Query the tables with Spark, or print its settings."),
    "mirror": _Place("lakefeed.pipeline.mirrors.commands", "mirror", "Keep current-state mirrors of change tables."),
    "maintain": _Place("lakefeed.pipeline.maintenance.commands", "maintain", "Compact tables and expire snapshots."),
    "consumers": _Place("lakefeed.pipeline.consumers.commands", "consumers", "List and remove consumers of tables."),
    "backfill": _Place("lakefeed.pipeline.backfill.commands", "backfill", "Load existing rows into a change table."),
}


class _Commands(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        place = COMMANDS[cmd_name]
        command = getattr(importlib.import_module(place.module), place.attribute)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, place.help) for name, place in COMMANDS.items()])


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="lakefeed", prog_name="lakefeed")
def main() -> None:
    """Lakefeed: database changes over WebSocket into Apache Iceberg tables, exactly once.

    \b
    A first tour, in two terminals:
      lakefeed serve
      echo '{"id": 1, "name": "Ada"}' | lakefeed push - --table users
    """
