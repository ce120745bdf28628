"""What the catalog asks of a database: names, properties and metadata pointers, each call one transaction.

Errors are the ones that clients see, because only the database knows at that moment whether a name is taken. Any
method raises StoreFailed when the database does not answer; a change may then have happened or not.

A change that is made while a claim is held (claims.py) records its outcome in the same transaction. If that key has an
outcome already, nothing changes and KeyTaken is raised.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass
from typing import Protocol

import orjson

from lakefeed.catalog.errors import AlreadyExists, CatalogError, KeyTaken, NoSuchTable, NoSuchView, StoreUnusable
from lakefeed.catalog.names import EntryId, Namespace, Pointer, TableId, ViewId

# --- catalog.store.claims ---------------------------------------------------------------------------------------------
#
# Idempotency keys as stores see them: the claim that a request makes, and the outcome that is kept under its key.
#
# A client that got no answer sends its request again under the same key. So that this does nothing twice, the outcome
# is
# written in the very transaction that makes the change: after a crash there are both or neither. A claim therefore has
# to reach the store from the far end of a request, through operations that it does not concern: it travels with the
# task, in a context variable.
#
#     key -> fingerprint of the request | outcome (JSON) | when it was recorded
#
# An outcome is as much as the answer cannot be told without; the answer itself, with a table's whole history, is built
# again from it.


# Clients' own words come back in messages; what is kept of one is bounded.
MESSAGE_MAX_CHARS = 2_000


@dataclass(frozen=True, slots=True)
class Claim:
    """A request under a key: what it asks, and since when."""

    key: str
    fingerprint: str
    at_ms: int


@dataclass(frozen=True, slots=True)
class Refusal:
    """An error that the same request would always be answered with."""

    status: int
    type: str
    message: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a request came to: the metadata that it made current or dropped, the properties it removed, a refusal."""

    location: str = ""
    removed: tuple[str, ...] = ()
    refusal: Refusal | None = None
    digest: str = ""

    @property
    def pointer(self) -> Pointer:
        """Return where the metadata is that it made current or dropped."""
        return Pointer(self.location, self.digest)


def outcome_at(pointer: Pointer) -> Outcome:
    """Say which metadata a request made current or dropped."""
    return Outcome(pointer.location, digest=pointer.digest)


@dataclass(frozen=True, slots=True)
class Remembered:
    """What is kept under a key."""

    fingerprint: str
    outcome: Outcome


_claim: ContextVar[Claim | None] = ContextVar("claim", default=None)


@contextmanager
def claiming(claim: Claim) -> Iterator[None]:
    """Let the first change that this task makes in a store carry the claim."""
    token = _claim.set(claim)
    try:
        yield
    finally:
        _claim.reset(token)


def current_claim() -> Claim | None:
    """Return the claim of the request that this task works for, if it has a key."""
    return _claim.get()


def encode_outcome(outcome: Outcome) -> str:
    """Write an outcome as a store keeps it."""
    return orjson.dumps({name: value for name, value in asdict(outcome).items() if value}).decode()


def decode_outcome(text: str) -> Outcome:
    """Read an outcome back."""
    kept = orjson.loads(text)
    refusal = kept.get("refusal")
    return Outcome(
        location=kept.get("location", ""),
        removed=tuple(kept.get("removed", ())),
        refusal=Refusal(**refusal) if refusal else None,
        digest=kept.get("digest", ""),
    )


# --- catalog.store.protocol -------------------------------------------------------------------------------------------


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
