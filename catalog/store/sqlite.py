"""The store on SQLite. Owns the SQL schema, its version, and the two threads that touch the database.

One connection writes and one reads, each in a thread of its own: in WAL mode a read never waits for a writer's sync.
Every write is one BEGIN IMMEDIATE transaction, synced before it returns (synchronous=FULL). Other processes may use
the same file; the pointer swap compares in SQL, so that is safe, if slow.

    namespaces  name (levels joined by 0x1F) | parent (all but the last level, '' at the top) | properties (JSON)
    tables      namespace | name | metadata_location
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import orjson

from catalog.errors import (
    AlreadyExists,
    NamespaceNotEmpty,
    NoSuchNamespace,
    NoSuchTable,
    StoreFailed,
    StoreUnusable,
)
from catalog.names import SEPARATOR, Namespace, TableId, dotted

SCHEMA_VERSION = 1

# How long to wait for another process that writes; ours never collide, having one writer.
_BUSY_TIMEOUT_S = 10.0
# SQLite's word for "no limit".
_UNLIMITED = -1

_SCHEMA = (
    "CREATE TABLE catalog_schema (version INTEGER NOT NULL) STRICT",
    """CREATE TABLE namespaces (
        name TEXT NOT NULL PRIMARY KEY,
        parent TEXT NOT NULL,
        properties TEXT NOT NULL
    ) STRICT, WITHOUT ROWID""",
    "CREATE UNIQUE INDEX namespaces_by_parent ON namespaces (parent, name)",
    """CREATE TABLE tables (
        namespace TEXT NOT NULL REFERENCES namespaces (name),
        name TEXT NOT NULL,
        metadata_location TEXT NOT NULL,
        PRIMARY KEY (namespace, name)
    ) STRICT, WITHOUT ROWID""",
)

_T = TypeVar("_T")


class _Line:
    """One connection and the only thread that uses it."""

    def __init__(self, name: str) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix=f"catalog-sqlite-{name}")
        self._connection: sqlite3.Connection | None = None

    async def open(self, path: Path) -> None:
        self._connection = await self._in_thread(lambda: _connect(path))

    async def close(self) -> None:
        if self._connection is not None:
            await self._in_thread(self._connection.close)
        self._executor.shutdown(wait=False)

    async def run(self, work: Callable[[sqlite3.Connection], _T]) -> _T:
        """Run work in the thread. Cancelling this leaves the work going on to its end."""
        connection = self._connection
        assert connection is not None, "store is not open"
        return await self._in_thread(lambda: work(connection))

    async def _in_thread(self, work: Callable[[], _T]) -> _T:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._executor, work)
        except sqlite3.Error as error:
            raise StoreFailed(f"Catalog database failed: {error}") from error


class SqliteStore:
    """Names and pointers in one SQLite file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._writer = _Line("write")
        self._reader = _Line("read")

    async def open(self) -> None:
        """Open the file, and make or check its schema."""
        await asyncio.to_thread(lambda: self._path.parent.mkdir(parents=True, exist_ok=True))
        await self._writer.open(self._path)
        await self._write(_prepare_schema)
        await self._reader.open(self._path)

    async def close(self) -> None:
        """Close both connections after running work."""
        await self._reader.close()
        await self._writer.close()

    async def create_namespace(self, namespace: Namespace, properties: Mapping[str, str]) -> None:
        """Create a namespace below an existing parent."""
        await self._write(lambda db: _create_namespace(db, namespace, properties))

    async def load_namespace(self, namespace: Namespace) -> dict[str, str]:
        """Return a namespace's properties."""
        return await self._reader.run(lambda db: _load_namespace(db, namespace))

    async def list_namespaces(self, parent: Namespace, *, after: str, limit: int | None) -> list[Namespace]:
        """Return one page of the namespaces directly below a parent."""
        return await self._reader.run(lambda db: _list_namespaces(db, parent, after=after, limit=limit))

    async def update_namespace(
        self, namespace: Namespace, *, removals: Collection[str], updates: Mapping[str, str]
    ) -> list[str]:
        """Remove and set properties; return which of the removals were there."""
        return await self._write(lambda db: _update_namespace(db, namespace, removals=removals, updates=updates))

    async def drop_namespace(self, namespace: Namespace) -> None:
        """Drop an empty namespace."""
        await self._write(lambda db: _drop_namespace(db, namespace))

    async def list_tables(self, namespace: Namespace, *, after: str, limit: int | None) -> list[TableId]:
        """Return one page of a namespace's tables."""
        return await self._reader.run(lambda db: _list_tables(db, namespace, after=after, limit=limit))

    async def load_pointer(self, table: TableId) -> str | None:
        """Return where a table's current metadata is, or None."""
        return await self._reader.run(lambda db: _load_pointer(db, table))

    async def create_table(self, table: TableId, location: str) -> None:
        """Create a table that points at its first metadata."""
        await self._write(lambda db: _create_table(db, table, location))

    async def swap_pointer(self, table: TableId, *, expected: str, new: str) -> bool:
        """Move a table's pointer if it still is where expected."""
        return await self._write(lambda db: _swap_pointer(db, table, expected=expected, new=new))

    async def put_table(self, table: TableId, location: str) -> None:
        """Point a table at metadata, whether or not it existed."""
        await self._write(lambda db: _put_table(db, table, location))

    async def rename_table(self, source: TableId, destination: TableId) -> None:
        """Give a table another name."""
        await self._write(lambda db: _rename_table(db, source, destination))

    async def drop_table(self, table: TableId) -> str:
        """Forget a table and return where its last metadata is."""
        return await self._write(lambda db: _drop_table(db, table))

    async def _write(self, work: Callable[[sqlite3.Connection], _T]) -> _T:
        return await self._writer.run(lambda db: _in_transaction(db, work))


