"""The store on SQLite: its schema and statements. sqlite_connections.py has the threads and the group commit.

    namespaces  name (levels joined by 0x1F) | parent (all but the last level, '' at the top) | properties (JSON)
    entries     namespace | name | kind (Table or View) | metadata_location | digest | table_uuid ('' if unknown)
    outcomes    idempotency_key | fingerprint | outcome (JSON) | recorded_ms

One connection writes and one lists, each in its own thread: in WAL mode a read never waits for a writer's sync. A
third one looks up pointers and outcomes on the event loop, because a lookup takes microseconds, less than handing it
to a thread. Every write is synced before it returns (synchronous=FULL). Other processes may use the same file: the
pointer swap compares in SQL, which is safe, if slow.

A new file gets the current schema at its first open. An existing file is only changed by `migrate`.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import orjson

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
)
from lakefeed.catalog.store.sqlite_connections import (
    ConnectionThread,
    GroupCommitThread,
    connect,
    in_transaction,
    store_failed,
)

SCHEMA = SqlSchema(
    version=4,
    create=(
        "CREATE TABLE catalog_schema (version INTEGER NOT NULL) STRICT",
        """CREATE TABLE namespaces (
            name TEXT NOT NULL PRIMARY KEY,
            parent TEXT NOT NULL,
            properties TEXT NOT NULL
        ) STRICT, WITHOUT ROWID""",
        "CREATE UNIQUE INDEX namespaces_by_parent ON namespaces (parent, name)",
        """CREATE TABLE entries (
            namespace TEXT NOT NULL REFERENCES namespaces (name),
            name TEXT NOT NULL,
            metadata_location TEXT NOT NULL,
            kind TEXT NOT NULL DEFAULT 'Table',
            digest TEXT NOT NULL DEFAULT '',
            table_uuid TEXT NOT NULL DEFAULT '',
            PRIMARY KEY (namespace, name)
        ) STRICT, WITHOUT ROWID""",
        """CREATE TABLE outcomes (
            idempotency_key TEXT NOT NULL PRIMARY KEY,
            fingerprint TEXT NOT NULL,
            outcome TEXT NOT NULL,
            recorded_ms INTEGER NOT NULL
        ) STRICT, WITHOUT ROWID""",
        "CREATE INDEX outcomes_by_time ON outcomes (recorded_ms)",
    ),
)

# SQLite's word for "no limit".
_UNLIMITED = -1

_UPDATE_ENTRY = (
    "UPDATE entries SET metadata_location = ?, digest = ?, table_uuid = ? WHERE namespace = ? AND name = ? AND kind = ?"
)

_T = TypeVar("_T")


class SqliteStore:
    """Names and pointers in one SQLite file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._writer = GroupCommitThread("write")
        self._reader = ConnectionThread("read")
        self._lookups: sqlite3.Connection | None = None

    async def open(self) -> None:
        """Open the file, and create or check its schema."""
        await asyncio.to_thread(lambda: self._path.parent.mkdir(parents=True, exist_ok=True))
        await self._writer.open(self._path)
        await self._writer.run(_create_or_check)
        await self._reader.open(self._path)
        self._lookups = connect(self._path)

    async def migrate(self) -> tuple[int, int]:
        """Bring the file to the current version."""
        thread = GroupCommitThread("migrate")
        await thread.open(self._path)
        try:
            return await thread.run(_migrate), SCHEMA.version
        finally:
            await thread.close()

    async def export(self) -> StoreContents:
        """Read everything in one transaction."""
        return await self._reader.run(lambda db: in_transaction(db, _export, begin="BEGIN"))

    async def restore(self, contents: StoreContents) -> None:
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
        """Remove and set properties; return which of the removals existed."""
        return await self._write(
            lambda db: _update_namespace(db, namespace, removals=removals, updates=updates),
            lambda removed: RequestOutcome(removed=tuple(removed)),
        )

    async def drop_namespace(self, namespace: Namespace) -> None:
        """Drop an empty namespace."""
        await self._write(lambda db: _drop_namespace(db, namespace))

    async def list_entries(
        self, kind: type[Entry], namespace: Namespace, *, after: str, limit: int | None
    ) -> list[Entry]:
        """Return one page of a namespace's tables or views."""
        return await self._reader.run(lambda db: _list_entries(db, kind, namespace, after=after, limit=limit))

    async def load_pointer(self, entry: EntryId) -> Pointer | None:
        """Return the pointer of a table or view, or None."""
        return self._lookup(lambda db: _load_pointer(db, entry))

    async def find_tables(self, *, table_uuid: str, directory: str) -> dict[TableId, Pointer]:
        """Return the tables that may be the one of this uuid."""
        return await self._reader.run(lambda db: _find_tables(db, table_uuid, directory))

    async def create_entry(self, entry: EntryId, pointer: Pointer) -> None:
        """Create a table or view that points at its first metadata."""
        await self._write(lambda db: _create_entry(db, entry, pointer), lambda _: outcome_at(pointer))

    async def swap_pointer(
        self, entry: EntryId, *, expected: Pointer, new: Pointer, prepare: Callable[[], None] | None = None
    ) -> bool:
        """Move a pointer if it still is at the expected version."""
        return await self._write(
            lambda db: _swap_pointer(db, entry, expected=expected, new=new),
            lambda swapped: outcome_at(new) if swapped else None,
            prepare=prepare,
        )

    async def move_pointers(self, moves: Sequence[PointerMove]) -> bool:
        """Make all moves in one transaction, or none."""
        try:
            await self._write(lambda db: _move_pointers(db, moves))
        except PointerMoved:
            return False
        return True

    async def put_entry(self, entry: EntryId, pointer: Pointer) -> None:
        """Point a table or view at metadata, whether or not it exists."""
        await self._write(lambda db: _put_entry(db, entry, pointer), lambda _: outcome_at(pointer))

    async def rename_entry(self, source: EntryId, destination: EntryId) -> None:
        """Rename a table or view."""
        await self._write(lambda db: _rename_entry(db, source, destination))

    async def drop_entry(self, entry: EntryId) -> Pointer:
        """Remove a table or view and return the pointer to its last metadata."""
        return await self._write(lambda db: _drop_entry(db, entry), outcome_at)

    async def load_outcome(self, key: str) -> RecordedOutcome | None:
        """Return what is recorded under an idempotency key, or None."""
        return self._lookup(lambda db: _load_outcome(db, key))

    async def record_outcome(self, claim: KeyClaim, outcome: RequestOutcome) -> None:
        """Record the outcome of a request that changed nothing."""
        await self._writer.run(lambda db: _record_outcome(db, claim, outcome))

    async def delete_outcomes(self, *, before_ms: int, kept_max: int) -> int:
        """Delete outcomes recorded before a time, and the oldest beyond a number; return how many were beyond it."""
        return await self._writer.run(lambda db: _delete_outcomes(db, before_ms=before_ms, kept_max=kept_max))

    def _lookup(self, read: Callable[[sqlite3.Connection], _T]) -> _T:
        assert self._lookups is not None, "store is not open"
        try:
            return read(self._lookups)
        except sqlite3.Error as error:
            raise store_failed(error) from error

    async def _write(
        self,
        work: Callable[[sqlite3.Connection], _T],
        outcome_of: Callable[[_T], RequestOutcome | None] = lambda _: RequestOutcome(),
        prepare: Callable[[], None] | None = None,
    ) -> _T:
        """Make a change; for a request with a key, record its outcome, if any, in the same transaction."""
        claim = current_claim()
        if claim is None:
            return await self._writer.run(work, prepare)

        def claimed_work(db: sqlite3.Connection) -> _T:
            result = work(db)
            outcome = outcome_of(result)
            if outcome is not None:
                _record_outcome(db, claim, outcome)
            return result

        return await self._writer.run(claimed_work, prepare)


