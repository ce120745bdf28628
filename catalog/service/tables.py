"""Operations on tables, one per method: load, apply the core, add a version.

A commit: read pointer and document, check requirements, apply updates, add the version (versions.py), all of it in the
table's turn; then delete the metadata files that fell out of the log, if the table asks for that.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass

from lakefeed.aio import Turns
from lakefeed.catalog.errors import AlreadyExists, BadRequest, CommitFailed, ValidationFailed
from lakefeed.catalog.json_fields import JsonObject
from lakefeed.catalog.metadata.document import check_document, is_same_table, may_be_purged
from lakefeed.catalog.metadata.updates import (
    CreateRequest,
    Requirement,
    Update,
    apply_updates,
    check_requirements,
    create_document,
    is_create,
    plan_create,
)
from lakefeed.catalog.names import Namespace, Pointer, TableId, ViewId, metadata_directory
from lakefeed.catalog.service.metadata_cache import MetadataFiles, StoredMetadata
from lakefeed.catalog.service.purge import Purges
from lakefeed.catalog.service.versions import Change, Versions
from lakefeed.catalog.store.protocol import Store, name_is_taken, no_such_entry
from lakefeed.contract.errors import FileMissing, LocationInvalid, StorageError
from lakefeed.locations import parent_path

# --- catalog.twins ----------------------------------------------------------------------------------------------------
#
# Whether a table has a second name, because its metadata was registered twice. Owns how that is found out.
#
# The two share their files, also when they have gone different ways since: a commit adds to one of them, and the
# metadata
# of either may lie elsewhere by now. The uuid stays. The database keeps it beside the pointer, so that no metadata has
# to
# be read, but that of tables whose uuid it does not know: those that were there before it kept it and were not
# committed
# to since, and those that have none, which only the first version of the format allows. A uuid that was read for this
# is
# told to the database, so that it is read once.
#
# Tables of different uuids are one as well if they have one location and their metadata is in one directory: of those
# the metadata is read.


# Metadata files that are read at once; the S3 client has ten connections, and commits need some.
_PARALLEL_READS = 6


async def find_twin(table: TableId, stored: StoredMetadata, *, store: Store, files: MetadataFiles) -> TableId | None:
    """Find another name of a table.

    Raises: StorageError, with the name of a table that may be a twin and cannot be read; StoreFailed.
    """
    uuid = stored.pointer.table_uuid
    found = await store.find_tables(table_uuid=uuid, directory=parent_path(stored.location))
    others = {name: pointer for name, pointer in found.items() if name != table}
    for name, pointer in others.items():
        if uuid and pointer.table_uuid == uuid:
            return name
    names = list(others)
    for first in range(0, len(names), _PARALLEL_READS):
        group = names[first : first + _PARALLEL_READS]
        twin = await _twin_in({name: others[name] for name in group}, table, stored, store=store, files=files)
        if twin is not None:
            return twin
    return None


async def _twin_in(
    group: Mapping[TableId, Pointer], table: TableId, stored: StoredMetadata, *, store: Store, files: MetadataFiles
) -> TableId | None:
    """Read a group of tables. What was learned is kept also if one of them cannot be read."""
    outcomes = await asyncio.gather(*(_maybe_read(files, pointer) for pointer in group.values()))
    read = {name: each for name, each in zip(group, outcomes, strict=True) if isinstance(each, StoredMetadata)}
    learned = {
        name: each.pointer for name, each in read.items() if each.pointer.table_uuid and not group[name].table_uuid
    }
    if learned:
        await store.note_uuids(learned)
    for name, each in read.items():
        if is_same_table(stored.document, each.document):
            return name
    for name, outcome in zip(group, outcomes, strict=True):
        if isinstance(outcome, StorageError):
            raise StorageError(
                f"Cannot purge table: its files may also be those of {name}, whose metadata cannot be read;"
                f" make it readable, or drop {table} without purge: {outcome}"
            ) from outcome
    return None


async def _maybe_read(files: MetadataFiles, pointer: Pointer) -> StoredMetadata | StorageError | None:
    """Read a table's metadata: None if there is none to be read, the error if it may be read another time."""
    try:
        return await files.peek(pointer)
    except (FileMissing, BadRequest, LocationInvalid):
        return None
    except StorageError as error:
        return error