def _connect(path: Path) -> sqlite3.Connection:
    # autocommit off the driver's hands: transactions below are explicit. The thread check stays on.
    connection = sqlite3.connect(path, timeout=_BUSY_TIMEOUT_S, isolation_level=None)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute("PRAGMA foreign_keys = ON")
    return connection


def _in_transaction(db: sqlite3.Connection, work: Callable[[sqlite3.Connection], _T]) -> _T:
    db.execute("BEGIN IMMEDIATE")
    try:
        result = work(db)
        db.execute("COMMIT")
    except BaseException:
        if db.in_transaction:
            db.execute("ROLLBACK")
        raise
    return result


def _prepare_schema(db: sqlite3.Connection) -> None:
    if db.execute("SELECT 1 FROM sqlite_schema WHERE name = 'catalog_schema'").fetchone() is None:
        for statement in _SCHEMA:
            db.execute(statement)
        db.execute("INSERT INTO catalog_schema VALUES (?)", (SCHEMA_VERSION,))
    (version,) = db.execute("SELECT version FROM catalog_schema").fetchone()
    if version != SCHEMA_VERSION:
        raise StoreUnusable(f"catalog database has another schema version: found={version} expected={SCHEMA_VERSION}")


def _key(namespace: Namespace) -> str:
    return SEPARATOR.join(namespace)


def _check_namespace(db: sqlite3.Connection, namespace: Namespace) -> None:
    if db.execute("SELECT 1 FROM namespaces WHERE name = ?", (_key(namespace),)).fetchone() is None:
        raise NoSuchNamespace(f"Namespace does not exist: {dotted(namespace)}")


def _create_namespace(db: sqlite3.Connection, namespace: Namespace, properties: Mapping[str, str]) -> None:
    parent = namespace[:-1]
    if parent:
        _check_namespace(db, parent)
    row = (_key(namespace), _key(parent), orjson.dumps(dict(properties)).decode())
    if db.execute("INSERT INTO namespaces VALUES (?, ?, ?) ON CONFLICT DO NOTHING", row).rowcount == 0:
        raise AlreadyExists(f"Namespace already exists: {dotted(namespace)}")


def _load_namespace(db: sqlite3.Connection, namespace: Namespace) -> dict[str, str]:
    row = db.execute("SELECT properties FROM namespaces WHERE name = ?", (_key(namespace),)).fetchone()
    if row is None:
        raise NoSuchNamespace(f"Namespace does not exist: {dotted(namespace)}")
    properties: dict[str, str] = orjson.loads(row[0])
    return properties


