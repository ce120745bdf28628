"""Metadata files as documents, with a cache of parsed ones. Owns serialising, unpacking and the cache's limit.

A metadata file never changes while a pointer points there, so what is cached for a pointer is true for as long as that
stands in the database. Files that were registered are written by others, who may not keep to that: what is read of one
is checked against the digest of what was registered. Cached documents are shared between requests: nobody may change
one.
"""

from __future__ import annotations

import asyncio
import functools
import gzip
import hashlib
import zlib
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

import orjson

from lakefeed.aio import SharedWork
from lakefeed.catalog.errors import BadRequest, FileChanged
from lakefeed.catalog.json_fields import JsonObject
from lakefeed.catalog.metadata.document import Serialised, only_referenced_snapshots, serialise
from lakefeed.catalog.names import Pointer, digest_of, point_at
from lakefeed.catalog.service.files import Files
from lakefeed.contract.errors import StorageError

# --- catalog.metadata_files -------------------------------------------------------------------------------------------


# Memory of a document and its bytes, per byte (measured with tables of 10 to 5,000 snapshots: 4.2).
_MEMORY_PER_BYTE = 5
# zlib's code for "a gzip header follows".
_GZIP_WINDOW_BITS = 31

# Location and digest: a table and its twin may point at one file, the one with a digest and the other without.
_Version = tuple[str, str]


@dataclass(frozen=True, slots=True)
class StoredMetadata:
    """One version of a table or view: where it is, what it says, and the very bytes, which answers embed."""

    pointer: Pointer
    content: Serialised

    @property
    def location(self) -> str:
        """Return where it is."""
        return self.pointer.location

    @property
    def document(self) -> JsonObject:
        """Return what it says."""
        return self.content.document

    @property
    def raw(self) -> bytes:
        """Return the bytes."""
        return self.content.raw


class MetadataFiles:
    """Reads and writes metadata files; the least recently used documents leave the cache first."""

    def __init__(self, files: Files, *, parse: Callable[[bytes], JsonObject], max_bytes: int, cache_bytes: int) -> None:
        self._files = files
        self._parse = parse
        self._max_bytes = max_bytes
        self._cache_bytes = cache_bytes
        self._cached: OrderedDict[_Version, StoredMetadata] = OrderedDict()
        self._used_bytes = 0
        self._reading: SharedWork[StoredMetadata] = SharedWork("catalog-read-metadata")

    async def load(self, pointer: Pointer) -> StoredMetadata:
        """Return the document that a pointer stands for. What many ask for at once is read, and held, once.

        Raises: FileMissing, FileChanged, StorageError; BadRequest if it is not what `parse` reads.
        """
        version = _version(pointer)
        cached = self._cached.get(version)
        if cached is not None:
            self._cached.move_to_end(version)
            return cached
        return await self._reading.outcome(version, lambda: self._read_and_keep(pointer.location, pointer.digest))

    async def peek(self, pointer: Pointer) -> StoredMetadata:
        """Return the document that a pointer stands for, and leave the cache as it is: for who looks at many, once.

        Raises: FileMissing, FileChanged, StorageError; BadRequest if it is not what `parse` reads.
        """
        return self._cached.get(_version(pointer)) or await self._read(pointer.location, pointer.digest)

    async def load_anew(self, location: str) -> StoredMetadata:
        """Return the document that is in a file now, whatever was there before, with the digest of its content.

        Raises: FileMissing, StorageError; BadRequest if it is not what `parse` reads.
        """
        return await self._read_and_keep(location, None)

    async def _read_and_keep(self, location: str, digest: str | None) -> StoredMetadata:
        stored = await self._read(location, digest)
        self.keep(stored)
        return stored

    async def _read(self, location: str, digest: str | None) -> StoredMetadata:
        """Read a file that has to have this digest: any if it is empty; if there is none, find out which it has."""
        raw = unpack(location, await self._files.read(location, max_bytes=self._max_bytes), self._max_bytes)
        if digest is None:
            digest = digest_of(raw)
        else:
            check_content(Pointer(location, digest), raw)
        document = self._parse(raw)
        pointer = point_at(location, document, digest=digest)
        return StoredMetadata(pointer, Serialised(document, raw, snapshots_at=None))

    async def check_exists(self, location: str) -> None:
        """Check that a file is there, whether or not its content is cached.

        Raises: FileMissing, StorageError.
        """
        await self._files.check_exists(location)

    async def write(self, location: str, document: JsonObject, *, base: StoredMetadata | None = None) -> StoredMetadata:
        """Write a document, made from that of `base`, under a new, unique location.

        Raises: StorageError.
        """
        stored = StoredMetadata(point_at(location, document), serialise(document, base.content if base else None))
        await self._files.write(location, stored.raw)
        self.keep(stored)
        return stored

    async def begin_write(
        self, location: str, document: JsonObject, *, base: StoredMetadata
    ) -> tuple[StoredMetadata, Callable[[], None] | None]:
        """Write a document like `write`; or, where that takes a thread, return what the caller has to run in one.

        The document is not kept: that is for `keep`, once it is written.

        Raises: StorageError.
        """
        stored = StoredMetadata(point_at(location, document), serialise(document, base.content))
        work = self._files.blocking_write(location, stored.raw)
        if work is None:
            await self._files.write(location, stored.raw)
        return stored, work

    async def delete(self, location: str) -> None:
        """Delete a file that nothing refers to.

        Raises: StorageError.
        """
        self.forget(Pointer(location))
        await self._files.delete(location)

    async def prepare(self, directories: list[str]) -> None:
        """Make directories, where there are directories.

        Raises: StorageError.
        """
        for directory in directories:
            await self._files.make_directory(directory)

    def forget(self, pointer: Pointer) -> None:
        """Drop from the cache what is superseded."""
        dropped = self._cached.pop(_version(pointer), None)
        if dropped is not None:
            self._used_bytes -= _memory_bytes(dropped)

    def keep(self, stored: StoredMetadata) -> None:
        """Keep in the cache what is in its file."""
        self.forget(stored.pointer)
        if _memory_bytes(stored) > self._cache_bytes:
            return  # it would drive out all others and then itself
        self._cached[_version(stored.pointer)] = stored
        self._used_bytes += _memory_bytes(stored)
        while self._used_bytes > self._cache_bytes:
            _, dropped = self._cached.popitem(last=False)
            self._used_bytes -= _memory_bytes(dropped)


