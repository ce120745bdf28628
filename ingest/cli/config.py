"""Command `lakefeed config`: every setting with its effective value and where that came from."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import click

from lakefeed.command_line import config_option, print_json, print_table, readable_errors
from lakefeed.ingest.config import Loaded, load_config, section_types


@click.command()
@config_option()
@click.option("--json", "as_json", is_flag=True, help="Print the values only, as JSON.")
def config(config_path: Path | None, *, as_json: bool) -> None:
    """Print every setting, its value and its origin.

    The origin is the settings file, an environment variable, or the default. Secrets are shown as (set).
    """
    with readable_errors():
        loaded = load_config(config_path, os.environ)
    rows = list(_settings(loaded))
    if as_json:
        print_json({row["setting"]: row["value"] for row in rows})
    else:
        print_table(rows, ("setting", "value", "from", "why"))


def _settings(loaded: Loaded) -> Iterator[dict[str, Any]]:
    for section, cls in section_types().items():
        for item in fields(cls):
            key = f"{section}.{item.name}"
            value = getattr(getattr(loaded.config, section), item.name)
            shown = "(set)" if item.metadata.get("secret") and value else value
            origin = loaded.origins.get(key, "default")
            yield {"setting": key, "value": shown, "from": origin, "why": item.metadata["why"]}
    for pattern, values in loaded.config.tables.sections.items():
        for name, value in values.items():
            key = f'tables."{pattern}".{name}'
            why = f"{name} of the tables that match this pattern"
            yield {"setting": key, "value": value, "from": loaded.origins[key], "why": why}
