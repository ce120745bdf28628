"""Options of commands that read tables without the service, and the catalog and storage that they open with them."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

from lakefeed.command_line import DEFAULT_URL, config_option, token_option, with_options
from lakefeed.contract.changes import TableName, table_name_of
from lakefeed.ingest.config import Config, load_config
from lakefeed.storage.config import StorageConfig
from lakefeed.writer.commit.rest_catalog import CatalogClient, open_foreign_catalog
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

    @asynccontextmanager
    async def open_catalog(self) -> AsyncIterator[CatalogClient]:
        """Connect to the catalog.

        Raises: CatalogError if it cannot be reached.
        """
        async with open_foreign_catalog(self.iceberg) as catalog:
            await catalog.load_config()
            yield catalog

    def storage_of(self, document: Mapping[str, Any]) -> StorageConfig:
        """Return the storage of a table: its metadata says where files are; the settings, how to get there."""
        return replace(self.config.storage, warehouse=document["location"])


def load_lake(config_path: Path | None, *, url: str | None, token: str) -> Lake:
    """Load the settings, overridden by the options.

    Raises: SettingsError.
    """
    config = load_config(config_path, os.environ).config
    iceberg = replace(config.iceberg, uri=url or config.iceberg.uri or DEFAULT_URL)
    return Lake(replace(iceberg, token=token, credential="") if token else iceberg, config)
