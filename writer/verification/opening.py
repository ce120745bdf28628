"""What `lakefeed verify` needs to reach a table: catalog and store. Owns their lifetime."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

from writer.changes import TableName
from writer.config import StorageConfig
from writer.iceberg.catalog_client import open_foreign_catalog
from writer.iceberg.config import IcebergConfig
from writer.storage import open_store
from writer.verification.verifier import Verifier


@asynccontextmanager
async def open_verifier(
    iceberg: IcebergConfig,
    name: TableName,
    *,
    storage: StorageConfig,
    on_rows: Callable[[int], object] = lambda _: None,
) -> AsyncIterator[Verifier]:
    """Open a table to verify it as it is now, beside whoever commits to it.

    Raises:
        CatalogError, StorageError: it cannot be reached.
    """
    async with open_foreign_catalog(iceberg) as catalog:
        await catalog.load_config()
        document = (await catalog.load_table(name)).document
    # The table says where its files are; the settings, how to get there.
    async with open_store(replace(storage, warehouse=document["location"])) as store:
        yield Verifier(name, document, store, on_rows=on_rows)
