"""Options of commands that read tables without the service: the catalog, the storage and the settings behind them."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

import click

from lakefeed.command_line import DEFAULT_URL, config_option, token_option, with_options
from lakefeed.contract.changes import TableName, table_name_of
from lakefeed.ingest.config import Config, load_config
from lakefeed.writer.config import IcebergConfig

lake_options = with_options(
    click.option("--url", help=f"Iceberg REST catalog, without /v1  [iceberg.uri, or {DEFAULT_URL}]"),
    token_option,
    config_option("storage, tables and catalog"),
)


@dataclass(frozen=True, slots=True)
class Lake:
    """A catalog and the settings for the storage behind it."""

    iceberg: IcebergConfig
    config: Config

    def table_name(self, table: str) -> TableName:
        """Return a table's full name; the default namespace may be left out."""
        return table_name_of(table, self.config.writer.default_namespace)


def load_lake(config_path: Path | None, *, url: str | None, token: str) -> Lake:
    """Load the settings, overridden by the options.

    Raises: SettingsError.
    """
    config = load_config(config_path, os.environ).config
    iceberg = replace(config.iceberg, uri=url or config.iceberg.uri or DEFAULT_URL)
    return Lake(replace(iceberg, token=token, credential="") if token else iceberg, config)
