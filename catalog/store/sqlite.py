"""The store on SQLite. Owns the statements; sqlite_schema.py owns the schema, sqlite_lines.py threads and transactions.

One connection writes and one lists, each in a thread of its own: in WAL mode a read never waits for a writer's sync.
A third one looks up pointers and outcomes on the event loop itself: a look-up takes microseconds, less than handing it
to a thread. Every write is synced before it returns (synchronous=FULL). Other processes may use the same file; the
pointer swap compares in SQL, so that is safe, if slow.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import orjson

from lakefeed.catalog.errors import AlreadyExists, NamespaceNotEmpty, NoSuchNamespace
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
    encode_outcome,
    entry_of,
    key_taken,
    name_is_taken,
    no_such_entry,
    outcome_at,
)
from lakefeed.catalog.store.sqlite_connections import Line, WriteLine, connect, in_transaction, store_failed

# --- catalog.store.sqlite_schema --------------------------------------------------------------------------------------
#
# The SQL schema of the SQLite store. Owns its version and the way there.
#
#     namespaces  name (levels joined by 0x1F) | parent (all but the last level, '' at the top) | properties (JSON)
#     entries     namespace | name | kind (Table or View) | metadata_location | digest | table_uuid ('' where not known)
#     outcomes    idempotency_key | fingerprint | outcome (JSON) | recorded_ms
#
# Migrations run forward only, and only when asked to; a new file goes through all of them at its first open.


# Statements that lead from each version to the next; a new file goes through all of them.
_MIGRATIONS: tuple[tuple[str, ...], ...] = (
    (
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
    ),
    (
        "ALTER TABLE tables RENAME TO entries",
        "ALTER TABLE entries ADD COLUMN kind TEXT NOT NULL DEFAULT 'Table'",
    ),
    (
        """CREATE TABLE outcomes (
        idempotency_key TEXT NOT NULL PRIMARY KEY,
        fingerprint TEXT NOT NULL,
        outcome TEXT NOT NULL,
        recorded_ms INTEGER NOT NULL
    ) STRICT, WITHOUT ROWID""",
        "CREATE INDEX outcomes_by_time ON outcomes (recorded_ms)",
    ),
    (
        "ALTER TABLE entries ADD COLUMN digest TEXT NOT NULL DEFAULT ''",
        "ALTER TABLE entries ADD COLUMN table_uuid TEXT NOT NULL DEFAULT ''",
    ),
)
SCHEMA_VERSION = len(_MIGRATIONS)


def prepare_schema(db: sqlite3.Connection) -> int:
    """Make the schema of a new file; return the version."""
    if db.execute("SELECT 1 FROM sqlite_schema WHERE name = 'catalog_schema'").fetchone() is None:
        migrate(db)
    (version,) = db.execute("SELECT version FROM catalog_schema").fetchone()
    return int(version)


def migrate(db: sqlite3.Connection) -> int:
    """Go through the migrations that a file has not seen; return the version that it had."""
    db.execute("CREATE TABLE IF NOT EXISTS catalog_schema (version INTEGER NOT NULL) STRICT")
    row = db.execute("SELECT version FROM catalog_schema").fetchone()
    version = 0 if row is None else int(row[0])
    if version > SCHEMA_VERSION:
        check_version(version, SCHEMA_VERSION)
    for statements in _MIGRATIONS[version:]:
        for statement in statements:
            db.execute(statement)
    db.execute("DELETE FROM catalog_schema")
    db.execute("INSERT INTO catalog_schema VALUES (?)", (SCHEMA_VERSION,))
    return version


# --- catalog.store.sqlite ---------------------------------------------------------------------------------------------


# SQLite's word for "no limit".
_UNLIMITED = -1

_UPDATE_ENTRY = (
    "UPDATE entries SET metadata_location = ?, digest = ?, table_uuid = ? WHERE namespace = ? AND name = ? AND kind = ?"
)

_T = TypeVar("_T")
_Entry = TypeVar("_Entry", bound=EntryId)


class _PointerMoved(Exception):
    """A pointer is not where it was expected: roll back."""


class SqliteStore:
    """Names and pointers in one SQLite file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._writer = WriteLine("write")
        self._reader = Line("read")
        self._lookups: sqlite3.Connection | None = None

    async def open(self) -> None:
        """Open the file, and make or check its schema."""
        await asyncio.to_thread(lambda: self._path.parent.mkdir(parents=True, exist_ok=True))
        await self._writer.open(self._path)
        check_version(await self._writer.run(prepare_schema), SCHEMA_VERSION)
        await self._reader.open(self._path)
        self._lookups = connect(self._path)

    async def migrate(self) -> tuple[int, int]:
        """Bring the file up to date."""
        line = WriteLine("migrate")
        await line.open(self._path)
        try:
            return await line.run(migrate), SCHEMA_VERSION
        finally:
            await line.close()

    async def export(self) -> Contents:
        """Read everything in one transaction."""
        return await self._reader.run(lambda db: in_transaction(db, _export, begin="BEGIN"))

    async def restore(self, contents: Contents) -> None:
        """Fill an empty store."""
        await self._writer.run(lambda db: _restore(db, contents))

    async def close(self) -> None:
        """Close the connections after running work."""
        if self._lookups is not None:
            self._lookups.close()
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
        return await self._write(
            lambda db: _update_namespace(db, namespace, removals=removals, updates=updates),
            lambda removed: Outcome(removed=tuple(removed)),
        )

    async def drop_namespace(self, namespace: Namespace) -> None:
        """Drop an empty namespace."""
        await self._write(lambda db: _drop_namespace(db, namespace))

    async def list_tables(self, namespace: Namespace, *, after: str, limit: int | None) -> list[TableId]:
        """Return one page of a namespace's tables."""
        return await self._reader.run(lambda db: _list_entries(db, TableId, namespace, after=after, limit=limit))

    async def list_views(self, namespace: Namespace, *, after: str, limit: int | None) -> list[ViewId]:
        """Return one page of a namespace's views."""
        return await self._reader.run(lambda db: _list_entries(db, ViewId, namespace, after=after, limit=limit))

    async def load_pointer(self, entry: EntryId) -> Pointer | None:
        """Return where the current metadata of a table or view is, or None."""
        return self._look_up(lambda db: _load_pointer(db, entry))

    async def find_tables(self, *, table_uuid: str, directory: str) -> dict[TableId, Pointer]:
        """Return the tables that may be the one of this uuid."""
        return await self._reader.run(lambda db: _find_tables(db, table_uuid, directory))

    async def note_uuids(self, tables: Mapping[TableId, Pointer]) -> None:
        """Keep the uuids of tables where none is known."""
        await self._writer.run(lambda db: _note_uuids(db, tables))

    async def create_entry(self, entry: EntryId, pointer: Pointer) -> None:
        """Create a table or view that points at its first metadata."""
        await self._write(lambda db: _create_entry(db, entry, pointer), lambda _: outcome_at(pointer))

    async def swap_pointer(
        self, entry: EntryId, *, expected: Pointer, new: Pointer, first: Callable[[], None] | None = None
    ) -> bool:
        """Move a pointer if it still is where expected."""
        return await self._write(
            lambda db: _swap_pointer(db, entry, expected=expected, new=new),
            lambda swapped: outcome_at(new) if swapped else None,
            first=first,
        )

    async def move_pointers(self, moves: Sequence[Move]) -> bool:
        """Make all moves in one transaction, or none."""
        try:
            await self._write(lambda db: _move_pointers(db, moves))
        except _PointerMoved:
            return False
        return True

    async def put_entry(self, entry: EntryId, pointer: Pointer) -> None:
        """Point a table or view at metadata, whether or not it existed."""
        await self._write(lambda db: _put_entry(db, entry, pointer), lambda _: outcome_at(pointer))

    async def rename_entry(self, source: EntryId, destination: EntryId) -> None:
        """Give a table or view another name."""
        await self._write(lambda db: _rename_entry(db, source, destination))

    async def drop_entry(self, entry: EntryId) -> Pointer:
        """Forget a table or view and return where its last metadata is."""
        return await self._write(lambda db: _drop_entry(db, entry), outcome_at)

    async def load_outcome(self, key: str) -> Remembered | None:
        """Return what became of the request with this idempotency key, or None."""
        return self._look_up(lambda db: _load_outcome(db, key))

    async def record_outcome(self, claim: Claim, outcome: Outcome) -> None:
        """Keep the outcome of a request that changed nothing."""
        await self._writer.run(lambda db: _record_outcome(db, claim, outcome))

    async def forget_outcomes(self, *, before_ms: int, kept_max: int) -> int:
        """Forget outcomes recorded before a time, and the oldest beyond a number; tell how many were too many."""
        return await self._writer.run(lambda db: _forget_outcomes(db, before_ms=before_ms, kept_max=kept_max))

    def _look_up(self, read: Callable[[sqlite3.Connection], _T]) -> _T:
        assert self._lookups is not None, "store is not open"
        try:
            return read(self._lookups)
        except sqlite3.Error as error:
            raise store_failed(error) from error

    async def _write(
        self,
        work: Callable[[sqlite3.Connection], _T],
        done: Callable[[_T], Outcome | None] = lambda _: Outcome(),
        first: Callable[[], None] | None = None,
    ) -> _T:
        """Make a change and, for a request with a key, record in the same transaction what was done, if anything."""
        claim = current_claim()
        if claim is None:
            return await self._writer.run(work, first)

        def claimed_work(db: sqlite3.Connection) -> _T:
            result = work(db)
            outcome = done(result)
            if outcome is not None:
                _record_outcome(db, claim, outcome)
            return result

        return await self._writer.run(claimed_work, first)


