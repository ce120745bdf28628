"""Validation finds what the catalog would refuse to serve."""

from __future__ import annotations

from pathlib import Path

import orjson

from lakefeed.catalog.config import CatalogConfig
from lakefeed.catalog.names import Pointer, TableId, content_digest
from lakefeed.catalog.service.backup import find_problems
from lakefeed.catalog.store.store import StoreContents
from tests.catalog.documents import new_table
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
    assert [problem.split(": ")[:2] for problem in problems] == [
        ["Table db.other", "Metadata file has other content than was registered, register it again"]
    ]
    await files.close()
