"""The whole service in the test's own event loop, on free ports, with its files in the test's directory."""

from __future__ import annotations

import os
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from ingest.config import Config, IngestConfig, ServerConfig
from ingest.service import Addresses, serving
from tests.ingest.talking import DEADLINE_S
from writer.config import MIB, LogConfig, WriterConfig


def small_config(data_dir: Path, **writer: object) -> Config:
    """Settings for tests: any port, small segments, and no flush unless it is asked for."""
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
