"""A client of the control plane, and the tables as DuckDB reads them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import aiohttp

from lakefeed.ingest.service import Addresses
from tests.clients import open_duckdb
from tests.ingest.ws_client import DEADLINE_S


async def get(http: aiohttp.ClientSession, path: str) -> dict:
    async with http.get(path) as answer:
        assert answer.status == 200
        return await answer.json()


async def post(http: aiohttp.ClientSession, path: str, *, status: int = 200) -> dict:
    async with http.post(path) as answer:
        assert answer.status == status
        return await answer.json()


async def metrics_of(http: aiohttp.ClientSession) -> dict[str, float]:
    """Return the samples of /metrics, by name and labels."""
    async with http.get("/metrics") as answer:
        assert answer.status == 200
        lines = (await answer.text()).splitlines()
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if not line.startswith("#")}


async def until(read: Callable[[], Awaitable[dict]], condition: Callable[[dict], object]) -> dict:
    """Read until the result meets the condition."""
    async with asyncio.timeout(DEADLINE_S):
        while not condition(seen := await read()):  # noqa: ASYNC110 - the network offers polling only
            await asyncio.sleep(0.01)
    return seen


def rows_of(http_url: str, table: str) -> list[tuple]:
    with open_duckdb(http_url) as connection:
        query = f"SELECT _cdc_sequence, _cdc_source, id, name FROM lake.default.{table} ORDER BY _cdc_sequence"
        return connection.execute(query).fetchall()


async def read_rows(service: Addresses, table: str) -> list[tuple]:
    return await asyncio.to_thread(rows_of, service.http_url, table)
