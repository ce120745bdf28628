"""Finished answers of table loads: their bytes, plain and gzipped, and their tags. Owns the cache and its limit.

A metadata file never changes while a pointer with its digest points there, so an answer depends on that pointer, on
how much of the history is shown and on the client configuration alone. A load is then one look-up of the pointer and
one write, whatever the table's age; and a client that has the version already is answered from the pointer alone.
"""

from __future__ import annotations

import asyncio
import functools
import gzip
import hashlib
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

import orjson

from catalog.metadata.answers import only_referenced_snapshots
from catalog.metadata_files import StoredMetadata
from catalog.pointers import Pointer
from catalog.shared_work import SharedWork

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
