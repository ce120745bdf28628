"""Who gets to the catalog that stands by itself: every operation is behind the one door."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio

from lakefeed.catalog.app import ROUTES
from lakefeed.ingest.config import AuthConfig, Config, ServerConfig
from lakefeed.ingest.service import serving_catalog

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
            async with http.request(method, path, headers=headers) as answer:
                assert (answer.status, answer.content_type) == (401, "application/json"), (method, path)


@pytest.mark.parametrize("path", ["/v1/config", "/v1/namespaces"])
async def test_a_token_opens_a_catalog_by_itself(http: aiohttp.ClientSession, path: str):
    async with http.get(path, headers={"Authorization": f"Bearer {TOKEN}"}) as answer:
        assert answer.status == 200
