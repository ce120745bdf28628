"""Purge of a table whose files may be those of another one, whose uuid the database does not know."""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest

from lakefeed.catalog.metadata.document import parse_document
from lakefeed.catalog.names import Pointer, TableId
from lakefeed.catalog.service.metadata_files import MetadataFiles, StoredMetadata
from lakefeed.catalog.service.purge import find_table_sharing_files
from lakefeed.catalog.store.sqlite import MemoryStore
from lakefeed.contract.errors import StorageError
from tests.catalog.documents import new_table
from tests.catalog.local_files import LocalFiles

DB = ("db",)
PURGED = TableId(DB, "purged")
OTHERS = [TableId(DB, f"t{number}") for number in range(20)]


class CountedFiles(LocalFiles):
    """The local disk; records the names of files read, and refuses to read one."""

    def __init__(self) -> None:
        super().__init__()
        self.read_names: list[str] = []
        self.refused_name = ""

    async def read(self, location: str, *, max_bytes: int) -> bytes:
        name = location.rsplit("/", 1)[1]
        self.read_names.append(name)
        if name == self.refused_name:
            raise StorageError(f"Access denied: {location}")
        return await super().read(location, max_bytes=max_bytes)


class Catalog:
    """A store without uuids, and its files, with a cache for a few of them."""

    def __init__(self, root: Path, *, cache_bytes: int = 20_000) -> None:
        self.root = root
        self.store = MemoryStore()
        self.disk = CountedFiles()
        self.files = MetadataFiles(self.disk, parse=parse_document, max_bytes=10**6, cache_bytes=cache_bytes)

    async def add(self, table: TableId, uuid: str) -> Pointer:
        """Create a table whose uuid the store does not know."""
        place = self.root / table.name / "metadata" / f"{table.name}.metadata.json"
        place.parent.mkdir(parents=True)
        document = {**new_table(), "table-uuid": uuid, "location": f"file://{self.root}/{table.name}"}
        place.write_bytes(orjson.dumps(document))
        pointer = Pointer(f"file://{place}")
        await self.store.create_entry(table, pointer)
        return pointer

    async def fill(self) -> StoredMetadata:
        """Create all tables; return the one to purge."""
        await self.store.open()
        await self.store.create_namespace(DB, {})
        for table in OTHERS:
            await self.add(table, f"uuid of {table.name}")
        return await self.files.load(await self.add(PURGED, "uuid"))

    async def close(self) -> None:
        await self.disk.close()
        await self.store.close()

    async def find_sharing(self, stored: StoredMetadata) -> TableId | None:
        """Find another table with the same files."""
        return await find_table_sharing_files(PURGED, stored, store=self.store, files=self.files)


async def test_tables_of_unknown_uuid_are_read_and_stay_out_of_the_cache(tmp_path: Path):
    catalog = Catalog(tmp_path)
    stored = await catalog.fill()
    catalog.disk.read_names.clear()
    assert await catalog.find_sharing(stored) is None
    assert sorted(catalog.disk.read_names) == sorted(f"{table.name}.metadata.json" for table in OTHERS)
    assert await catalog.files.load(stored.pointer) is stored
    await catalog.close()


async def test_table_with_the_same_files_is_found_though_its_uuid_is_unknown(tmp_path: Path):
    catalog = Catalog(tmp_path)
    stored = await catalog.fill()
    other = TableId(DB, "other-name")
    await catalog.add(other, "uuid")
    assert await catalog.find_sharing(stored) == other
    await catalog.close()


async def test_table_that_cannot_be_read_is_named(tmp_path: Path):
    catalog = Catalog(tmp_path)
    stored = await catalog.fill()
    catalog.disk.refused_name = "t1.metadata.json"
    with pytest.raises(
        StorageError, match=r"db\.t1, .*make it readable, or drop db\.purged without purge.*Access denied"
    ):
        await catalog.find_sharing(stored)
    catalog.disk.refused_name = ""
    assert await catalog.find_sharing(stored) is None
    await catalog.close()
