"""Backup of a store as text, and validation of the metadata that it points at. The format is the same for all stores.

    {"lakefeed-catalog-backup": 2}
    {"namespace": [level, ...], "properties": {...}}
    {"kind": "Table" or "View", "namespace": [level, ...], "name": name, "metadata-location": location,
     "digest": digest, "table-uuid": uuid}
    {"sha256": of all bytes before this line}

One JSON object per line, namespaces first, parents before their children. Digest and uuid are left out if unknown.
Version 1 has no last line, so a backup of it that was cut off between two lines cannot be recognised.

Metadata files are deleted some commits after they were superseded, so those that an old backup names may be gone. The
newest file beside the missing one takes its place; see `find_newest`.
"""

from __future__ import annotations

import asyncio
import hashlib
import posixpath
from collections import defaultdict
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import orjson

from lakefeed.catalog.config import CatalogConfig
from lakefeed.catalog.errors import BadRequest, CatalogError, FileChanged
from lakefeed.catalog.json_fields import (
    JsonObject,
    as_object,
    maybe_text,
    parse_object,
    read_int,
    read_text,
    read_text_map,
)
from lakefeed.catalog.metadata.document import check_document, parse_document
from lakefeed.catalog.metadata.views import parse_view_document
from lakefeed.catalog.names import (
    EntryId,
    Namespace,
    Pointer,
    ViewId,
    check_name,
    content_digest,
    namespace_from_json,
    next_version,
)
from lakefeed.catalog.service.metadata_files import Files, check_content, unpack
from lakefeed.catalog.store.store import StoreContents, entry_of
from lakefeed.contract.errors import FileMissing, LakefeedError, StorageError

_VERSION_KEY = "lakefeed-catalog-backup"
_VERSION = 2
_VERSION_WITHOUT_CHECKSUM = 1
_CHECKSUM_KEY = "sha256"
_METADATA_SUFFIXES = (".metadata.json", ".metadata.json.gz")
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
    text = b"".join(orjson.dumps(line) + b"\n" for line in lines)
    return text + orjson.dumps({_CHECKSUM_KEY: hashlib.sha256(text).hexdigest()}) + b"\n"


def decode_backup(text: bytes) -> StoreContents:
    """Read a backup.

    Raises: BadRequest, with the number of the line that cannot be read.
    """
    head, *lines = text.splitlines(keepends=True) or [b"{}"]
    try:
        version = read_int(parse_object(head), _VERSION_KEY)
    except BadRequest as error:
        raise BadRequest(f"File is not a backup of a catalog: {error}") from error
    if version not in (_VERSION_WITHOUT_CHECKSUM, _VERSION):
        raise BadRequest(f"Backup is of an unknown version, use the lakefeed that wrote it: version={version}")
    if version == _VERSION:
        *lines, last = lines or [b""]
        _check_whole(b"".join((head, *lines)), last)
    namespaces: dict[Namespace, dict[str, str]] = {}
    entries: dict[EntryId, Pointer] = {}
    for number, line in enumerate(lines, start=2):
        try:
            _read_line(line, namespaces, entries)
        except BadRequest as error:
            raise BadRequest(f"Backup cannot be read: {error}: line={number}") from error
    return StoreContents(namespaces, entries)


def _check_whole(text: bytes, last: bytes) -> None:
    try:
        expected = maybe_text(parse_object(last), _CHECKSUM_KEY)
    except BadRequest:
        expected = None
    if expected is None:
        raise BadRequest("Backup is incomplete, use another one: its last line has no checksum")
    if hashlib.sha256(text).hexdigest() != expected:
        raise BadRequest("Backup was changed after it was written, use another one: its checksum differs")


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


@dataclass(frozen=True, slots=True)
class Problem:
    """A table or view whose metadata file is missing, cannot be read, or is not what was registered."""

    entry: EntryId
    pointer: Pointer
    error: LakefeedError

    @property
    def is_outage(self) -> bool:
        """Return whether the storage failed, so that nothing is known about the file."""
        return isinstance(self.error, StorageError) and not isinstance(self.error, FileMissing | FileChanged)

    def __str__(self) -> str:
        return f"{self.entry.kind} {self.entry}: {self.error}: metadata_location={self.pointer.location}"


async def find_problems(contents: StoreContents, files: Files, config: CatalogConfig) -> AsyncIterator[Problem | None]:
    """Check that the metadata of every table and view exists, parses, and is what was registered.

    Yields for each, in any order, what is wrong with it, or None.
    """
    limit = asyncio.Semaphore(PARALLEL_READS)

    async def check(entry: EntryId, pointer: Pointer) -> Problem | None:
        async with limit:
            try:
                raw = await _read(pointer.location, files, config)
                check_content(pointer, raw)
                if isinstance(entry, ViewId):
                    parse_view_document(raw)
                else:
                    _parse_table(raw, pointer.table_uuid)
            except LakefeedError as error:
                return Problem(entry, pointer, error)
        return None

    for done in asyncio.as_completed([check(entry, pointer) for entry, pointer in contents.entries.items()]):
        yield await done


async def find_newest(pointer: Pointer, files: Files, config: CatalogConfig) -> Pointer | None:
    """Return the newest metadata file of a table whose own file cannot be read, or None.

    It is in the same directory, has a higher version and the same table uuid. A crash between the write of a file and
    the swap of the pointer leaves two files of one version: the one that was updated last is taken. An older version
    is not: it would take back commits that the backup has. Without a uuid nothing shows whose file it is.

    Raises: StorageError if the storage fails.
    """
    directory, oldest = posixpath.dirname(pointer.location), next_version(pointer.location)
    by_version: defaultdict[int, list[str]] = defaultdict(list)
    for name in await files.list_names(directory) if pointer.table_uuid else ():
        if name.endswith(_METADATA_SUFFIXES) and next_version(name) > oldest:
            by_version[next_version(name)].append(f"{directory}/{name}")
    for version in sorted(by_version, reverse=True):
        found: list[tuple[int, Pointer]] = []
        for location in by_version[version]:
            try:
                raw = await _read(location, files, config)
                updated_ms = _parse_table(raw, pointer.table_uuid)["last-updated-ms"]
            except (CatalogError, FileMissing):
                continue
            digest = content_digest(raw) if pointer.digest else ""
            found.append((updated_ms, Pointer(location, digest, pointer.table_uuid)))
        if found:
            return max(found, key=lambda each: (each[0], each[1].location))[1]
    return None


async def _read(location: str, files: Files, config: CatalogConfig) -> bytes:
    packed = await files.read(location, max_bytes=config.metadata_max_bytes)
    return unpack(location, packed, config.metadata_max_bytes)


def _parse_table(raw: bytes, table_uuid: str) -> JsonObject:
    """Read a table's document. Raise BadRequest if it cannot be read or is another table's."""
    document = parse_document(raw)
    check_document(document)
    if table_uuid and document.get("table-uuid") != table_uuid:
        raise BadRequest(f"Metadata file is of another table: {document.get('table-uuid')}, expected {table_uuid}")
    return document
