"""Child process of verify.py: plans a full scan of one snapshot with PyIceberg. The only import of PyIceberg.

Manifests are read through lakefeed.storage, so that every store works that the table itself uses; decoding them and
choosing files is PyIceberg's.
"""

from __future__ import annotations

import asyncio
import io
import json
import sys
import threading
from collections.abc import Callable
from typing import Any

from pyiceberg.catalog.noop import NoopCatalog
from pyiceberg.io import FileIO, InputFile, InputStream, OutputFile
from pyiceberg.table import StaticTable
from pyiceberg.table.metadata import TableMetadataUtil

from lakefeed.storage.config import StorageConfig
from lakefeed.storage.store import open_store
from lakefeed.writer.verify import partition_text

ReadObject = Callable[[str], bytes]


class _StoredFile(InputFile):
    """An object of our store as PyIceberg reads files."""

    def __init__(self, location: str, read: ReadObject) -> None:
        super().__init__(location)
        self._read = read

    def __len__(self) -> int:
        return len(self._read(self.location))

    def exists(self) -> bool:
        """Return True: a missing object is an error when it is opened."""
        return True

    def open(self, seekable: bool = True) -> InputStream:
        """Read the object."""
        return io.BytesIO(self._read(self.location))


class _StoreIO(FileIO):
    """Our store as PyIceberg's file access. Read-only."""

    def __init__(self, read: ReadObject) -> None:
        super().__init__()
        self._read = read

    def new_input(self, location: str) -> InputFile:
        """Return a file to read."""
        return _StoredFile(location, self._read)

    def new_output(self, location: str) -> OutputFile:
        """Refuse to write."""
        raise NotImplementedError(location)

    def delete(self, location: str | InputFile | OutputFile) -> None:
        """Refuse to delete."""
        raise NotImplementedError(location)


def plan_files(request: dict[str, Any], read: ReadObject) -> dict[str, tuple[int, str]]:
    """Return rows and partition of each data file that PyIceberg finds, by path."""
    table = StaticTable(
        identifier=("static", "table"),
        metadata=TableMetadataUtil.parse_raw(json.dumps(request["metadata"])),
        metadata_location="",
        io=_StoreIO(read),
        catalog=NoopCatalog("static"),
    )
    tasks = table.scan(snapshot_id=request["snapshot_id"]).plan_files()
    found = {}
    for file in (task.file for task in tasks):
        values = [file.partition[position] for position in range(len(file.partition))]
        found[file.file_path] = (file.record_count, partition_text(values))
    return found


async def main() -> None:
    """Read a request from stdin, and write the files as JSON to stdout."""
    request = json.load(sys.stdin)
    loop = asyncio.get_running_loop()
    async with open_store(StorageConfig(**request["storage"])) as store:

        def read(location: str) -> bytes:
            assert threading.current_thread() is not threading.main_thread(), "the loop's thread would wait for itself"
            return asyncio.run_coroutine_threadsafe(store.read(location), loop).result()

        files = await asyncio.to_thread(plan_files, request, read)
    json.dump(files, sys.stdout)


if __name__ == "__main__":
    asyncio.run(main())
