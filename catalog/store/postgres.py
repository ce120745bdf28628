"""The store on PostgreSQL: its schema, its statements and the pool of connections.

    namespaces  name (levels joined by 0x1F) | parent (all but the last level, NULL at the top) | properties (JSON)
    entries     namespace | name | kind (Table or View) | metadata_location | digest | table_uuid ('' if unknown)
    outcomes    idempotency_key | fingerprint | outcome (JSON) | recorded_ms

Any number of catalog processes may share one database: pointers are compared and swapped in SQL, the primary key keeps
names unique, and foreign keys prevent that a namespace is dropped while an entry is created in it. Names are compared
byte by byte (COLLATE "C"), because pages of lists rely on that order.

A new database gets the current schema at its first open. An existing one is only changed by `migrate`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import asyncpg
import orjson

from lakefeed.catalog.errors import StoreFailed, StoreUnusable
from lakefeed.catalog.names import EntryId, Namespace, Pointer, TableId
from lakefeed.catalog.store.protocol import (
    Entry,
    KeyClaim,
    PointerMove,
    PointerMoved,
    RecordedOutcome,
    RequestOutcome,
    SqlSchema,
    StoreContents,
    check_empty,
    current_claim,
    decode_outcome,
    entry_key,
    entry_of,
    key_taken,
    name_in_use,
    namespace_exists,
    namespace_key,
    namespace_not_empty,
    namespace_of,
    no_such_entry,
    no_such_namespace,
    outcome_at,
    pointer_columns,
    rename_target_in_use,
    run_blocking,
)

SCHEMA = SqlSchema(
    version=3,
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
)
# An advisory lock that serialises processes that create or migrate the schema. Any number will do.
_SCHEMA_LOCK = 5_213_207_411

# A schema of its own, because other applications may use the same database.
_SEARCH_PATH = {"search_path": "lakefeed_catalog"}

_POOL_MAX_CONNECTIONS = 8


class _Connection(asyncpg.Connection):  # type: ignore[misc]  # asyncpg has no types
    """A connection that returns to the pool without a round trip: nothing outlives its transaction."""

    def get_reset_query(self) -> str:
        """Return no statement. A transaction that is still open is rolled back anyway."""
        return ""


_INSERT_ENTRY = (
    "INSERT INTO entries (namespace, name, kind, metadata_location, digest, table_uuid) VALUES ($1, $2, $3, $4, $5, $6)"
)
_UPDATE_ENTRY = (
    "UPDATE entries SET metadata_location = $4, digest = $5, table_uuid = $6"
    " WHERE namespace = $1 AND name = $2 AND kind = $3"
)


class PostgresStore:
    """Names and pointers in one PostgreSQL database."""

    def __init__(self, url: str, *, timeout_s: float) -> None:
        self._url = url
        self._timeout_s = timeout_s
        self._pool: asyncpg.Pool | None = None

    async def open(self) -> None:
        """Connect, and create or check the schema."""
        await self._connect()
        async with self._transaction() as db:
            version = await _read_version(db)
            if version == 0:
                await _migrate(db)
            else:
                SCHEMA.check(version)

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
            async with self._transaction() as db:
                return await _migrate(db), SCHEMA.version
        finally:
            await self.close()

    async def export(self) -> StoreContents:
        """Read everything in one transaction."""
        async with self._connection() as db, db.transaction(isolation="repeatable_read", readonly=True):
            namespaces = await db.fetch("SELECT name, properties FROM namespaces ORDER BY name")
            entries = await db.fetch(
                "SELECT kind, namespace, name, metadata_location, digest, table_uuid"
                " FROM entries ORDER BY namespace, name"
            )
        return StoreContents(
            {namespace_of(name): orjson.loads(properties) for name, properties in namespaces},
            {entry_of(kind, namespace_of(space), name): Pointer(*pointer) for kind, space, name, *pointer in entries},
        )

    async def restore(self, contents: StoreContents) -> None:
        """Fill an empty store."""
        namespaces = [
            (namespace_key(name), namespace_key(name[:-1]) or None, orjson.dumps(dict(properties)).decode())
            for name, properties in contents.namespaces.items()
        ]
        entries = [(*entry_key(entry), *pointer_columns(pointer)) for entry, pointer in contents.entries.items()]
        async with self._transaction() as db:
            check_empty(not await db.fetchval("SELECT EXISTS (SELECT 1 FROM namespaces)"))
            await db.executemany("INSERT INTO namespaces VALUES ($1, $2, $3)", namespaces)
            await db.executemany(_INSERT_ENTRY, entries)

    async def close(self) -> None:
        """Close the connections after running work."""
        if self._pool is not None:
            await self._pool.close()

    async def create_namespace(self, namespace: Namespace, properties: Mapping[str, str]) -> None:
        """Create a namespace below an existing parent."""
        parent = namespace_key(namespace[:-1]) if len(namespace) > 1 else None
        sql = "INSERT INTO namespaces VALUES ($1, $2, $3) ON CONFLICT DO NOTHING"
        async with self._transaction() as db:
            try:
                done = await db.execute(sql, namespace_key(namespace), parent, orjson.dumps(dict(properties)).decode())
            except asyncpg.ForeignKeyViolationError as error:
                raise no_such_namespace(namespace[:-1]) from error
            if _rows(done) == 0:
                raise namespace_exists(namespace)
            await _record(db, RequestOutcome())

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
            rows = await db.fetch(
                sql, namespace_key(parent) if parent else None, namespace_key((*parent, after)), limit
            )
        return [namespace_of(row["name"]) for row in rows]

    async def update_namespace(
        self, namespace: Namespace, *, removals: Collection[str], updates: Mapping[str, str]
    ) -> list[str]:
        """Remove and set properties; return which of the removals existed."""
        async with self._transaction() as db:
            properties = await _load_namespace(db, namespace, for_update=True)
            removed = [name for name in removals if properties.pop(name, None) is not None]
            text = orjson.dumps(properties | dict(updates)).decode()
            await db.execute("UPDATE namespaces SET properties = $1 WHERE name = $2", text, namespace_key(namespace))
            await _record(db, RequestOutcome(removed=tuple(removed)))
        return removed

    async def drop_namespace(self, namespace: Namespace) -> None:
        """Drop an empty namespace."""
        async with self._transaction() as db:
            try:
                done = await db.execute("DELETE FROM namespaces WHERE name = $1", namespace_key(namespace))
            except asyncpg.ForeignKeyViolationError as error:
                contained = "namespaces" if error.table_name == "namespaces" else "tables or views"
                raise namespace_not_empty(namespace, contained) from error
            if _rows(done) == 0:
                raise no_such_namespace(namespace)
            await _record(db, RequestOutcome())

    async def list_entries(
        self, kind: type[Entry], namespace: Namespace, *, after: str, limit: int | None
    ) -> list[Entry]:
        """Return one page of a namespace's tables or views."""
        sql = "SELECT name FROM entries WHERE namespace = $1 AND kind = $2 AND name > $3 ORDER BY name LIMIT $4"
        async with self._connection() as db:
            await _load_namespace(db, namespace)
            rows = await db.fetch(sql, namespace_key(namespace), kind.kind, after, limit)
        return [kind(namespace, row["name"]) for row in rows]

    async def load_pointer(self, entry: EntryId) -> Pointer | None:
        """Return the pointer of a table or view, or None."""
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
        return {TableId(namespace_of(space), name): Pointer(*pointer) for space, name, *pointer in rows}

    async def create_entry(self, entry: EntryId, pointer: Pointer) -> None:
        """Create a table or view that points at its first metadata."""
        async with self._transaction() as db:
            await _create_entry(db, entry, pointer)
            await _record(db, outcome_at(pointer))

    async def swap_pointer(
        self, entry: EntryId, *, expected: Pointer, new: Pointer, prepare: Callable[[], None] | None = None
    ) -> bool:
        """Move a pointer if it still is at the expected version."""
        await run_blocking(prepare)
        async with self._change() as db:
            swapped = await _swap_pointer(db, entry, expected=expected, new=new)
            if swapped:
                await _record(db, outcome_at(new))
        return swapped

    async def move_pointers(self, moves: Sequence[PointerMove]) -> bool:
        """Make all moves in one transaction, or none."""
        try:
            async with self._transaction() as db:
                await _move_pointers(db, moves)
                await _record(db, RequestOutcome())
        except PointerMoved:
            return False
        return True

    async def put_entry(self, entry: EntryId, pointer: Pointer) -> None:
        """Point a table or view at metadata, whether or not it exists."""
        async with self._transaction() as db:
            if _rows(await db.execute(_UPDATE_ENTRY, *entry_key(entry), *pointer_columns(pointer))) == 0:
                await _create_entry(db, entry, pointer)
            await _record(db, outcome_at(pointer))

    async def rename_entry(self, source: EntryId, destination: EntryId) -> None:
        """Rename a table or view."""
        sql = "UPDATE entries SET namespace = $1, name = $2 WHERE namespace = $3 AND name = $4 AND kind = $5"
        async with self._transaction() as db:
            if await _load_pointer(db, source) is None:
                raise no_such_entry(source)
            await _load_namespace(db, destination.namespace)
            kind = await _kind_at(db, destination)
            if kind is not None and source != destination:
                raise rename_target_in_use(source, destination, kind)
            try:
                done = await db.execute(sql, namespace_key(destination.namespace), destination.name, *entry_key(source))
            except asyncpg.UniqueViolationError as error:
                raise rename_target_in_use(source, destination, destination.kind) from error
            except asyncpg.ForeignKeyViolationError as error:
                raise no_such_namespace(destination.namespace) from error
            if _rows(done) == 0:
                raise no_such_entry(source)
            await _record(db, RequestOutcome())

    async def drop_entry(self, entry: EntryId) -> Pointer:
        """Remove a table or view and return the pointer to its last metadata."""
        sql = (
            "DELETE FROM entries WHERE namespace = $1 AND name = $2 AND kind = $3"
            " RETURNING metadata_location, digest, table_uuid"
        )
        async with self._change() as db:
            row = await db.fetchrow(sql, *entry_key(entry))
            if row is None:
                raise no_such_entry(entry)
            pointer = Pointer(*row)
            await _record(db, outcome_at(pointer))
        return pointer

    async def load_outcome(self, key: str) -> RecordedOutcome | None:
        """Return what is recorded under an idempotency key, or None."""
        sql = "SELECT fingerprint, outcome FROM outcomes WHERE idempotency_key = $1"
        async with self._connection() as db:
            row = await db.fetchrow(sql, key)
        return None if row is None else RecordedOutcome(row["fingerprint"], decode_outcome(row["outcome"]))

    async def record_outcome(self, claim: KeyClaim, outcome: RequestOutcome) -> None:
        """Record the outcome of a request that changed nothing."""
        async with self._connection() as db:
            await _record_outcome(db, claim, outcome)

    async def delete_outcomes(self, *, before_ms: int, kept_max: int) -> int:
        """Delete outcomes recorded before a time, and the oldest beyond a number; return how many were beyond it."""
        excess = (
            "DELETE FROM outcomes WHERE idempotency_key IN"
            " (SELECT idempotency_key FROM outcomes ORDER BY recorded_ms DESC OFFSET $1)"
        )
        async with self._connection() as db:
            await db.execute("DELETE FROM outcomes WHERE recorded_ms < $1", before_ms)
            return _rows(await db.execute(excess, kept_max))

    @asynccontextmanager
    async def _connection(self) -> AsyncIterator[Any]:
        """Borrow a connection; every statement on it is a transaction of its own."""
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
        """Borrow a connection for a change of one statement, with a transaction if its outcome is recorded too."""
        return self._connection() if current_claim() is None else self._transaction()


