"""Access to the catalog: its host authenticates every operation, and passes on who sends a request."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from lakefeed.catalog.app import ROUTES
from lakefeed.catalog.routes.http import PRINCIPAL
from lakefeed.ingest.admission.auth import build_auth
from lakefeed.ingest.config import AuthConfig, Config, ServerConfig
from lakefeed.ingest.http.gate import require_token
from lakefeed.ingest.service import build_own_catalog, serving_catalog
from lakefeed.storage.config import StorageConfig

TOKEN = "a-token-of-the-tests"


@pytest_asyncio.fixture
async def http(tmp_path: Path) -> AsyncIterator[aiohttp.ClientSession]:
    server = ServerConfig(data_dir=str(tmp_path), http_port=0)
    async with (
        serving_catalog(Config(server=server, auth=AuthConfig(tokens=(TOKEN,)))) as url,
        aiohttp.ClientSession(url) as session,
    ):
        yield session


async def test_no_operation_of_a_catalog_by_itself_is_reached_without_a_token(http: aiohttp.ClientSession):
    operations = {("GET", "/v1/config")} | {(route.method, f"/v1/{route.path}") for route in ROUTES}
    assert len(operations) > 30
    for method, path in sorted(operations):
        for headers in ({}, {"Authorization": "Bearer another-token-than-ours"}):
            async with http.request(method, path, headers=headers) as response:
                assert (response.status, response.content_type) == (401, "application/json"), (method, path)


@pytest.mark.parametrize("path", ["/v1/config", "/v1/namespaces"])
async def test_a_token_opens_a_catalog_by_itself(http: aiohttp.ClientSession, path: str):
    async with http.get(path, headers={"Authorization": f"Bearer {TOKEN}"}) as response:
        assert response.status == 200


async def test_principal_of_a_token_reaches_the_handlers_of_the_catalog(tmp_path: Path):
    async def show_principal(request: web.Request) -> web.Response:
        return web.Response(text=request[PRINCIPAL])

    storage = StorageConfig(warehouse=f"file://{tmp_path}/warehouse")
    catalog = build_own_catalog(Config(), storage, tmp_path)
    catalog.router.add_get("/principal", show_principal)
    host = web.Application(middlewares=[require_token(build_auth([TOKEN, f"another-{TOKEN}"]))])
    host.add_subapp("/v1", catalog)
    async with TestClient(TestServer(host)) as client:
        for name, token in (("token-1", TOKEN), ("token-2", f"another-{TOKEN}")):
            async with client.get("/v1/principal", headers={"Authorization": f"Bearer {token}"}) as response:
                assert await response.text() == name