def _read_version(db: sqlite3.Connection) -> int:
    """Return the version of a file's schema; 0 if it has none."""
    if db.execute("SELECT 1 FROM sqlite_schema WHERE name = 'catalog_schema'").fetchone() is None:
        return 0
    (version,) = db.execute("SELECT version FROM catalog_schema").fetchone()
    return int(version)


def _create_or_check(db: sqlite3.Connection) -> None:
    version = _read_version(db)
    if version == 0:
        _migrate(db)
    else:
        SCHEMA.check(version)


def _migrate(db: sqlite3.Connection) -> int:
    """Bring a new or older file to the current version; return the version it had."""
    version = _read_version(db)
    for statement in SCHEMA.statements_from(version):
        db.execute(statement)
    return version


def _export(db: sqlite3.Connection) -> StoreContents:
    namespaces = db.execute("SELECT name, properties FROM namespaces ORDER BY name")
    entries = db.execute(
        "SELECT kind, namespace, name, metadata_location, digest, table_uuid FROM entries ORDER BY namespace, name"
    )
    return StoreContents(
        {namespace_of(name): orjson.loads(properties) for name, properties in namespaces},
        {entry_of(kind, namespace_of(space), name): Pointer(*pointer) for kind, space, name, *pointer in entries},
    )


def _restore(db: sqlite3.Connection, contents: StoreContents) -> None:
    check_empty(db.execute("SELECT 1 FROM namespaces LIMIT 1").fetchone() is None)
    for namespace, properties in contents.namespaces.items():
        _create_namespace(db, namespace, properties)
    for entry, pointer in contents.entries.items():
        _create_entry(db, entry, pointer)