def _export(db: sqlite3.Connection) -> Contents:
    namespaces = db.execute("SELECT name, properties FROM namespaces ORDER BY name")
    entries = db.execute(
        "SELECT kind, namespace, name, metadata_location, digest, table_uuid FROM entries ORDER BY namespace, name"
    )
    return Contents(
        {_levels(name): orjson.loads(properties) for name, properties in namespaces},
        {entry_of(kind, _levels(space), name): Pointer(*pointer) for kind, space, name, *pointer in entries},
    )


def _restore(db: sqlite3.Connection, contents: Contents) -> None:
    check_empty(db.execute("SELECT 1 FROM namespaces LIMIT 1").fetchone() is not None)
    for namespace, properties in contents.namespaces.items():
        _create_namespace(db, namespace, properties)
    for entry, pointer in contents.entries.items():
        _create_entry(db, entry, pointer)


def _levels(key: str) -> Namespace:
    return tuple(key.split(SEPARATOR))


def _key(namespace: Namespace) -> str:
    return SEPARATOR.join(namespace)


def _entry_key(entry: EntryId) -> tuple[str, str, str]:
    return _key(entry.namespace), entry.name, entry.kind


def _columns(pointer: Pointer) -> tuple[str, str, str]:
    return pointer.location, pointer.digest, pointer.table_uuid


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
    return [_levels(name) for (name,) in rows]


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
        ("tables or views", "SELECT 1 FROM entries WHERE namespace = ? LIMIT 1"),
        ("namespaces", "SELECT 1 FROM namespaces WHERE parent = ? LIMIT 1"),
    ):
        if db.execute(sql, (key,)).fetchone() is not None:
            raise NamespaceNotEmpty(f"Namespace {dotted(namespace)} is not empty: it contains {held}")
    db.execute("DELETE FROM namespaces WHERE name = ?", (key,))


