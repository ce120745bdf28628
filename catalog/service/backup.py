"""What a store holds, as text. Core: owns the layout of a backup, which is the same for every kind of store.

    {"lakefeed-catalog-backup": 1}
    {"namespace": [level, ...], "properties": {...}}
    {"kind": "Table" or "View", "namespace": [level, ...], "name": name, "metadata-location": location,
     "digest": digest, "table-uuid": uuid}

One JSON object a line, namespaces first and parents before their children. Digest and uuid are left out where they are
not known.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import orjson

from lakefeed.catalog.config import CatalogConfig
from lakefeed.catalog.errors import BadRequest
from lakefeed.catalog.json_fields import as_object, maybe_text, parse_object, read_int, read_text, read_text_map
from lakefeed.catalog.metadata.document import check_document, parse_document
from lakefeed.catalog.metadata.views import parse_view_document
from lakefeed.catalog.names import EntryId, Namespace, Pointer, ViewId, check_name, namespace_from_json
from lakefeed.catalog.service.files import Files
from lakefeed.catalog.service.metadata_cache import check_content, unpack
from lakefeed.catalog.store.protocol import Contents, entry_of
from lakefeed.contract.errors import LakefeedError

# --- catalog.backup ---------------------------------------------------------------------------------------------------


_VERSION_KEY = "lakefeed-catalog-backup"
_VERSION = 1


def encode_backup(contents: Contents) -> bytes:
    """Lay out a backup."""
    lines: list[dict[str, Any]] = [{_VERSION_KEY: _VERSION}]
    lines += [{"namespace": name, "properties": dict(held)} for name, held in contents.namespaces.items()]
    lines += [_entry_line(entry, pointer) for entry, pointer in contents.entries.items()]
    return b"".join(orjson.dumps(line) + b"\n" for line in lines)


def _entry_line(entry: EntryId, pointer: Pointer) -> dict[str, Any]:
    known = {"digest": pointer.digest, "table-uuid": pointer.table_uuid}
    return {
        "kind": entry.kind,
        "namespace": entry.namespace,
        "name": entry.name,
        "metadata-location": pointer.location,
        **{key: value for key, value in known.items() if value},
    }


def decode_backup(text: bytes) -> Contents:
    """Read a backup.

    Raises: BadRequest, with the number of the line.
    """
    head, *lines = text.splitlines() or [b"{}"]
    if read_int(parse_object(head), _VERSION_KEY) != _VERSION:
        raise BadRequest(f"Backup is of an unknown version: {head.decode(errors='replace')}")
    namespaces: dict[Namespace, dict[str, str]] = {}
    entries: dict[EntryId, Pointer] = {}
    for number, line in enumerate(lines, start=2):
        try:
            _read_line(line, namespaces, entries)
        except BadRequest as error:
            raise BadRequest(f"Backup cannot be read: {error}: line={number}") from error
    return Contents(namespaces, entries)


def _read_line(line: bytes, namespaces: dict[Namespace, dict[str, str]], entries: dict[EntryId, Pointer]) -> None:
    document = as_object(parse_object(line), "line")
    namespace = namespace_from_json(document)
    if "kind" not in document:
        namespaces[namespace] = read_text_map(document, "properties")
        return
    if namespace not in namespaces:
        raise BadRequest("the namespace does not come before what it holds")
    entry = entry_of(read_text(document, "kind"), namespace, check_name(document.get("name"), "name"))
    entries[entry] = Pointer(
        read_text(document, "metadata-location"),
        digest=maybe_text(document, "digest") or "",
        table_uuid=maybe_text(document, "table-uuid") or "",
    )


# --- catalog.validation -----------------------------------------------------------------------------------------------
#
# Whether the metadata behind every name exists, can be read and is what was registered. Changes nothing.


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
            except LakefeedError as error:
                return f"{entry.kind} {entry}: {error}: metadata_location={location}"
        return None

    for done in asyncio.as_completed([look(entry, pointer) for entry, pointer in contents.entries.items()]):
        yield await done


def _check(entry: EntryId, raw: bytes) -> None:
    if isinstance(entry, ViewId):
        parse_view_document(raw)
    else:
        check_document(parse_document(raw))
