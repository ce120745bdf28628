"""The store: what the catalog asks of a database. Names, properties and metadata pointers; each call one transaction.

Errors are those that clients see, because only the database knows at that moment whether a name is in use. Every
method raises StoreFailed if the database does not answer; a change may then have happened or not.

Idempotency. A client that got no response repeats its request under the same key. The outcome of a request is
therefore recorded in the same transaction as its change: after a crash both exist or neither.

    key -> fingerprint of the request | outcome (JSON) | time of the record

The claim on a key travels from the HTTP handler to the store in a context variable, past the operations in between,
which it does not concern. If the key has an outcome already, nothing changes and KeyTaken is raised. An outcome holds
only what is needed to build the response again; the response itself contains a table's whole history.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field
from typing import Protocol, TypeVar

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

Entry = TypeVar("Entry", bound=EntryId)

# Messages repeat the client's words; what is kept of one is bounded.
MESSAGE_MAX_CHARS = 2_000


@dataclass(frozen=True, slots=True)
class KeyClaim:
    """A request under an idempotency key: what it asks, and since when."""

    key: str
    fingerprint: str
    at_ms: int


@dataclass(frozen=True, slots=True)
class RecordedError:
    """An error that the same request always gets."""

    status: int
    type: str
    message: str


@dataclass(frozen=True, slots=True)
class RequestOutcome:
    """What a request did: the metadata that it made current or dropped, the properties it removed, or its error."""

    location: str = ""
    removed: tuple[str, ...] = ()
    refusal: RecordedError | None = None
    digest: str = ""

    @property
    def pointer(self) -> Pointer:
        """Return the pointer to the metadata that the request made current or dropped."""
        return Pointer(self.location, self.digest)

    def to_text(self) -> str:
        """Return the outcome as stores keep it."""
        return orjson.dumps({name: value for name, value in asdict(self).items() if value}).decode()


@dataclass(frozen=True, slots=True)
class RecordedOutcome:
    """What a store keeps under an idempotency key."""

    fingerprint: str
    outcome: RequestOutcome


def outcome_at(pointer: Pointer) -> RequestOutcome:
    """Return the outcome of a request that made this metadata current, or dropped it."""
    return RequestOutcome(pointer.location, digest=pointer.digest)


def decode_outcome(text: str) -> RequestOutcome:
    """Read an outcome as stores keep it."""
    kept = orjson.loads(text)
    refusal = kept.get("refusal")
    return RequestOutcome(
        location=kept.get("location", ""),
        removed=tuple(kept.get("removed", ())),
        refusal=RecordedError(**refusal) if refusal else None,
        digest=kept.get("digest", ""),
    )


_claim: ContextVar[KeyClaim | None] = ContextVar("claim", default=None)


@contextmanager
def holding_claim(claim: KeyClaim) -> Iterator[None]:
    """Record the outcome of the first change that this task makes in a store under the claim's key."""
    token = _claim.set(claim)
    try:
        yield
    finally:
        _claim.reset(token)


def current_claim() -> KeyClaim | None:
    """Return the claim of the request that this task handles, or None if it has no key."""
    return _claim.get()


@dataclass(frozen=True, slots=True)
class PointerMove:
    """A pointer that moves from one version to another; without `expected` the entry is created."""

    entry: EntryId
    expected: Pointer | None
    new: Pointer


class PointerMoved(Exception):
    """A pointer is not at its expected version: an SQL store rolls its transaction back."""


@dataclass(frozen=True, slots=True)
class StoreContents:
    """Everything that a store holds, as of one moment: namespaces, parents first, and entries with their pointers."""

    namespaces: Mapping[Namespace, Mapping[str, str]]
    entries: Mapping[EntryId, Pointer]


