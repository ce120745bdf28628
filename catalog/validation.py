"""Whether the metadata behind every name exists, can be read and is what was registered. Changes nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from catalog.config import CatalogConfig
from catalog.errors import CatalogError
from catalog.metadata.documents import check_document, parse_document
from catalog.metadata.views import parse_view_document
from catalog.metadata_files import check_content, unpack
from catalog.names import EntryId, ViewId
from catalog.pointers import Pointer
from catalog.storage import Files
from catalog.store.protocol import Contents

# Files that are read at once: enough to hide a far store's delay, few enough to hold in memory.
PARALLEL_READS = 8


async def find_problems(contents: Contents, files: Files, config: CatalogConfig) -> AsyncIterator[str | None]:
    """Yield for every table and view what is wrong with it, None if nothing is, in any order."""
    limit = asyncio.Semaphore(PARALLEL_READS)

    async def look(entry: EntryId, pointer: Pointer) -> str | None:
        location = pointer.location
        async with limit:
            try:
                packed = await files.read(location, max_bytes=config.metadata_max_bytes)
                raw = unpack(location, packed, config.metadata_max_bytes)
                check_content(pointer, raw)
                _check(entry, raw)
            except CatalogError as error:
                return f"{entry.kind} {entry}: {error}: metadata_location={location}"
        return None

    for done in asyncio.as_completed([look(entry, pointer) for entry, pointer in contents.entries.items()]):
        yield await done


def _check(entry: EntryId, raw: bytes) -> None:
    if isinstance(entry, ViewId):
        parse_view_document(raw)
    else:
        check_document(parse_document(raw))
