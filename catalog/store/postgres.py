"""The store on PostgreSQL. Owns the statements and the pool of connections; postgres_schema.py owns the SQL schema.

Any number of catalog processes may share one database: pointers are compared and swapped in SQL, names are kept apart
by the primary key, and foreign keys keep a namespace from being dropped under what is being created in it.

Names are compared byte by byte (COLLATE "C"), as pages of lists rely on it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, TypeVar

import asyncpg
import orjson

from lakefeed.catalog.errors import AlreadyExists, NamespaceNotEmpty, NoSuchNamespace, StoreFailed, StoreUnusable
from lakefeed.catalog.names import SEPARATOR, EntryId, Namespace, Pointer, TableId, ViewId, dotted
from lakefeed.catalog.store.protocol import (
    Claim,
    Contents,
    Move,
    Outcome,
    Remembered,
    check_empty,
    check_version,
    current_claim,
    decode_outcome,
    do_first,
    encode_outcome,
    entry_of,
    key_taken,
    name_is_taken,
    no_such_entry,
    outcome_at,
)

# --- catalog.store.postgres_schema ------------------------------------------------------------------------------------
#
# The SQL schema of the PostgreSQL store. Owns its version and the way there.
#
#     namespaces  name (levels joined by 0x1F) | parent (all but the last level, NULL at the top) | properties (JSON)
#     entries     namespace | name | kind (Table or View) | metadata_location | digest | table_uuid ('' where not known)
#     outcomes    idempotency_key | fingerprint | outcome (JSON) | recorded_ms
#
# Migrations run forward only, and only when asked to, in a transaction and under a lock that all processes take; a new
# database goes through all of them at its first open.


# Statements that lead from each version to the next; a new database goes through all of them.
_MIGRATIONS: tuple[tuple[str, ...], ...] = (
    (
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
            PRIMARY KEY (namespace, name)
        )""",
    ),
    (
        """CREATE TABLE outcomes (
            idempotency_key TEXT COLLATE "C" PRIMARY KEY,
            fingerprint TEXT NOT NULL,
            outcome TEXT NOT NULL,
            recorded_ms BIGINT NOT NULL
        )""",
        "CREATE INDEX outcomes_by_time ON outcomes (recorded_ms)",
    ),
    (
        "ALTER TABLE entries ADD COLUMN digest TEXT NOT NULL DEFAULT ''",
        "ALTER TABLE entries ADD COLUMN table_uuid TEXT NOT NULL DEFAULT ''",
    ),
)
SCHEMA_VERSION = len(_MIGRATIONS)

# Any number, as long as all processes take the same: who migrates, the others wait.
_MIGRATION_LOCK = 5_213_207_411


async def prepare_schema(db: Any) -> int:
    """Make the schema of a new database; return the version."""
    await _lock_schema(db)
    if await db.fetchval("SELECT to_regclass('lakefeed_catalog.catalog_schema')") is None:
        await migrate(db)
    version: int = await db.fetchval("SELECT version FROM catalog_schema")
    return version


async def migrate(db: Any) -> int:
    """Go through the migrations that a database has not seen; return the version that it had."""
    await _lock_schema(db)
    await db.execute("CREATE SCHEMA IF NOT EXISTS lakefeed_catalog")
    await db.execute("CREATE TABLE IF NOT EXISTS catalog_schema (version INTEGER NOT NULL)")
    version: int = await db.fetchval("SELECT version FROM catalog_schema") or 0
    if version > SCHEMA_VERSION:
        check_version(version, SCHEMA_VERSION)
    for statements in _MIGRATIONS[version:]:
        for statement in statements:
            await db.execute(statement)
    await db.execute("DELETE FROM catalog_schema")
    await db.execute("INSERT INTO catalog_schema VALUES ($1)", SCHEMA_VERSION)
    return version


async def _lock_schema(db: Any) -> None:
    await db.execute("SELECT pg_advisory_xact_lock($1)", _MIGRATION_LOCK)


# --- catalog.store.postgres -------------------------------------------------------------------------------------------


# Beside other things that may live in the database.
_SEARCH_PATH = {"search_path": "lakefeed_catalog"}

