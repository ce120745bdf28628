"""Which store the settings ask for. PostgreSQL's driver is imported only where it is used: it is an optional part."""

from __future__ import annotations

from pathlib import Path

from catalog.config import MEMORY_DATABASE, CatalogConfig
from catalog.errors import StoreUnusable
from catalog.store.memory import MemoryStore
from catalog.store.protocol import Store
from catalog.store.sqlite import SqliteStore


def build_store(config: CatalogConfig, sqlite_path: Path) -> Store:
    """Build the store, not yet connected.

    Raises: StoreUnusable.
    """
    if not config.database:
        return SqliteStore(sqlite_path)
    if config.database == MEMORY_DATABASE:
        return MemoryStore()
    try:
        from catalog.store.postgres import PostgresStore  # noqa: PLC0415 - asyncpg may not be installed
    except ModuleNotFoundError as error:
        raise StoreUnusable("catalog.database needs asyncpg: pip install 'lakefeed[postgres]'") from error
    return PostgresStore(config.database, timeout_s=config.database_timeout_s)
