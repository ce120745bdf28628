"""The catalog's process: the real application over a store in memory that survives it.

Fake: HTTP (network.py), the database and the object store. Real: routes, update engine, caches, commit queues.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
from collections.abc import Callable, Mapping
from typing import TypeVar

from lakefeed.catalog.app import build_app
from lakefeed.catalog.config import CatalogConfig, Warehouse
from lakefeed.catalog.names import EntryId, Pointer
from lakefeed.catalog.service.metadata_files import Files
from lakefeed.catalog.store.sqlite import MemoryStore
from lakefeed.catalog.store.store import Operation, StoreContents
from lakefeed.storage.config import StorageConfig
from tests.simulation.lake import Lake
from tests.simulation.network import Process
from tests.simulation.storage import Objects, SimulatedStore

WAREHOUSE = "s3://lake"

_T = TypeVar("_T")


class WatchedStore(MemoryStore):
    """The store in memory, with an observer of its pointers after every write."""

    on_change: Callable[[Mapping[EntryId, Pointer]], None]

    async def _write(
        self, operation: Operation[_T], prepare: Callable[[], None] | None = None, *, is_single: bool = False
    ) -> _T:
        result = await super()._write(operation, prepare, is_single=is_single)
        self.on_change((await self.export()).entries)
        return result


class Catalog:
    """A catalog that can be killed, restarted and restored; `process` is None while it is down."""

    def __init__(self, objects: Objects, lake: Lake) -> None:
        self.process: Process | None = None
        self._objects = objects
        self._lake = lake
        self._ending: list[asyncio.Task[None]] = []
        self._open_store()

    def _open_store(self) -> None:
        self.store = WatchedStore()
        self.store.on_change = self._lake.observe

    async def start(self) -> None:
        """Start a process on what the database holds."""
        files = Files(SimulatedStore(self._objects), timeout_s=60.0)
        app = build_app(CatalogConfig(), Warehouse(StorageConfig(warehouse=WAREHOUSE)), store=self.store, files=files)
        process = Process("catalog", contextvars.copy_context())
        app.freeze()
        await app.startup()
        process.app = app
        self.process = process

    def kill(self) -> None:
        """Kill the process; requests under way end wherever they are."""
        process, self.process = self.process, None
        if process is not None and process.app is not None:
            self._ending.append(asyncio.get_running_loop().create_task(process.app.cleanup()))
            process.end()

    async def clean_up(self) -> None:
        """End everything."""
        self.kill()
        await asyncio.gather(*self._ending, return_exceptions=True)

    async def back_up(self) -> StoreContents:
        """Export the database."""
        return await self.store.export()

    async def restore(self, contents: StoreContents) -> None:
        """Replace the database by an earlier export. The process must be down."""
        assert self.process is None
        self._open_store()
        self.store.on_change = functools.partial(self._lake.observe, restored=True)
        await self.store.restore(contents)
        self.store.on_change = self._lake.observe