_POOL_MAX_CONNECTIONS = 8


_Entry = TypeVar("_Entry", bound=EntryId)


class _Connection(asyncpg.Connection):  # type: ignore[misc]  # asyncpg has no types
    """A connection that goes back to the pool without a round trip: nothing here outlives its transaction."""

    def get_reset_query(self) -> str:
        """Return nothing to send; a transaction that is still open is rolled back all the same."""
        return ""


_INSERT_ENTRY = (
    "INSERT INTO entries (namespace, name, kind, metadata_location, digest, table_uuid) VALUES ($1, $2, $3, $4, $5, $6)"
)
_UPDATE_ENTRY = (
    "UPDATE entries SET metadata_location = $4, digest = $5, table_uuid = $6"
    " WHERE namespace = $1 AND name = $2 AND kind = $3"
)


class _PointerMoved(Exception):
    """A pointer is not where it was expected; ends the transaction."""


class PostgresStore:
    """Names and pointers in one PostgreSQL database."""

    def __init__(self, url: str, *, timeout_s: float) -> None:
        self._url = url
        self._timeout_s = timeout_s
        self._pool: asyncpg.Pool | None = None

    async def open(self) -> None:
        """Connect, and make or check the schema."""
        await self._connect()
        async with self._transaction() as db:
            version = await prepare_schema(db)
        check_version(version, SCHEMA_VERSION)

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
        """Bring the database up to date."""
        await self._connect()
        try:
            async with self._transaction() as db:
                return await migrate(db), SCHEMA_VERSION
        finally:
            await self.close()

    async def export(self) -> Contents:
        """Read everything in one transaction."""
        async with self._connection() as db, db.transaction(isolation="repeatable_read", readonly=True):
            namespaces = await db.fetch("SELECT name, properties FROM namespaces ORDER BY name")
            entries = await db.fetch(
                "SELECT kind, namespace, name, metadata_location, digest, table_uuid"
                " FROM entries ORDER BY namespace, name"
            )
        return Contents(
            {_levels(name): orjson.loads(properties) for name, properties in namespaces},
            {entry_of(kind, _levels(space), name): Pointer(*pointer) for kind, space, name, *pointer in entries},
        )

    async def restore(self, contents: Contents) -> None:
        """Fill an empty store."""
        namespaces = [
            (_key(name), _key(name[:-1]) or None, orjson.dumps(dict(properties)).decode())
            for name, properties in contents.namespaces.items()
        ]
        entries = [(*_entry_key(entry), *_columns(pointer)) for entry, pointer in contents.entries.items()]
        async with self._transaction() as db:
            check_empty(await db.fetchval("SELECT EXISTS (SELECT 1 FROM namespaces)"))
            await db.executemany("INSERT INTO namespaces VALUES ($1, $2, $3)", namespaces)
            await db.executemany(_INSERT_ENTRY, entries)

    async def close(self) -> None:
        """Close the connections after running work."""
        if self._pool is not None:
            await self._pool.close()

    async def create_namespace(self, namespace: Namespace, properties: Mapping[str, str]) -> None:
        """Create a namespace below an existing parent."""
        parent = _key(namespace[:-1]) if len(namespace) > 1 else None
        sql = "INSERT INTO namespaces VALUES ($1, $2, $3) ON CONFLICT DO NOTHING"
        async with self._transaction() as db:
            try:
                done = await db.execute(sql, _key(namespace), parent, orjson.dumps(dict(properties)).decode())
            except asyncpg.ForeignKeyViolationError as error:
                raise _no_namespace(namespace[:-1]) from error
            if _rows(done) == 0:
                raise AlreadyExists(f"Namespace already exists: {dotted(namespace)}")
            await _record(db, Outcome())

    async def load_namespace(self, namespace: Namespace) -> dict[str, str]:
        """Return a namespace's properties."""
        async with self._connection() as db:
            return await _load_namespace(db, namespace)

    async def list_namespaces(self, parent: Namespace, *, after: str, limit: int | None) -> list[Namespace]:
        """Return one page of the namespaces directly below a parent."""
        sql = "SELECT name FROM namespaces WHERE parent IS NOT DISTINCT FROM $1 AND name > $2 ORDER BY name LIMIT $3"
        async with self._connection() as db:
            if parent:
                await _load_namespace(db, parent)
            rows = await db.fetch(sql, _key(parent) if parent else None, _key((*parent, after)), limit)
        return [_levels(row["name"]) for row in rows]

    async def update_namespace(
        self, namespace: Namespace, *, removals: Collection[str], updates: Mapping[str, str]
    ) -> list[str]:
        """Remove and set properties; return which of the removals were there."""
        async with self._transaction() as db:
            properties = await _load_namespace(db, namespace, for_update=True)
            removed = [name for name in removals if properties.pop(name, None) is not None]
            text = orjson.dumps(properties | dict(updates)).decode()
            await db.execute("UPDATE namespaces SET properties = $1 WHERE name = $2", text, _key(namespace))
            await _record(db, Outcome(removed=tuple(removed)))
        return removed

    async def drop_namespace(self, namespace: Namespace) -> None:
        """Drop an empty namespace."""
        async with self._transaction() as db:
            try:
                done = await db.execute("DELETE FROM namespaces WHERE name = $1", _key(namespace))
            except asyncpg.ForeignKeyViolationError as error:
                held = "namespaces" if error.table_name == "namespaces" else "tables or views"
                raise NamespaceNotEmpty(f"Namespace {dotted(namespace)} is not empty: it contains {held}") from error
            if _rows(done) == 0:
                raise _no_namespace(namespace)
            await _record(db, Outcome())

    async def list_tables(self, namespace: Namespace, *, after: str, limit: int | None) -> list[TableId]:
        """Return one page of a namespace's tables."""
        return await self._list(TableId, namespace, after=after, limit=limit)

    async def list_views(self, namespace: Namespace, *, after: str, limit: int | None) -> list[ViewId]:
        """Return one page of a namespace's views."""
        return await self._list(ViewId, namespace, after=after, limit=limit)

    async def load_pointer(self, entry: EntryId) -> Pointer | None:
        """Return where the current metadata of a table or view is, or None."""
        async with self._connection() as db:
            return await _load_pointer(db, entry)

    async def find_tables(self, *, table_uuid: str, directory: str) -> dict[TableId, Pointer]:
        """Return the tables that may be the one of this uuid."""
        sql = (
            "SELECT namespace, name, metadata_location, digest, table_uuid FROM entries WHERE kind = $1"
            " AND ($2 = '' OR table_uuid IN ('', $2) OR strpos(metadata_location, $3) > 0)"
        )
        async with self._connection() as db:
            rows = await db.fetch(sql, TableId.kind, table_uuid, directory)
        return {TableId(_levels(space), name): Pointer(*pointer) for space, name, *pointer in rows}

    async def note_uuids(self, tables: Mapping[TableId, Pointer]) -> None:
        """Keep the uuids of tables where none is known."""
        sql = f"{_UPDATE_ENTRY} AND metadata_location = $4 AND digest = $5 AND table_uuid = ''"
        async with self._connection() as db:
            await db.executemany(sql, [(*_entry_key(table), *_columns(new)) for table, new in tables.items()])

    async def create_entry(self, entry: EntryId, pointer: Pointer) -> None:
        """Create a table or view that points at its first metadata."""
        async with self._transaction() as db:
            await _create_entry(db, entry, pointer)
            await _record(db, outcome_at(pointer))

    async def swap_pointer(
        self, entry: EntryId, *, expected: Pointer, new: Pointer, first: Callable[[], None] | None = None
    ) -> bool:
        """Move a pointer if it still is where expected."""
        await do_first(first)
        async with self._change() as db:
            swapped = await _swap_pointer(db, entry, expected=expected, new=new)
            if swapped:
                await _record(db, outcome_at(new))
        return swapped

    async def move_pointers(self, moves: Sequence[Move]) -> bool:
        """Make all moves in one transaction, or none."""
        try:
            async with self._transaction() as db:
                await _move_pointers(db, moves)
                await _record(db, Outcome())
        except _PointerMoved:
            return False
        return True

    async def put_entry(self, entry: EntryId, pointer: Pointer) -> None:
        """Point a table or view at metadata, whether or not it existed."""
        async with self._transaction() as db:
            if _rows(await db.execute(_UPDATE_ENTRY, *_entry_key(entry), *_columns(pointer))) == 0:
                await _create_entry(db, entry, pointer)
            await _record(db, outcome_at(pointer))

    async def rename_entry(self, source: EntryId, destination: EntryId) -> None:
        """Give a table or view another name."""
        sql = "UPDATE entries SET namespace = $1, name = $2 WHERE namespace = $3 AND name = $4 AND kind = $5"
        async with self._transaction() as db:
            if await _load_pointer(db, source) is None:
                raise no_such_entry(source)
            await _load_namespace(db, destination.namespace)
            kind = await _kind_at(db, destination)
            if kind is not None and source != destination:
                raise AlreadyExists(f"Cannot rename {source} to {destination}. {kind} already exists")
            try:
                done = await db.execute(sql, _key(destination.namespace), destination.name, *_entry_key(source))
            except asyncpg.UniqueViolationError as error:
                message = f"Cannot rename {source} to {destination}. {destination.kind} already exists"
                raise AlreadyExists(message) from error
            except asyncpg.ForeignKeyViolationError as error:
                raise _no_namespace(destination.namespace) from error
            if _rows(done) == 0:
                raise no_such_entry(source)
            await _record(db, Outcome())

    async def drop_entry(self, entry: EntryId) -> Pointer:
        """Forget a table or view and return where its last metadata is."""
        sql = (
            "DELETE FROM entries WHERE namespace = $1 AND name = $2 AND kind = $3"
            " RETURNING metadata_location, digest, table_uuid"
        )
        async with self._change() as db:
            row = await db.fetchrow(sql, *_entry_key(entry))
            if row is None:
                raise no_such_entry(entry)
            pointer = Pointer(*row)
            await _record(db, outcome_at(pointer))
        return pointer

    async def load_outcome(self, key: str) -> Remembered | None:
        """Return what became of the request with this idempotency key, or None."""
        sql = "SELECT fingerprint, outcome FROM outcomes WHERE idempotency_key = $1"
        async with self._connection() as db:
            row = await db.fetchrow(sql, key)
        return None if row is None else Remembered(row["fingerprint"], decode_outcome(row["outcome"]))

    async def record_outcome(self, claim: Claim, outcome: Outcome) -> None:
        """Keep the outcome of a request that changed nothing."""
        async with self._connection() as db:
            await _record_outcome(db, claim, outcome)

    async def forget_outcomes(self, *, before_ms: int, kept_max: int) -> int:
        """Forget outcomes recorded before a time, and the oldest beyond a number; tell how many were too many."""
        excess = (
            "DELETE FROM outcomes WHERE idempotency_key IN"
            " (SELECT idempotency_key FROM outcomes ORDER BY recorded_ms DESC OFFSET $1)"
        )
        async with self._connection() as db:
            await db.execute("DELETE FROM outcomes WHERE recorded_ms < $1", before_ms)
            return _rows(await db.execute(excess, kept_max))

    async def _list(self, kind: type[_Entry], namespace: Namespace, *, after: str, limit: int | None) -> list[_Entry]:
        sql = "SELECT name FROM entries WHERE namespace = $1 AND kind = $2 AND name > $3 ORDER BY name LIMIT $4"
        async with self._connection() as db:
            await _load_namespace(db, namespace)
            rows = await db.fetch(sql, _key(namespace), kind.kind, after, limit)
        return [kind(namespace, row["name"]) for row in rows]

    @asynccontextmanager
    async def _connection(self) -> AsyncIterator[Any]:
        """Lend a connection; every statement on it is a transaction of its own."""
        assert self._pool is not None, "store is not open"
        try:
            async with asyncio.timeout(self._timeout_s), self._pool.acquire() as connection:
                yield connection
        except (OSError, asyncpg.PostgresError, asyncpg.InterfaceError) as error:  # TimeoutError is an OSError
            raise StoreFailed(f"Catalog database failed: {error or type(error).__name__}") from error

    @asynccontextmanager
    async def _transaction(self) -> AsyncIterator[Any]:
        async with self._connection() as connection, connection.transaction():
            yield connection

    def _change(self) -> AbstractAsyncContextManager[Any]:
        """Lend a connection for a change of one statement: a transaction by itself, unless its outcome is recorded."""
        return self._connection() if current_claim() is None else self._transaction()


