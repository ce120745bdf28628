"""A real catalog server, mounted under /v1 as the service does it, and clients for it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import requests
from aiohttp import web
from pyiceberg.catalog.rest import RestCatalog

from lakefeed.catalog.app import build_catalog, build_store
from lakefeed.catalog.config import MEMORY_DATABASE, CatalogConfig, Warehouse
from lakefeed.catalog.store.store import Store
from lakefeed.storage.config import StorageConfig
from tests.clients import open_pyiceberg
from tests.serving import serve_in_thread


@dataclass(frozen=True, slots=True)
class Server:
    """A running catalog; `url` is what clients are given, without /v1."""

    url: str
    stop: Callable[[], None]


class Client:
    """Raw requests; answers are (status, parsed body)."""

    def __init__(self, server: Server) -> None:
        self._base = f"{server.url}/v1/"
        self._session = requests.Session()

    def send(self, method: str, path: str, body: Any = None, **options: Any) -> requests.Response:
        return self._session.request(method, self._base + path, json=body, timeout=60, **options)

    def get(self, path: str, **options: Any) -> tuple[int, Any]:
        return parsed(self.send("GET", path, **options))

    def post(self, path: str, body: Any = None, **options: Any) -> tuple[int, Any]:
        return parsed(self.send("POST", path, body, **options))

    def head(self, path: str) -> int:
        return self.send("HEAD", path).status_code

    def delete(self, path: str, **options: Any) -> tuple[int, Any]:
        return parsed(self.send("DELETE", path, **options))

    def close(self) -> None:
        self._session.close()


def parsed(response: requests.Response) -> tuple[int, Any]:
    return response.status_code, response.json() if response.content else None


@pytest_asyncio.fixture(params=["sqlite", "postgres", "memory"])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Store]:
    """Open a store of each kind, with one namespace in it."""
    if request.param == "postgres":
        database = await asyncio.to_thread(request.getfixturevalue("make_postgres"))
    else:
        database = MEMORY_DATABASE if request.param == "memory" else ""
    opened = build_store(CatalogConfig(database=database), tmp_path / "catalog.db")
    await opened.open()
    await opened.create_namespace(("db",), {"owner": "me"})
    yield opened
    await opened.close()


@pytest.fixture(params=["sqlite", "postgres"])
def lasting_database(request: pytest.FixtureRequest) -> str:
    """Name a new database of each kind that outlives a server, as `catalog.database` does."""
    return request.getfixturevalue("make_postgres")() if request.param == "postgres" else ""


@pytest.fixture
def warehouse(tmp_path: Path) -> Warehouse:
    return Warehouse(StorageConfig(warehouse=f"file://{tmp_path}/warehouse"))


@pytest.fixture
def start_server(tmp_path: Path, warehouse: Warehouse) -> Iterator[Callable[..., Server]]:
    """Start servers over one database and warehouse; all are stopped at the end."""
    with contextlib.ExitStack() as running:

        def start(app: web.Application | None = None, **settings: Any) -> Server:
            catalog = app or build_catalog(CatalogConfig(**settings), warehouse, tmp_path / "catalog.db")
            main = web.Application()
            main.add_subapp("/v1", catalog)
            one = running.enter_context(contextlib.ExitStack())
            return Server(one.enter_context(serve_in_thread(main)), one.close)

        yield start


@pytest.fixture
def connect() -> Iterator[Callable[[Server], Client]]:
    clients: list[Client] = []

    def open_client(server: Server) -> Client:
        clients.append(Client(server))
        return clients[-1]

    yield open_client
    for client in clients:
        client.close()


@pytest.fixture
def server(start_server: Callable[..., Server]) -> Server:
    return start_server()


@pytest.fixture
def client(server: Server, connect: Callable[[Server], Client]) -> Client:
    return connect(server)


@pytest.fixture
def pyiceberg(server: Server) -> Iterator[RestCatalog]:
    with contextlib.closing(open_pyiceberg(server.url)) as catalog:
        yield catalog
