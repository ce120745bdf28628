"""The object store in memory, and the stand-in for Parquet.

Fake: objects are entries of a dictionary; a data file is a JSON list of its rows, as far as the checks need them.
Real: everything that decides which objects are written, under which names, and when they are referred to.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import orjson
import pyarrow as pa

from lakefeed.contract.errors import FileMissing, StorageError
from lakefeed.iceberg.layout import Partition
from lakefeed.iceberg.manifests import DataFile

# The columns of a table, and of a quarantine, that identify a change.
COLUMNS = ("_cdc_source", "_cdc_sequence", "uid", "row_image")

REQUEST_MAX_S = 0.02


def encode_rows(
    rows: pa.Table, *, location: str, partition: Partition, sort_order_id: int | None = None, **_: object
) -> tuple[bytes, DataFile]:
    """Encode a data file and describe it; takes the place of `write_data_file`."""
    names = [name for name in COLUMNS if name in rows.column_names]
    body = orjson.dumps(rows.select(names).to_pylist())
    return body, DataFile(location, partition, rows.num_rows, len(body), {}, {}, {}, {}, {}, (4,), sort_order_id)


@dataclass(slots=True)
class Objects:
    """What the store holds. `fault` returns whether the next request fails."""

    chance: random.Random
    fault: Callable[[], bool] = lambda: False
    held: dict[str, bytes] = field(default_factory=dict)
    # Locations that were written before: none may be written twice.
    written: set[str] = field(default_factory=set)


class SimulatedStore:
    """A client of the store; implements `ObjectStore`. A failed write may have happened."""

    def __init__(self, objects: Objects) -> None:
        self._objects = objects

    async def open(self) -> None:
        """Connect."""

    async def close(self) -> None:
        """Disconnect."""

    async def write(self, location: str, data: Any) -> None:
        objects = self._objects
        fails = await self._request()
        if not fails or objects.chance.random() < 0.5:
            assert location not in objects.written, f"an object is written twice: {location}"
            objects.written.add(location)
            objects.held[location] = bytes(data)
        self._maybe_fail(fails, location)

    def blocking_write(self, _location: str, _data: Any) -> None:
        """Return that writes need no thread."""

    async def read(self, location: str, *, max_bytes: int | None = None) -> bytes:
        del max_bytes
        self._maybe_fail(await self._request(), location)
        try:
            return self._objects.held[location]
        except KeyError:
            raise FileMissing(f"no such object: {location}") from None

    async def exists(self, location: str) -> bool:
        self._maybe_fail(await self._request(), location)
        return location in self._objects.held

    async def delete(self, location: str) -> None:
        fails = await self._request()
        self._objects.held.pop(location, None)
        self._maybe_fail(fails, location)

    async def make_directory(self, _location: str) -> None:
        """Do nothing: the store has no directories."""

    async def _request(self) -> bool:
        await asyncio.sleep(self._objects.chance.random() * REQUEST_MAX_S)
        return self._objects.fault()

    def _maybe_fail(self, fails: bool, location: str) -> None:
        if fails:
            raise StorageError(f"store is down: {location}")
