"""The whole service in the test's event loop, on free ports, with its files in the test's directory."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from lakefeed.ingest.config import Config, IngestConfig, ServerConfig
from lakefeed.ingest.service import Addresses, serving
from lakefeed.ingest.websocket.socket import BudgetedConnection
from lakefeed.settings import MIB
from lakefeed.writer.config import LogConfig, WriterConfig
from tests.ingest.ws_client import DEADLINE_S


def small_config(data_dir: Path, **writer: object) -> Config:
    """Return settings for tests: free ports, small segments, and no flush unless requested."""
    return Config(
        server=ServerConfig(http_port=0, ws_port=0, data_dir=str(data_dir)),
        ingest=IngestConfig(frame_max_bytes=MIB // 4, event_max_bytes=MIB // 8),
        log=LogConfig(segment_max_bytes=MIB, max_bytes=64 * MIB),
        writer=WriterConfig(**{"flush_max_age_s": 3600.0, "flush_check_interval_s": 0.02, **writer}),
    )


@pytest.fixture
async def service(tmp_path: Path) -> AsyncIterator[Addresses]:
    """The service with `small_config`."""
    async with serving(small_config(tmp_path / "data")) as addresses:
        yield addresses


@pytest.fixture
async def http(service: Addresses) -> AsyncIterator[aiohttp.ClientSession]:
    """A client of the service's control plane."""
    timeout = aiohttp.ClientTimeout(total=DEADLINE_S)
    async with aiohttp.ClientSession(service.http_url, timeout=timeout) as session:
        yield session


@pytest.fixture
def stuck_log(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """A disk that syncs only while the event is set; it is at first."""
    works = threading.Event()
    works.set()
    really_sync = os.fdatasync

    def sync(descriptor: int) -> None:
        assert works.wait(DEADLINE_S)
        really_sync(descriptor)

    monkeypatch.setattr(os, "fdatasync", sync)
    yield works
    works.set()


@pytest.fixture
def stuck_socket(monkeypatch: pytest.MonkeyPatch) -> Iterator[asyncio.Event]:
    """A network that carries replies only while the event is set, which it is at first; close frames always pass."""
    works = asyncio.Event()
    works.set()
    really_send = BudgetedConnection.send

    async def send(self: BudgetedConnection, message: Any, **options: Any) -> None:
        await works.wait()
        await really_send(self, message, **options)

    monkeypatch.setattr(BudgetedConnection, "send", send)
    yield works
    works.set()
