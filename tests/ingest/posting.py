"""HTTP ingest on a real log, with a client: the routes, the intake behind them, and no writer to trim the log."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
from aiohttp import web

from ingest.config import IngestConfig
from ingest.debezium import DebeziumConfig
from ingest.debezium_intake import DebeziumIntake
from ingest.http_ingest import HttpIngest, add_http_ingest
from ingest.metrics import IngestMetrics
from tests.ingest.test_intake import SMALL_LOG, Running, running
from writer.config import LogConfig
from writer.envelope import Event, decode_batch
from writer.wal.files import Filesystem

DEADLINE_S = 30.0
NDJSON = {"Content-Type": "application/x-ndjson"}
# A fixed moment: what is numbered by the time of its receipt is numbered the same in every run.
NOW_S = 1_794_802_444.0
NOW_US = 1_794_802_444_000_000


class Answer(NamedTuple):
    status: int
    document: dict[str, Any]


class Poster:
    """A client of the two routes."""

    def __init__(self, client: aiohttp.ClientSession, url: str) -> None:
        self.url = url
        self._client = client

    async def post(
        self, path: str, body: Any, *, headers: Mapping[str, str] | None = None, params: Mapping[str, Any] | None = None
    ) -> Answer:
        data = body if isinstance(body, bytes) or hasattr(body, "__aiter__") else json.dumps(body).encode()
        async with asyncio.timeout(DEADLINE_S):
            async with self._client.post(self.url + path, data=data, headers=headers, params=params) as response:
                return Answer(response.status, json.loads(await response.read()))

    async def batch(self, *sequences: int, source: str = "shop", **fields: Any) -> Answer:
        return await self.post("/cdc", {"sourceDoId": source, "events": [insert(each) for each in sequences], **fields})

    async def rows(self, *rows: Any, source: str = "shop", **params: Any) -> Answer:
        body = b"".join(json.dumps(row).encode() + b"\n" for row in rows)
        return await self.post("/cdc", body, headers=NDJSON, params={"source": source, "table": "users", **params})

    async def debezium(self, *documents: Any, source: str = "shop", headers: Mapping[str, str] | None = None) -> Answer:
        body = documents[0] if len(documents) == 1 else list(documents)
        return await self.post("/cdc/debezium", body, headers=headers, params={"source": source})


class Posting(Poster):
    """The client, and what is behind the routes."""

    def __init__(self, client: aiohttp.ClientSession, url: str, at_work: Running, debezium: DebeziumIntake) -> None:
        super().__init__(client, url)
        self.at_work = at_work
        self.debezium_intake = debezium

    def events(self, source: str = "shop") -> list[Event]:
        """The changes in the log, without those that admission left out."""
        return [
            event
            for frame in self.at_work.frames()
            if frame.source == source
            for event in decode_batch(frame.body).events
            if event.sequence > frame.after_sequence
        ]

    def sequences(self, source: str = "shop") -> list[int]:
        return [event.sequence for event in self.events(source)]

    def metric(self, name: str, **labels: str) -> float:
        return self.at_work._registry.get_sample_value(name, labels) or 0.0

    def rows_taken(self, source: str = "shop") -> list[Any]:
        return [json.loads(bytes(event.after)) for event in self.events(source)]


def insert(sequence: int, **fields: Any) -> dict[str, Any]:
    after = {"id": sequence, "type": "a column of this name"}
    return {"sequence": sequence, "operation": "INSERT", "table": "users", "after": after, **fields}


@asynccontextmanager
async def posting(
    directory: Path,
    *,
    log_config: LogConfig = SMALL_LOG,
    config: IngestConfig | None = None,
    debezium: DebeziumConfig | None = None,
    files: Filesystem | None = None,
) -> AsyncIterator[Posting]:
    """Serve the two routes on a free port."""
    config = config or IngestConfig()
    async with running(directory, log_config=log_config, config=config, files=files) as at_work:
        metrics: IngestMetrics = at_work.intake._metrics
        debezium_intake = DebeziumIntake(
            at_work.intake, config=debezium or DebeziumConfig(), metrics=metrics, clock=lambda: NOW_S
        )
        app = web.Application()
        add_http_ingest(app, HttpIngest(config, at_work.intake, debezium_intake, metrics))
        async with _serving(app) as url, aiohttp.ClientSession(auto_decompress=False) as client:
            yield Posting(client, url, at_work, debezium_intake)


@asynccontextmanager
async def _serving(app: web.Application) -> AsyncIterator[str]:
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        yield f"http://{host}:{port}"
    finally:
        await runner.cleanup()