async def _load_namespace(db: Any, namespace: Namespace, *, for_update: bool = False) -> dict[str, str]:
    sql = "SELECT properties FROM namespaces WHERE name = $1"
    text = await db.fetchval(f"{sql} FOR UPDATE" if for_update else sql, _key(namespace))
    if text is None:
        raise _no_namespace(namespace)
    properties: dict[str, str] = orjson.loads(text)
    return properties


async def _load_pointer(db: Any, entry: EntryId) -> Pointer | None:
    sql = "SELECT metadata_location, digest, table_uuid FROM entries WHERE namespace = $1 AND name = $2 AND kind = $3"
    row = await db.fetchrow(sql, *_entry_key(entry))
    return None if row is None else Pointer(*row)


async def _kind_at(db: Any, entry: EntryId) -> str | None:
    """Tell what has a name now, whichever kind is asked for."""
    sql = "SELECT kind FROM entries WHERE namespace = $1 AND name = $2"
    kind: str | None = await db.fetchval(sql, _key(entry.namespace), entry.name)
    return kind


async def _create_entry(db: Any, entry: EntryId, pointer: Pointer) -> None:
    try:
        done = await db.execute(f"{_INSERT_ENTRY} ON CONFLICT DO NOTHING", *_entry_key(entry), *_columns(pointer))
    except asyncpg.ForeignKeyViolationError as error:
        raise _no_namespace(entry.namespace) from error
    if _rows(done) == 0:
        raise name_is_taken(entry, await _kind_at(db, entry) or entry.kind)


