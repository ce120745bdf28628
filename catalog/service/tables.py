"""Operations on tables and views that take more than one step: create, commit, register, drop.

A commit, and what a crash after each step leaves:

    1. wait for the commit queue of its table, in this process             nothing
    2. load the table, check requirements, apply updates                   nothing
    3. write the metadata file, swap the pointer (versions.py)             a file that nothing refers to, or the commit
    4. delete metadata files that left the metadata log, if so configured  files that nothing refers to

A transaction does the same for several tables: it holds all their queues, plans every commit before it writes a file,
and moves all pointers in one transaction of the database. Queues are entered in the order of names, so that two
transactions cannot deadlock. Other processes do not take part in the queues; the pointer swap decides.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack

from lakefeed.aio import KeyedLocks
from lakefeed.catalog.errors import AlreadyExists, CommitFailed
from lakefeed.catalog.json_fields import JsonObject
from lakefeed.catalog.metadata.document import check_document
from lakefeed.catalog.metadata.updates import (
    CreateRequest,
    Update,
    apply_updates,
    check_requirements,
    create_document,
    is_create,
    plan_create,
)
from lakefeed.catalog.metadata.views import (
    CreateView,
    apply_view_updates,
    check_view_requirements,
    create_view_document,
)
from lakefeed.catalog.names import TableId, ViewId, metadata_directory
from lakefeed.catalog.service.metadata_files import StoredMetadata
from lakefeed.catalog.service.purge import Purges
from lakefeed.catalog.service.versions import COMMIT_ATTEMPTS, Commit, VersionChange, Versions
from lakefeed.catalog.store.store import name_in_use, no_such_entry


class Tables:
    """The tables of the warehouse. Their metadata is read through `versions`."""

    def __init__(
        self, versions: Versions, *, commit_queues: KeyedLocks, purges: Purges, clock_ms: Callable[[], int]
    ) -> None:
        self.versions = versions
        self._purges = purges
        self._store = versions.store
        self._files = versions.files
        self._commit_queues = commit_queues
        self._clock_ms = clock_ms

    async def stage(self, table: TableId, request: CreateRequest) -> JsonObject:
        """Return the metadata that a create starts from, and make its directories; store nothing.

        Raises: NoSuchNamespace, AlreadyExists, LocationForbidden, ValidationFailed.
        """
        table_uuid = self.versions.new_uuid()
        location = await self.versions.new_location(table, table_uuid, requested=request.location)
        updates = plan_create(request, location=location, table_uuid=table_uuid)
        document = self._create_document(updates, table_uuid=table_uuid, location=location)
        await self._check_free(table)
        await self._make_directories(document)
        return document

    async def create(self, table: TableId, request: CreateRequest) -> StoredMetadata:
        """Create a table.

        Raises: NoSuchNamespace, AlreadyExists, LocationForbidden, ValidationFailed; CommitStateUnknown.
        """
        return await self.versions.insert(table, await self.stage(table, request))

    async def commit(self, table: TableId, commit: Commit) -> StoredMetadata:
        """Commit to a table, or create it if the commit requires that. The outcome of a cancelled commit is unknown.

        Raises: NoSuchTable, CommitFailed, ValidationFailed, LocationForbidden, TooManyWaiting; CommitStateUnknown.
        """
        async with self._commit_queues.hold(table):
            planned, stored = await self._commit(table, commit)
        await self.versions.delete_files(planned.expired_files)
        return stored

    async def commit_transaction(self, commits: Mapping[TableId, Commit]) -> None:
        """Commit to all tables or to none. The outcome of a cancelled transaction is unknown.

        Raises: NoSuchTable, CommitFailed, ValidationFailed, LocationForbidden, TooManyWaiting; CommitStateUnknown.
        """
        async with AsyncExitStack() as held:
            for table in sorted(commits):
                await held.enter_async_context(self._commit_queues.hold(table))
            planned = await self._commit_all(commits)
        await self.versions.delete_files([location for each in planned for location in each.expired_files])

    async def register(self, table: TableId, location: str, *, overwrite: bool) -> StoredMetadata:
        """Create a table from an existing metadata file, or replace the table of that name if so asked.

        Raises: NoSuchNamespace, AlreadyExists, LocationForbidden, FileMissing, BadRequest, ValidationFailed.
        """
        self.versions.confinement.check(location)
        await self._store.load_namespace(table.namespace)
        if not overwrite:
            await self._check_free(table)
        stored = await self._files.load_for_register(location)
        check_document(stored.document)
        self.versions.check_locations(stored.document)
        async with self._commit_queues.hold(table):
            if overwrite:
                await self._store.put_entry(table, stored.pointer)
            else:
                await self._store.create_entry(table, stored.pointer)
        return stored

    async def unregister(self, table: TableId) -> StoredMetadata:
        """Drop a table without its files and return its last metadata, to be registered elsewhere.

        Raises: NoSuchTable, FileMissing, StorageError.
        """
        async with self._commit_queues.hold(table):
            stored = await self.versions.load_current(table)
            await self._store.drop_entry(table)
        self._files.forget(stored.pointer)
        return stored

    async def drop(self, table: TableId, *, purge: bool) -> None:
        """Drop a table. With `purge`, delete its files too; the deletion of very many continues in the background.

        Raises: NoSuchTable; with `purge` ValidationFailed, StorageError.
        """
        if purge:
            await self._purges.drop_and_purge(table)
        else:
            self._files.forget(await self._store.drop_entry(table))

    async def _commit(self, table: TableId, commit: Commit) -> tuple[VersionChange, StoredMetadata]:
        for _ in range(COMMIT_ATTEMPTS):
            planned = await self._plan(table, commit)
            try:
                stored = await self.versions.apply(planned)
            except AlreadyExists as error:
                if await self._store.load_pointer(table) is None:
                    raise  # a view has the name
                raise CommitFailed("Requirement failed: table already exists") from error
            if stored is not None:
                return planned, stored
        raise CommitFailed(f"Commit lost the race {COMMIT_ATTEMPTS} times, try again: {table}")

    async def _commit_all(self, commits: Mapping[TableId, Commit]) -> list[VersionChange]:
        for _ in range(COMMIT_ATTEMPTS):
            planned = [await self._plan(table, commit) for table, commit in commits.items()]
            try:
                if await self.versions.apply_all(planned):
                    return planned
            except AlreadyExists as error:  # created by another process since it was planned
                raise CommitFailed(f"Requirement failed: {error}") from error
        raise CommitFailed(f"Commit lost the race {COMMIT_ATTEMPTS} times, try again: {', '.join(map(str, commits))}")

    async def _plan(self, table: TableId, commit: Commit) -> VersionChange:
        """Check the requirements of a commit and apply its updates; store nothing."""
        pointer = await self._store.load_pointer(table)
        if pointer is None:
            return VersionChange(table, None, await self._first_document(table, commit))
        base = await self._files.load(pointer)
        check_requirements(commit.requirements, base.document)
        applied = apply_updates(base.document, commit.updates, base_location=base.location, now_ms=self._clock_ms())
        if applied is None:
            return VersionChange(table, base, None)
        return VersionChange(table, base, applied.document, applied.expired_files)

    async def _first_document(self, table: TableId, commit: Commit) -> JsonObject:
        if not is_create(commit.requirements):
            raise no_such_entry(table)
        table_uuid = self.versions.new_uuid()
        location = await self.versions.new_location(table, table_uuid)
        document = self._create_document(commit.updates, table_uuid=table_uuid, location=location)
        await self._make_directories(document)
        return document

    def _create_document(self, updates: list[Update], *, table_uuid: str, location: str) -> JsonObject:
        document = create_document(updates, default_uuid=table_uuid, default_location=location, now_ms=self._clock_ms())
        self.versions.check_locations(document)
        return document

    async def _check_free(self, table: TableId) -> None:
        """Check that a name is free before work is done; the store checks again in its transaction."""
        for entry in (table, ViewId(table.namespace, table.name)):
            if await self._store.load_pointer(entry) is not None:
                raise name_in_use(table, entry.kind)

    async def _make_directories(self, document: JsonObject) -> None:
        """Make the directories of a new local table: DuckDB writes there before it commits, and makes none."""
        for directory in (metadata_directory(document), f"{document['location']}/data"):
            await self._files.storage.make_directory(directory)


class Views:
    """The views of the warehouse. Their files are never deleted."""

    def __init__(self, versions: Versions, *, commit_queues: KeyedLocks, clock_ms: Callable[[], int]) -> None:
        self.versions = versions
        self._store = versions.store
        self._commit_queues = commit_queues
        self._clock_ms = clock_ms

    async def create(self, view: ViewId, request: CreateView) -> StoredMetadata:
        """Create a view.

        Raises: NoSuchNamespace, AlreadyExists, LocationForbidden, ValidationFailed; CommitStateUnknown.
        """
        view_uuid = self.versions.new_uuid()
        location = await self.versions.new_location(view, view_uuid, requested=request.location)
        document = create_view_document(request, view_uuid=view_uuid, location=location, now_ms=self._clock_ms())
        self.versions.check_locations(document)
        return await self.versions.insert(view, document)

    async def commit(self, view: ViewId, commit: Commit) -> StoredMetadata:
        """Commit to a view. The outcome of a cancelled commit is unknown.

        Raises: NoSuchView, CommitFailed, ValidationFailed, LocationForbidden, TooManyWaiting; CommitStateUnknown.
        """
        async with self._commit_queues.hold(view):
            for _ in range(COMMIT_ATTEMPTS):
                base = await self.versions.load_current(view)
                check_view_requirements(commit.requirements, base.document)
                document = apply_view_updates(base.document, commit.updates, now_ms=self._clock_ms())
                committed = await self.versions.apply(VersionChange(view, base, document))
                if committed is not None:
                    return committed
        raise CommitFailed(f"Commit lost the race {COMMIT_ATTEMPTS} times, try again: {view}")

    async def register(self, view: ViewId, location: str) -> StoredMetadata:
        """Create a view from an existing metadata file.

        Raises: NoSuchNamespace, AlreadyExists, LocationForbidden, FileMissing, BadRequest, ValidationFailed.
        """
        self.versions.confinement.check(location)
        await self._store.load_namespace(view.namespace)
        stored = await self.versions.files.load_for_register(location)
        self.versions.check_locations(stored.document)
        await self._store.create_entry(view, stored.pointer)
        return stored

    async def drop(self, view: ViewId) -> None:
        """Drop a view; its metadata can be registered again.

        Raises: NoSuchView.
        """
        self.versions.files.forget(await self._store.drop_entry(view))