# --- catalog.tables ---------------------------------------------------------------------------------------------------


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

        Raises: FileMissing, StorageError.
        """
        return await self._files.load(pointer)

    async def recall(self, table: TableId, pointer: Pointer) -> StoredMetadata:
        """Return what a table was once, or what it is now if that version's file has been deleted since.

        Raises: NoSuchTable, FileMissing, StorageError.
        """
        return await self._versions.recall(table, pointer)

    async def stage(self, table: TableId, request: CreateRequest) -> JsonObject:
        """Return the metadata that a create would start from, and make its directories; store nothing.

        Raises: NoSuchNamespace, AlreadyExists, LocationForbidden, ValidationFailed.
        """
        document = await self._new_document(table, request)
        await self._check_free(table)
        await self._prepare(document)
        return document

    async def create(self, table: TableId, request: CreateRequest) -> StoredMetadata:
        """Create a table.

        Raises: NoSuchNamespace, AlreadyExists, LocationForbidden, ValidationFailed; CommitStateUnknown.
        """
        document = await self.stage(table, request)
        return await self._versions.insert(table, document)

    async def commit(self, table: TableId, commit: Commit) -> StoredMetadata:
        """Commit to a table, or create it if that is what the commit requires. Cancelling leaves the outcome open.

        Raises: NoSuchTable, CommitFailed, ValidationFailed, LocationForbidden, TooManyWaiting; CommitStateUnknown.
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

        Raises: NoSuchTable, NoSuchNamespace, CommitFailed, ValidationFailed, LocationForbidden.
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

        Raises: NoSuchNamespace, AlreadyExists, LocationForbidden, FileMissing, BadRequest, ValidationFailed.
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

        Raises: NoSuchTable, FileMissing, StorageError.
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

        Raises: NoSuchTable, ValidationFailed, StorageError.
        """
        await self._check_purgeable(table)
        await self._purges.run(table, drop=lambda: self._store.drop_entry(table))

    async def _check_purgeable(self, table: TableId) -> None:
        pointer = await self._store.load_pointer(table)
        if pointer is None:
            raise no_such_entry(table)
        try:
            stored = await self._files.load(pointer)
        except (FileMissing, BadRequest, LocationInvalid):
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


# --- catalog.transactions ---------------------------------------------------------------------------------------------
#
# Commits to several tables at once: all of them, or none. Owns the order of steps; versions.py moves the pointers.
#
# Steps, and what a crash after each one leaves behind:
#
#     1. wait for the turns of all tables                          nothing
#     2. check the requirements of all, apply the updates of all   nothing, whichever fails
#     3. write all metadata files                                  files that nothing refers to
#     4. move all pointers in one transaction of the database      the commit, whole
#
# Turns are waited for in the order of names, so that two transactions never wait for each other in a circle.


class Transactions:
    """Transactions over the tables of the one warehouse."""

    def __init__(self, tables: Tables, versions: Versions, *, turns: Turns) -> None:
        self._tables = tables
        self._versions = versions
        self._turns = turns

    async def commit(self, commits: Mapping[TableId, Commit]) -> None:
        """Commit to all tables, creating those whose commits require that. Cancelling leaves the outcome open.

        Raises: NoSuchTable, CommitFailed, ValidationFailed, LocationForbidden, TooManyWaiting; CommitStateUnknown.
        """
        async with AsyncExitStack() as held:
            for table in sorted(commits):
                await held.enter_async_context(self._turns.turn(table))
            planned = await self._commit_in_turn(commits)
        await self._versions.discard_all([location for plan in planned for location in plan.expired_files])

    async def _commit_in_turn(self, commits: Mapping[TableId, Commit]) -> list[PlannedCommit]:
        for _ in range(COMMIT_ATTEMPTS):
            planned = [await self._tables.plan(table, commit) for table, commit in commits.items()]
            if await self._replace([plan.change for plan in planned]):
                return planned
        raise CommitFailed(f"Commit lost the race {COMMIT_ATTEMPTS} times, try again: {', '.join(map(str, commits))}")

    async def _replace(self, changes: Sequence[Change]) -> bool:
        try:
            return await self._versions.replace_all(changes)
        except AlreadyExists as error:  # in another process, since we looked
            raise CommitFailed(f"Requirement failed: {error}") from error
