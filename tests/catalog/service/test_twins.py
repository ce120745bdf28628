"""Twins among tables whose uuid the database does not know, as after an update from a version that did not keep it."""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest

from lakefeed.catalog.metadata.document import parse_document
from lakefeed.catalog.names import Pointer, TableId
from lakefeed.catalog.service.metadata_cache import MetadataFiles, StoredMetadata
from lakefeed.catalog.service.tables import find_twin
from lakefeed.catalog.store.memory import MemoryStore
from lakefeed.contract.errors import StorageError
from tests.catalog.documents import new_table
from tests.catalog.local_files import LocalFiles

DB = ("db",)
PURGED = TableId(DB, "purged")
OTHERS = [TableId(DB, f"t{number}") for number in range(20)]


class CountedFiles(LocalFiles):
    """The local disk, with the names of what was read, and of what may not be."""

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
    """A store that knows no uuid, and its files, of which the cache holds one that is used all the time."""

    def __init__(self, root: Path, *, cache_bytes: int = 20_000) -> None:
        self.root = root
        self.store = MemoryStore()
        self.disk = CountedFiles()
        self.files = MetadataFiles(self.disk, parse=parse_document, max_bytes=10**6, cache_bytes=cache_bytes)

    async def add(self, table: TableId, uuid: str) -> Pointer:
        """Make a table of a uuid that the store is not told."""
        place = self.root / table.name / "metadata" / f"{table.name}.metadata.json"
        place.parent.mkdir(parents=True)
        document = {**new_table(), "table-uuid": uuid, "location": f"file://{self.root}/{table.name}"}
        place.write_bytes(orjson.dumps(document))
        pointer = Pointer(f"file://{place}")
        await self.store.create_entry(table, pointer)
        return pointer

    async def fill(self) -> StoredMetadata:
        """Make all tables; return the one that is to be purged."""
        await self.store.create_namespace(DB, {})
        for table in OTHERS:
            await self.add(table, f"uuid of {table.name}")
        return await self.files.load(await self.add(PURGED, "uuid"))

    async def find_twin(self, stored: StoredMetadata) -> TableId | None:
        """Look for a twin."""
        return await find_twin(PURGED, stored, store=self.store, files=self.files)


async def test_tables_of_unknown_uuid_are_read_once_and_then_known(tmp_path: Path):
    catalog = Catalog(tmp_path)
    stored = await catalog.fill()
    catalog.disk.read_names.clear()
    assert await catalog.find_twin(stored) is None
    assert sorted(catalog.disk.read_names) == sorted(f"{table.name}.metadata.json" for table in OTHERS)
    assert await catalog.find_twin(stored) is None
    assert len(catalog.disk.read_names) == len(OTHERS)
    for table in OTHERS:
        pointer = await catalog.store.load_pointer(table)
        assert pointer is not None
        assert pointer.table_uuid == f"uuid of {table.name}"
    await catalog.disk.close()


async def test_looking_for_twins_drives_nothing_out_of_the_cache(tmp_path: Path):
    catalog = Catalog(tmp_path)
    stored = await catalog.fill()
    assert await catalog.find_twin(stored) is None
    assert await catalog.files.load(stored.pointer) is stored
    await catalog.disk.close()


async def test_twin_of_unknown_uuid_is_found_and_known_from_then_on(tmp_path: Path):
    catalog = Catalog(tmp_path)
    stored = await catalog.fill()
    twin = TableId(DB, "a-twin")
    await catalog.add(twin, "uuid")
    assert await catalog.find_twin(stored) == twin
    catalog.disk.read_names.clear()
    assert await catalog.find_twin(stored) == twin
    assert catalog.disk.read_names == []
    await catalog.disk.close()


async def test_table_that_cannot_be_read_is_named_and_those_read_with_it_are_known(tmp_path: Path):
    catalog = Catalog(tmp_path)
    stored = await catalog.fill()
    catalog.disk.refused_name = "t1.metadata.json"
    with pytest.raises(
        StorageError, match=r"db\.t1, .*make it readable, or drop db\.purged without purge.*Access denied"
    ):
        await catalog.find_twin(stored)
    known = await catalog.store.load_pointer(OTHERS[0])
    assert known is not None
    assert known.table_uuid == "uuid of t0"
    catalog.disk.refused_name = ""
    assert await catalog.find_twin(stored) is None
    await catalog.disk.close()
