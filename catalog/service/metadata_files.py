"""Metadata files: object storage with Iceberg's error texts, and a cache of parsed documents under a byte limit.

    pointer --MetadataFiles--> document and its bytes        location --Files--> bytes, with one time limit

A metadata file never changes while a pointer points at it, so what is cached for a pointer stays true. Registered
files belong to other writers, who may overwrite them: their content is compared with the digest in the pointer. Cached
documents are shared between requests and never changed.
"""

from __future__ import annotations

import asyncio
import errno
import functools
import zlib
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

from lakefeed.aio import SingleFlight
from lakefeed.catalog.errors import BadRequest, FileChanged
from lakefeed.catalog.json_fields import JsonObject
from lakefeed.catalog.metadata.document import EncodedDocument, encode_document
from lakefeed.catalog.names import Pointer, content_digest, pointer_to
from lakefeed.contract.errors import FileMissing, LocationInvalid, StorageError
from lakefeed.locations import parse_location
from lakefeed.storage.store import ObjectStore

# Locations of current metadata files, which every load asks for; a few hundred bytes each.
_PARSED_MAX = 4_096
# Memory of a document and its bytes, per byte (measured with tables of 10 to 5,000 snapshots: 4.2).
_MEMORY_PER_BYTE = 5
# zlib's code for "a gzip header follows".
_GZIP_WINDOW_BITS = 31

_K = TypeVar("_K")
_V = TypeVar("_V")
_T = TypeVar("_T")


class Files:
    """Whole files by location. Every method raises LocationInvalid for a location that has no single meaning."""

    def __init__(self, store: ObjectStore, *, timeout_s: float) -> None:
        self._store = store
        self._timeout_s = timeout_s

    async def open(self) -> None:
        """Open the store."""
        await self._store.open()

    async def close(self) -> None:
        """Close the store."""
        await self._store.close()

    async def read(self, location: str, *, max_bytes: int) -> bytes:
        """Read a file.

        Raises: FileMissing; StorageError, also if the file is larger than `max_bytes`.
        """
        return await self._run(location, lambda checked: self._store.read(checked, max_bytes=max_bytes))

    async def write(self, location: str, body: bytes) -> None:
        """Write a new file, which is durable when this returns.

        Raises: StorageError. Whether the file exists is then unknown.
        """
        await self._run(location, lambda checked: self._store.write(checked, body))

    def blocking_write(self, location: str, body: bytes) -> Callable[[], None] | None:
        """Return a function that writes a new file from a thread, or None if writes need no thread.

        It raises: StorageError.
        """
        write = self._store.blocking_write(_normalized(location), body)
        if write is None:
            return None

        def write_or_fail() -> None:
            with _catalog_errors(location):
                write()

        return write_or_fail

    async def delete(self, location: str) -> None:
        """Delete a file. It is no error if the file does not exist.

        Raises: StorageError.
        """
        await self._run(location, self._store.delete)

    async def check_exists(self, location: str) -> None:
        """Check that a file exists.

        Raises: FileMissing, StorageError.
        """
        if not await self._run(location, self._store.exists):
            raise _missing(location)

    async def list_names(self, directory: str) -> list[str]:
        """Return the names of the files in a directory; none if it does not exist.

        Raises: StorageError.
        """
        return await self._run(directory, self._store.list_names)

    async def make_directory(self, location: str) -> None:
        """Create a directory and its parents, where storage has directories.

        Raises: StorageError.
        """
        await self._run(location, self._store.make_directory)

    async def _run(self, location: str, call: Callable[[str], Awaitable[_T]]) -> _T:
        with _catalog_errors(location):
            async with asyncio.timeout(self._timeout_s):
                return await call(_normalized(location))


@contextmanager
def _catalog_errors(location: str) -> Iterator[None]:
    try:
        yield
    except FileMissing as error:
        raise _missing(location) from error
    except TimeoutError as error:
        raise StorageError(f"Storage failed: timed out: {location}") from error
    except StorageError as error:
        cause = error.__cause__
        if isinstance(cause, OSError) and cause.errno == errno.ENAMETOOLONG:  # only another location helps
            raise LocationInvalid(f"Invalid location, longer than a path may be: {location}") from error
        raise


def _missing(location: str) -> FileMissing:
    """Return the error in the words of Iceberg's clients."""
    return FileMissing(f"Failed to open input stream for file: {location}")


@functools.lru_cache(_PARSED_MAX)
def _normalized(text: str) -> str:
    """Return a location in the one spelling that every store reads."""
    location = parse_location(text)
    return location.path if location.scheme == "file" else f"{location.scheme}://{location.container}{location.path}"


class ByteLru(Generic[_K, _V]):
    """A cache with a limit in bytes; the least recently used values leave first."""

    def __init__(self, max_bytes: int, *, size_of: Callable[[_V], int]) -> None:
        self._max_bytes = max_bytes
        self._size_of = size_of
        self._values: OrderedDict[_K, _V] = OrderedDict()
        self._used_bytes = 0

    def get(self, key: _K) -> _V | None:
        """Return a value, or None."""
        value = self._values.get(key)
        if value is not None:
            self._values.move_to_end(key)
        return value

    def pop(self, key: _K) -> None:
        """Remove a value, if it is cached."""
        value = self._values.pop(key, None)
        if value is not None:
            self._used_bytes -= self._size_of(value)

    def put(self, key: _K, value: _V) -> None:
        """Add a value, unless it alone exceeds the limit: it would evict all others."""
        self.pop(key)
        size = self._size_of(value)
        if size > self._max_bytes:
            return
        self._values[key] = value
        self._used_bytes += size
        while self._used_bytes > self._max_bytes:
            self.pop(next(iter(self._values)))


