"""Validation finds what the catalog would refuse to serve; the newest metadata file replaces one that is gone."""

from __future__ import annotations

from pathlib import Path

import orjson

from lakefeed.catalog.config import CatalogConfig
from lakefeed.catalog.names import Pointer, TableId, content_digest
from lakefeed.catalog.service.backup import find_newest, find_problems
from lakefeed.catalog.store.store import StoreContents
from tests.catalog.documents import UUID, new_table
from tests.catalog.local_files import LocalFiles

DB = ("db",)


async def test_file_that_was_written_over_after_it_was_registered_is_a_problem(tmp_path: Path):
    raw = orjson.dumps(new_table())
    place = tmp_path / "v1.metadata.json"
    place.write_bytes(raw)
    location = f"file://{place}"
    digests = {"same": content_digest(raw), "other": content_digest(b"what was registered"), "unknown": ""}
    contents = StoreContents(
        {DB: {}}, {TableId(DB, name): Pointer(location, digest) for name, digest in digests.items()}
    )
    files = LocalFiles()
    problems = [found async for found in find_problems(contents, files, CatalogConfig()) if found]
    assert [str(problem).split(": ")[:2] for problem in problems] == [
        ["Table db.other", "Metadata file has other content than was registered, register it again"]
    ]
    await files.close()


async def test_newest_file_is_of_the_highest_version_that_can_be_read_and_of_the_same_table(tmp_path: Path):
    table = new_table()
    other = {**table, "table-uuid": "other"}
    later = {**table, "last-updated-ms": table["last-updated-ms"] + 1}
    files = {"00002-a": table, "00005-a": table, "00005-b": later, "00005-c": table, "00008-a": other}
    for name, document in files.items():
        (tmp_path / f"{name}.metadata.json").write_bytes(orjson.dumps(document))
    (tmp_path / "00007-cut.metadata.json").write_bytes(orjson.dumps(table)[:100])
    (tmp_path / "00009-a.avro").write_bytes(b"")
    storage = LocalFiles()

    async def newest(version: int, table_uuid: str = UUID) -> Pointer | None:
        lost = Pointer(f"file://{tmp_path}/{version:05d}-lost.metadata.json", table_uuid=table_uuid)
        return await find_newest(lost, storage, CatalogConfig())

    expected = Pointer(f"file://{tmp_path}/00005-b.metadata.json", table_uuid=UUID)
    assert await newest(3) == expected
    assert await newest(4) == expected
    assert await newest(5) is None, "a file of the same version does not follow the one in the backup"
    assert await newest(3, table_uuid="") is None
    await storage.close()
