"""PostgreSQL: the schema, and the pool of connections.

Any number of catalog processes may share one database. Foreign keys prevent that a namespace is dropped while an entry
is created in it. Names are compared byte by byte (COLLATE "C"), because pages of lists rely on that order.

A new database gets the current schema at its first open. An existing one is only changed by `migrate`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import asyncpg

from lakefeed.catalog.errors import StoreFailed, StoreUnusable
from lakefeed.catalog.store.store import Operation, SqlSchema, Store

SCHEMA = SqlSchema(
    version=3,
    find="SELECT 1 WHERE to_regclass('lakefeed_catalog.catalog_schema') IS NOT NULL",
    create=(
        "CREATE SCHEMA IF NOT EXISTS lakefeed_catalog",
        "CREATE TABLE catalog_schema (version INTEGER NOT NULL)",
        """CREATE TABLE namespaces (
            name TEXT COLLATE "C" PRIMARY KEY,
            parent TEXT COLLATE "C" REFERENCES namespaces (name),
            properties TEXT NOT NULL
        )""",
        "CREATE UNIQUE INDEX namespaces_by_parent ON namespaces (parent, name)",
        """CREATE TABLE entries (
            namespace TEXT COLLATE "C" NOT NULL REFERENCES namespaces (name),
            name TEXT COLLATE "C" NOT NULL,
            kind TEXT COLLATE "C" NOT NULL,
            metadata_location TEXT NOT NULL,
            digest TEXT NOT NULL DEFAULT '',
            table_uuid TEXT NOT NULL DEFAULT '',
            PRIMARY KEY (namespace, name)
        )""",
        """CREATE TABLE outcomes (
            idempotency_key TEXT COLLATE "C" PRIMARY KEY,
            fingerprint TEXT NOT NULL,
            outcome TEXT NOT NULL,
            recorded_ms BIGINT NOT NULL
        )""",
        "CREATE INDEX outcomes_by_time ON outcomes (recorded_ms)",
    ),
    # Serialises processes that create or migrate the schema. Any number will do.
    lock="SELECT pg_advisory_xact_lock(5213207411)",
)

# A schema of its own, because other applications may use the same database.
_SEARCH_PATH = {"search_path": "lakefeed_catalog"}

_POOL_MAX_CONNECTIONS = 8

_T = TypeVar("_T")


class _Connection(asyncpg.Connection):  # type: ignore[misc]  # asyncpg has no types
    """A connection that returns to the pool without a round trip: nothing outlives its transaction."""

    def get_reset_query(self) -> str:
        """Return no statement. A transaction that is still open is rolled back anyway."""
        return ""


class PostgresStore(Store):
    """Names and pointers in one PostgreSQL database."""

    top_parent = None  # the parent is a foreign key

    def __init__(self, url: str, *, timeout_s: float) -> None:
        self._url = url
        self._timeout_s = timeout_s
        self._pool: asyncpg.Pool | None = None

    async def open(self) -> None:
        """Connect, and create or check the schema."""
        await self._connect()
        await self._write(SCHEMA.open(migrate=False))

    async def _connect(self) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                self._pool = await asyncpg.create_pool(
                    self._url,
                    min_size=1,
                    max_size=_POOL_MAX_CONNECTIONS,
                    server_settings=_SEARCH_PATH,
                    connection_class=_Connection,
                )
        except (OSError, asyncpg.PostgresError, ValueError) as error:
            raise StoreUnusable(f"cannot connect to the catalog's database: {error}") from error

    async def migrate(self) -> tuple[int, int]:
        """Bring the database to the current version."""
        await self._connect()
        try:
            return await self._write(SCHEMA.open(migrate=True)), SCHEMA.version
        finally:
            await self.close()

    async def close(self) -> None:
        """Close the connections after running work."""
        if self._pool is not None:
            await self._pool.close()

    async def _read(self, operation: Operation[_T]) -> _T:
        async with self._connection() as db, db.transaction(isolation="repeatable_read", readonly=True):
            return await _run(db, operation)

    async def _look_up(self, operation: Operation[_T]) -> _T:
        async with self._connection() as db:
            return await _run(db, operation)

    async def _write(
        self, operation: Operation[_T], prepare: Callable[[], None] | None = None, *, is_single: bool = False
    ) -> _T:
        if prepare is not None:
            await asyncio.to_thread(prepare)
        if is_single:
            return await self._look_up(operation)
        async with self._connection() as db, db.transaction():
            return await _run(db, operation)

    @asynccontextmanager
    async def _connection(self) -> AsyncIterator[Any]:
        """Borrow a connection; every statement on it is a transaction of its own."""
        assert self._pool is not None, "store is not open"
        try:
            async with asyncio.timeout(self._timeout_s), self._pool.acquire() as connection:
                yield connection
        except (OSError, asyncpg.PostgresError, asyncpg.InterfaceError) as error:  # TimeoutError is an OSError
            raise StoreFailed(f"Catalog database failed: {error or type(error).__name__}") from error


async def _run(db: Any, operation: Operation[_T]) -> _T:
    try:
        sql, parameters = next(operation)
        while True:
            if isinstance(parameters, list):
                await db.executemany(sql, parameters)
                rows = []
            else:
                rows = await db.fetch(sql, *parameters)
            sql, parameters = operation.send(rows)
    except StopIteration as end:
        result: _T = end.value
        return result
