"""Versions of tables and views: a metadata file, and the pointer that makes it current. Owns the order of the two.

A new version, and what a crash after each step leaves behind:

    1. write the metadata file under a name nobody else uses        a file that nothing refers to
    2. swap the pointer in the database if it did not move          the new version, whole

The new file is deleted again only when the database has said that the swap did not happen. If its answer is unknown,
the file stays: it may be the table.
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
from lakefeed.catalog.service.metadata_cache import MetadataFiles, StoredMetadata
from lakefeed.catalog.store.protocol import Move, Store, current_claim, no_such_entry, outcome_at
from lakefeed.contract.errors import FileMissing, LakefeedError
from lakefeed.locations import Confinement

# The S3 client has ten connections, and commits need some.
_PARALLEL_DELETES = 6

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Change:
    """One entry's part of a transaction: the first version without a base, no new one without a document."""

    entry: EntryId
    base: StoredMetadata | None
    document: JsonObject | None


@dataclass(frozen=True, slots=True)
class Versions:
    """Reads, adds and follows versions. `verify_files` asks the storage at every look-up whether the file is there."""

    store: Store
    files: MetadataFiles
    confinement: Confinement
    verify_files: bool
    new_uuid: Callable[[], str]

    async def locate(self, entry: EntryId) -> Pointer:
        """Return where the current metadata is, without reading it.

        Raises: NoSuchTable, NoSuchView; FileMissing if files are to be verified.
        """
        pointer = await self.store.load_pointer(entry)
        if pointer is None:
            raise no_such_entry(entry)
        if self.verify_files:
            await self.files.check_exists(pointer.location)
        return pointer

    async def default_location(self, entry: EntryId, entry_uuid: str) -> str:
        """Return where a new table or view goes unless its client asks for a place.

        Raises: NoSuchNamespace.
        """
        properties = await self.store.load_namespace(entry.namespace)
        base = properties.get("location") or namespace_location(self.confinement.warehouse, entry.namespace)
        return entry_location(base, entry, entry_uuid)

    def check_places(self, document: JsonObject) -> None:
        """Check that a document keeps to the places that clients may use.

        Raises: BadRequest, LocationForbidden.
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
            await self._check_landed(entry, location, error)
        except LakefeedError:
            await self.discard(location)
            raise
        return stored

    async def keep(self, base: StoredMetadata) -> StoredMetadata:
        """Stay with a version, which a commit would not change; one with a key has come to its outcome nevertheless.

        Raises: KeyTaken, StoreFailed.
        """
        claim = current_claim()
        if claim is not None:
            await self.store.record_outcome(claim, outcome_at(base.pointer))
        return base

    async def recall(self, entry: EntryId, pointer: Pointer) -> StoredMetadata:
        """Return a version that was current once, or the one that is now if its file is gone or another one since.

        Raises: NoSuchTable, NoSuchView, FileMissing, FileChanged, StorageError.
        """
        try:
            return await self.files.load(pointer)
        except (FileMissing, FileChanged):
            return await self.files.load(await self.locate(entry))

    async def replace(self, entry: EntryId, base: StoredMetadata, document: JsonObject) -> StoredMetadata | None:
        """Write the version after `base` and move the pointer; None if somebody else moved it first.

        Raises: StorageError; CommitStateUnknown.
        """
        if _places(document) != _places(base.document):
            self.check_places(document)
        location = metadata_location(document, version=next_version(base.location), file_uuid=self.new_uuid())
        stored, first = await self.files.begin_write(location, document, base=base)
        try:
            swapped = await self.store.swap_pointer(entry, expected=base.pointer, new=stored.pointer, first=first)
        except StoreFailed as error:
            await self._check_landed(entry, location, error)
            swapped = True
        except LakefeedError:
            await self.discard(location)
            raise
        if not swapped:
            await self.discard(location)
            return None
        self.files.keep(stored)
        self.files.forget(base.pointer)
        return stored

    async def replace_all(self, changes: Sequence[Change]) -> bool:
        """Write the versions of several entries and move all their pointers at once; tell whether they were moved.

        Raises: AlreadyExists, NoSuchNamespace, StorageError; CommitStateUnknown.
        """
        moves: list[Move] = []
        try:
            for change in changes:
                moves.append(await self._write(change))  # noqa: PERF401 - those written so far count if one fails
            moved = await self.store.move_pointers(moves)
        except StoreFailed as error:
            for move in moves:
                await self._check_landed(move.entry, move.new.location, error)
            moved = True
        except LakefeedError:
            await self._discard_moves(moves)
            raise
        if not moved:
            await self._discard_moves(moves)
            return False
        for move in moves:
            if move.expected is not None and move.expected != move.new:
                self.files.forget(move.expected)
        return True

    async def _write(self, change: Change) -> Move:
        """Write a change's file; of one that changes nothing, expect that the pointer stays where it is."""
        base, document = change.base, change.document
        if document is None:
            assert base is not None, "a first version has a document"
            return Move(change.entry, base.pointer, base.pointer)
        if base is not None and _places(document) != _places(base.document):
            self.check_places(document)
        version = 0 if base is None else next_version(base.location)
        location = metadata_location(document, version=version, file_uuid=self.new_uuid())
        stored = await self.files.write(location, document, base=base)
        return Move(change.entry, base.pointer if base else None, stored.pointer)

    async def _discard_moves(self, moves: Sequence[Move]) -> None:
        for move in moves:
            if move.new != move.expected:
                await self.discard(move.new.location)

    async def _check_landed(self, entry: EntryId, location: str, cause: StoreFailed) -> None:
        """Find out what became of a change whose answer got lost.

        Raises: CommitStateUnknown unless the entry is seen to point at `location`.
        """
        try:
            found = await self.store.load_pointer(entry)
        except StoreFailed:
            found = None
        if found is None or found.location != location:
            raise CommitStateUnknown(f"Commit may or may not have happened: {entry}") from cause

    async def discard_all(self, locations: Sequence[str]) -> None:
        """Delete metadata files that nothing refers to, a few at a time."""
        for first in range(0, len(locations), _PARALLEL_DELETES):
            await asyncio.gather(*map(self.discard, locations[first : first + _PARALLEL_DELETES]))

    async def discard(self, location: str) -> None:
        """Delete a metadata file that nothing refers to, if it is ours to delete; failing is only untidy."""
        try:
            if self.confinement.allows(location):
                await self.files.delete(location)
        except LakefeedError as error:
            kept = {"metadata_location": location, "reason": str(error)}
            _logger.warning("metadata_file_kept", extra=kept)


def _places(document: JsonObject) -> tuple[str, str]:
    return document["location"], metadata_directory(document)
