"""Operations on tables, one per method: load, apply the core, write metadata, swap the pointer.

A commit, and what a crash after each step leaves behind:

    1. read pointer and document, check requirements, apply updates     nothing
    2. write the new metadata file under a name nobody else uses        a file that nothing refers to
    3. swap the pointer in the database if it did not move               the commit, whole
    4. delete metadata files that fell out of the log, if asked to      files that nothing refers to

The new file is deleted again only when the database has said that the swap did not happen. If its answer is unknown,
the file stays: it may be the table.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from catalog.errors import (
    AlreadyExists,
    CatalogError,
    CommitFailed,
    CommitStateUnknown,
    NoSuchTable,
    StoreFailed,
)
from catalog.fields import JsonObject
from catalog.locations import (
    Confinement,
    metadata_directory,
    metadata_location,
    namespace_location,
    next_version,
    table_location,
)
from catalog.metadata.create import CreateRequest, create_document, plan_create
from catalog.metadata.documents import check_document
from catalog.metadata.requirements import Requirement, check_requirements, is_create
from catalog.metadata.updates import Update, apply_updates
from catalog.metadata_files import MetadataFiles, StoredMetadata
from catalog.names import Namespace, TableId
from catalog.store.protocol import Store
from catalog.turns import Turns

# Swaps lost to other processes before a commit gives up. In one process commits take turns and lose none.
COMMIT_ATTEMPTS = 5

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Commit:
    """The requirements and updates of one table, parsed."""

    requirements: list[Requirement]
    updates: list[Update]


class Tables:
    """Tables of the one warehouse. Clock and uuids come from outside."""

    def __init__(
        self,
        *,
        store: Store,
        files: MetadataFiles,
        turns: Turns,
        confinement: Confinement,
        verify_files: bool,
        clock_ms: Callable[[], int],
        new_uuid: Callable[[], str],
    ) -> None:
        self._store = store
        self._files = files
        self._turns = turns
        self._confinement = confinement
        self._verify_files = verify_files
        self._clock_ms = clock_ms
        self._new_uuid = new_uuid

    async def list_tables(self, namespace: Namespace, *, after: str, limit: int | None) -> list[TableId]:
        """Return one page of a namespace's tables.

        Raises: NoSuchNamespace.
        """
        return await self._store.list_tables(namespace, after=after, limit=limit)

    async def locate(self, table: TableId) -> str:
        """Return where a table's current metadata is, without reading it.

        Raises: NoSuchTable; FileMissing if files are to be verified.
        """
        location = await self._store.load_pointer(table)
        if location is None:
            raise NoSuchTable(f"Table does not exist: {table}")
        if self._verify_files:
            await self._files.check_exists(location)
        return location

    async def load(self, location: str) -> StoredMetadata:
        """Return a located table's metadata.

        Raises: FileMissing, StorageFailed.
        """
        return await self._files.load(location)

    async def stage(self, table: TableId, request: CreateRequest) -> JsonObject:
        """Return the metadata that a create would start from, and make its directories; store nothing.

        Raises: NoSuchNamespace, AlreadyExists, Forbidden, ValidationFailed.
        """
        document = await self._new_document(table, request)
        if await self._store.load_pointer(table) is not None:
            raise AlreadyExists(f"Table already exists: {table}")
        await self._prepare(document)
        return document

    async def create(self, table: TableId, request: CreateRequest) -> StoredMetadata:
        """Create a table.

        Raises: NoSuchNamespace, AlreadyExists, Forbidden, ValidationFailed; CommitStateUnknown.
        """
        document = await self.stage(table, request)
        return await self._insert(table, document)

    async def commit(self, table: TableId, commit: Commit) -> StoredMetadata:
        """Commit to a table, or create it if that is what the commit requires. Cancelling leaves the outcome open.

        Raises: NoSuchTable, CommitFailed, ValidationFailed, Forbidden, TooManyCommits; CommitStateUnknown.
        """
        async with self._turns.turn(table):
            for _ in range(COMMIT_ATTEMPTS):
                location = await self._store.load_pointer(table)
                if location is None:
                    return await self._commit_create(table, commit)
                committed = await self._commit_once(table, commit, base=await self._files.load(location))
                if committed is not None:
                    return committed
        raise CommitFailed(f"Commit lost the race {COMMIT_ATTEMPTS} times, try again: {table}")

    async def register(self, table: TableId, location: str, *, overwrite: bool) -> StoredMetadata:
        """Make a table of a metadata file that exists, in place of the one of that name if so asked.

        Raises: NoSuchNamespace, AlreadyExists, Forbidden, FileMissing, BadRequest, ValidationFailed.
        """
        self._confinement.check(location)
        await self._store.load_namespace(table.namespace)
        if not overwrite and await self._store.load_pointer(table) is not None:
            raise AlreadyExists(f"Table already exists: {table}")
        stored = await self._files.load(location)
        check_document(stored.document)
        self._check_places(stored.document)
        async with self._turns.turn(table):
            if overwrite:
                await self._store.put_table(table, location)
            else:
                await self._store.create_table(table, location)
        return stored

    async def rename(self, source: TableId, destination: TableId) -> None:
        """Give a table another name; its files stay where they are.

        Raises: NoSuchTable, NoSuchNamespace, AlreadyExists.
        """
        await self._store.rename_table(source, destination)

    async def drop(self, table: TableId, *, purge: bool) -> None:
        """Forget a table. Its files stay, also on purge: the log names what is left to delete.

        Raises: NoSuchTable.
        """
        location = await self._store.drop_table(table)
        self._files.forget(location)
        if purge:
            _logger.warning("purge_left_files", extra={"table": str(table), "metadata_location": location})

    async def _new_document(self, table: TableId, request: CreateRequest) -> JsonObject:
        table_uuid = self._new_uuid()
        default = await self._default_location(table, table_uuid)
        location = request.location.rstrip("/") if request.location else default
        updates = plan_create(request, location=location, table_uuid=table_uuid)
        return self._create_document(updates, table_uuid=table_uuid, location=location)

    async def _default_location(self, table: TableId, table_uuid: str) -> str:
        properties = await self._store.load_namespace(table.namespace)
        base = properties.get("location") or namespace_location(self._confinement.warehouse, table.namespace)
        return table_location(base, table, table_uuid)

    def _create_document(self, updates: list[Update], *, table_uuid: str, location: str) -> JsonObject:
        document = create_document(updates, default_uuid=table_uuid, default_location=location, now_ms=self._clock_ms())
        self._check_places(document)
        return document

    def _check_places(self, document: JsonObject) -> None:
        self._confinement.check(document["location"])
        self._confinement.check(metadata_directory(document))

    async def _prepare(self, document: JsonObject) -> None:
        """Make the directories of a new local table: DuckDB writes there before it commits, and makes none."""
        await self._files.prepare([metadata_directory(document), f"{document['location']}/data"])

    async def _insert(self, table: TableId, document: JsonObject) -> StoredMetadata:
        location = metadata_location(document, version=0, file_uuid=self._new_uuid())
        stored = await self._files.write(location, document)
        try:
            await self._store.create_table(table, location)
        except StoreFailed as error:
            await self._check_landed(table, location, error)
        except CatalogError:
            await self._discard(location)
            raise
        return stored

    async def _commit_create(self, table: TableId, commit: Commit) -> StoredMetadata:
        if not is_create(commit.requirements):
            raise NoSuchTable(f"Table does not exist: {table}")
        table_uuid = self._new_uuid()
        location = await self._default_location(table, table_uuid)
        document = self._create_document(commit.updates, table_uuid=table_uuid, location=location)
        await self._prepare(document)
        try:
            return await self._insert(table, document)
        except AlreadyExists as error:
            raise CommitFailed("Requirement failed: table already exists") from error

    async def _commit_once(self, table: TableId, commit: Commit, *, base: StoredMetadata) -> StoredMetadata | None:
        """Try one commit on top of `base`; None if somebody else moved the pointer first."""
        check_requirements(commit.requirements, base.document)
        applied = apply_updates(base.document, commit.updates, base_location=base.location, now_ms=self._clock_ms())
        if applied is None:
            return base
        if _places(applied.document) != _places(base.document):
            self._check_places(applied.document)
        location = metadata_location(applied.document, version=next_version(base.location), file_uuid=self._new_uuid())
        stored = await self._files.write(location, applied.document)
        try:
            swapped = await self._store.swap_pointer(table, expected=base.location, new=location)
        except StoreFailed as error:
            await self._check_landed(table, location, error)
            swapped = True
        if not swapped:
            await self._discard(location)
            return None
        self._files.forget(base.location)
        for expired in applied.expired_files:
            await self._discard(expired)
        return stored

    async def _check_landed(self, table: TableId, location: str, cause: StoreFailed) -> None:
        """Find out what became of a change whose answer got lost.

        Raises: CommitStateUnknown unless the table is seen to point at `location`.
        """
        try:
            found = await self._store.load_pointer(table)
        except StoreFailed:
            found = None
        if found != location:
            raise CommitStateUnknown(f"Commit may or may not have happened: {table}") from cause

    async def _discard(self, location: str) -> None:
        """Delete a metadata file that nothing refers to, if it is ours to delete; failing is only untidy."""
        try:
            if self._confinement.allows(location):
                await self._files.delete(location)
        except CatalogError as error:
            kept = {"metadata_location": location, "reason": str(error)}
            _logger.warning("metadata_file_kept", extra=kept)


def _places(document: JsonObject) -> tuple[str, str]:
    return document["location"], metadata_directory(document)
