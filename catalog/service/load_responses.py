"""Load responses, encoded, plain and gzipped, in a cache under a byte limit.

A load response is `{"metadata-location":...,"metadata":{...},"config":{...}}`. Everything up to the config depends on
the pointer alone and is cached. The config may differ per request and is appended to the cached bytes, which are
neither encoded nor compressed again: a load is one lookup of the pointer and one write, whatever the table's age.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import struct
import zlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import orjson

from lakefeed.aio import SingleFlight
from lakefeed.catalog.metadata.document import only_referenced_snapshots
from lakefeed.catalog.names import Pointer
from lakefeed.catalog.service.metadata_files import ByteLru, StoredMetadata

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
        # The last deflate blocks of the stream, without compression.
        starts = range(0, len(end), _STORED_BLOCK_MAX_BYTES)
        chunks = [end[start : start + _STORED_BLOCK_MAX_BYTES] for start in starts]
        blocks = [
            struct.pack("<BHH", number == len(chunks), len(chunk), len(chunk) ^ 0xFFFF) + chunk
            for number, chunk in enumerate(chunks, start=1)
        ]
        return b"".join((self.data, *blocks, trailer))


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
