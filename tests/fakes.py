"""Stand-ins for what is outside of us, and for what only fails when nobody watches."""

from __future__ import annotations

import asyncio
import enum
import json
import threading
from collections import deque
from collections.abc import Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Self

import aiohttp
from aiohttp import web
from yarl import URL

from lakefeed.writer.wal.directory import Filesystem

# A test that forgets to open the gate fails, and does not hang.
HELD_MAX_S = 20.0


class FaultyFilesystem(Filesystem):
    """The real filesystem, whose calls fail or write less than asked when told to."""

    def __init__(self) -> None:
        self.write_max_bytes: int | None = None
        self._faults: dict[str, tuple[int, int]] = {}

    def fail(self, operation: str, code: int, *, after_calls: int = 0) -> None:
        """Let calls of this method raise OSError with this errno, from now on or after some that still work."""
        self._faults[operation] = (code, after_calls)

    def heal(self) -> None:
        self._faults.clear()

    def _maybe_fail(self, operation: str) -> None:
        if operation not in self._faults:
            return
        code, calls_left = self._faults[operation]
        if calls_left == 0:
            raise OSError(code, f"injected into {operation}")
        self._faults[operation] = (code, calls_left - 1)

    def read(self, descriptor: int, buffer: memoryview, position: int) -> int:
        self._maybe_fail("read")
        return super().read(descriptor, buffer, position)

    def write(self, descriptor: int, parts: Sequence[bytes | memoryview], position: int) -> int:
        self._maybe_fail("write")
        if self.write_max_bytes is not None:
            parts = [b"".join(parts)[: self.write_max_bytes]]
        return super().write(descriptor, parts, position)

    def allocate(self, descriptor: int, size_bytes: int) -> None:
        self._maybe_fail("allocate")
        super().allocate(descriptor, size_bytes)

    def sync(self, descriptor: int) -> None:
        self._maybe_fail("sync")
        super().sync(descriptor)

    def sync_directory(self, directory: Path) -> None:
        self._maybe_fail("sync_directory")
        super().sync_directory(directory)

    def rename(self, source: Path, target: Path) -> None:
        self._maybe_fail("rename")
        super().rename(source, target)

    def link(self, source: Path, target: Path) -> None:
        self._maybe_fail("link")
        super().link(source, target)

    def unlink(self, path: Path) -> None:
        self._maybe_fail("unlink")
        super().unlink(path)


class HeldFilesystem(Filesystem):
    """The real filesystem, whose syncs wait until they are let through."""

    def __init__(self) -> None:
        self.open_gate = threading.Event()
        self.open_gate.set()
        self.begun = 0
        self.syncs = 0

    def sync(self, descriptor: int) -> None:
        self.begun += 1
        assert self.open_gate.wait(HELD_MAX_S)
        super().sync(descriptor)
        self.syncs += 1


class CatalogFault(enum.Enum):
    """What goes wrong with one request; all but the `AFTER` ones keep it from the catalog."""

    BAD_REQUEST = "400"
    CONFLICT = "409"
    FORBIDDEN = "403"
    SLOW_DOWN = "429"
    ERROR_BEFORE = "500, and nothing happened"
    ERROR_AFTER = "500, though it happened"
    HANG_UP_BEFORE = "the connection is lost, and nothing happened"
    HANG_UP_AFTER = "the connection is lost, though it happened"
    SILENCE_AFTER = "no answer ever, though it happened"


class FlakyCatalog:
    """A proxy in front of a real catalog, which spoils commits or loads of tables when told to.

    Commits are spoiled in the order of `commit_faults`, loads in that of `load_faults`; when these are used up,
    everything goes through, except all commits to the tables in `broken_tables`.
    """

    def __init__(self, catalog_url: str) -> None:
        self.url = ""
        self.commit_faults: deque[CatalogFault] = deque()
        self.load_faults: deque[CatalogFault] = deque()
        self.broken_tables: dict[str, CatalogFault] = {}
        self.commits_seen = 0
        self.transactions_seen = 0
        self._catalog_url = catalog_url
        app = web.Application(client_max_size=64 * 1024 * 1024)
        app.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession()
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        host, port = self._runner.addresses[0][:2]
        self.url = f"http://{host}:{port}"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()
        await self._session.close()

    async def _handle(self, request: web.Request) -> web.Response:
        fault = self._next_fault(request, await request.read())
        if fault is None:
            return await self._forward(request)
        if fault.name.endswith("_AFTER"):
            await self._forward(request)
        if fault is CatalogFault.SILENCE_AFTER:
            await asyncio.Event().wait()
        if fault in {CatalogFault.HANG_UP_BEFORE, CatalogFault.HANG_UP_AFTER}:
            assert request.transport is not None
            request.transport.abort()
        # The others tell nothing of the kind: what the catalog has done is anybody's guess.
        status = int(fault.value) if fault.value.isdigit() else HTTPStatus.INTERNAL_SERVER_ERROR
        return web.json_response({"error": {"message": fault.value}}, status=status)

    def _next_fault(self, request: web.Request, body: bytes) -> CatalogFault | None:
        if "/tables/" not in request.path and not request.path.endswith("/transactions/commit"):
            return None
        if request.method == "POST":
            self.commits_seen += 1
            self.transactions_seen += request.path.endswith("/transactions/commit")
            for table in _tables_of(request.path, body):
                if table in self.broken_tables:
                    return self.broken_tables[table]
        faults = self.commit_faults if request.method == "POST" else self.load_faults
        return faults.popleft() if faults else None

    async def _forward(self, request: web.Request) -> web.Response:
        url = f"{self._catalog_url}{request.raw_path}"
        body, headers = await request.read(), {"Content-Type": "application/json"}
        async with self._session.request(request.method, URL(url, encoded=True), data=body, headers=headers) as answer:
            return web.Response(status=answer.status, body=await answer.read(), content_type="application/json")


class BluntCatalog(FlakyCatalog):
    """A catalog that answers 400 where the table is another than a commit thinks, as Iceberg's Java server may."""

    async def _forward(self, request: web.Request) -> web.Response:
        answer = await super()._forward(request)
        if answer.status == HTTPStatus.CONFLICT and "/namespaces/" in request.path:
            return web.Response(status=HTTPStatus.BAD_REQUEST, body=answer.body, content_type="application/json")
        return answer


class OldCatalog(FlakyCatalog):
    """A catalog that commits to one table at a time."""

    async def _forward(self, request: web.Request) -> web.Response:
        answer = await super()._forward(request)
        if request.path == "/v1/config":
            assert isinstance(answer.body, bytes)
            return web.Response(body=answer.body.replace(b"/transactions/commit", b""), content_type="application/json")
        return answer


def _tables_of(path: str, body: bytes) -> list[str]:
    """Name the tables that a commit is for."""
    if path.endswith("/transactions/commit"):
        return [change["identifier"]["name"] for change in json.loads(body)["table-changes"]]
    return [path.rpartition("/")[2]]