def check_content(pointer: Pointer, raw: bytes) -> None:
    """Check that an unpacked file is the one that was registered, if it was.

    Raises: FileChanged.
    """
    if pointer.digest and digest_of(raw) != pointer.digest:
        raise FileChanged(f"Metadata file has other content than was registered, register it again: {pointer.location}")


def unpack(location: str, body: bytes, max_bytes: int) -> bytes:
    """Unpack a metadata file that other writers compressed, never beyond the limit.

    Raises: BadRequest, StorageError.
    """
    if not location.endswith((".gz.metadata.json", ".metadata.json.gz")):
        return body
    decompressor = zlib.decompressobj(_GZIP_WINDOW_BITS)
    try:
        unpacked = decompressor.decompress(body, max_bytes)
    except zlib.error as error:
        raise BadRequest(f"Malformed gzip in metadata file: {location}") from error
    if decompressor.unconsumed_tail:
        raise StorageError(f"File is larger than {max_bytes} bytes: {location}")
    return unpacked


def _version(pointer: Pointer) -> _Version:
    return pointer.location, pointer.digest


def _memory_bytes(stored: StoredMetadata) -> int:
    return len(stored.raw) * _MEMORY_PER_BYTE


# --- catalog.answers --------------------------------------------------------------------------------------------------
#
# Finished answers of table loads: their bytes, plain and gzipped, and their tags. Owns the cache and its limit.
#
# A metadata file never changes while a pointer with its digest points there, so an answer depends on that pointer, on
# how much of the history is shown and on the client configuration alone. A load is then one look-up of the pointer and
# one write, whatever the table's age; and a client that has the version already is answered from the pointer alone.


ALL, REFS = "all", "refs"

# Enough of a SHA-256 that two versions of one table never share a tag.
_ETAG_BYTES = 16
# Tags that are kept, a few hundred bytes each with their locations.
_ETAGS_MAX = 4_096
# Below a packet there is nothing to win.
GZIP_MIN_BYTES = 1_400
# A document of a thousand snapshots packs 8 to 1 at the lowest level, in a third of the default level's time.
_GZIP_LEVEL = 1


@dataclass(frozen=True, slots=True)
class Key:
    """What an answer depends on."""

    pointer: Pointer
    shown: str
    packed: bool


class LoadAnswers:
    """Answers by what they depend on; the least recently used leave first."""

    def __init__(self, client_config: Mapping[str, str], *, max_bytes: int) -> None:
        self._config = orjson.dumps(dict(client_config))
        self._max_bytes = max_bytes
        self._kept: OrderedDict[Key, bytes] = OrderedDict()
        self._used_bytes = 0
        self._building: SharedWork[bytes] = SharedWork("catalog-build-answer")
        # A load of a version that did not change asks for the same tag again and again.
        self.etag = functools.lru_cache(_ETAGS_MAX)(self._etag)

    def _etag(self, pointer: Pointer, shown: str) -> str:
        """Tag all that an answer says: the version, how much of it is shown, and the client configuration."""
        facts = b"\0".join((pointer.location.encode(), pointer.digest.encode(), shown.encode(), self._config))
        return hashlib.sha256(facts).hexdigest()[: 2 * _ETAG_BYTES]

    async def find_or_build(self, key: Key, load: Callable[[], Awaitable[StoredMetadata]]) -> bytes:
        """Give a finished answer, building it from the metadata if it is not kept; who asks meanwhile waits for it.

        Raises: what `load` raises.
        """
        kept = self._kept.get(key)
        if kept is None:
            return await self._building.outcome(key, lambda: self._build(key, load))
        self._kept.move_to_end(key)
        return kept

    async def _build(self, key: Key, load: Callable[[], Awaitable[StoredMetadata]]) -> bytes:
        answer = self.build(await load(), key.shown)
        if key.packed and len(answer) >= GZIP_MIN_BYTES:
            answer = await asyncio.to_thread(functools.partial(gzip.compress, answer, _GZIP_LEVEL, mtime=0))
        self._keep(key, answer)
        return answer

    def build(self, stored: StoredMetadata, shown: str = ALL, *, with_config: bool = True) -> bytes:
        """Put an answer together; the metadata's bytes go in as they are in the file."""
        metadata = stored.raw if shown == ALL else orjson.dumps(only_referenced_snapshots(stored.document))
        config = (b',"config":', self._config) if with_config else ()
        return b"".join(
            (b'{"metadata-location":', orjson.dumps(stored.location), b',"metadata":', metadata, *config, b"}")
        )

    def _keep(self, key: Key, answer: bytes) -> None:
        if len(answer) > self._max_bytes:
            return
        self._used_bytes += len(answer) - len(self._kept.pop(key, b""))
        self._kept[key] = answer
        while self._used_bytes > self._max_bytes:
            _, dropped = self._kept.popitem(last=False)
            self._used_bytes -= len(dropped)