def _check_namespace(db: sqlite3.Connection, namespace: Namespace) -> None:
    if db.execute("SELECT 1 FROM namespaces WHERE name = ?", (namespace_key(namespace),)).fetchone() is None:
        raise no_such_namespace(namespace)


def _create_namespace(db: sqlite3.Connection, namespace: Namespace, properties: Mapping[str, str]) -> None:
    parent = namespace[:-1]
    if parent:
        _check_namespace(db, parent)
    row = (namespace_key(namespace), namespace_key(parent), orjson.dumps(dict(properties)).decode())
    if db.execute("INSERT INTO namespaces VALUES (?, ?, ?) ON CONFLICT DO NOTHING", row).rowcount == 0:
        raise namespace_exists(namespace)


def _load_namespace(db: sqlite3.Connection, namespace: Namespace) -> dict[str, str]:
    row = db.execute("SELECT properties FROM namespaces WHERE name = ?", (namespace_key(namespace),)).fetchone()
    if row is None:
        raise no_such_namespace(namespace)
    properties: dict[str, str] = orjson.loads(row[0])
    return properties


def _list_namespaces(db: sqlite3.Connection, parent: Namespace, *, after: str, limit: int | None) -> list[Namespace]:
    if parent:
        _check_namespace(db, parent)
    rows = db.execute(
        "SELECT name FROM namespaces WHERE parent = ? AND name > ? ORDER BY name LIMIT ?",
        (namespace_key(parent), namespace_key((*parent, after)), _UNLIMITED if limit is None else limit),
    )
    return [namespace_of(name) for (name,) in rows]


def _update_namespace(
    db: sqlite3.Connection, namespace: Namespace, *, removals: Collection[str], updates: Mapping[str, str]
) -> list[str]:
    properties = _load_namespace(db, namespace)
    removed = [name for name in removals if properties.pop(name, None) is not None]
    properties |= updates
    row = (orjson.dumps(properties).decode(), namespace_key(namespace))
    db.execute("UPDATE namespaces SET properties = ? WHERE name = ?", row)
    return removed


def _drop_namespace(db: sqlite3.Connection, namespace: Namespace) -> None:
    key = namespace_key(namespace)
    _check_namespace(db, namespace)
    for contained, sql in (
        ("tables or views", "SELECT 1 FROM entries WHERE namespace = ? LIMIT 1"),
        ("namespaces", "SELECT 1 FROM namespaces WHERE parent = ? LIMIT 1"),
    ):
        if db.execute(sql, (key,)).fetchone() is not None:
            raise namespace_not_empty(namespace, contained)
    db.execute("DELETE FROM namespaces WHERE name = ?", (key,))


def _list_entries(
    db: sqlite3.Connection, kind: type[Entry], namespace: Namespace, *, after: str, limit: int | None
) -> list[Entry]:
    _check_namespace(db, namespace)
    rows = db.execute(
        "SELECT name FROM entries WHERE namespace = ? AND kind = ? AND name > ? ORDER BY name LIMIT ?",
        (namespace_key(namespace), kind.kind, after, _UNLIMITED if limit is None else limit),
    )
    return [kind(namespace, name) for (name,) in rows]


def _load_pointer(db: sqlite3.Connection, entry: EntryId) -> Pointer | None:
    sql = "SELECT metadata_location, digest, table_uuid FROM entries WHERE namespace = ? AND name = ? AND kind = ?"
    row = db.execute(sql, entry_key(entry)).fetchone()
    return None if row is None else Pointer(*row)


