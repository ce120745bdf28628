"""The store in memory, for tests and trials: nothing survives the process. Owns plain dictionaries.

No method awaits anything, so each is one step that no other request can see half of.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TypeVar

from lakefeed.catalog.errors import AlreadyExists, NamespaceNotEmpty, NoSuchNamespace
from lakefeed.catalog.names import EntryId, Namespace, Pointer, TableId, ViewId, dotted
from lakefeed.catalog.store.protocol import (
    Claim,
    Contents,
    Move,
    Outcome,
    Remembered,
    check_empty,
    current_claim,
    do_first,
    key_taken,
    name_is_taken,
    no_such_entry,
    outcome_at,
)

_Entry = TypeVar("_Entry", bound=EntryId)


class MemoryStore:
    """Names and pointers in two dictionaries, outcomes in a third one, oldest first."""

    def __init__(self) -> None:
        self._namespaces: dict[Namespace, dict[str, str]] = {}
        self._entries: dict[tuple[Namespace, str], tuple[EntryId, Pointer]] = {}
        self._outcomes: dict[str, tuple[int, Remembered]] = {}

    async def open(self) -> None:
        """Nothing to open."""

    async def close(self) -> None:
        """Nothing to close."""

    async def migrate(self) -> tuple[int, int]:
        """Nothing to bring up to date."""
        return (0, 0)

    async def export(self) -> Contents:
        """Copy everything."""
        return Contents(
            {name: dict(properties) for name, properties in sorted(self._namespaces.items())},
            dict(sorted(self._entries.values(), key=lambda held: _key(held[0]))),
        )

    async def restore(self, contents: Contents) -> None:
        """Fill the store, if it is empty."""
        check_empty(bool(self._namespaces))
        self._namespaces = {name: dict(properties) for name, properties in contents.namespaces.items()}
        self._entries = {_key(entry): (entry, pointer) for entry, pointer in contents.entries.items()}

    async def create_namespace(self, namespace: Namespace, properties: Mapping[str, str]) -> None:
        """Create a namespace below an existing parent."""
        self._check_key()
        if len(namespace) > 1:
            self._properties(namespace[:-1])
        if namespace in self._namespaces:
            raise AlreadyExists(f"Namespace already exists: {dotted(namespace)}")
        self._namespaces[namespace] = dict(properties)
        self._record(Outcome())

    async def load_namespace(self, namespace: Namespace) -> dict[str, str]:
        """Return a namespace's properties."""
        return dict(self._properties(namespace))

    async def list_namespaces(self, parent: Namespace, *, after: str, limit: int | None) -> list[Namespace]:
        """Return one page of the namespaces directly below a parent."""
        if parent:
            self._properties(parent)
        children = sorted(name for name in self._namespaces if name[:-1] == parent and name[-1] > after)
        return children[:limit]

    async def update_namespace(
        self, namespace: Namespace, *, removals: Collection[str], updates: Mapping[str, str]
    ) -> list[str]:
        """Remove and set properties; return which of the removals were there."""
        self._check_key()
        properties = self._properties(namespace)
        removed = [name for name in removals if properties.pop(name, None) is not None]
        properties.update(updates)
        self._record(Outcome(removed=tuple(removed)))
        return removed

    async def drop_namespace(self, namespace: Namespace) -> None:
        """Drop an empty namespace."""
        self._check_key()
        self._properties(namespace)
        if any(held == namespace for held, _ in self._entries):
            raise NamespaceNotEmpty(f"Namespace {dotted(namespace)} is not empty: it contains tables or views")
        if any(name[:-1] == namespace for name in self._namespaces):
            raise NamespaceNotEmpty(f"Namespace {dotted(namespace)} is not empty: it contains namespaces")
        del self._namespaces[namespace]
        self._record(Outcome())

    async def list_tables(self, namespace: Namespace, *, after: str, limit: int | None) -> list[TableId]:
        """Return one page of a namespace's tables."""
        return self._list(TableId, namespace, after=after, limit=limit)

    async def list_views(self, namespace: Namespace, *, after: str, limit: int | None) -> list[ViewId]:
        """Return one page of a namespace's views."""
        return self._list(ViewId, namespace, after=after, limit=limit)

    async def load_pointer(self, entry: EntryId) -> Pointer | None:
        """Return where the current metadata of a table or view is, or None."""
        return self._pointer(entry)

    async def find_tables(self, *, table_uuid: str, directory: str) -> dict[TableId, Pointer]:
        """Return the tables that may be the one of this uuid."""
        return {
            entry: pointer
            for entry, pointer in self._entries.values()
            if isinstance(entry, TableId)
            and (not table_uuid or pointer.table_uuid in ("", table_uuid) or directory in pointer.location)
        }

    async def note_uuids(self, tables: Mapping[TableId, Pointer]) -> None:
        """Keep the uuids of tables where none is known."""
        for table, pointer in tables.items():
            found = self._pointer(table)
            if found is not None and found.is_version(pointer) and not found.table_uuid:
                self._entries[_key(table)] = (table, pointer)

    async def create_entry(self, entry: EntryId, pointer: Pointer) -> None:
        """Create a table or view that points at its first metadata."""
        self._check_key()
        self._create(entry, pointer)
        self._record(outcome_at(pointer))

    async def swap_pointer(
        self, entry: EntryId, *, expected: Pointer, new: Pointer, first: Callable[[], None] | None = None
    ) -> bool:
        """Move a pointer if it still is where expected."""
        await do_first(first)
        return self._move([Move(entry, expected, new)], outcome_at(new))

    async def move_pointers(self, moves: Sequence[Move]) -> bool:
        """Make all moves, or none."""
        return self._move(moves, Outcome())

    async def put_entry(self, entry: EntryId, pointer: Pointer) -> None:
        """Point a table or view at metadata, whether or not it existed."""
        self._check_key()
        if self._pointer(entry) is None:
            self._create(entry, pointer)
        self._entries[_key(entry)] = (entry, pointer)
        self._record(outcome_at(pointer))

    async def rename_entry(self, source: EntryId, destination: EntryId) -> None:
        """Give a table or view another name."""
        self._check_key()
        pointer = self._pointer(source)
        if pointer is None:
            raise no_such_entry(source)
        self._properties(destination.namespace)
        found = self._entries.get(_key(destination))
        if found is not None and source != destination:
            raise AlreadyExists(f"Cannot rename {source} to {destination}. {found[0].kind} already exists")
        del self._entries[_key(source)]
        self._entries[_key(destination)] = (destination, pointer)
        self._record(Outcome())

    async def drop_entry(self, entry: EntryId) -> Pointer:
        """Forget a table or view and return where its last metadata is."""
        self._check_key()
        pointer = self._pointer(entry)
        if pointer is None:
            raise no_such_entry(entry)
        del self._entries[_key(entry)]
        self._record(outcome_at(pointer))
        return pointer

    async def load_outcome(self, key: str) -> Remembered | None:
        """Return what became of the request with this idempotency key, or None."""
        found = self._outcomes.get(key)
        return None if found is None else found[1]

    async def record_outcome(self, claim: Claim, outcome: Outcome) -> None:
        """Keep the outcome of a request that changed nothing."""
        if claim.key in self._outcomes:
            raise key_taken(claim)
        self._outcomes[claim.key] = (claim.at_ms, Remembered(claim.fingerprint, outcome))

    async def forget_outcomes(self, *, before_ms: int, kept_max: int) -> int:
        """Forget outcomes recorded before a time, and the oldest beyond a number; tell how many were too many."""
        fresh = {key: kept for key, kept in self._outcomes.items() if kept[0] >= before_ms}
        excess = max(len(fresh) - kept_max, 0)
        self._outcomes = dict(itertools.islice(fresh.items(), excess, None))
        return excess

    def _check_key(self) -> None:
        claim = current_claim()
        if claim is not None and claim.key in self._outcomes:
            raise key_taken(claim)

    def _record(self, outcome: Outcome) -> None:
        claim = current_claim()
        if claim is not None:
            self._outcomes[claim.key] = (claim.at_ms, Remembered(claim.fingerprint, outcome))

    def _move(self, moves: Sequence[Move], outcome: Outcome) -> bool:
        self._check_key()
        for move in moves:
            if move.expected is None:
                self._check_free(move.entry)
                continue
            found = self._pointer(move.entry)
            if found is None or not found.is_version(move.expected):
                return False
        for move in moves:
            self._entries[_key(move.entry)] = (move.entry, move.new)
        self._record(outcome)
        return True

    def _properties(self, namespace: Namespace) -> dict[str, str]:
        if namespace not in self._namespaces:
            raise NoSuchNamespace(f"Namespace does not exist: {dotted(namespace)}")
        return self._namespaces[namespace]

    def _pointer(self, entry: EntryId) -> Pointer | None:
        found = self._entries.get(_key(entry))
        return found[1] if found is not None and found[0] == entry else None

    def _check_free(self, entry: EntryId) -> None:
        self._properties(entry.namespace)
        found = self._entries.get(_key(entry))
        if found is not None:
            raise name_is_taken(entry, found[0].kind)

    def _create(self, entry: EntryId, pointer: Pointer) -> None:
        self._check_free(entry)
        self._entries[_key(entry)] = (entry, pointer)

    def _list(self, kind: type[_Entry], namespace: Namespace, *, after: str, limit: int | None) -> list[_Entry]:
        self._properties(namespace)
        held = (entry for entry, _ in self._entries.values())
        found = [e for e in held if isinstance(e, kind) and e.namespace == namespace and e.name > after]
        return sorted(found)[:limit]


def _key(entry: EntryId) -> tuple[Namespace, str]:
    return entry.namespace, entry.name
