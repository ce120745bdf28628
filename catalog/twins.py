"""Whether a table has a second name, because its metadata was registered twice. Owns how that is found out.

The two share their files, also when they have gone different ways since: a commit adds to one of them, and the metadata
of either may lie elsewhere by now. The uuid stays. The database keeps it beside the pointer, so that no metadata has to
be read, but that of tables whose uuid it does not know: those that were there before it kept it and were not committed
to since, and those that have none, which only the first version of the format allows. A uuid that was read for this is
told to the database, so that it is read once.

Tables of different uuids are one as well if they have one location and their metadata is in one directory: of those
the metadata is read.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from catalog.errors import BadRequest, FileMissing, StorageFailed
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

    Raises: StorageFailed, with the name of a table that may be a twin and cannot be read; StoreFailed.
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
        if isinstance(outcome, StorageFailed):
            raise StorageFailed(
                f"Cannot purge table: its files may also be those of {name}, whose metadata cannot be read;"
                f" make it readable, or drop {table} without purge: {outcome}"
            ) from outcome
    return None


async def _maybe_read(files: MetadataFiles, pointer: Pointer) -> StoredMetadata | StorageFailed | None:
    """Read a table's metadata: None if there is none to be read, the error if it may be read another time."""
    try:
        return await files.peek(pointer)
    except (FileMissing, BadRequest):
        return None
    except StorageFailed as error:
        return error
