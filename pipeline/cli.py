"""The program that spark-submit runs: the Spark commands of `lakefeed`, without the service.

    lakefeed mirror run --once                                       on this machine
    spark-submit --py-files lakefeed.whl job.py mirror run --once    on a cluster; job.py calls `main`

A command's module is imported when the command is used.
"""

from __future__ import annotations

import importlib

import click

# Command -> module and attribute. `lakefeed verify` is a command of the service, because it also works without Spark;
# `verify` here is the part that uses Spark.
JOBS = {
    "backfill": ("lakefeed.pipeline.backfill.commands", "backfill"),
    "consumers": ("lakefeed.pipeline.consumers.commands", "consumers"),
    "maintain": ("lakefeed.pipeline.maintenance.commands", "maintain"),
    "mirror": ("lakefeed.pipeline.mirrors.commands", "mirror"),
    "spark": ("lakefeed.pipeline.spark.commands", "spark"),
    "verify": ("lakefeed.pipeline.verification.commands", "verify_tables"),
}


class _Jobs(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(JOBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in JOBS:
            return None
        module, attribute = JOBS[cmd_name]
        command = getattr(importlib.import_module(module), attribute)
        assert isinstance(command, click.Command)
        return command


@click.group(cls=_Jobs)
def main() -> None:
    """Run a job of Lakefeed on Spark."""