async def _read_version(db: Any) -> int:
    """Lock the schema until the transaction ends and return its version; 0 if there is none."""
    await db.execute("SELECT pg_advisory_xact_lock($1)", _SCHEMA_LOCK)
    if await db.fetchval("SELECT to_regclass('lakefeed_catalog.catalog_schema')") is None:
        return 0
    version: int = await db.fetchval("SELECT version FROM catalog_schema")
    return version


async def _migrate(db: Any) -> int:
    """Bring a database to the current version, in one transaction; return the version it had."""
    version = await _read_version(db)
    for statement in SCHEMA.statements_from(version):
        await db.execute(statement)
    return version


async def _load_namespace(db: Any, namespace: Namespace, *, for_update: bool = False) -> dict[str, str]:
    sql = "SELECT properties FROM namespaces WHERE name = $1"
    text = await db.fetchval(f"{sql} FOR UPDATE" if for_update else sql, namespace_key(namespace))
    if text is None:
        raise no_such_namespace(namespace)
    properties: dict[str, str] = orjson.loads(text)
    return properties


async def _load_pointer(db: Any, entry: EntryId) -> Pointer | None:
    sql = "SELECT metadata_location, digest, table_uuid FROM entries WHERE namespace = $1 AND name = $2 AND kind = $3"
    row = await db.fetchrow(sql, *entry_key(entry))
    return None if row is None else Pointer(*row)


