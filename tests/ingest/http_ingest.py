"""HTTP ingest on a real log, with a client: the routes, the intake behind them, and no writer to trim the log."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
from aiohttp import web

from lakefeed.ingest.admission.limits import SharedLimits
from lakefeed.ingest.config import IngestConfig
from lakefeed.ingest.debezium.events import DebeziumConfig
from lakefeed.ingest.http.changes import ROUTES, HttpIngest
from lakefeed.ingest.http.gate import RequestGate
from lakefeed.ingest.http.listener import serve_http
from lakefeed.ingest.intake.debezium import DebeziumIntake
from lakefeed.ingest.metrics import IngestMetrics
from lakefeed.settings import MIB
from lakefeed.writer.config import LogConfig
from lakefeed.writer.wal.directory import Filesystem
from lakefeed.writer.wire.json_batch import Event, decode_batch
from tests.ingest.running_intake import SMALL_LOG, RunningIntake, running_intake

DEADLINE_S = 60.0
NDJSON = {"Content-Type": "application/x-ndjson"}
# A fixed moment: what is numbered by the time of its receipt is numbered the same in every run.
NOW_S = 1_794_802_444.0
NOW_US = 1_794_802_444_000_000


class Answer(NamedTuple):
    status: int
    document: dict[str, Any]


class HttpClient:
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


class HttpIngestClient(HttpClient):
    """The client, and what is behind the routes."""

    def __init__(
        self,
        client: aiohttp.ClientSession,
        url: str,
        *,
        running: RunningIntake,
        debezium: DebeziumIntake,
        gate: RequestGate,
    ) -> None:
        super().__init__(client, url)
        self.running = running
        self.debezium_intake = debezium
        self.gate = gate

    def events(self, source: str = "shop") -> list[Event]:
        """The changes in the log, without those that admission left out."""
        return [
            event
            for frame in self.running.frames()
            if frame.source == source
            for event in decode_batch(frame.body).events
            if event.sequence > frame.after_sequence
        ]

    def sequences(self, source: str = "shop") -> list[int]:
        return [event.sequence for event in self.events(source)]

    def metric(self, name: str, **labels: str) -> float:
        return self.running._registry.get_sample_value(name, labels) or 0.0

    def accepted_rows(self, source: str = "shop") -> list[Any]:
        return [json.loads(bytes(event.after)) for event in self.events(source)]


def insert(sequence: int, **fields: Any) -> dict[str, Any]:
    after = {"id": sequence, "type": "a column of this name"}
    return {"sequence": sequence, "operation": "INSERT", "table": "users", "after": after, **fields}


@asynccontextmanager
async def serving_routes(
    directory: Path,
    *,
    log_config: LogConfig = SMALL_LOG,
    config: IngestConfig | None = None,
    debezium: DebeziumConfig | None = None,
    files: Filesystem | None = None,
    send_buffer_bytes: int | None = None,
) -> AsyncIterator[HttpIngestClient]:
    """Serve the two routes on a free port. `send_buffer_bytes` bounds what the system keeps of unread answers."""
    config = config or IngestConfig()
    async with running_intake(directory, log_config=log_config, config=config, files=files) as running:
        metrics: IngestMetrics = running.intake._metrics
        debezium_intake = DebeziumIntake(
            running.intake, config=debezium or DebeziumConfig(), metrics=metrics, clock=lambda: NOW_S
        )
        gate = RequestGate(config, SharedLimits(config, time.time()))
        app = web.Application()
        ingest = HttpIngest(config, intake=running.intake, debezium=debezium_intake, gate=gate, metrics=metrics)
        ingest.add_routes(app)
        async with serving_http(app, config, send_buffer_bytes=send_buffer_bytes) as url, _client() as client:
            yield HttpIngestClient(client, url, running=running, debezium=debezium_intake, gate=gate)


def _client() -> aiohttp.ClientSession:
    """A client that sends what it is given, over as many connections as it takes."""
    return aiohttp.ClientSession(auto_decompress=False, connector=aiohttp.TCPConnector(limit=0))


@asynccontextmanager
async def serving_http(
    app: web.Application, config: IngestConfig, *, send_buffer_bytes: int | None = None
) -> AsyncIterator[str]:
    """Serve an application as the service does, on a free port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        host, port = listener.getsockname()
        if send_buffer_bytes is not None:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer_bytes)
        async with serve_http(
            app,
            listener,
            connections_max=config.http_connections_max,
            body_max_bytes=MIB,
            own_body_routes=ROUTES,
            shutdown_s=0.1,
        ):
            yield f"http://{host}:{port}"
