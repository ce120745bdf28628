"""Command `lakefeed`: the list of all commands. A command's module is imported when the command is called."""

from __future__ import annotations

import importlib
from typing import NamedTuple

import click


class _Command(NamedTuple):
    module: str
    help: str


# A command stands in its module under its own name. The help texts repeat the first sentence of each command, so that
# `lakefeed --help` imports none of them.
COMMANDS = {
    "serve": _Command("lakefeed.ingest.cli.service", "Start the service."),
    "push": _Command("lakefeed.ingest.cli.push", "Send a file of JSON lines to the service."),
    "status": _Command("lakefeed.ingest.cli.service", "Show the state of a running service."),
    "flush": _Command("lakefeed.ingest.cli.service", "Commit everything that is durable, and wait for it."),
    "config": _Command("lakefeed.ingest.cli.service", "Print every setting, its value and its origin."),
    "catalog": _Command("lakefeed.ingest.cli.catalog", "Run the catalog alone, back it up, validate it."),
    "wal": _Command("lakefeed.ingest.cli.wal", "Inspect the write-ahead log, and repair a damaged one."),
    "quarantine": _Command("lakefeed.ingest.cli.quarantine", "List, replay or drop refused changes."),
    "verify": _Command("lakefeed.ingest.cli.verify", "Check that a table holds exactly the recorded rows."),
    "spark": _Command("lakefeed.pipeline.spark.commands", "Query the tables with Spark, or print its settings."),
    "mirror": _Command("lakefeed.pipeline.mirrors.commands", "Keep current-state mirrors of change tables."),
    "maintain": _Command("lakefeed.pipeline.maintenance.commands", "Compact tables and expire snapshots."),
    "consumers": _Command("lakefeed.pipeline.consumers.commands", "List and remove consumers of tables."),
    "backfill": _Command("lakefeed.pipeline.backfill.commands", "Load existing rows into a change table."),
}


class _Commands(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command = getattr(importlib.import_module(COMMANDS[cmd_name].module), cmd_name)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, command.help) for name, command in COMMANDS.items()])


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="lakefeed", prog_name="lakefeed")
def main() -> None:
    """Lakefeed: database changes over WebSocket into Apache Iceberg tables, exactly once.

    \b
    A first tour, in two terminals:
      lakefeed serve
      echo '{"id": 1, "name": "Ada"}' | lakefeed push - --table users
    """
