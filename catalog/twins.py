"""Whether a table has a second name, because its metadata was registered twice. Owns how that is found out.

The two share their files, also when they have gone different ways since: a commit adds to one of them, and the metadata
of either may lie elsewhere by now. The uuid stays. The database keeps it beside the pointer, so that no metadata has to
be read, but that of tables whose uuid it does not know: those that were there before it kept it and were not committed
to since, and those that have none, which only the first version of the format allows.

Tables of different uuids are one as well if they have one location and their metadata is in one directory.
"""

from __future__ import annotations

import asyncio

from catalog.errors import BadRequest, FileMissing
from catalog.fields import JsonObject
from catalog.locations import parent_path
from catalog.metadata.documents import is_same_table
from catalog.metadata_files import MetadataFiles, StoredMetadata
from catalog.names import TableId
from catalog.pointers import Pointer
from catalog.store.protocol import Store

# Metadata files that are read at once; the S3 client has ten connections, and commits need some.
_PARALLEL_READS = 6


async def find_twin(table: TableId, stored: StoredMetadata, *, store: Store, files: MetadataFiles) -> TableId | None:
    """Find another name of a table.

    Raises: BadRequest, StorageFailed, StoreFailed.
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
        documents = await asyncio.gather(*(_maybe_document(files, others[name]) for name in group))
        for name, document in zip(group, documents, strict=True):
            if is_same_table(stored.document, document):
                return name
    return None


async def _maybe_document(files: MetadataFiles, pointer: Pointer) -> JsonObject | None:
    try:
        return (await files.load(pointer)).document
    except (FileMissing, BadRequest):
        return None
