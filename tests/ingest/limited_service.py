"""The whole service with some limits changed, and what its status says of them."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from lakefeed.ingest.service import Addresses, serving
from lakefeed.ingest.websocket.server import MONITOR_INTERVAL_S
from tests.ingest.conftest import small_config
from tests.ingest.talking import DEADLINE_S

# Short, but with room for a slow machine to do what is not to be punished.
TIMEOUT_S = 2 * MONITOR_INTERVAL_S


@asynccontextmanager
async def limited(directory: Path, **ingest: Any) -> AsyncIterator[Addresses]:
    """The service with some limits changed."""
    config = small_config(directory)
    async with serving(replace(config, ingest=replace(config.ingest, **ingest))) as addresses:
        yield addresses


async def status_of(addresses: Addresses) -> dict[str, Any]:
    timeout = aiohttp.ClientTimeout(total=DEADLINE_S)
    async with aiohttp.ClientSession(addresses.http_url, timeout=timeout) as http, http.get("/status") as answer:
        return await answer.json()


async def until_status(addresses: Addresses, condition: Callable[[dict], object]) -> dict[str, Any]:
    """Look until the status meets a condition."""
    async with asyncio.timeout(DEADLINE_S):
        while not condition(status := await status_of(addresses)):  # noqa: ASYNC110 - over the network there is only looking
            await asyncio.sleep(0.02)
    return status


def refused_count(status: dict[str, Any], name: str) -> int:
    return status["rateLimitMetrics"][name]


def dial(addresses: Addresses) -> socket.socket:
    """Connect and say nothing."""
    target = urlsplit(addresses.ws_url)
    return socket.create_connection((target.hostname, target.port))