async def _swap_pointer(db: Any, entry: EntryId, *, expected: Pointer, new: Pointer) -> bool:
    sql = f"{_UPDATE_ENTRY} AND metadata_location = $7 AND digest = $8"
    facts = (*_entry_key(entry), *_columns(new), expected.location, expected.digest)
    return _rows(await db.execute(sql, *facts)) == 1


async def _move_pointers(db: Any, moves: Sequence[Move]) -> None:
    # In the order of names: two transactions that lock the same rows never wait in a circle.
    for move in sorted(moves, key=lambda each: (each.entry.namespace, each.entry.name)):
        if move.expected is None:
            await _create_entry(db, move.entry, move.new)
        elif not await _swap_pointer(db, move.entry, expected=move.expected, new=move.new):
            raise _PointerMoved


async def _record(db: Any, outcome: Outcome) -> None:
    """Record what the open transaction does, if it does so for a request with a key."""
    claim = current_claim()
    if claim is not None:
        await _record_outcome(db, claim, outcome)


async def _record_outcome(db: Any, claim: Claim, outcome: Outcome) -> None:
    # Waits for another transaction that has written the same key and is still open.
    sql = "INSERT INTO outcomes VALUES ($1, $2, $3, $4) ON CONFLICT DO NOTHING"
    if _rows(await db.execute(sql, claim.key, claim.fingerprint, encode_outcome(outcome), claim.at_ms)) == 0:
        raise key_taken(claim)


def _key(namespace: Namespace) -> str:
    return SEPARATOR.join(namespace)


def _levels(key: str) -> Namespace:
    return tuple(key.split(SEPARATOR))


def _entry_key(entry: EntryId) -> tuple[str, str, str]:
    return _key(entry.namespace), entry.name, entry.kind


def _columns(pointer: Pointer) -> tuple[str, str, str]:
    return pointer.location, pointer.digest, pointer.table_uuid


def _no_namespace(namespace: Namespace) -> NoSuchNamespace:
    return NoSuchNamespace(f"Namespace does not exist: {dotted(namespace)}")


def _rows(tag: str) -> int:
    """Read how many rows a statement touched from the words that it was answered with: `UPDATE 1`."""
    return int(tag.rpartition(" ")[2])
