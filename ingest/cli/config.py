"""Command `lakefeed config`: every setting with its effective value and where that came from."""

from __future__ import annotations

import enum
import os
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import click

from lakefeed.command_line import config_option, print_json, print_table, readable_errors
from lakefeed.ingest.config import TABLES, LoadedConfig, load_config


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
        print_table(rows, ("setting", "value", "from", "what it does"))


def _settings(loaded: LoadedConfig) -> Iterator[dict[str, Any]]:
    sections = {name: section for name, section in loaded.sections.items() if name != TABLES}
    for name, section in sections.items():
        for item in fields(section):
            key = f"{name}.{item.name}"
            value = _shown(getattr(section, item.name))
            shown = "(set)" if item.metadata.get("secret") and value else value
            origin = loaded.origins.get(key, "default")
            yield {"setting": key, "value": shown, "from": origin, "what it does": item.metadata["help"]}
    for pattern, values in loaded.sections[TABLES].items():
        for name, value in values.items():
            key = f'tables."{pattern}".{name}'
            what = f"{name} of the tables that match this pattern"
            yield {"setting": key, "value": value, "from": loaded.origins[key], "what it does": what}


def _shown(value: Any) -> Any:
    if isinstance(value, enum.Enum):
        return value.value
    return [_shown(each) for each in value] if isinstance(value, tuple) else value
