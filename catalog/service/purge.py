"""Deleting the files of tables that are dropped for good. Owns their order and how many purges run at once.

Steps, and what a crash after each one leaves behind:

    1. drop the entry                                                  files that nothing refers to
    2. of every manifest: its data and delete files, then itself      fewer of them
    3. manifest lists and statistics                                   metadata files
    4. metadata files, the current one last                            nothing

Nothing takes up a purge that was cut short. Its last metadata file is still there, though, and named in the log: once
registered again, the table can be purged again, and what is gone by then is passed over. For the same reason it stays
if a file could not be deleted.

Only files that the metadata names are deleted, and of those only the table's own (locations.py): what somebody has put
beside them, or added from elsewhere, stays. Memory is bounded by one manifest for each purge that runs.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

from lakefeed.catalog.json_fields import JsonObject
from lakefeed.catalog.names import Pointer, TableId, owned_directories
from lakefeed.catalog.service.files import Files
from lakefeed.catalog.service.metadata_cache import MetadataFiles
from lakefeed.contract.errors import FileMissing, LakefeedError
from lakefeed.iceberg.manifests import live_file_paths, manifest_paths
from lakefeed.locations import Confinement, OwnedDirectories

# Each holds one manifest and its paths in memory; further ones wait with their tables still there.
PURGES_MAX = 4
# Deletes of one purge that run at once; the S3 client has ten connections, and commits need some.
PARALLEL_DELETES = 6
# Clients find the files of a table of thousands gone when they are answered, and do not hang on one of millions.
ANSWER_WAIT_S = 20.0

_logger = logging.getLogger(__name__)

_T = TypeVar("_T")


@dataclass(slots=True)
class _Tally:
    """What became of the files of one table."""

    deleted: int = 0
    foreign: int = 0
    failed: int = 0


class Purges:
    """The purges that run."""

    def __init__(
        self, files: Files, metadata_files: MetadataFiles, confinement: Confinement, *, file_max_bytes: int
    ) -> None:
        self._files = files
        self._metadata_files = metadata_files
        self._confinement = confinement
        self._file_max_bytes = file_max_bytes
        self._places = asyncio.Semaphore(PURGES_MAX)
        self._running: set[asyncio.Task[None]] = set()

    async def run(self, table: TableId, *, drop: Callable[[], Awaitable[Pointer]]) -> None:
        """Drop the entry, whose last metadata `drop` returns, and delete the files; return after a while at the latest.

        Cancelling this leaves the purge going on.

        Raises: what `drop` raises.
        """
        await self._places.acquire()
        try:
            pointer = await drop()
            task = asyncio.create_task(self._purge(table, pointer), name=f"purge {table}")
        except BaseException:
            self._places.release()
            raise
        self._running.add(task)
        task.add_done_callback(self._end)
        await asyncio.wait([task], timeout=ANSWER_WAIT_S)

    async def close(self) -> None:
        """Stop the purges that run; what they have not deleted stays."""
        for task in self._running:
            task.cancel()
        if self._running:
            await asyncio.wait(self._running)

    def _end(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        self._places.release()

    async def _purge(self, table: TableId, pointer: Pointer) -> None:
        location = pointer.location
        facts: dict[str, str | int] = {"table": str(table), "metadata_location": location}
        try:
            document = (await self._metadata_files.load(pointer)).document
            purge = _Purge(
                self._files, owned_directories(document, self._confinement), file_max_bytes=self._file_max_bytes
            )
            tally = await purge.run(document, location)
        except LakefeedError as error:
            _logger.warning("purge_left_files", extra=facts | {"reason": str(error)})
        except asyncio.CancelledError:
            _logger.warning("purge_left_files", extra=facts | {"reason": "shutting down"})
            raise
        except Exception:
            _logger.exception("purge_left_files", extra=facts)
        else:
            facts |= {"deleted": tally.deleted, "foreign": tally.foreign, "failed": tally.failed}
            if tally.failed:
                _logger.warning("purge_left_files", extra=facts)
            else:
                _logger.info("table_purged", extra=facts)
        finally:
            self._metadata_files.forget(pointer)


class _Purge:
    """One table's purge."""

    def __init__(self, files: Files, own: OwnedDirectories, *, file_max_bytes: int) -> None:
        self._files = files
        self._own = own
        self._file_max_bytes = file_max_bytes
        self._tally = _Tally()

    async def run(self, document: JsonObject, location: str) -> _Tally:
        async for manifest in self._manifests(document):
            failed_before = self._tally.failed
            await self._delete_all(await self._maybe_read(manifest, live_file_paths))
            if self._tally.failed == failed_before:
                await self._delete_all([manifest])
        if not self._tally.failed:
            await self._delete_all([*_manifest_lists(document), *_statistics(document)])
            await self._delete_all(entry["metadata-file"] for entry in document.get("metadata-log") or ())
        if not self._tally.failed:
            await self._delete_all([location])
        return self._tally

    async def _manifests(self, document: JsonObject) -> AsyncIterator[str]:
        """Find every manifest once, though the snapshots share most of them."""
        seen: set[str] = set()
        for snapshot in document.get("snapshots") or ():
            listed = snapshot.get("manifest-list")
            # Only the oldest version of the format names manifests in the snapshot itself.
            found = await self._maybe_read(listed, manifest_paths) if listed else snapshot.get("manifests") or ()
            for manifest in found:
                if manifest not in seen:
                    seen.add(manifest)
                    yield manifest

    async def _maybe_read(self, location: str, read: Callable[[bytes, str], list[str]]) -> list[str]:
        """Read which files a file names: none if it is gone, foreign or, which counts as a failure, not readable."""
        if not self._own.contain(location):
            return []
        try:
            data = await self._files.read(location, max_bytes=self._file_max_bytes)
            return await asyncio.to_thread(read, data, location)
        except FileMissing:
            return []
        except LakefeedError as error:
            self._fail(location, error)
            return []

    async def _delete_all(self, locations: Iterable[str]) -> None:
        own = []
        for location in locations:
            if self._own.contain(location):
                own.append(location)
            else:
                self._tally.foreign += 1
        for group in _groups(own, PARALLEL_DELETES):
            await asyncio.gather(*(self._delete(location) for location in group))

    async def _delete(self, location: str) -> None:
        try:
            await self._files.delete(location)
            self._tally.deleted += 1
        except LakefeedError as error:
            self._fail(location, error)

    def _fail(self, location: str, error: LakefeedError) -> None:
        self._tally.failed += 1
        _logger.warning("purge_failed_on_file", extra={"location": location, "reason": str(error)})


def _manifest_lists(document: JsonObject) -> list[str]:
    snapshots = document.get("snapshots") or ()
    return [snapshot["manifest-list"] for snapshot in snapshots if "manifest-list" in snapshot]


def _statistics(document: JsonObject) -> list[str]:
    kinds = (document.get("statistics") or (), document.get("partition-statistics") or ())
    return [each["statistics-path"] for each in itertools.chain(*kinds)]


def _groups(items: list[_T], size: int) -> Iterable[list[_T]]:
    return (items[start : start + size] for start in range(0, len(items), size))
