"""Metadata files and load responses, each with a cache under a byte limit.

    pointer --MetadataFiles--> document and its bytes --LoadResponses--> encoded response --config--> body

A metadata file never changes while a pointer points at it, so what is cached for a pointer stays true. Registered
files belong to other writers, who may overwrite them: their content is compared with the digest in the pointer. Cached
documents are shared between requests and never changed.

A load response is `{"metadata-location":...,"metadata":{...},"config":{...}}`. Everything up to the config depends on
the pointer alone and is cached, plain and gzipped. The config may differ per request and is appended to the cached
bytes, which are neither encoded nor compressed again: a load is one lookup of the pointer and one write, whatever the
table's age.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import struct
import zlib
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import orjson

from lakefeed.aio import SingleFlight
from lakefeed.catalog.errors import BadRequest, FileChanged
from lakefeed.catalog.json_fields import JsonObject
from lakefeed.catalog.metadata.document import only_referenced_snapshots
from lakefeed.catalog.metadata.encoding import EncodedDocument, encode_document
from lakefeed.catalog.names import Pointer, content_digest, pointer_to
from lakefeed.catalog.service.files import Files
from lakefeed.contract.errors import StorageError

# Memory of a document and its bytes, per byte (measured with tables of 10 to 5,000 snapshots: 4.2).
_MEMORY_PER_BYTE = 5
# zlib's code for "a gzip header follows".
_GZIP_WINDOW_BITS = 31

_K = TypeVar("_K")
_V = TypeVar("_V")


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
        self._files = files
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
        raw = unpack(location, await self._files.read(location, max_bytes=self._max_bytes), self._max_bytes)
        if digest is None:
            digest = content_digest(raw)
        else:
            check_content(Pointer(location, digest), raw)
        document = self._parse(raw)
        pointer = pointer_to(location, document, digest=digest)
        return StoredMetadata(pointer, EncodedDocument(document, raw, snapshots_at=None))

    async def check_exists(self, location: str) -> None:
        """Check that a file exists, whether or not its content is cached.

        Raises: FileMissing, StorageError.
        """
        await self._files.check_exists(location)

    async def write(self, location: str, document: JsonObject, *, base: StoredMetadata | None = None) -> StoredMetadata:
        """Write a document that was made from `base` to a new location.

        Raises: StorageError.
        """
        stored = StoredMetadata(
            pointer_to(location, document), encode_document(document, base.content if base else None)
        )
        await self._files.write(location, stored.raw)
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

    async def make_directories(self, directories: list[str]) -> None:
        """Create directories, if the storage has directories.

        Raises: StorageError.
        """
        for directory in directories:
            await self._files.make_directory(directory)

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


# Values of the query parameter `snapshots`.
ALL, REFS = "all", "refs"

# Enough of a SHA-256 that two versions of one table never share a tag.
_ETAG_CHARS = 32
# Tags in the cache, a few hundred bytes each with their locations.
_ETAGS_MAX = 4_096
# A smaller response fits in one packet, compressed or not.
GZIP_MIN_BYTES = 1_400
# A document of a thousand snapshots shrinks to an eighth at the lowest level, in a third of the default level's time.
_GZIP_LEVEL = 1
# RFC 1952: magic number, deflate, no flags, no time, fastest algorithm, unknown system.
_GZIP_HEADER = b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x04\xff"
# RFC 1951, section 3.2.4: the length of a stored block has 16 bits.
_STORED_BLOCK_MAX_BYTES = 0xFFFF


@dataclass(frozen=True, slots=True)
class ResponseKey:
    """What the cached part of a load response depends on."""

    pointer: Pointer
    snapshots: str
    gzip: bool


@dataclass(frozen=True, slots=True)
class EncodedLoad:
    """A load response without its end: the config and the closing brace.

    A gzipped one is a gzip header and deflate blocks that end at a byte boundary. The end of the response is appended
    as stored blocks, and the checksum continues that of the plain bytes. The body is one gzip member, because not all
    clients read several.
    """

    data: bytes
    is_gzip: bool
    plain_bytes: int
    plain_crc: int

    def body(self, config: bytes | None) -> bytes:
        """Return the body of a response with this config, encoded as JSON; None leaves it out."""
        end = b"}" if config is None else b',"config":' + config + b"}"
        if not self.is_gzip:
            return self.data + end
        trailer = struct.pack("<LL", zlib.crc32(end, self.plain_crc), (self.plain_bytes + len(end)) & 0xFFFFFFFF)
        return b"".join((self.data, *_stored_blocks(end), trailer))


def encode_load(stored: StoredMetadata, snapshots: str = ALL, *, compress: bool = False) -> EncodedLoad:
    """Encode a load response. The metadata's bytes are embedded as they are in the file."""
    metadata = stored.raw if snapshots == ALL else orjson.dumps(only_referenced_snapshots(stored.document))
    plain = b"".join((b'{"metadata-location":', orjson.dumps(stored.location), b',"metadata":', metadata))
    if not compress or len(plain) < GZIP_MIN_BYTES:
        return EncodedLoad(plain, is_gzip=False, plain_bytes=len(plain), plain_crc=0)
    compressor = zlib.compressobj(_GZIP_LEVEL, zlib.DEFLATED, -zlib.MAX_WBITS)
    data = b"".join((_GZIP_HEADER, compressor.compress(plain), compressor.flush(zlib.Z_SYNC_FLUSH)))
    return EncodedLoad(data, is_gzip=True, plain_bytes=len(plain), plain_crc=zlib.crc32(plain))


class LoadResponses:
    """The cache of encoded load responses."""

    def __init__(self, *, max_bytes: int) -> None:
        self._cached: ByteLru[ResponseKey, EncodedLoad] = ByteLru(max_bytes, size_of=lambda encoded: len(encoded.data))
        self._builds: SingleFlight[EncodedLoad] = SingleFlight("catalog-encode-load")

    async def find_or_encode(self, key: ResponseKey, load: Callable[[], Awaitable[StoredMetadata]]) -> EncodedLoad:
        """Return an encoded response from the cache, or encode it. Concurrent requests for one key share the work.

        Raises: what `load` raises.
        """
        cached = self._cached.get(key)
        return await self._builds.run(key, lambda: self._encode(key, load)) if cached is None else cached

    async def _encode(self, key: ResponseKey, load: Callable[[], Awaitable[StoredMetadata]]) -> EncodedLoad:
        stored = await load()
        if key.gzip:
            encoded = await asyncio.to_thread(encode_load, stored, key.snapshots, compress=True)
        else:
            encoded = encode_load(stored, key.snapshots)
        self._cached.put(key, encoded)
        return encoded


@functools.lru_cache(_ETAGS_MAX)
def load_etag(pointer: Pointer, snapshots: str, config: bytes) -> str:
    """Return the entity tag of a response: a digest of the version, of the snapshots shown and of the config."""
    parts = b"\0".join((pointer.location.encode(), pointer.digest.encode(), snapshots.encode(), config))
    return hashlib.sha256(parts).hexdigest()[:_ETAG_CHARS]


def _stored_blocks(data: bytes) -> list[bytes]:
    """Return the last deflate blocks of a stream, without compression."""
    chunks = [data[start : start + _STORED_BLOCK_MAX_BYTES] for start in range(0, len(data), _STORED_BLOCK_MAX_BYTES)]
    return [
        struct.pack("<BHH", number == len(chunks), len(chunk), len(chunk) ^ 0xFFFF) + chunk
        for number, chunk in enumerate(chunks, start=1)
    ]
