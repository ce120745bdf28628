"""One node: the real service of `lakefeed.ingest.service.serving`, started, killed and started again.

Fake: listeners, the log's files (a journal that can lose power), thread pools, the session of the catalog's client, the
object store. Real: all parts of the service, and the order in which it starts and stops them.

A killed process ends by cancellation. Whatever its tasks still do then reaches nobody: its disk was copied at the
moment of the kill, the network takes nothing from it, and what it sent before is on its way.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import random
import shutil
from collections.abc import AsyncIterator, Callable, Iterator
from contextvars import ContextVar
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from aiohttp import web

from lakefeed.contract.errors import LakefeedError
from lakefeed.ingest import service
from lakefeed.ingest.config import Config
from lakefeed.ingest.websocket.server import DataPlane
from lakefeed.writer.commit.rest_catalog import CatalogClient, Credentials
from lakefeed.writer.wal.log import FileLog
from tests.model.disk import ModelDisk
from tests.simulation.catalog import Catalog
from tests.simulation.loop import MachineClock, machine_clock
from tests.simulation.network import CatalogSession, ClientSocket, Network, Process
from tests.simulation.storage import Objects, SimulatedStore, encode_rows

REQUEST_TIMEOUT_S = 30.0

_running: ContextVar[Life] = ContextVar("running_life")


class Life(Process):
    """One process of a node, from its start to its end."""

    def __init__(self, node: Node, disk: ModelDisk) -> None:
        super().__init__(node.name, node.context.copy())
        self.node = node
        self.disk = disk
        self.data_plane: DataPlane | None = None
        self.stopping = asyncio.Event()
        self.failure: BaseException | None = None

    async def run(self) -> None:
        """Serve until stopped."""
        _running.set(self)
        try:
            async with service.serving(self.node.config):
                await self.stopping.wait()
        except (Exception, ExceptionGroup) as error:  # noqa: BLE001 - the end of a process
            self.failure = error


class Node:
    """A machine with a disk and a clock, on which one process at a time runs."""

    def __init__(
        self, name: str, config: Config, *, directory: Path, network: Network, catalog: Catalog, objects: Objects
    ) -> None:
        self.name = name
        self.config = config
        self.network = network
        self.catalog = catalog
        self.objects = objects
        self.clock = MachineClock()
        self.context = contextvars.copy_context()
        self.context.run(machine_clock.set, self.clock)
        self.life: Life | None = None
        self._main: asyncio.Task[None] | None = None
        self._ending: list[asyncio.Task[None]] = []
        self._directory = directory / name
        self._directory.mkdir()
        self._starts = 0
        self._disk = ModelDisk(self._directory / "0")

    @property
    def disk(self) -> ModelDisk:
        return self._disk

    @property
    def is_up(self) -> bool:
        """Return whether the process is there and has not ended by itself."""
        return self._main is not None and not self._main.done()

    @property
    def is_serving(self) -> bool:
        return self.is_up and self.life is not None and self.life.data_plane is not None

    def server(self) -> Process | None:
        """Return the process that requests to this machine reach."""
        return self.life if self.is_up else None

    def start(self) -> None:
        """Start a process on what the disk holds."""
        assert not self.is_up
        self.life = Life(self, self._disk)
        self._main = self.life.start(self.life.run())

    def kill(self, *, power_loss: random.Random | None) -> None:
        """End the process at this very moment; with a power loss, the disk keeps only what was synced for sure."""
        life, main = self.life, self._main
        if life is None or main is None:
            return
        self._starts += 1
        old = self._disk
        self._disk = old.crash(self._directory / str(self._starts), moment=old.moment(), power_loss=power_loss)
        self.life = self._main = None
        life.end()
        if life.data_plane is not None:
            for connection in life.data_plane.connections():
                connection.socket.transport.abort()
        self._ending.append(main)

    async def stop(self) -> None:
        """Stop in order."""
        life, main = self.life, self._main
        if life is None or main is None:
            return
        life.stopping.set()
        await asyncio.wait([main])
        if self._main is main:  # not killed meanwhile
            self.kill(power_loss=None)

    async def clean_up(self) -> None:
        """End everything and remove the files."""
        self.kill(power_loss=None)
        await asyncio.gather(*self._ending, return_exceptions=True)
        shutil.rmtree(self._directory)

    def connect(self, source: str, on_sent: Callable[[bytes], object]) -> ClientSocket | None:
        """Open a connection of a source; None if nothing listens."""
        life = self.life
        if not self.is_serving or life is None or life.data_plane is None or not life.is_alive:
            return None
        client = ClientSocket(self.network, source, life, on_sent)
        life.start(life.data_plane._serve(client.server))
        return client


# -- the seams of the service


@contextlib.contextmanager
def _listen(*_: object, **__: object) -> Iterator[Any]:
    yield SimpleNamespace(getsockname=lambda: ("127.0.0.1", 1))


@contextlib.asynccontextmanager
async def _serve_http(app: web.Application, *_: object, **__: object) -> AsyncIterator[None]:
    life = _running.get()
    app.freeze()
    life.app = app
    try:
        yield
    finally:
        life.app = None


@contextlib.asynccontextmanager
async def _open_log(*_: object) -> AsyncIterator[FileLog]:
    life = _running.get()
    await asyncio.sleep(0)
    log = FileLog.open(life.disk.directory, life.node.config.log, files=life.disk)
    try:
        yield log
    finally:
        with contextlib.suppress(LakefeedError):
            await log.close()


@contextlib.asynccontextmanager
async def _open_store(*_: object) -> AsyncIterator[SimulatedStore]:
    yield SimulatedStore(_running.get().node.objects)


@contextlib.asynccontextmanager
async def _open_catalog(*_: object) -> AsyncIterator[CatalogClient]:
    life = _running.get()
    session: Any = CatalogSession(life.node.network, life, lambda: life.node.catalog.process)
    yield CatalogClient(session, "http://catalog", credentials=Credentials(), warehouse="", timeout_s=REQUEST_TIMEOUT_S)


@contextlib.asynccontextmanager
async def _listen_ws(data_plane: DataPlane, *_: object) -> AsyncIterator[None]:
    life = _running.get()
    life.data_plane = data_plane
    try:
        yield
    finally:
        life.data_plane = None
        for connection in data_plane.connections():
            connection.socket.transport.abort()


@contextlib.contextmanager
def simulated_seams() -> Iterator[None]:
    """Replace what the service reaches the outside with, while the block runs."""
    with contextlib.ExitStack() as patches:
        for name, fake in {
            "lakefeed.ingest.service.listen": _listen,
            "lakefeed.ingest.service.serve_http": _serve_http,
            "lakefeed.ingest.service._open_log": _open_log,
            "lakefeed.ingest.service.open_store": _open_store,
            "lakefeed.ingest.service.open_foreign_catalog": _open_catalog,
            "lakefeed.ingest.websocket.server.DataPlane.listen": _listen_ws,
            "lakefeed.writer.files.parquet.write_data_file": encode_rows,
        }.items():
            patches.enter_context(mock.patch(name, fake))
        yield
