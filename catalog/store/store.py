"""The store: names, properties and metadata pointers in a database. Owns every statement, for all databases.

    namespaces  name (levels joined by 0x1F) | parent (all but the last level) | properties (JSON)
    entries     namespace | name | kind (Table or View) | metadata_location | digest | table_uuid ('' if unknown)
    outcomes    idempotency_key | fingerprint | outcome (JSON) | recorded_ms

An operation is a generator: it yields statements, gets the rows of each one, and returns the result. It does not know
who runs it: sqlite.py does so in a thread and postgres.py on the event loop, each in one transaction, which is rolled
back if the operation raises. Statements use what SQLite and PostgreSQL have in common. The exceptions are row locks
(`FOR UPDATE`, `FOR KEY SHARE`) and parameters (`$1`), which sqlite.py translates.

Several processes may share a database: pointers are compared and swapped in SQL, the primary key keeps names unique,
and a locked namespace is not dropped while an entry is created in it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeAlias, TypeVar

import orjson

from lakefeed.catalog.errors import (
    AlreadyExists,
    CatalogError,
    KeyTaken,
    NamespaceNotEmpty,
    NoSuchNamespace,
    NoSuchTable,
    NoSuchView,
    StoreUnusable,
)
from lakefeed.catalog.names import SEPARATOR, EntryId, Namespace, Pointer, TableId, ViewId, dotted
from lakefeed.catalog.store.outcomes import KeyClaim, RecordedOutcome, RequestOutcome, current_claim, outcome_at

_T = TypeVar("_T")
_Entry = TypeVar("_Entry", bound=EntryId)

# A statement and its parameters; a list of parameters runs the statement for each of them and has no rows.
Statement: TypeAlias = tuple[str, tuple[Any, ...] | list[tuple[Any, ...]]]
Operation: TypeAlias = Generator[Statement, Sequence[Any], _T]

_FOR_UPDATE = " FOR UPDATE"
# What a foreign key locks too: others may do the same, but the row stays.
_FOR_KEY_SHARE = " FOR KEY SHARE"

# More rows than a table can have; only PostgreSQL has a limit that means "all".
_UNLIMITED = 2**62

_INSERT_NAMESPACE = "INSERT INTO namespaces (name, parent, properties) VALUES ($1, $2, $3)"
_INSERT_ENTRY = (
    "INSERT INTO entries (namespace, name, kind, metadata_location, digest, table_uuid) VALUES ($1, $2, $3, $4, $5, $6)"
)
_UPDATE_ENTRY = (
    "UPDATE entries SET metadata_location = $4, digest = $5, table_uuid = $6"
    " WHERE namespace = $1 AND name = $2 AND kind = $3"
)
_DELETE_ENTRY = (
    "DELETE FROM entries WHERE namespace = $1 AND name = $2 AND kind = $3"
    " RETURNING metadata_location, digest, table_uuid"
)


@dataclass(frozen=True, slots=True)
class PointerMove:
    """A pointer that moves from one version to another; without `expected` the entry is created."""

    entry: EntryId
    expected: Pointer | None
    new: Pointer


class _PointerMoved(Exception):
    """A pointer is not at its expected version: the transaction is rolled back."""


@dataclass(frozen=True, slots=True)
class StoreContents:
    """Everything that a store holds, as of one moment: namespaces, parents first, and entries with their pointers."""

    namespaces: Mapping[Namespace, Mapping[str, str]]
    entries: Mapping[EntryId, Pointer]


@dataclass(frozen=True, slots=True)
class SqlSchema:
    """A versioned SQL schema, whose version is the one row of the table `catalog_schema`.

    `lock` keeps other processes from changing the schema until the transaction ends, and `find` has a row if the
    database has the schema. `migrations` has the statements that lead from a version to the next one, by the version
    that they start from.
    """

    version: int
    find: str
    create: Sequence[str]
    migrations: Mapping[int, Sequence[str]] = field(default_factory=dict)
    lock: str = ""

    def open(self, *, migrate: bool) -> Operation[int]:
        """Create the schema in a new database; check it in an existing one, or migrate it. Return the version found.

        Raises: StoreUnusable.
        """
        if self.lock:
            yield self.lock, ()
        found = 0
        if (yield self.find, ()):
            ((found,),) = yield "SELECT version FROM catalog_schema", ()
        if found == 0:
            for statement in (*self.create, f"INSERT INTO catalog_schema VALUES ({self.version})"):  # noqa: S608 - our own number
                yield statement, ()
        elif found != self.version:
            self._check_supported(found, migrate=migrate)
            for start in range(found, self.version):
                for statement in self.migrations[start]:
                    yield statement, ()
            yield "UPDATE catalog_schema SET version = $1", (self.version,)
        return found

    def _check_supported(self, found: int, *, migrate: bool) -> None:
        oldest = min(self.migrations, default=self.version)
        facts = f"found={found} oldest={oldest} current={self.version}"
        if found > self.version:
            raise StoreUnusable(f"catalog database was made by a newer lakefeed, update lakefeed: {facts}")
        if found < oldest:
            raise StoreUnusable(
                "catalog database is too old to be migrated: save it with the `lakefeed catalog backup` of the version"
                f" that made it, then use `lakefeed catalog restore` with a new database: {facts}"
            )
        if not migrate:
            facts = f"found={found} current={self.version}"
            raise StoreUnusable(f"catalog database has an older version, run `lakefeed catalog migrate`: {facts}")


class Store(ABC):
    """Names and pointers; each call is one transaction.

    Errors are those that clients see, because only the database knows at that moment whether a name is in use. Every
    method raises StoreFailed if the database does not answer; a change may then have happened or not.
    """

    # The parent of a namespace at the top, as the schema has it.
    top_parent: ClassVar[str | None] = ""

    @abstractmethod
    async def open(self) -> None:
        """Connect. Create the schema of a new database, and check the version of an existing one.

        Raises: StoreUnusable if the database has another version.
        """

    @abstractmethod
    async def migrate(self) -> tuple[int, int]:
        """Bring a database that is not open to the current version; return its version before and after.

        Raises: StoreUnusable.
        """

    @abstractmethod
    async def close(self) -> None:
        """Disconnect after running work."""

    @abstractmethod
    async def _read(self, operation: Operation[_T]) -> _T:
        """Run an operation that changes nothing, and that sees one state of the database."""

    @abstractmethod
    async def _look_up(self, operation: Operation[_T]) -> _T:
        """Run an operation that reads one row by its key, as nearly all requests do."""

    @abstractmethod
    async def _write(
        self, operation: Operation[_T], prepare: Callable[[], None] | None = None, *, is_single: bool = False
    ) -> _T:
        """Run `prepare` in a thread, then the operation; a single statement needs no explicit transaction."""

    async def _change(
        self,
        operation: Operation[_T],
        outcome_of: Callable[[_T], RequestOutcome | None] = lambda _: RequestOutcome(),
        prepare: Callable[[], None] | None = None,
        *,
        is_single: bool = False,
    ) -> _T:
        """Make a change; for a request with a key, record its outcome, if any, in the same transaction."""
        claim = current_claim.get()
        if claim is None:
            return await self._write(operation, prepare, is_single=is_single)
        return await self._write(_with_outcome(operation, claim, outcome_of), prepare)

    async def export(self) -> StoreContents:
        """Read everything in one transaction, beside other requests."""
        return await self._read(_export())

    async def restore(self, contents: StoreContents) -> None:
        """Fill an empty store in one transaction.

        Raises: StoreUnusable if it is not empty.
        """
        await self._write(self._restore(contents))

    async def create_namespace(self, namespace: Namespace, properties: Mapping[str, str]) -> None:
        """Create a namespace below an existing parent.

        Raises: AlreadyExists, NoSuchNamespace.
        """
        await self._change(self._create_namespace(namespace, properties))

    async def load_namespace(self, namespace: Namespace) -> dict[str, str]:
        """Return a namespace's properties.

        Raises: NoSuchNamespace.
        """
        return await self._read(_load_namespace(namespace))

    async def list_namespaces(self, parent: Namespace, *, after: str, limit: int | None) -> list[Namespace]:
        """Return the namespaces directly below a parent (empty: the top), ordered by last level, after that level.

        Raises: NoSuchNamespace.
        """
        return await self._read(_list_namespaces(parent, after, limit))

    async def update_namespace(
        self, namespace: Namespace, *, removals: Collection[str], updates: Mapping[str, str]
    ) -> list[str]:
        """Remove and set properties; return which of the removals existed.

        Raises: NoSuchNamespace.
        """
        operation = _update_namespace(namespace, removals, updates)
        return await self._change(operation, lambda removed: RequestOutcome(removed=tuple(removed)))

    async def drop_namespace(self, namespace: Namespace) -> None:
        """Drop an empty namespace.

        Raises: NoSuchNamespace, NamespaceNotEmpty.
        """
        await self._change(_drop_namespace(namespace))

    async def list_entries(
        self, kind: type[_Entry], namespace: Namespace, *, after: str, limit: int | None
    ) -> list[_Entry]:
        """Return a namespace's tables or views, ordered by name, after a name.

        Raises: NoSuchNamespace.
        """
        return await self._read(_list_entries(kind, namespace, after, limit))

    async def load_pointer(self, entry: EntryId) -> Pointer | None:
        """Return the pointer of a table or view, or None if none of this kind and name exists."""
        return await self._look_up(_load_pointer(entry))

    async def find_tables(self, *, table_uuid: str, directory: str) -> dict[TableId, Pointer]:
        """Return the tables that may be the one of this uuid, whose metadata is in this directory. Scans all tables.

        These are the tables with the uuid, those without any, and those with the directory in their metadata location;
        all tables, if the uuid is empty.
        """
        return await self._read(_find_tables(table_uuid, directory))

    async def create_entry(self, entry: EntryId, pointer: Pointer) -> None:
        """Create a table or view that points at its first metadata.

        Raises: AlreadyExists, NoSuchNamespace.
        """
        await self._change(_create_entry(entry, pointer), lambda _: outcome_at(pointer))

    async def swap_pointer(
        self, entry: EntryId, *, expected: Pointer, new: Pointer, prepare: Callable[[], None] | None = None
    ) -> bool:
        """Move a pointer if it still is at the expected version; return whether it was.

        `prepare` runs first, in a thread, because it blocks. If it fails, its error is raised and nothing has moved.
        """
        operation = _swap_pointer(entry, expected=expected, new=new)
        return await self._change(
            operation, lambda swapped: outcome_at(new) if swapped else None, prepare, is_single=True
        )

    async def move_pointers(self, moves: Sequence[PointerMove]) -> bool:
        """Make all moves in one transaction if every pointer is at its expected version; return whether they were.

        Raises: AlreadyExists, NoSuchNamespace; nothing has moved then.
        """
        try:
            await self._change(_move_pointers(moves))
        except _PointerMoved:
            return False
        return True

    async def put_entry(self, entry: EntryId, pointer: Pointer) -> None:
        """Point a table or view at metadata, whether or not it exists.

        Raises: NoSuchNamespace; AlreadyExists if the name belongs to the other kind.
        """
        await self._change(_put_entry(entry, pointer), lambda _: outcome_at(pointer))

    async def rename_entry(self, source: EntryId, destination: EntryId) -> None:
        """Rename a table or view, also into another namespace.

        Raises: NoSuchTable, NoSuchView, NoSuchNamespace, AlreadyExists.
        """
        await self._change(_rename_entry(source, destination))

    async def drop_entry(self, entry: EntryId) -> Pointer:
        """Remove a table or view and return the pointer to its last metadata.

        Raises: NoSuchTable, NoSuchView.
        """
        return await self._change(_drop_entry(entry), outcome_at, is_single=True)

    async def load_outcome(self, key: str) -> RecordedOutcome | None:
        """Return what is recorded under an idempotency key, or None."""
        return await self._look_up(_load_outcome(key))

    async def record_outcome(self, claim: KeyClaim, outcome: RequestOutcome) -> None:
        """Record the outcome of a request that changed nothing.

        Raises: KeyTaken.
        """
        await self._write(_record_outcome(claim, outcome), is_single=True)

    async def delete_outcomes(self, *, before_ms: int, kept_max: int) -> int:
        """Delete outcomes recorded before a time, and the oldest beyond a number; return how many were beyond it."""
        return await self._write(_delete_outcomes(before_ms, kept_max))

    def _restore(self, contents: StoreContents) -> Operation[None]:
        if (yield "SELECT 1 FROM namespaces LIMIT 1", ()):
            raise StoreUnusable("catalog database is not empty: restore into a new one")
        yield _INSERT_NAMESPACE, [self._namespace_row(*item) for item in contents.namespaces.items()]
        yield _INSERT_ENTRY, [(*_entry_key(entry), *_columns(pointer)) for entry, pointer in contents.entries.items()]

    def _create_namespace(self, namespace: Namespace, properties: Mapping[str, str]) -> Operation[None]:
        if len(namespace) > 1:
            yield from _load_namespace(namespace[:-1], _FOR_KEY_SHARE)
        row = self._namespace_row(namespace, properties)
        if not (yield f"{_INSERT_NAMESPACE} ON CONFLICT DO NOTHING RETURNING 1", row):
            raise AlreadyExists(f"Namespace already exists: {dotted(namespace)}")

    def _namespace_row(self, namespace: Namespace, properties: Mapping[str, str]) -> tuple[Any, ...]:
        parent = _namespace_key(namespace[:-1]) or self.top_parent
        return _namespace_key(namespace), parent, orjson.dumps(dict(properties)).decode()


def _export() -> Operation[StoreContents]:
    namespaces = yield "SELECT name, properties FROM namespaces ORDER BY name", ()
    sql = "SELECT kind, namespace, name, metadata_location, digest, table_uuid FROM entries ORDER BY namespace, name"
    entries = yield sql, ()
    return StoreContents(
        {_namespace_of(name): orjson.loads(properties) for name, properties in namespaces},
        {entry_of(kind, _namespace_of(space), name): Pointer(*pointer) for kind, space, name, *pointer in entries},
    )


def _load_namespace(namespace: Namespace, lock: str = "") -> Operation[dict[str, str]]:
    sql = "SELECT properties FROM namespaces WHERE name = $1"
    rows = yield f"{sql}{lock}", (_namespace_key(namespace),)
    if not rows:
        raise NoSuchNamespace(f"Namespace does not exist: {dotted(namespace)}")
    properties: dict[str, str] = orjson.loads(rows[0][0])
    return properties


def _list_namespaces(parent: Namespace, after: str, limit: int | None) -> Operation[list[Namespace]]:
    if parent:
        yield from _load_namespace(parent)
    sql = "SELECT name FROM namespaces WHERE COALESCE(parent, '') = $1 AND name > $2 ORDER BY name LIMIT $3"
    first = _namespace_key((*parent, after))
    rows = yield sql, (_namespace_key(parent), first, _UNLIMITED if limit is None else limit)
    return [_namespace_of(name) for (name,) in rows]


def _update_namespace(
    namespace: Namespace, removals: Collection[str], updates: Mapping[str, str]
) -> Operation[list[str]]:
    properties = yield from _load_namespace(namespace, _FOR_UPDATE)
    removed = [name for name in removals if properties.pop(name, None) is not None]
    text = orjson.dumps(properties | dict(updates)).decode()
    yield "UPDATE namespaces SET properties = $1 WHERE name = $2", (text, _namespace_key(namespace))
    return removed


def _drop_namespace(namespace: Namespace) -> Operation[None]:
    yield from _load_namespace(namespace, _FOR_UPDATE)
    key = (_namespace_key(namespace),)
    for contained, sql in (
        ("tables or views", "SELECT 1 FROM entries WHERE namespace = $1 LIMIT 1"),
        ("namespaces", "SELECT 1 FROM namespaces WHERE parent = $1 LIMIT 1"),
    ):
        if (yield sql, key):
            raise NamespaceNotEmpty(f"Namespace {dotted(namespace)} is not empty: it contains {contained}")
    yield "DELETE FROM namespaces WHERE name = $1", key


def _list_entries(kind: type[_Entry], namespace: Namespace, after: str, limit: int | None) -> Operation[list[_Entry]]:
    yield from _load_namespace(namespace)
    sql = "SELECT name FROM entries WHERE namespace = $1 AND kind = $2 AND name > $3 ORDER BY name LIMIT $4"
    rows = yield sql, (_namespace_key(namespace), kind.kind, after, _UNLIMITED if limit is None else limit)
    return [kind(namespace, name) for (name,) in rows]


def _load_pointer(entry: EntryId) -> Operation[Pointer | None]:
    sql = "SELECT metadata_location, digest, table_uuid FROM entries WHERE namespace = $1 AND name = $2 AND kind = $3"
    rows = yield sql, _entry_key(entry)
    return Pointer(*rows[0]) if rows else None


def _find_tables(table_uuid: str, directory: str) -> Operation[dict[TableId, Pointer]]:
    # The databases have no common function that finds text in text.
    sql = (
        "SELECT namespace, name, metadata_location, digest, table_uuid FROM entries WHERE kind = $1"
        " AND ($2 = '' OR table_uuid IN ('', $2) OR REPLACE(metadata_location, $3, '') <> metadata_location)"
    )
    rows = yield sql, (TableId.kind, table_uuid, directory)
    return {TableId(_namespace_of(space), name): Pointer(*pointer) for space, name, *pointer in rows}


def _create_entry(entry: EntryId, pointer: Pointer) -> Operation[None]:
    if not (yield from _insert_entry(entry, pointer)):
        raise name_in_use(entry, (yield from _kind_at(entry)))


def _insert_entry(entry: EntryId, pointer: Pointer) -> Operation[bool]:
    """Insert an entry; return whether its name was free."""
    yield from _load_namespace(entry.namespace, _FOR_KEY_SHARE)
    sql = f"{_INSERT_ENTRY} ON CONFLICT DO NOTHING RETURNING 1"
    return bool((yield sql, (*_entry_key(entry), *_columns(pointer))))


def _kind_at(entry: EntryId) -> Operation[str]:
    """Return the kind of the entry that has a name in use. If it was dropped meanwhile, it was of the same kind."""
    rows = yield "SELECT kind FROM entries WHERE namespace = $1 AND name = $2", _entry_key(entry)[:2]
    return rows[0][0] if rows else entry.kind


def _swap_pointer(entry: EntryId, *, expected: Pointer, new: Pointer) -> Operation[bool]:
    sql = f"{_UPDATE_ENTRY} AND metadata_location = $7 AND digest = $8 RETURNING 1"
    return bool((yield sql, (*_entry_key(entry), *_columns(new), expected.location, expected.digest)))


def _move_pointers(moves: Sequence[PointerMove]) -> Operation[None]:
    # In the order of names, so that two transactions that lock the same rows cannot deadlock.
    for move in sorted(moves, key=lambda each: (each.entry.namespace, each.entry.name)):
        if move.expected is None:
            yield from _create_entry(move.entry, move.new)
        elif not (yield from _swap_pointer(move.entry, expected=move.expected, new=move.new)):
            raise _PointerMoved


def _put_entry(entry: EntryId, pointer: Pointer) -> Operation[None]:
    if not (yield f"{_UPDATE_ENTRY} RETURNING 1", (*_entry_key(entry), *_columns(pointer))):
        yield from _create_entry(entry, pointer)


def _rename_entry(source: EntryId, destination: EntryId) -> Operation[None]:
    pointer = yield from _drop_entry(source)
    if not (yield from _insert_entry(destination, pointer)):
        kind = yield from _kind_at(destination)
        raise AlreadyExists(f"Cannot rename {source} to {destination}. {kind} already exists")


def _drop_entry(entry: EntryId) -> Operation[Pointer]:
    rows = yield _DELETE_ENTRY, _entry_key(entry)
    if not rows:
        raise no_such_entry(entry)
    return Pointer(*rows[0])


def _with_outcome(
    operation: Operation[_T], claim: KeyClaim, outcome_of: Callable[[_T], RequestOutcome | None]
) -> Operation[_T]:
    result = yield from operation
    outcome = outcome_of(result)
    if outcome is not None:
        yield from _record_outcome(claim, outcome)
    return result


def _load_outcome(key: str) -> Operation[RecordedOutcome | None]:
    rows = yield "SELECT fingerprint, outcome FROM outcomes WHERE idempotency_key = $1", (key,)
    return RecordedOutcome(rows[0][0], RequestOutcome.from_text(rows[0][1])) if rows else None


def _record_outcome(claim: KeyClaim, outcome: RequestOutcome) -> Operation[None]:
    # On PostgreSQL the insert waits for an open transaction that has written the same key.
    sql = "INSERT INTO outcomes VALUES ($1, $2, $3, $4) ON CONFLICT DO NOTHING RETURNING 1"
    if not (yield sql, (claim.key, claim.fingerprint, outcome.to_text(), claim.at_ms)):
        raise KeyTaken(f"Idempotency-Key has an outcome already: {claim.key}")


def _delete_outcomes(before_ms: int, kept_max: int) -> Operation[int]:
    yield "DELETE FROM outcomes WHERE recorded_ms < $1", (before_ms,)
    excess = (
        "DELETE FROM outcomes WHERE idempotency_key IN"
        " (SELECT idempotency_key FROM outcomes ORDER BY recorded_ms DESC LIMIT $1 OFFSET $2) RETURNING 1"
    )
    return len((yield excess, (_UNLIMITED, kept_max)))


def _namespace_key(namespace: Namespace) -> str:
    return SEPARATOR.join(namespace)


def _namespace_of(key: str) -> Namespace:
    return tuple(key.split(SEPARATOR))


def _entry_key(entry: EntryId) -> tuple[str, str, str]:
    """Return the columns `namespace`, `name` and `kind` of an entry."""
    return _namespace_key(entry.namespace), entry.name, entry.kind


def _columns(pointer: Pointer) -> tuple[str, str, str]:
    """Return the columns `metadata_location`, `digest` and `table_uuid` of a pointer."""
    return pointer.location, pointer.digest, pointer.table_uuid


def entry_of(kind: str, namespace: Namespace, name: str) -> EntryId:
    """Return the identifier of a table or view from the kind that a store keeps."""
    return (ViewId if kind == ViewId.kind else TableId)(namespace, name)


def no_such_entry(entry: EntryId) -> CatalogError:
    """Return the error for a table or view that does not exist."""
    kind = NoSuchView if isinstance(entry, ViewId) else NoSuchTable
    return kind(f"{entry.kind} does not exist: {entry}")


def name_in_use(entry: EntryId, by_kind: str) -> AlreadyExists:
    """Return the error for a name in use. Iceberg words it differently if the other kind has the name."""
    same = entry.kind == by_kind
    return AlreadyExists(f"{by_kind} {'already exists' if same else 'with same name already exists'}: {entry}")
