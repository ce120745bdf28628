"""The store in memory, for tests and simulations: nothing survives the process.

No method awaits between its first read and its last write, so each is one transaction.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence

from lakefeed.catalog.names import EntryId, Namespace, Pointer, TableId
from lakefeed.catalog.store.protocol import (
    Entry,
    KeyClaim,
    PointerMove,
    RecordedOutcome,
    RequestOutcome,
    StoreContents,
    check_empty,
    current_claim,
    key_taken,
    name_in_use,
    namespace_exists,
    namespace_not_empty,
    no_such_entry,
    no_such_namespace,
    outcome_at,
    rename_target_in_use,
    run_blocking,
)


class MemoryStore:
    """Names and pointers in two dictionaries; outcomes in a third one, oldest first."""

    def __init__(self) -> None:
        self._namespaces: dict[Namespace, dict[str, str]] = {}
        self._entries: dict[tuple[Namespace, str], tuple[EntryId, Pointer]] = {}
        self._outcomes: dict[str, tuple[int, RecordedOutcome]] = {}

    async def open(self) -> None:
        """Do nothing: there is no connection."""

    async def close(self) -> None:
        """Do nothing: there is no connection."""

    async def migrate(self) -> tuple[int, int]:
        """Do nothing: there is no schema."""
        return (0, 0)

    async def export(self) -> StoreContents:
        """Copy everything."""
        return StoreContents(
            {name: dict(properties) for name, properties in sorted(self._namespaces.items())},
            dict(sorted(self._entries.values(), key=lambda held: _key(held[0]))),
        )

    async def restore(self, contents: StoreContents) -> None:
        """Fill an empty store."""
        check_empty(not self._namespaces)
        self._namespaces = {name: dict(properties) for name, properties in contents.namespaces.items()}
        self._entries = {_key(entry): (entry, pointer) for entry, pointer in contents.entries.items()}

    async def create_namespace(self, namespace: Namespace, properties: Mapping[str, str]) -> None:
        """Create a namespace below an existing parent."""
        self._check_key()
        if len(namespace) > 1:
            self._properties(namespace[:-1])
        if namespace in self._namespaces:
            raise namespace_exists(namespace)
        self._namespaces[namespace] = dict(properties)
        self._record(RequestOutcome())

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
        """Remove and set properties; return which of the removals existed."""
        self._check_key()
        properties = self._properties(namespace)
        removed = [name for name in removals if properties.pop(name, None) is not None]
        properties.update(updates)
        self._record(RequestOutcome(removed=tuple(removed)))
        return removed

    async def drop_namespace(self, namespace: Namespace) -> None:
        """Drop an empty namespace."""
        self._check_key()
        self._properties(namespace)
        if any(held == namespace for held, _ in self._entries):
            raise namespace_not_empty(namespace, "tables or views")
        if any(name[:-1] == namespace for name in self._namespaces):
            raise namespace_not_empty(namespace, "namespaces")
        del self._namespaces[namespace]
        self._record(RequestOutcome())

    async def list_entries(
        self, kind: type[Entry], namespace: Namespace, *, after: str, limit: int | None
    ) -> list[Entry]:
        """Return one page of a namespace's tables or views."""
        self._properties(namespace)
        entries = (entry for entry, _ in self._entries.values())
        return sorted(e for e in entries if isinstance(e, kind) and e.namespace == namespace and e.name > after)[:limit]

    async def load_pointer(self, entry: EntryId) -> Pointer | None:
        """Return the pointer of a table or view, or None."""
        return self._pointer(entry)

    async def find_tables(self, *, table_uuid: str, directory: str) -> dict[TableId, Pointer]:
        """Return the tables that may be the one of this uuid."""
        return {
            entry: pointer
            for entry, pointer in self._entries.values()
            if isinstance(entry, TableId)
            and (not table_uuid or pointer.table_uuid in ("", table_uuid) or directory in pointer.location)
        }

    async def create_entry(self, entry: EntryId, pointer: Pointer) -> None:
        """Create a table or view that points at its first metadata."""
        self._check_key()
        self._create(entry, pointer)
        self._record(outcome_at(pointer))

    async def swap_pointer(
        self, entry: EntryId, *, expected: Pointer, new: Pointer, prepare: Callable[[], None] | None = None
    ) -> bool:
        """Move a pointer if it still is at the expected version."""
        await run_blocking(prepare)
        return self._move([PointerMove(entry, expected, new)], outcome_at(new))

    async def move_pointers(self, moves: Sequence[PointerMove]) -> bool:
        """Make all moves, or none."""
        return self._move(moves, RequestOutcome())

    async def put_entry(self, entry: EntryId, pointer: Pointer) -> None:
        """Point a table or view at metadata, whether or not it exists."""
        self._check_key()
        if self._pointer(entry) is None:
            self._create(entry, pointer)
        self._entries[_key(entry)] = (entry, pointer)
        self._record(outcome_at(pointer))

    async def rename_entry(self, source: EntryId, destination: EntryId) -> None:
        """Rename a table or view."""
        self._check_key()
        pointer = self._pointer(source)
        if pointer is None:
            raise no_such_entry(source)
        self._properties(destination.namespace)
        found = self._entries.get(_key(destination))
        if found is not None and source != destination:
            raise rename_target_in_use(source, destination, found[0].kind)
        del self._entries[_key(source)]
        self._entries[_key(destination)] = (destination, pointer)
        self._record(RequestOutcome())

    async def drop_entry(self, entry: EntryId) -> Pointer:
        """Remove a table or view and return the pointer to its last metadata."""
        self._check_key()
        pointer = self._pointer(entry)
        if pointer is None:
            raise no_such_entry(entry)
        del self._entries[_key(entry)]
        self._record(outcome_at(pointer))
        return pointer

    async def load_outcome(self, key: str) -> RecordedOutcome | None:
        """Return what is recorded under an idempotency key, or None."""
        found = self._outcomes.get(key)
        return None if found is None else found[1]

    async def record_outcome(self, claim: KeyClaim, outcome: RequestOutcome) -> None:
        """Record the outcome of a request that changed nothing."""
        if claim.key in self._outcomes:
            raise key_taken(claim)
        self._outcomes[claim.key] = (claim.at_ms, RecordedOutcome(claim.fingerprint, outcome))

    async def delete_outcomes(self, *, before_ms: int, kept_max: int) -> int:
        """Delete outcomes recorded before a time, and the oldest beyond a number; return how many were beyond it."""
        fresh = {key: kept for key, kept in self._outcomes.items() if kept[0] >= before_ms}
        excess = max(len(fresh) - kept_max, 0)
        self._outcomes = dict(itertools.islice(fresh.items(), excess, None))
        return excess

    def _check_key(self) -> None:
        claim = current_claim()
        if claim is not None and claim.key in self._outcomes:
            raise key_taken(claim)

    def _record(self, outcome: RequestOutcome) -> None:
        claim = current_claim()
        if claim is not None:
            self._outcomes[claim.key] = (claim.at_ms, RecordedOutcome(claim.fingerprint, outcome))

    def _move(self, moves: Sequence[PointerMove], outcome: RequestOutcome) -> bool:
        self._check_key()
        for move in moves:
            if move.expected is None:
                self._check_free(move.entry)
                continue
            found = self._pointer(move.entry)
            if found is None or found.version != move.expected.version:
                return False
        for move in moves:
            self._entries[_key(move.entry)] = (move.entry, move.new)
        self._record(outcome)
        return True

    def _properties(self, namespace: Namespace) -> dict[str, str]:
        if namespace not in self._namespaces:
            raise no_such_namespace(namespace)
        return self._namespaces[namespace]

    def _pointer(self, entry: EntryId) -> Pointer | None:
        found = self._entries.get(_key(entry))
        return found[1] if found is not None and found[0] == entry else None

    def _check_free(self, entry: EntryId) -> None:
        self._properties(entry.namespace)
        found = self._entries.get(_key(entry))
        if found is not None:
            raise name_in_use(entry, found[0].kind)

    def _create(self, entry: EntryId, pointer: Pointer) -> None:
        self._check_free(entry)
        self._entries[_key(entry)] = (entry, pointer)


def _key(entry: EntryId) -> tuple[Namespace, str]:
    return entry.namespace, entry.name
