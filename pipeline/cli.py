"""The pipeline's commands, as `lakefeed` has them. Owns their names; each part owns its own commands.

They are imported when they are asked for, so that no other command pays for them.
"""

from __future__ import annotations

import importlib

import click

# Name of a command -> where it stands.
COMMANDS = {
    "spark": ("lakefeed.pipeline.spark.conf", "spark"),
    "mirror": ("lakefeed.pipeline.mirrors.commands", "mirror"),
    "maintain": ("lakefeed.pipeline.maintenance.commands", "maintain"),
    "consumers": ("lakefeed.pipeline.consumers.commands", "consumers"),
    "backfill": ("lakefeed.pipeline.backfill.commands", "backfill"),
}


class WithPipeline(click.Group):
    """A group that has the pipeline's commands besides its own."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Name all commands."""
        return sorted([*super().list_commands(ctx), *COMMANDS])

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import a command of the pipeline, or give one of the group's own."""
        if cmd_name not in COMMANDS:
            return super().get_command(ctx, cmd_name)
        module, attribute = COMMANDS[cmd_name]
        command = getattr(importlib.import_module(module), attribute)
        assert isinstance(command, click.Command)
        return command
