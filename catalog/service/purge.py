"""Purge: drop a table and delete its files. Owns what may be deleted, the order, and how many purges run at once.

Steps, and what a crash after each one leaves:

    1. check that no other table has the same files                   the table
    2. drop the entry                                                 files that nothing refers to
    3. for every manifest: its data and delete files, then itself     fewer of them
    4. manifest lists and statistics                                  metadata files
    5. metadata files, the current one last                           nothing

A purge that was interrupted is not resumed. Its last metadata file still exists and is named in the log: after it is
registered again, the table can be purged again, and missing files are skipped. For the same reason the file stays if
another file could not be deleted.

Only files that the metadata names are deleted, and of those only files in the table's own directories: files that
other programs put there, and files added from elsewhere, stay. Each running purge holds one manifest in memory.

A table shares its files with another name if its metadata was registered twice, even if commits have taken the two
apart since. Tables with the same uuid share files. Tables without a known uuid (format 1 allows that), and tables with
metadata in the same directory, share files if they have the same location; their metadata is read to find out.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass

from lakefeed.aio import map_parallel
from lakefeed.catalog.errors import BadRequest, ValidationFailed
from lakefeed.catalog.json_fields import JsonObject
from lakefeed.catalog.metadata.document import is_same_table, is_true
from lakefeed.catalog.names import Pointer, TableId, owned_directories
from lakefeed.catalog.service.metadata_files import Files, MetadataFiles, StoredMetadata
from lakefeed.catalog.service.versions import Versions
from lakefeed.catalog.store.store import Store
from lakefeed.contract.errors import FileMissing, LakefeedError, LocationInvalid, StorageError
from lakefeed.contract.properties import GC_ENABLED
from lakefeed.iceberg.manifests import live_file_paths, manifest_paths
from lakefeed.locations import OwnedDirectories, parent_path

# Each holds one manifest and its paths in memory. Further purges wait before they drop their table.
PURGES_MAX = 4
# Files of one purge, or of one search, that are handled at once; the S3 client has ten connections.
PARALLEL_FILES = 6
# A client waits for the deletion of thousands of files, but not of millions.
RESPONSE_WAIT_S = 20.0

_logger = logging.getLogger(__name__)


async def find_table_sharing_files(
    table: TableId, stored: StoredMetadata, *, store: Store, files: MetadataFiles
) -> TableId | None:
    """Return another table with the same files, or None.

    Raises: StorageError, with the name of a table whose metadata cannot be read; StoreFailed.
    """
    uuid = stored.pointer.table_uuid
    found = await store.find_tables(table_uuid=uuid, directory=parent_path(stored.location))
    others = {name: pointer for name, pointer in found.items() if name != table}
    for name, pointer in others.items():
        if uuid and pointer.table_uuid == uuid:
            return name

    unreadable: dict[TableId, StorageError] = {}

    async def has_same_files(name: TableId) -> bool:
        try:
            other = await files.load_uncached(others[name])
        except (FileMissing, BadRequest, LocationInvalid):
            return False
        except StorageError as error:  # a later read may succeed
            unreadable[name] = error
            return False
        return is_same_table(stored.document, other.document)

    shared = await map_parallel(has_same_files, others, at_once=PARALLEL_FILES)
    for name, has_same in zip(others, shared, strict=True):
        if has_same:
            return name
    for name, error in unreadable.items():
        raise StorageError(
            f"Cannot purge table: its files may also be those of {name}, whose metadata cannot be read;"
            f" make it readable, or drop {table} without purge: {error}"
        ) from error
    return None


class Purges:
    """Starts purges and waits for them."""

    def __init__(self, versions: Versions, *, max_bytes: int) -> None:
        self._versions = versions
        self._store = versions.store
        self._files = versions.files
        self._max_bytes = max_bytes
        self._slots = asyncio.Semaphore(PURGES_MAX)
        self._running: set[asyncio.Task[None]] = set()

    async def drop_and_purge(self, table: TableId) -> None:
        """Drop a table and delete its files; return after RESPONSE_WAIT_S at the latest, while the purge continues.

        Cancelling this does not stop the purge.

        Raises: NoSuchTable, ValidationFailed, StorageError, StoreFailed.
        """
        await self._check_allowed(table)
        await self._slots.acquire()
        try:
            pointer = await self._store.drop_entry(table)
            task = asyncio.create_task(self._purge(table, pointer), name=f"purge {table}")
        except BaseException:
            self._slots.release()
            raise
        self._running.add(task)
        task.add_done_callback(self._end)
        await asyncio.wait([task], timeout=RESPONSE_WAIT_S)

    async def close(self) -> None:
        """Cancel running purges; files that they have not deleted stay."""
        for task in self._running:
            task.cancel()
        if self._running:
            await asyncio.wait(self._running)

    def _end(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        self._slots.release()

    async def _check_allowed(self, table: TableId) -> None:
        try:
            stored = await self._versions.load_current(table)
        except (FileMissing, BadRequest, LocationInvalid):
            return  # without metadata no file can be found: only the entry is dropped
        properties = stored.document["properties"]
        if GC_ENABLED in properties and not is_true(properties, GC_ENABLED):
            raise ValidationFailed("Cannot purge table: GC is disabled (deleting files may corrupt other tables)")
        other = await find_table_sharing_files(table, stored, store=self._store, files=self._files)
        if other is not None:
            raise ValidationFailed(f"Cannot purge table: its files are also those of {other}; drop it without purge")

    async def _purge(self, table: TableId, pointer: Pointer) -> None:
        location = pointer.location
        facts: dict[str, str | int] = {"table": str(table), "metadata_location": location}
        try:
            document = (await self._files.load(pointer)).document
            owned = owned_directories(document, self._versions.confinement)
            counts = await _Purge(self._files.storage, owned, max_bytes=self._max_bytes).run(document, location)
        except LakefeedError as error:
            _logger.warning("purge_incomplete", extra=facts | {"reason": str(error)})
        except asyncio.CancelledError:
            _logger.warning("purge_incomplete", extra=facts | {"reason": "shutting down"})
            raise
        except Exception:
            _logger.exception("purge_incomplete", extra=facts)
        else:
            facts |= {"deleted": counts.deleted, "foreign": counts.foreign, "failed": counts.failed}
            if counts.failed:
                _logger.warning("purge_incomplete", extra=facts)
            else:
                _logger.info("table_purged", extra=facts)
        finally:
            self._files.forget(pointer)


@dataclass(slots=True)
class _Counts:
    """Files of one table by what became of them; foreign ones are outside its directories and stay."""

    deleted: int = 0
    foreign: int = 0
    failed: int = 0


class _Purge:
    """The purge of one table."""

    def __init__(self, files: Files, owned: OwnedDirectories, *, max_bytes: int) -> None:
        self._files = files
        self._owned = owned
        self._max_bytes = max_bytes
        self._counts = _Counts()

    async def run(self, document: JsonObject, location: str) -> _Counts:
        async for manifest in self._manifests(document):
            failed_before = self._counts.failed
            await self._delete_all(await self._referenced_files(manifest, live_file_paths))
            if self._counts.failed == failed_before:
                await self._delete_all([manifest])
        if not self._counts.failed:
            snapshots = document.get("snapshots") or ()
            statistics = (*(document.get("statistics") or ()), *(document.get("partition-statistics") or ()))
            await self._delete_all(each["manifest-list"] for each in snapshots if "manifest-list" in each)
            await self._delete_all(each["statistics-path"] for each in statistics)
            await self._delete_all(each["metadata-file"] for each in document.get("metadata-log") or ())
        if not self._counts.failed:
            await self._delete_all([location])
        return self._counts

    async def _manifests(self, document: JsonObject) -> AsyncIterator[str]:
        """Yield every manifest once, although snapshots share most of them."""
        seen: set[str] = set()
        for snapshot in document.get("snapshots") or ():
            listed = snapshot.get("manifest-list")
            # Snapshots of format 1 may name their manifests themselves.
            found = await self._referenced_files(listed, manifest_paths) if listed else snapshot.get("manifests") or ()
            for manifest in found:
                if manifest not in seen:
                    seen.add(manifest)
                    yield manifest

    async def _referenced_files(self, location: str, read: Callable[[bytes, str], list[str]]) -> list[str]:
        """Return the files that a file refers to; none if it is missing, foreign, or, which is counted, unreadable."""
        if not self._owned.contain(location):
            return []
        try:
            data = await self._files.read(location, max_bytes=self._max_bytes)
            return await asyncio.to_thread(read, data, location)
        except FileMissing:
            return []
        except LakefeedError as error:
            self._count_failure(location, error)
            return []

    async def _delete_all(self, locations: Iterable[str]) -> None:
        remaining = list(locations)
        for first in range(0, len(remaining), PARALLEL_FILES):
            await asyncio.gather(*map(self._delete, remaining[first : first + PARALLEL_FILES]))

    async def _delete(self, location: str) -> None:
        if not self._owned.contain(location):
            self._counts.foreign += 1
            return
        try:
            await self._files.delete(location)
            self._counts.deleted += 1
        except LakefeedError as error:
            self._count_failure(location, error)

    def _count_failure(self, location: str, error: LakefeedError) -> None:
        self._counts.failed += 1
        _logger.warning("purge_file_failed", extra={"location": location, "reason": str(error)})