@dataclass(frozen=True, slots=True)
class SqlSchema:
    """A versioned SQL schema, whose version is the one row of the table `catalog_schema`.

    `migrations` has the statements that lead from a version to the next one, by the version that they start from.
    """

    version: int
    create: Sequence[str]
    migrations: Mapping[int, Sequence[str]] = field(default_factory=dict)

    def check(self, found: int) -> None:
        """Check that a database has this version.

        Raises: StoreUnusable.
        """
        if found != self.version:
            self._check_supported(found)
            facts = f"found={found} current={self.version}"
            raise StoreUnusable(f"catalog database has an older version, run `lakefeed catalog migrate`: {facts}")

    def statements_from(self, found: int) -> list[str]:
        """Return the statements that bring a database (version 0: a new one) to this version.

        Raises: StoreUnusable.
        """
        if found == 0:
            return [*self.create, f"INSERT INTO catalog_schema VALUES ({self.version})"]  # noqa: S608 - our own number
        self._check_supported(found)
        statements = [statement for start in range(found, self.version) for statement in self.migrations[start]]
        return [*statements, f"UPDATE catalog_schema SET version = {self.version}"]  # noqa: S608 - our own number

    def _check_supported(self, found: int) -> None:
        oldest = min(self.migrations, default=self.version)
        facts = f"found={found} oldest={oldest} current={self.version}"
        if found > self.version:
            raise StoreUnusable(f"catalog database was made by a newer lakefeed, update lakefeed: {facts}")
        if found < oldest:
            raise StoreUnusable(
                "catalog database is too old to be migrated: save it with the `lakefeed catalog backup` of the version"
                f" that made it, then use `lakefeed catalog restore` with a new database: {facts}"
            )


class Store(Protocol):
    """Names and pointers."""

    async def open(self) -> None:
        """Connect. Create the schema of a new database, and check the version of an existing one.

        Raises: StoreUnusable if the database has another version.
        """

    async def migrate(self) -> tuple[int, int]:
        """Bring a database that is not open to the current version; return its version before and after.

        Raises: StoreUnusable.
        """

    async def export(self) -> StoreContents:
        """Read everything in one transaction, beside other requests."""

    async def restore(self, contents: StoreContents) -> None:
        """Fill an empty store in one transaction.

        Raises: StoreUnusable if it is not empty.
        """

    async def close(self) -> None:
        """Disconnect after running work."""

    async def create_namespace(self, namespace: Namespace, properties: Mapping[str, str]) -> None:
        """Create a namespace below an existing parent.

        Raises: AlreadyExists, NoSuchNamespace.
        """

    async def load_namespace(self, namespace: Namespace) -> dict[str, str]:
        """Return a namespace's properties.

        Raises: NoSuchNamespace.
        """

    async def list_namespaces(self, parent: Namespace, *, after: str, limit: int | None) -> list[Namespace]:
        """Return the namespaces directly below a parent (empty: the top), ordered by last level, after that level.

        Raises: NoSuchNamespace.
        """

    async def update_namespace(
        self, namespace: Namespace, *, removals: Collection[str], updates: Mapping[str, str]
    ) -> list[str]:
        """Remove and set properties; return which of the removals existed.

        Raises: NoSuchNamespace.
        """

    async def drop_namespace(self, namespace: Namespace) -> None:
        """Drop an empty namespace.

        Raises: NoSuchNamespace, NamespaceNotEmpty.
        """

    async def list_entries(
        self, kind: type[Entry], namespace: Namespace, *, after: str, limit: int | None
    ) -> list[Entry]:
        """Return a namespace's tables or views, ordered by name, after a name.

        Raises: NoSuchNamespace.
        """

    async def load_pointer(self, entry: EntryId) -> Pointer | None:
        """Return the pointer of a table or view, or None if none of this kind and name exists."""

    async def find_tables(self, *, table_uuid: str, directory: str) -> dict[TableId, Pointer]:
        """Return the tables that may be the one of this uuid, whose metadata is in this directory. Scans all tables.

        These are the tables with the uuid, those without any, and those with the directory in their metadata location;
        all tables, if the uuid is empty.
        """

    async def create_entry(self, entry: EntryId, pointer: Pointer) -> None:
        """Create a table or view that points at its first metadata.

        Raises: AlreadyExists, NoSuchNamespace.
        """

    async def swap_pointer(
        self, entry: EntryId, *, expected: Pointer, new: Pointer, prepare: Callable[[], None] | None = None
    ) -> bool:
        """Move a pointer if it still is at the expected version; return whether it was.

        `prepare` runs first, in a thread, because it blocks. If it fails, its error is raised and nothing has moved.
        """

    async def move_pointers(self, moves: Sequence[PointerMove]) -> bool:
        """Make all moves in one transaction if every pointer is at its expected version; return whether they were.

        Raises: AlreadyExists, NoSuchNamespace; nothing has moved then.
        """

    async def put_entry(self, entry: EntryId, pointer: Pointer) -> None:
        """Point a table or view at metadata, whether or not it exists.

        Raises: NoSuchNamespace; AlreadyExists if the name belongs to the other kind.
        """

    async def rename_entry(self, source: EntryId, destination: EntryId) -> None:
        """Rename a table or view, also into another namespace.

        Raises: NoSuchTable, NoSuchView, NoSuchNamespace, AlreadyExists.
        """

    async def drop_entry(self, entry: EntryId) -> Pointer:
        """Remove a table or view and return the pointer to its last metadata.

        Raises: NoSuchTable, NoSuchView.
        """

    async def load_outcome(self, key: str) -> RecordedOutcome | None:
        """Return what is recorded under an idempotency key, or None."""

    async def record_outcome(self, claim: KeyClaim, outcome: RequestOutcome) -> None:
        """Record the outcome of a request that changed nothing.

        Raises: KeyTaken.
        """

    async def delete_outcomes(self, *, before_ms: int, kept_max: int) -> int:
        """Delete outcomes recorded before a time, and the oldest beyond a number; return how many were beyond it."""