def _list_entries(
    db: sqlite3.Connection, kind: type[_Entry], namespace: Namespace, *, after: str, limit: int | None
) -> list[_Entry]:
    _check_namespace(db, namespace)
    rows = db.execute(
        "SELECT name FROM entries WHERE namespace = ? AND kind = ? AND name > ? ORDER BY name LIMIT ?",
        (_key(namespace), kind.kind, after, _UNLIMITED if limit is None else limit),
    )
    return [kind(namespace, name) for (name,) in rows]


def _load_pointer(db: sqlite3.Connection, entry: EntryId) -> Pointer | None:
    sql = "SELECT metadata_location, digest, table_uuid FROM entries WHERE namespace = ? AND name = ? AND kind = ?"
    row = db.execute(sql, _entry_key(entry)).fetchone()
    return None if row is None else Pointer(*row)


def _find_tables(db: sqlite3.Connection, table_uuid: str, directory: str) -> dict[TableId, Pointer]:
    sql = (
        "SELECT namespace, name, metadata_location, digest, table_uuid FROM entries WHERE kind = ?"
        " AND (? = '' OR table_uuid IN ('', ?) OR instr(metadata_location, ?) > 0)"
    )
    rows = db.execute(sql, (TableId.kind, table_uuid, table_uuid, directory))
    return {TableId(_levels(space), name): Pointer(*pointer) for space, name, *pointer in rows}