def _list_namespaces(db: sqlite3.Connection, parent: Namespace, *, after: str, limit: int | None) -> list[Namespace]:
    if parent:
        _check_namespace(db, parent)
    rows = db.execute(
        "SELECT name FROM namespaces WHERE parent = ? AND name > ? ORDER BY name LIMIT ?",
        (_key(parent), _key((*parent, after)), _UNLIMITED if limit is None else limit),
    )
    return [tuple(name.split(SEPARATOR)) for (name,) in rows]


def _update_namespace(
    db: sqlite3.Connection, namespace: Namespace, *, removals: Collection[str], updates: Mapping[str, str]
) -> list[str]:
    properties = _load_namespace(db, namespace)
    removed = [name for name in removals if properties.pop(name, None) is not None]
    properties |= updates
    row = (orjson.dumps(properties).decode(), _key(namespace))
    db.execute("UPDATE namespaces SET properties = ? WHERE name = ?", row)
    return removed


def _drop_namespace(db: sqlite3.Connection, namespace: Namespace) -> None:
    key = _key(namespace)
    _check_namespace(db, namespace)
    for held, sql in (
        ("tables", "SELECT 1 FROM tables WHERE namespace = ? LIMIT 1"),
        ("namespaces", "SELECT 1 FROM namespaces WHERE parent = ? LIMIT 1"),
    ):
        if db.execute(sql, (key,)).fetchone() is not None:
            raise NamespaceNotEmpty(f"Namespace {dotted(namespace)} is not empty: it contains {held}")
    db.execute("DELETE FROM namespaces WHERE name = ?", (key,))


def _list_tables(db: sqlite3.Connection, namespace: Namespace, *, after: str, limit: int | None) -> list[TableId]:
    _check_namespace(db, namespace)
    rows = db.execute(
        "SELECT name FROM tables WHERE namespace = ? AND name > ? ORDER BY name LIMIT ?",
        (_key(namespace), after, _UNLIMITED if limit is None else limit),
    )
    return [TableId(namespace, name) for (name,) in rows]


def _load_pointer(db: sqlite3.Connection, table: TableId) -> str | None:
    sql = "SELECT metadata_location FROM tables WHERE namespace = ? AND name = ?"
    row = db.execute(sql, (_key(table.namespace), table.name)).fetchone()
    return None if row is None else str(row[0])


def _create_table(db: sqlite3.Connection, table: TableId, location: str) -> None:
    _check_namespace(db, table.namespace)
    row = (_key(table.namespace), table.name, location)
    if db.execute("INSERT INTO tables VALUES (?, ?, ?) ON CONFLICT DO NOTHING", row).rowcount == 0:
        raise AlreadyExists(f"Table already exists: {table}")


def _swap_pointer(db: sqlite3.Connection, table: TableId, *, expected: str, new: str) -> bool:
    sql = "UPDATE tables SET metadata_location = ? WHERE namespace = ? AND name = ? AND metadata_location = ?"
    return db.execute(sql, (new, _key(table.namespace), table.name, expected)).rowcount == 1


def _put_table(db: sqlite3.Connection, table: TableId, location: str) -> None:
    _check_namespace(db, table.namespace)
    sql = "INSERT INTO tables VALUES (?, ?, ?) ON CONFLICT DO UPDATE SET metadata_location = excluded.metadata_location"
    db.execute(sql, (_key(table.namespace), table.name, location))


def _rename_table(db: sqlite3.Connection, source: TableId, destination: TableId) -> None:
    if _load_pointer(db, source) is None:
        raise NoSuchTable(f"Table does not exist: {source}")
    if source == destination:
        return
    _check_namespace(db, destination.namespace)
    if _load_pointer(db, destination) is not None:
        raise AlreadyExists(f"Cannot rename {source} to {destination}. Table already exists")
    db.execute(
        "UPDATE tables SET namespace = ?, name = ? WHERE namespace = ? AND name = ?",
        (_key(destination.namespace), destination.name, _key(source.namespace), source.name),
    )


def _drop_table(db: sqlite3.Connection, table: TableId) -> str:
    location = _load_pointer(db, table)
    if location is None:
        raise NoSuchTable(f"Table does not exist: {table}")
    db.execute("DELETE FROM tables WHERE namespace = ? AND name = ?", (_key(table.namespace), table.name))
    return location
