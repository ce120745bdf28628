"""What the catalog asks of a database: names, properties and metadata pointers, each call one transaction.

Errors are the ones that clients see, because only the database knows at that moment whether a name is taken. Any
method raises StoreFailed when the database does not answer; a change may then have happened or not.

A change that is made while a claim is held (claims.py) records its outcome in the same transaction. If that key has an
outcome already, nothing changes and KeyTaken is raised.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from catalog.errors import AlreadyExists, CatalogError, KeyTaken, NoSuchTable, NoSuchView, StoreUnusable
from catalog.names import EntryId, Namespace, TableId, ViewId
from catalog.pointers import Pointer
from catalog.store.claims import Claim, Outcome, Remembered


def no_such_entry(entry: EntryId) -> CatalogError:
    """Say that there is no table or view of this name."""
    kind = NoSuchView if isinstance(entry, ViewId) else NoSuchTable
    return kind(f"{entry.kind} does not exist: {entry}")


def name_is_taken(entry: EntryId, by_kind: str) -> CatalogError:
    """Say that a name is taken, and by what: Iceberg words it differently where it is the other kind."""
    same = entry.kind == by_kind
    return AlreadyExists(f"{by_kind} {'already exists' if same else 'with same name already exists'}: {entry}")


def key_taken(claim: Claim) -> CatalogError:
    """Say that the key of a request has an outcome already."""
    return KeyTaken(f"Idempotency-Key has an outcome already: {claim.key}")


def check_version(found: int, known: int) -> None:
    """Check that a database is of the version that this program works with.

    Raises: StoreUnusable.
    """
    facts = f"found={found} known={known}"
    if found > known:
        raise StoreUnusable(f"catalog database is of a newer version, made by a newer lakefeed: {facts}")
    if found < known:
        raise StoreUnusable(f"catalog database is of an older version, run `lakefeed catalog migrate`: {facts}")


def check_empty(is_filled: bool) -> None:
    """Check that nothing would be overwritten.

    Raises: StoreUnusable.
    """
    if is_filled:
        raise StoreUnusable("catalog database is not empty: restore into a new one")


def entry_of(kind: str, namespace: Namespace, name: str) -> EntryId:
    """Name a table or view by the kind that a store keeps."""
    return (ViewId if kind == ViewId.kind else TableId)(namespace, name)


async def do_first(first: Callable[[], None] | None) -> None:
    """Do what has to be done before a pointer moves, for stores that have no thread of their own to do it in.

    Raises: what `first` raises.
    """
    if first is not None:
        await asyncio.to_thread(first)


@dataclass(frozen=True, slots=True)
class Move:
    """A pointer that goes from one place to another; without `expected` the entry is created."""

    entry: EntryId
    expected: Pointer | None
    new: Pointer


@dataclass(frozen=True, slots=True)
class Contents:
    """Everything that a store holds, as of one moment: namespaces, parents first, and entries with their pointers."""

    namespaces: Mapping[Namespace, Mapping[str, str]]
    entries: Mapping[EntryId, Pointer]


class Store(Protocol):
    """Names and pointers."""

    async def open(self) -> None:
        """Connect; make the schema of a new database, and check that of an old one.

        Raises: StoreUnusable, also for a database that `migrate` would have to bring up to date.
        """

    async def migrate(self) -> tuple[int, int]:
        """Bring a database up to date, before it is opened; return its version before and after.

        Raises: StoreUnusable.
        """

    async def export(self) -> Contents:
        """Read everything in one transaction, while others go on."""

    async def restore(self, contents: Contents) -> None:
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
        """Return the namespaces directly below a parent (empty: the top) by last level, after one of these levels.

        Raises: NoSuchNamespace.
        """

    async def update_namespace(
        self, namespace: Namespace, *, removals: Collection[str], updates: Mapping[str, str]
    ) -> list[str]:
        """Remove and set properties; return which of the removals were there.

        Raises: NoSuchNamespace.
        """

    async def drop_namespace(self, namespace: Namespace) -> None:
        """Drop an empty namespace.

        Raises: NoSuchNamespace, NamespaceNotEmpty.
        """

    async def list_tables(self, namespace: Namespace, *, after: str, limit: int | None) -> list[TableId]:
        """Return a namespace's tables by name, after a name.

        Raises: NoSuchNamespace.
        """

    async def list_views(self, namespace: Namespace, *, after: str, limit: int | None) -> list[ViewId]:
        """Return a namespace's views by name, after a name.

        Raises: NoSuchNamespace.
        """

    async def load_pointer(self, entry: EntryId) -> Pointer | None:
        """Return where the current metadata of a table or view is, or None if there is none of this kind and name."""

    async def find_tables(self, *, table_uuid: str, directory: str) -> dict[TableId, Pointer]:
        """Return the tables that may be the one of this uuid, whose metadata is in this directory. Looks at all.

        That are those of the uuid, those whose uuid is not known, and those with this text in their metadata location;
        all tables, if the uuid is empty.
        """

    async def note_uuids(self, tables: Mapping[TableId, Pointer]) -> None:
        """Keep the uuids of tables where none is known, if they still are at these versions; skip the others.

        No version changes by it, so it is not what a request comes to: no outcome is recorded.
        """

    async def create_entry(self, entry: EntryId, pointer: Pointer) -> None:
        """Create a table or view that points at its first metadata.

        Raises: AlreadyExists, NoSuchNamespace.
        """

    async def swap_pointer(
        self, entry: EntryId, *, expected: Pointer, new: Pointer, first: Callable[[], None] | None = None
    ) -> bool:
        """Move a pointer if it still is at the version that is expected; tell whether it was.

        `first` is done before, in a thread, because it blocks. If it fails its error is raised, and nothing has moved.
        """

    async def move_pointers(self, moves: Sequence[Move]) -> bool:
        """Make all moves in one transaction if every pointer still is where expected; tell whether they were made.

        Raises: AlreadyExists, NoSuchNamespace; nothing has moved then.
        """

    async def put_entry(self, entry: EntryId, pointer: Pointer) -> None:
        """Point a table or view at metadata, whether or not it existed.

        Raises: NoSuchNamespace; AlreadyExists if the name is taken by the other kind.
        """

    async def rename_entry(self, source: EntryId, destination: EntryId) -> None:
        """Give a table or view another name, also in another namespace.

        Raises: NoSuchTable, NoSuchView, NoSuchNamespace, AlreadyExists.
        """

    async def drop_entry(self, entry: EntryId) -> Pointer:
        """Forget a table or view and return where its last metadata is.

        Raises: NoSuchTable, NoSuchView.
        """

    async def load_outcome(self, key: str) -> Remembered | None:
        """Return what became of the request with this idempotency key, or None."""

    async def record_outcome(self, claim: Claim, outcome: Outcome) -> None:
        """Keep the outcome of a request that changed nothing.

        Raises: KeyTaken.
        """

    async def forget_outcomes(self, *, before_ms: int, kept_max: int) -> int:
        """Forget outcomes recorded before a time, and the oldest beyond a number; tell how many were too many."""
