"""Backup of a store as text, and validation of the metadata that it points at. The format is the same for all stores.

    {"lakefeed-catalog-backup": 1}
    {"namespace": [level, ...], "properties": {...}}
    {"kind": "Table" or "View", "namespace": [level, ...], "name": name, "metadata-location": location,
     "digest": digest, "table-uuid": uuid}

One JSON object per line, namespaces first, parents before their children. Digest and uuid are left out if unknown.
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
from lakefeed.catalog.service.metadata_files import Files, check_content, unpack
from lakefeed.catalog.store.store import StoreContents, entry_of
from lakefeed.contract.errors import LakefeedError

_VERSION_KEY = "lakefeed-catalog-backup"
_VERSION = 1
# Enough to hide the latency of a remote store, few enough to hold in memory.
PARALLEL_READS = 8


def encode_backup(contents: StoreContents) -> bytes:
    """Return a backup of a store's contents."""
    lines: list[dict[str, Any]] = [{_VERSION_KEY: _VERSION}]
    lines += [{"namespace": name, "properties": dict(held)} for name, held in contents.namespaces.items()]
    for entry, pointer in contents.entries.items():
        line = {"kind": entry.kind, **entry.to_json(), "metadata-location": pointer.location}
        known = {"digest": pointer.digest, "table-uuid": pointer.table_uuid}
        lines.append({**line, **{key: value for key, value in known.items() if value}})
    return b"".join(orjson.dumps(line) + b"\n" for line in lines)


def decode_backup(text: bytes) -> StoreContents:
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
    return StoreContents(namespaces, entries)


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


async def find_problems(contents: StoreContents, files: Files, config: CatalogConfig) -> AsyncIterator[str | None]:
    """Check that the metadata of every table and view exists, parses, and is what was registered.

    Yields for each, in any order, what is wrong with it, or None.
    """
    limit = asyncio.Semaphore(PARALLEL_READS)

    async def check(entry: EntryId, pointer: Pointer) -> str | None:
        location = pointer.location
        async with limit:
            try:
                packed = await files.read(location, max_bytes=config.metadata_max_bytes)
                raw = unpack(location, packed, config.metadata_max_bytes)
                check_content(pointer, raw)
                if isinstance(entry, ViewId):
                    parse_view_document(raw)
                else:
                    check_document(parse_document(raw))
            except LakefeedError as error:
                return f"{entry.kind} {entry}: {error}: metadata_location={location}"
        return None

    for done in asyncio.as_completed([check(entry, pointer) for entry, pointer in contents.entries.items()]):
        yield await done
