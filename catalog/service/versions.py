"""Versions of tables and views: a metadata file, and the pointer that makes it current. Owns the order of the two.

A new version, and what a crash after each step leaves:

    1. write the metadata file under a unique name                  a file that nothing refers to
    2. swap the pointer in the database, if it has not moved        the new version

The new file is deleted only if the database has confirmed that the swap did not happen. If the outcome is unknown, the
file stays, because it may be the table.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lakefeed.catalog.errors import CommitStateUnknown, FileChanged, StoreFailed
from lakefeed.catalog.json_fields import JsonObject
from lakefeed.catalog.names import (
    EntryId,
    Pointer,
    entry_location,
    metadata_directory,
    metadata_location,
    namespace_location,
    next_version,
)
from lakefeed.catalog.service.metadata_files import MetadataFiles, StoredMetadata
from lakefeed.catalog.store.outcomes import current_claim, outcome_at
from lakefeed.catalog.store.store import PointerMove, Store, no_such_entry
from lakefeed.contract.errors import FileMissing, LakefeedError
from lakefeed.locations import Confinement

# Pointer swaps that a commit may lose to other processes. In one process, commits to one entry are queued.
COMMIT_ATTEMPTS = 5
# The S3 client has ten connections, and commits need some of them.
_PARALLEL_DELETES = 6

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Commit:
    """The requirements and updates that a client sends for one table or view, parsed."""

    requirements: list[JsonObject]
    updates: list[JsonObject]


@dataclass(frozen=True, slots=True)
class VersionChange:
    """The change of one entry: without a base it creates the entry, without a document it changes nothing.

    The caller deletes the metadata files that the new version no longer names.
    """

    entry: EntryId
    base: StoredMetadata | None
    document: JsonObject | None
    expired_files: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Versions:
    """Reads and adds versions. With `verify_files`, every lookup checks that the metadata file exists."""

    store: Store
    files: MetadataFiles
    confinement: Confinement
    verify_files: bool
    new_uuid: Callable[[], str]

    async def locate(self, entry: EntryId) -> Pointer:
        """Return the pointer to the current metadata, without reading it.

        Raises: NoSuchTable, NoSuchView; FileMissing if files are verified.
        """
        pointer = await self.store.load_pointer(entry)
        if pointer is None:
            raise no_such_entry(entry)
        if self.verify_files:
            await self.files.storage.check_exists(pointer.location)
        return pointer

    async def load_current(self, entry: EntryId) -> StoredMetadata:
        """Return the current version.

        Raises: NoSuchTable, NoSuchView, FileMissing, FileChanged, StorageError.
        """
        pointer = await self.store.load_pointer(entry)
        if pointer is None:
            raise no_such_entry(entry)
        return await self.files.load(pointer)

    async def load_recorded(self, entry: EntryId, pointer: Pointer) -> StoredMetadata:
        """Return the version of a recorded outcome, or the current one if that file is gone or was overwritten.

        Raises: NoSuchTable, NoSuchView, FileMissing, FileChanged, StorageError.
        """
        try:
            return await self.files.load(pointer)
        except (FileMissing, FileChanged):
            return await self.files.load(await self.locate(entry))

    async def new_location(self, entry: EntryId, entry_uuid: str, *, requested: str | None = None) -> str:
        """Return the location of a new table or view: the requested one, or one below its namespace.

        Raises: NoSuchNamespace.
        """
        properties = await self.store.load_namespace(entry.namespace)
        if requested:
            return requested.rstrip("/")
        base = properties.get("location") or namespace_location(self.confinement.warehouse, entry.namespace)
        return entry_location(base, entry, entry_uuid)

    def check_locations(self, document: JsonObject) -> None:
        """Check that the locations in a document are inside the warehouse.

        Raises: LocationInvalid, LocationForbidden.
        """
        self.confinement.check(document["location"])
        self.confinement.check(metadata_directory(document))

    async def insert(self, entry: EntryId, document: JsonObject) -> StoredMetadata:
        """Write the first version and create the entry.

        Raises: AlreadyExists, NoSuchNamespace, StorageError; CommitStateUnknown.
        """
        location = metadata_location(document, version=0, file_uuid=self.new_uuid())
        stored = await self.files.write(location, document)
        try:
            await self.store.create_entry(entry, stored.pointer)
        except StoreFailed as error:
            await self._check_committed(entry, location, error)
        except LakefeedError:
            await self.delete_file(location)
            raise
        return stored

    async def apply(self, change: VersionChange) -> StoredMetadata | None:
        """Make one change; return the current version after it, or None if the pointer has moved since the base.

        Raises: AlreadyExists, NoSuchNamespace, KeyTaken, StorageError, StoreFailed; CommitStateUnknown.
        """
        if change.base is None:
            assert change.document is not None, "a first version has a document"
            return await self.insert(change.entry, change.document)
        if change.document is not None:
            return await self._replace(change.entry, change.base, change.document)
        claim = current_claim.get()
        if claim is not None:  # a request that changes nothing has an outcome nevertheless
            await self.store.record_outcome(claim, outcome_at(change.base.pointer))
        return change.base

    async def apply_all(self, changes: Sequence[VersionChange]) -> bool:
        """Make all changes in one transaction; return False if a pointer has moved since its base.

        Raises: AlreadyExists, NoSuchNamespace, StorageError; CommitStateUnknown.
        """
        moves: list[PointerMove] = []
        try:
            for change in changes:
                moves.append(await self._write(change))  # noqa: PERF401 - if one fails, the files so far are deleted
            moved = await self.store.move_pointers(moves)
        except StoreFailed as error:
            for move in moves:
                await self._check_committed(move.entry, move.new.location, error)
            moved = True
        except LakefeedError:
            await self._delete_new_files(moves)
            raise
        if not moved:
            await self._delete_new_files(moves)
            return False
        for move in moves:
            if move.expected is not None and move.expected != move.new:
                self.files.forget(move.expected)
        return True

    async def delete_files(self, locations: Sequence[str]) -> None:
        """Delete metadata files that nothing refers to, a few at a time."""
        for first in range(0, len(locations), _PARALLEL_DELETES):
            await asyncio.gather(*map(self.delete_file, locations[first : first + _PARALLEL_DELETES]))

    async def delete_file(self, location: str) -> None:
        """Delete a metadata file that nothing refers to, if it is inside the warehouse. A failure is only logged."""
        try:
            if self.confinement.allows(location):
                await self.files.delete(location)
        except LakefeedError as error:
            _logger.warning("metadata_file_kept", extra={"metadata_location": location, "reason": str(error)})

    async def _replace(self, entry: EntryId, base: StoredMetadata, document: JsonObject) -> StoredMetadata | None:
        location = self._next_location(base, document)
        stored, prepare = await self.files.begin_write(location, document, base=base)
        try:
            swapped = await self.store.swap_pointer(entry, expected=base.pointer, new=stored.pointer, prepare=prepare)
        except StoreFailed as error:
            await self._check_committed(entry, location, error)
            swapped = True
        except LakefeedError:
            await self.delete_file(location)
            raise
        if not swapped:
            await self.delete_file(location)
            return None
        self.files.keep(stored)
        self.files.forget(base.pointer)
        return stored

    async def _write(self, change: VersionChange) -> PointerMove:
        """Write the file of a change. One that changes nothing requires that the pointer does not move."""
        base, document = change.base, change.document
        if document is None:
            assert base is not None, "a first version has a document"
            return PointerMove(change.entry, base.pointer, base.pointer)
        stored = await self.files.write(self._next_location(base, document), document, base=base)
        return PointerMove(change.entry, base.pointer if base else None, stored.pointer)

    def _next_location(self, base: StoredMetadata | None, document: JsonObject) -> str:
        if base is not None and _directories(document) != _directories(base.document):
            self.check_locations(document)
        version = 0 if base is None else next_version(base.location)
        return metadata_location(document, version=version, file_uuid=self.new_uuid())

    async def _delete_new_files(self, moves: Sequence[PointerMove]) -> None:
        for move in moves:
            if move.new != move.expected:
                await self.delete_file(move.new.location)

    async def _check_committed(self, entry: EntryId, location: str, cause: StoreFailed) -> None:
        """Look up what became of a change whose outcome is unknown.

        Raises: CommitStateUnknown unless the entry points at `location`.
        """
        try:
            found = await self.store.load_pointer(entry)
        except StoreFailed:
            found = None
        if found is None or found.location != location:
            raise CommitStateUnknown(f"Commit may or may not have happened: {entry}") from cause


def _directories(document: JsonObject) -> tuple[str, str]:
    return document["location"], metadata_directory(document)
