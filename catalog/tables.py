"""Operations on tables, one per method: load, apply the core, add a version.

A commit: read pointer and document, check requirements, apply updates, add the version (versions.py), all of it in the
table's turn; then delete the metadata files that fell out of the log, if the table asks for that.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from catalog.errors import AlreadyExists, BadRequest, CommitFailed, FileMissing, ValidationFailed
from catalog.fields import JsonObject
from catalog.locations import metadata_directory
from catalog.metadata.create import CreateRequest, create_document, plan_create
from catalog.metadata.documents import check_document
from catalog.metadata.properties import may_be_purged
from catalog.metadata.requirements import Requirement, check_requirements, is_create
from catalog.metadata.updates import Update, apply_updates
from catalog.metadata_files import StoredMetadata
from catalog.names import Namespace, TableId, ViewId
from catalog.pointers import Pointer
from catalog.purge import Purges
from catalog.store.protocol import name_is_taken, no_such_entry
from catalog.turns import Turns
from catalog.twins import find_twin
from catalog.versions import Change, Versions

# Swaps lost to other processes before a commit gives up. In one process commits take turns and lose none.
COMMIT_ATTEMPTS = 5


@dataclass(frozen=True, slots=True)
class Commit:
    """The requirements and updates of one table, parsed."""

    requirements: list[Requirement]
    updates: list[Update]


@dataclass(frozen=True, slots=True)
class _Committed:
    """A version that became the table, and the metadata files to delete now."""

    stored: StoredMetadata
    expired_files: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PlannedCommit:
    """A commit that was checked, and the metadata files to delete once it has happened."""

    change: Change
    expired_files: tuple[str, ...] = ()


class Tables:
    """Tables of the one warehouse. The clock comes from outside."""

    def __init__(self, versions: Versions, *, turns: Turns, purges: Purges, clock_ms: Callable[[], int]) -> None:
        self._versions = versions
        self._purges = purges
        self._store = versions.store
        self._files = versions.files
        self._turns = turns
        self._clock_ms = clock_ms

    async def list_tables(self, namespace: Namespace, *, after: str, limit: int | None) -> list[TableId]:
        """Return one page of a namespace's tables.

        Raises: NoSuchNamespace.
        """
        return await self._store.list_tables(namespace, after=after, limit=limit)

    async def locate(self, table: TableId) -> Pointer:
        """Return where a table's current metadata is, without reading it.

        Raises: NoSuchTable; FileMissing if files are to be verified.
        """
        return await self._versions.locate(table)

    async def load(self, pointer: Pointer) -> StoredMetadata:
        """Return a located table's metadata.

        Raises: FileMissing, StorageFailed.
        """
        return await self._files.load(pointer)

    async def recall(self, table: TableId, pointer: Pointer) -> StoredMetadata:
        """Return what a table was once, or what it is now if that version's file has been deleted since.

        Raises: NoSuchTable, FileMissing, StorageFailed.
        """
        return await self._versions.recall(table, pointer)

    async def stage(self, table: TableId, request: CreateRequest) -> JsonObject:
        """Return the metadata that a create would start from, and make its directories; store nothing.

        Raises: NoSuchNamespace, AlreadyExists, Forbidden, ValidationFailed.
        """
        document = await self._new_document(table, request)
        await self._check_free(table)
        await self._prepare(document)
        return document

    async def create(self, table: TableId, request: CreateRequest) -> StoredMetadata:
        """Create a table.

        Raises: NoSuchNamespace, AlreadyExists, Forbidden, ValidationFailed; CommitStateUnknown.
        """
        document = await self.stage(table, request)
        return await self._versions.insert(table, document)

    async def commit(self, table: TableId, commit: Commit) -> StoredMetadata:
        """Commit to a table, or create it if that is what the commit requires. Cancelling leaves the outcome open.

        Raises: NoSuchTable, CommitFailed, ValidationFailed, Forbidden, TooManyWaiting; CommitStateUnknown.
        """
        async with self._turns.turn(table):
            committed = await self._commit_in_turn(table, commit)
        await self._versions.discard_all(committed.expired_files)
        return committed.stored

    async def _commit_in_turn(self, table: TableId, commit: Commit) -> _Committed:
        for _ in range(COMMIT_ATTEMPTS):
            pointer = await self._store.load_pointer(table)
            if pointer is None:
                return _Committed(await self._commit_create(table, commit))
            committed = await self._commit_once(table, commit, base=await self._files.load(pointer))
            if committed is not None:
                return committed
        raise CommitFailed(f"Commit lost the race {COMMIT_ATTEMPTS} times, try again: {table}")

    async def plan(self, table: TableId, commit: Commit) -> PlannedCommit:
        """Check and apply a commit that is part of a transaction; store nothing.

        Raises: NoSuchTable, NoSuchNamespace, CommitFailed, ValidationFailed, Forbidden.
        """
        pointer = await self._store.load_pointer(table)
        if pointer is None:
            return PlannedCommit(Change(table, None, await self._first_document(table, commit)))
        base = await self._files.load(pointer)
        check_requirements(commit.requirements, base.document)
        applied = apply_updates(base.document, commit.updates, base_location=base.location, now_ms=self._clock_ms())
        if applied is None:
            return PlannedCommit(Change(table, base, None))
        return PlannedCommit(Change(table, base, applied.document), applied.expired_files)

    async def register(self, table: TableId, location: str, *, overwrite: bool) -> StoredMetadata:
        """Make a table of a metadata file that exists, in place of the one of that name if so asked.

        Raises: NoSuchNamespace, AlreadyExists, Forbidden, FileMissing, BadRequest, ValidationFailed.
        """
        self._versions.confinement.check(location)
        await self._store.load_namespace(table.namespace)
        if not overwrite:
            await self._check_free(table)
        stored = await self._files.load_anew(location)
        check_document(stored.document)
        self._versions.check_places(stored.document)
        async with self._turns.turn(table):
            if overwrite:
                await self._store.put_entry(table, stored.pointer)
            else:
                await self._store.create_entry(table, stored.pointer)
        return stored

    async def unregister(self, table: TableId) -> StoredMetadata:
        """Forget a table and return its last metadata, with which it can be registered elsewhere; its files stay.

        Raises: NoSuchTable, FileMissing, StorageFailed.
        """
        async with self._turns.turn(table):
            pointer = await self._store.load_pointer(table)
            if pointer is None:
                raise no_such_entry(table)
            stored = await self._files.load(pointer)
            await self._store.drop_entry(table)
        self._files.forget(pointer)
        return stored

    async def rename(self, source: TableId, destination: TableId) -> None:
        """Give a table another name; its files stay where they are.

        Raises: NoSuchTable, NoSuchNamespace, AlreadyExists.
        """
        await self._store.rename_entry(source, destination)

    async def drop(self, table: TableId) -> None:
        """Forget a table; its files stay.

        Raises: NoSuchTable.
        """
        self._files.forget(await self._store.drop_entry(table))

    async def purge(self, table: TableId) -> None:
        """Forget a table and delete its files; deleting very many goes on after this returns.

        Raises: NoSuchTable, ValidationFailed, StorageFailed.
        """
        await self._check_purgeable(table)
        await self._purges.run(table, drop=lambda: self._store.drop_entry(table))

    async def _check_purgeable(self, table: TableId) -> None:
        pointer = await self._store.load_pointer(table)
        if pointer is None:
            raise no_such_entry(table)
        try:
            stored = await self._files.load(pointer)
        except (FileMissing, BadRequest):
            return  # there is nothing to find its files by: only the name is left to drop
        if not may_be_purged(stored.document["properties"]):
            raise ValidationFailed("Cannot purge table: GC is disabled (deleting files may corrupt other tables)")
        twin = await find_twin(table, stored, store=self._store, files=self._files)
        if twin is not None:
            raise ValidationFailed(f"Cannot purge table: its files are also those of {twin}; drop it without purge")

    async def _check_free(self, table: TableId) -> None:
        """Look before work is done; the store looks again when it counts."""
        for entry in (table, ViewId(table.namespace, table.name)):
            if await self._store.load_pointer(entry) is not None:
                raise name_is_taken(table, entry.kind)

    async def _new_document(self, table: TableId, request: CreateRequest) -> JsonObject:
        table_uuid = self._versions.new_uuid()
        default = await self._versions.default_location(table, table_uuid)
        location = request.location.rstrip("/") if request.location else default
        updates = plan_create(request, location=location, table_uuid=table_uuid)
        return self._create_document(updates, table_uuid=table_uuid, location=location)

    def _create_document(self, updates: list[Update], *, table_uuid: str, location: str) -> JsonObject:
        document = create_document(updates, default_uuid=table_uuid, default_location=location, now_ms=self._clock_ms())
        self._versions.check_places(document)
        return document

    async def _prepare(self, document: JsonObject) -> None:
        """Make the directories of a new local table: DuckDB writes there before it commits, and makes none."""
        await self._files.prepare([metadata_directory(document), f"{document['location']}/data"])

    async def _first_document(self, table: TableId, commit: Commit) -> JsonObject:
        if not is_create(commit.requirements):
            raise no_such_entry(table)
        table_uuid = self._versions.new_uuid()
        location = await self._versions.default_location(table, table_uuid)
        document = self._create_document(commit.updates, table_uuid=table_uuid, location=location)
        await self._prepare(document)
        return document

    async def _commit_create(self, table: TableId, commit: Commit) -> StoredMetadata:
        document = await self._first_document(table, commit)
        try:
            return await self._versions.insert(table, document)
        except AlreadyExists as error:
            if await self._store.load_pointer(table) is None:
                raise  # a view took the name
            raise CommitFailed("Requirement failed: table already exists") from error

    async def _commit_once(self, table: TableId, commit: Commit, *, base: StoredMetadata) -> _Committed | None:
        """Try one commit on top of `base`; None if somebody else moved the pointer first."""
        check_requirements(commit.requirements, base.document)
        applied = apply_updates(base.document, commit.updates, base_location=base.location, now_ms=self._clock_ms())
        if applied is None:
            return _Committed(await self._versions.keep(base))
        stored = await self._versions.replace(table, base, applied.document)
        return None if stored is None else _Committed(stored, applied.expired_files)