async def _kind_at(db: Any, entry: EntryId) -> str | None:
    """Return the kind of the entry that has a name, or None."""
    sql = "SELECT kind FROM entries WHERE namespace = $1 AND name = $2"
    kind: str | None = await db.fetchval(sql, namespace_key(entry.namespace), entry.name)
    return kind


async def _create_entry(db: Any, entry: EntryId, pointer: Pointer) -> None:
    try:
        done = await db.execute(f"{_INSERT_ENTRY} ON CONFLICT DO NOTHING", *entry_key(entry), *pointer_columns(pointer))
    except asyncpg.ForeignKeyViolationError as error:
        raise no_such_namespace(entry.namespace) from error
    if _rows(done) == 0:
        raise name_in_use(entry, await _kind_at(db, entry) or entry.kind)


async def _swap_pointer(db: Any, entry: EntryId, *, expected: Pointer, new: Pointer) -> bool:
    sql = f"{_UPDATE_ENTRY} AND metadata_location = $7 AND digest = $8"
    facts = (*entry_key(entry), *pointer_columns(new), expected.location, expected.digest)
    return _rows(await db.execute(sql, *facts)) == 1


async def _move_pointers(db: Any, moves: Sequence[PointerMove]) -> None:
    # In the order of names, so that two transactions that lock the same rows cannot deadlock.
    for move in sorted(moves, key=lambda each: (each.entry.namespace, each.entry.name)):
        if move.expected is None:
            await _create_entry(db, move.entry, move.new)
        elif not await _swap_pointer(db, move.entry, expected=move.expected, new=move.new):
            raise PointerMoved


async def _record(db: Any, outcome: RequestOutcome) -> None:
    """Record the outcome in the open transaction, if the request has a key."""
    claim = current_claim()
    if claim is not None:
        await _record_outcome(db, claim, outcome)


async def _record_outcome(db: Any, claim: KeyClaim, outcome: RequestOutcome) -> None:
    # The insert waits for an open transaction that has written the same key.
    sql = "INSERT INTO outcomes VALUES ($1, $2, $3, $4) ON CONFLICT DO NOTHING"
    if _rows(await db.execute(sql, claim.key, claim.fingerprint, outcome.to_text(), claim.at_ms)) == 0:
        raise key_taken(claim)


def _rows(tag: str) -> int:
    """Return how many rows a statement touched from its command tag: `UPDATE 1`."""
    return int(tag.rpartition(" ")[2])