def _note_uuids(db: sqlite3.Connection, tables: Mapping[TableId, Pointer]) -> None:
    sql = f"{_UPDATE_ENTRY} AND metadata_location = ? AND digest = ? AND table_uuid = ''"
    rows = [(*_columns(new), *_entry_key(table), new.location, new.digest) for table, new in tables.items()]
    db.executemany(sql, rows)


def _kind_at(db: sqlite3.Connection, entry: EntryId) -> str | None:
    """Tell what has a name now, whichever kind is asked for."""
    sql = "SELECT kind FROM entries WHERE namespace = ? AND name = ?"
    row = db.execute(sql, (_key(entry.namespace), entry.name)).fetchone()
    return None if row is None else str(row[0])


def _create_entry(db: sqlite3.Connection, entry: EntryId, pointer: Pointer) -> None:
    _check_namespace(db, entry.namespace)
    kind = _kind_at(db, entry)
    if kind is not None:
        raise name_is_taken(entry, kind)
    sql = "INSERT INTO entries (namespace, name, kind, metadata_location, digest, table_uuid) VALUES (?, ?, ?, ?, ?, ?)"
    db.execute(sql, (*_entry_key(entry), *_columns(pointer)))


def _swap_pointer(db: sqlite3.Connection, entry: EntryId, *, expected: Pointer, new: Pointer) -> bool:
    sql = f"{_UPDATE_ENTRY} AND metadata_location = ? AND digest = ?"
    return db.execute(sql, (*_columns(new), *_entry_key(entry), expected.location, expected.digest)).rowcount == 1


def _move_pointers(db: sqlite3.Connection, moves: Sequence[Move]) -> None:
    for move in moves:
        if move.expected is None:
            _create_entry(db, move.entry, move.new)
        elif not _swap_pointer(db, move.entry, expected=move.expected, new=move.new):
            raise _PointerMoved


def _put_entry(db: sqlite3.Connection, entry: EntryId, pointer: Pointer) -> None:
    if db.execute(_UPDATE_ENTRY, (*_columns(pointer), *_entry_key(entry))).rowcount == 0:
        _create_entry(db, entry, pointer)


def _rename_entry(db: sqlite3.Connection, source: EntryId, destination: EntryId) -> None:
    if _load_pointer(db, source) is None:
        raise no_such_entry(source)
    if source == destination:
        return
    _check_namespace(db, destination.namespace)
    kind = _kind_at(db, destination)
    if kind is not None:
        raise AlreadyExists(f"Cannot rename {source} to {destination}. {kind} already exists")
    db.execute(
        "UPDATE entries SET namespace = ?, name = ? WHERE namespace = ? AND name = ?",
        (_key(destination.namespace), destination.name, _key(source.namespace), source.name),
    )


def _drop_entry(db: sqlite3.Connection, entry: EntryId) -> Pointer:
    pointer = _load_pointer(db, entry)
    if pointer is None:
        raise no_such_entry(entry)
    db.execute("DELETE FROM entries WHERE namespace = ? AND name = ?", (_key(entry.namespace), entry.name))
    return pointer


def _load_outcome(db: sqlite3.Connection, key: str) -> Remembered | None:
    row = db.execute("SELECT fingerprint, outcome FROM outcomes WHERE idempotency_key = ?", (key,)).fetchone()
    return None if row is None else Remembered(row[0], decode_outcome(row[1]))


def _record_outcome(db: sqlite3.Connection, claim: Claim, outcome: Outcome) -> None:
    row = (claim.key, claim.fingerprint, encode_outcome(outcome), claim.at_ms)
    if db.execute("INSERT INTO outcomes VALUES (?, ?, ?, ?) ON CONFLICT DO NOTHING", row).rowcount == 0:
        raise key_taken(claim)


def _forget_outcomes(db: sqlite3.Connection, *, before_ms: int, kept_max: int) -> int:
    db.execute("DELETE FROM outcomes WHERE recorded_ms < ?", (before_ms,))
    excess = (
        "DELETE FROM outcomes WHERE idempotency_key IN"
        " (SELECT idempotency_key FROM outcomes ORDER BY recorded_ms DESC LIMIT -1 OFFSET ?)"
    )
    return db.execute(excess, (kept_max,)).rowcount