def _find_tables(db: sqlite3.Connection, table_uuid: str, directory: str) -> dict[TableId, Pointer]:
    sql = (
        "SELECT namespace, name, metadata_location, digest, table_uuid FROM entries WHERE kind = ?"
        " AND (? = '' OR table_uuid IN ('', ?) OR instr(metadata_location, ?) > 0)"
    )
    rows = db.execute(sql, (TableId.kind, table_uuid, table_uuid, directory))
    return {TableId(namespace_of(space), name): Pointer(*pointer) for space, name, *pointer in rows}


def _kind_at(db: sqlite3.Connection, entry: EntryId) -> str | None:
    """Return the kind of the entry that has a name, or None."""
    sql = "SELECT kind FROM entries WHERE namespace = ? AND name = ?"
    row = db.execute(sql, (namespace_key(entry.namespace), entry.name)).fetchone()
    return None if row is None else str(row[0])


def _create_entry(db: sqlite3.Connection, entry: EntryId, pointer: Pointer) -> None:
    _check_namespace(db, entry.namespace)
    kind = _kind_at(db, entry)
    if kind is not None:
        raise name_in_use(entry, kind)
    sql = "INSERT INTO entries (namespace, name, kind, metadata_location, digest, table_uuid) VALUES (?, ?, ?, ?, ?, ?)"
    db.execute(sql, (*entry_key(entry), *pointer_columns(pointer)))


def _swap_pointer(db: sqlite3.Connection, entry: EntryId, *, expected: Pointer, new: Pointer) -> bool:
    sql = f"{_UPDATE_ENTRY} AND metadata_location = ? AND digest = ?"
    return db.execute(sql, (*pointer_columns(new), *entry_key(entry), expected.location, expected.digest)).rowcount == 1


def _move_pointers(db: sqlite3.Connection, moves: Sequence[PointerMove]) -> None:
    for move in moves:
        if move.expected is None:
            _create_entry(db, move.entry, move.new)
        elif not _swap_pointer(db, move.entry, expected=move.expected, new=move.new):
            raise PointerMoved


def _put_entry(db: sqlite3.Connection, entry: EntryId, pointer: Pointer) -> None:
    if db.execute(_UPDATE_ENTRY, (*pointer_columns(pointer), *entry_key(entry))).rowcount == 0:
        _create_entry(db, entry, pointer)


def _rename_entry(db: sqlite3.Connection, source: EntryId, destination: EntryId) -> None:
    if _load_pointer(db, source) is None:
        raise no_such_entry(source)
    if source == destination:
        return
    _check_namespace(db, destination.namespace)
    kind = _kind_at(db, destination)
    if kind is not None:
        raise rename_target_in_use(source, destination, kind)
    db.execute(
        "UPDATE entries SET namespace = ?, name = ? WHERE namespace = ? AND name = ?",
        (namespace_key(destination.namespace), destination.name, namespace_key(source.namespace), source.name),
    )


def _drop_entry(db: sqlite3.Connection, entry: EntryId) -> Pointer:
    pointer = _load_pointer(db, entry)
    if pointer is None:
        raise no_such_entry(entry)
    db.execute("DELETE FROM entries WHERE namespace = ? AND name = ?", (namespace_key(entry.namespace), entry.name))
    return pointer


def _load_outcome(db: sqlite3.Connection, key: str) -> RecordedOutcome | None:
    row = db.execute("SELECT fingerprint, outcome FROM outcomes WHERE idempotency_key = ?", (key,)).fetchone()
    return None if row is None else RecordedOutcome(row[0], decode_outcome(row[1]))


def _record_outcome(db: sqlite3.Connection, claim: KeyClaim, outcome: RequestOutcome) -> None:
    row = (claim.key, claim.fingerprint, outcome.to_text(), claim.at_ms)
    if db.execute("INSERT INTO outcomes VALUES (?, ?, ?, ?) ON CONFLICT DO NOTHING", row).rowcount == 0:
        raise key_taken(claim)


def _delete_outcomes(db: sqlite3.Connection, *, before_ms: int, kept_max: int) -> int:
    db.execute("DELETE FROM outcomes WHERE recorded_ms < ?", (before_ms,))
    excess = (
        "DELETE FROM outcomes WHERE idempotency_key IN"
        " (SELECT idempotency_key FROM outcomes ORDER BY recorded_ms DESC LIMIT -1 OFFSET ?)"
    )
    return db.execute(excess, (kept_max,)).rowcount
