"""The whole service with some limits changed, and its /status."""

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
from tests.ingest.ws_client import DEADLINE_S

# Short, but long enough for a slow machine to do what must not time out.
TIMEOUT_S = 2 * MONITOR_INTERVAL_S


@asynccontextmanager
async def serving_with(directory: Path, **ingest: Any) -> AsyncIterator[Addresses]:
    """Serve with some settings of [ingest] changed."""
    config = small_config(directory)
    async with serving(replace(config, ingest=replace(config.ingest, **ingest))) as addresses:
        yield addresses


async def status_of(addresses: Addresses) -> dict[str, Any]:
    timeout = aiohttp.ClientTimeout(total=DEADLINE_S)
    async with aiohttp.ClientSession(addresses.http_url, timeout=timeout) as http, http.get("/status") as answer:
        return await answer.json()


async def wait_for_status(addresses: Addresses, condition: Callable[[dict], object]) -> dict[str, Any]:
    """Poll until the status meets a condition."""
    async with asyncio.timeout(DEADLINE_S):
        while not condition(status := await status_of(addresses)):  # noqa: ASYNC110 - the network offers polling only
            await asyncio.sleep(0.02)
    return status


def refused_count(status: dict[str, Any], name: str) -> int:
    return status["rateLimitMetrics"][name]


def open_socket(addresses: Addresses) -> socket.socket:
    """Open a TCP connection and send nothing."""
    target = urlsplit(addresses.ws_url)
    return socket.create_connection((target.hostname, target.port))