def namespace_key(namespace: Namespace) -> str:
    """Return a namespace as SQL stores keep it."""
    return SEPARATOR.join(namespace)


def namespace_of(key: str) -> Namespace:
    """Read a namespace as SQL stores keep it."""
    return tuple(key.split(SEPARATOR))


def entry_key(entry: EntryId) -> tuple[str, str, str]:
    """Return the columns `namespace`, `name` and `kind` of an entry."""
    return namespace_key(entry.namespace), entry.name, entry.kind


def pointer_columns(pointer: Pointer) -> tuple[str, str, str]:
    """Return the columns `metadata_location`, `digest` and `table_uuid` of a pointer."""
    return pointer.location, pointer.digest, pointer.table_uuid


def entry_of(kind: str, namespace: Namespace, name: str) -> EntryId:
    """Return the identifier of a table or view from the kind that a store keeps."""
    return (ViewId if kind == ViewId.kind else TableId)(namespace, name)


def no_such_namespace(namespace: Namespace) -> NoSuchNamespace:
    """Return the error for a namespace that does not exist."""
    return NoSuchNamespace(f"Namespace does not exist: {dotted(namespace)}")


def namespace_exists(namespace: Namespace) -> AlreadyExists:
    """Return the error for a namespace that exists already."""
    return AlreadyExists(f"Namespace already exists: {dotted(namespace)}")


def namespace_not_empty(namespace: Namespace, contained: str) -> NamespaceNotEmpty:
    """Return the error for a namespace that contains tables, views or namespaces."""
    return NamespaceNotEmpty(f"Namespace {dotted(namespace)} is not empty: it contains {contained}")


def no_such_entry(entry: EntryId) -> CatalogError:
    """Return the error for a table or view that does not exist."""
    kind = NoSuchView if isinstance(entry, ViewId) else NoSuchTable
    return kind(f"{entry.kind} does not exist: {entry}")


def name_in_use(entry: EntryId, by_kind: str) -> AlreadyExists:
    """Return the error for a name in use. Iceberg words it differently if the other kind has the name."""
    same = entry.kind == by_kind
    return AlreadyExists(f"{by_kind} {'already exists' if same else 'with same name already exists'}: {entry}")


def rename_target_in_use(source: EntryId, destination: EntryId, by_kind: str) -> AlreadyExists:
    """Return the error for a rename to a name in use."""
    return AlreadyExists(f"Cannot rename {source} to {destination}. {by_kind} already exists")


def key_taken(claim: KeyClaim) -> KeyTaken:
    """Return the error for an idempotency key that has an outcome already."""
    return KeyTaken(f"Idempotency-Key has an outcome already: {claim.key}")


def check_empty(is_empty: bool) -> None:
    """Check that a restore overwrites nothing.

    Raises: StoreUnusable.
    """
    if not is_empty:
        raise StoreUnusable("catalog database is not empty: restore into a new one")


async def run_blocking(prepare: Callable[[], None] | None) -> None:
    """Run blocking work in a thread, for stores without a thread of their own.

    Raises: what the work raises.
    """
    if prepare is not None:
        await asyncio.to_thread(prepare)