@dataclass(frozen=True, slots=True)
class StoredMetadata:
    """One version of a table or view: its pointer, its document, and the bytes of its file."""

    pointer: Pointer
    content: EncodedDocument

    @property
    def location(self) -> str:
        """Return the location of the file."""
        return self.pointer.location

    @property
    def document(self) -> JsonObject:
        """Return the document."""
        return self.content.document

    @property
    def raw(self) -> bytes:
        """Return the bytes of the file, which responses embed."""
        return self.content.raw


class MetadataFiles:
    """Reads and writes metadata files through a cache of parsed documents."""

    def __init__(self, files: Files, *, parse: Callable[[bytes], JsonObject], max_bytes: int, cache_bytes: int) -> None:
        self.storage = files
        self._parse = parse
        self._max_bytes = max_bytes
        self._cached: ByteLru[tuple[str, str], StoredMetadata] = ByteLru(
            cache_bytes, size_of=lambda stored: len(stored.raw) * _MEMORY_PER_BYTE
        )
        self._reads: SingleFlight[StoredMetadata] = SingleFlight("catalog-read-metadata")

    async def load(self, pointer: Pointer) -> StoredMetadata:
        """Return the version that a pointer stands for. Concurrent loads of one version share one read.

        Raises: FileMissing, FileChanged, StorageError; BadRequest if `parse` cannot read it.
        """
        cached = self._cached.get(pointer.version)
        if cached is not None:
            return cached
        return await self._reads.run(pointer.version, lambda: self._read_and_keep(pointer.location, pointer.digest))

    async def load_uncached(self, pointer: Pointer) -> StoredMetadata:
        """Return the version that a pointer stands for without adding it to the cache, for scans of many tables.

        Raises: FileMissing, FileChanged, StorageError; BadRequest if `parse` cannot read it.
        """
        return self._cached.get(pointer.version) or await self._read(pointer.location, pointer.digest)

    async def load_for_register(self, location: str) -> StoredMetadata:
        """Read a file whatever is cached for its location, and return it with the digest of its content.

        Raises: FileMissing, StorageError; BadRequest if `parse` cannot read it.
        """
        return await self._read_and_keep(location, None)

    async def _read_and_keep(self, location: str, digest: str | None) -> StoredMetadata:
        stored = await self._read(location, digest)
        self.keep(stored)
        return stored

    async def _read(self, location: str, digest: str | None) -> StoredMetadata:
        """Read a file and check its digest: an empty one matches any content, None is computed from the content."""
        raw = unpack(location, await self.storage.read(location, max_bytes=self._max_bytes), self._max_bytes)
        if digest is None:
            digest = content_digest(raw)
        else:
            check_content(Pointer(location, digest), raw)
        document = self._parse(raw)
        pointer = pointer_to(location, document, digest=digest)
        return StoredMetadata(pointer, EncodedDocument(document, raw, snapshots_at=None))

    async def write(self, location: str, document: JsonObject, *, base: StoredMetadata | None = None) -> StoredMetadata:
        """Write a document that was made from `base` to a new location.

        Raises: StorageError.
        """
        stored = StoredMetadata(
            pointer_to(location, document), encode_document(document, base.content if base else None)
        )
        await self.storage.write(location, stored.raw)
        self.keep(stored)
        return stored

    async def begin_write(
        self, location: str, document: JsonObject, *, base: StoredMetadata
    ) -> tuple[StoredMetadata, Callable[[], None] | None]:
        """Write a document like `write`, or, if the storage blocks, return the work that the caller runs in a thread.

        The document is not cached: the caller calls `keep` once it is written.

        Raises: StorageError.
        """
        stored = StoredMetadata(pointer_to(location, document), encode_document(document, base.content))
        work = self.storage.blocking_write(location, stored.raw)
        if work is None:
            await self.storage.write(location, stored.raw)
        return stored, work

    async def delete(self, location: str) -> None:
        """Delete a file that nothing refers to.

        Raises: StorageError.
        """
        self.forget(Pointer(location))
        await self.storage.delete(location)

    def forget(self, pointer: Pointer) -> None:
        """Remove a superseded version from the cache."""
        self._cached.pop(pointer.version)

    def keep(self, stored: StoredMetadata) -> None:
        """Add a version to the cache that is in its file."""
        self._cached.put(stored.pointer.version, stored)


def check_content(pointer: Pointer, raw: bytes) -> None:
    """Check that a registered file, unpacked, still has the content that was registered.

    Raises: FileChanged.
    """
    if pointer.digest and content_digest(raw) != pointer.digest:
        raise FileChanged(f"Metadata file has other content than was registered, register it again: {pointer.location}")


def unpack(location: str, body: bytes, max_bytes: int) -> bytes:
    """Decompress a metadata file of a writer that compresses them, within the limit.

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
