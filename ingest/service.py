"""Builds the parts and owns their lifetime. The one place that knows all packages, the catalog among them.

Starting, in order: log, control plane with the catalog, writer, data plane. Stopping, in order: stop accepting (1001),
finish the intake, flush until the deadline, end the tasks, close the log. What is not flushed waits in the log.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import logging
import os
import signal
import socket
import time
import uuid
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from aiohttp import web
from prometheus_client import CollectorRegistry

from catalog.app import build_catalog
from catalog.config import S3Settings, Warehouse
from ingest.config import Config
from ingest.debezium_intake import DebeziumIntake
from ingest.errors import ConfigError, IngestError
from ingest.http import Parts, build_control_plane
from ingest.http_ingest import HttpIngest, add_http_ingest
from ingest.intake import Intake
from ingest.metrics import IngestMetrics
from ingest.server import PATH, DataPlane
from writer.buffer import FlushReason
from writer.committer import Committer
from writer.config import LogConfig, StorageConfig, WriterConfig
from writer.feed import Feed
from writer.iceberg.catalog_client import open_catalog
from writer.iceberg.partitions import parse_partition
from writer.metrics import WriterMetrics
from writer.schema import initial_columns
from writer.storage import open_store
from writer.table_writer import TableContext
from writer.types import Schema
from writer.wal.log import Log

logger = logging.getLogger(__name__)

# How often the event loop's lag is measured; each measurement costs one timer.
LAG_INTERVAL_S = 0.5

# Requests that are still running when everything else has stopped.
CONTROL_PLANE_SHUTDOWN_S = 5.0

Announce = Callable[[str, str], None]


@dataclass(frozen=True, slots=True)
class Addresses:
    """Where the service listens, with the ports that were really taken."""

    ws_url: str
    http_url: str


async def run_service(config: Config, *, announce: Announce) -> int:
    """Serve until SIGTERM or SIGINT; the exit code."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    try:
        async with serving(config) as addresses:
            announce(addresses.ws_url, addresses.http_url)
            await stop.wait()
            logger.info("stopping")
    except ExceptionGroup as group:
        logger.error("part_failed", exc_info=group)  # noqa: TRY400 - the group itself is the message
        return 1
    logger.info("stopped")
    return 0


@asynccontextmanager
async def serving(config: Config) -> AsyncIterator[Addresses]:
    """Run all parts while the block runs; a part that fails ends the block with its error."""
    _check_partition(config.writer)
    data_dir = _make_data_dir(config)
    storage = replace(config.storage, warehouse=warehouse_location(config, data_dir))
    with (
        listen(config.server.host, config.server.http_port, setting="http_port") as listener,
        listen(config.server.host, config.server.ws_port, setting="ws_port") as ws_listener,
        ThreadPoolExecutor(config.writer.decode_threads, thread_name_prefix="decode") as decoders,
        ThreadPoolExecutor(1, thread_name_prefix="parquet") as encoders,
    ):
        http_url = _url("http", listener)
        registry = CollectorRegistry()
        async with (
            _open_log(data_dir / "log", config.log) as log,
            open_store(storage) as store,
            open_catalog(http_url) as catalog_client,
            asyncio.TaskGroup() as tasks,
        ):
            context = TableContext(
                node=config.server.node_id or load_node_id(data_dir),
                config=config.writer,
                committer=Committer(catalog_client, store),
                store=store,
                decoders=decoders,
                encoders=encoders,
                metrics=WriterMetrics(registry),
                clock=time.monotonic,
            )
            parts = _build_parts(config, log, context=context, tasks=tasks, registry=registry)
            async with _control_plane(config, parts, storage=storage, listener=listener, data_dir=data_dir):
                await catalog_client.load_config()
                async with _working(config, parts, tasks=tasks, ws_listener=ws_listener) as ws_url:
                    yield Addresses(ws_url=ws_url, http_url=http_url)


@asynccontextmanager
async def _open_log(directory: Path, config: LogConfig) -> AsyncIterator[Log]:
    log = Log.open(directory, config)
    try:
        yield log
    finally:
        await log.close()


def _make_data_dir(config: Config) -> Path:
    data_dir = Path(config.server.data_dir).resolve()
    data_dir.mkdir(parents=True, exist_ok=True)
    return data_dir


def warehouse_location(config: Config, data_dir: Path) -> str:
    """Name the warehouse as the URI that tables are placed under."""
    given = config.storage.warehouse
    if given.startswith(("s3://", "file:///")):
        return given.rstrip("/")
    return f"file://{Path(given).resolve() if given else data_dir / 'warehouse'}"


def load_node_id(data_dir: Path) -> str:
    """Read this node's name, making one at the first start: markers in tables must find it again."""
    path = data_dir / "node-id"
    if not path.exists():
        partial = path.with_suffix(".partial")
        with partial.open("w", encoding="utf-8") as file:
            file.write(f"node-{uuid.uuid4()}\n")
            file.flush()
            os.fsync(file.fileno())  # an empty name after a power loss would be one that nobody has
        partial.replace(path)
    return path.read_text(encoding="utf-8").strip()


def _build_parts(
    config: Config,
    log: Log,
    *,
    context: TableContext,
    tasks: asyncio.TaskGroup,
    registry: CollectorRegistry,
) -> Parts:
    metrics = IngestMetrics(registry)
    intake = Intake(log, config=config.ingest, metrics=metrics)
    feed = Feed(log, context, tasks=tasks, marks_at_start=intake.sources())
    debezium = DebeziumIntake(intake, config=config.debezium.to_config(), metrics=metrics, clock=time.time)
    return Parts(
        config=config.server,
        version=importlib.metadata.version("lakefeed"),
        node=context.node,
        started_at=time.time(),
        data_plane=DataPlane(intake, feed, debezium=debezium, config=config.ingest, metrics=metrics),
        intake=intake,
        feed=feed,
        registry=registry,
        metrics=metrics,
        debezium=debezium,
    )


def _check_partition(config: WriterConfig) -> None:
    """Refuse a partition that not every table could have, before there are tables."""
    try:
        parse_partition(config.partition, Schema(0, initial_columns(keep_before=config.keep_before)))
    except ValueError as error:
        raise ConfigError(f"writer.partition: {error}") from error


@asynccontextmanager
async def _control_plane(
    config: Config, parts: Parts, *, storage: StorageConfig, listener: socket.socket, data_dir: Path
) -> AsyncIterator[None]:
    """Serve the control plane and, under /v1, the catalog."""
    app = build_control_plane(parts)
    add_http_ingest(app, HttpIngest(config.ingest, parts.intake, parts.debezium, parts.metrics))
    s3 = S3Settings(
        endpoint=storage.s3_endpoint,
        region=storage.s3_region,
        path_style=storage.s3_path_style,
        access_key_id=storage.s3_access_key_id,
        secret_access_key=storage.s3_secret_access_key,
    )
    warehouse = Warehouse(location=storage.warehouse, s3=s3)
    app.add_subapp("/v1", build_catalog(config.catalog, warehouse, data_dir / "catalog.sqlite"))
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=CONTROL_PLANE_SHUTDOWN_S)
    await runner.setup()
    try:
        await web.SockSite(runner, listener).start()
        yield
    finally:
        await runner.cleanup()


@asynccontextmanager
async def _working(
    config: Config, parts: Parts, *, tasks: asyncio.TaskGroup, ws_listener: socket.socket
) -> AsyncIterator[str]:
    """Take changes while the block runs; then stop in order, so that what was acked is committed or in the log."""
    feed = parts.feed
    intake_task = tasks.create_task(parts.intake.run(), name="intake")
    background = [
        tasks.create_task(feed.run_reader(), name="feed-reader"),
        tasks.create_task(feed.run_applier(), name="feed-applier"),
        tasks.create_task(feed.run_timer(), name="feed-timer"),
        tasks.create_task(parts.data_plane.run_receipts(), name="receipts"),
        tasks.create_task(parts.data_plane.run_watch(), name="ws-watch"),
        tasks.create_task(_measure_lag(parts.metrics), name="event-loop-lag"),
    ]
    async with parts.data_plane.listen(ws_listener):
        yield _url("ws", ws_listener) + PATH
    parts.intake.close()
    await intake_task
    try:
        async with asyncio.timeout(config.server.shutdown_deadline_s):
            await feed.flush(reason=FlushReason.SHUTDOWN)
    except TimeoutError:
        logger.warning(
            "flush_left_for_next_start", extra={"problems": feed.problems(now=time.monotonic(), stalled_after_s=0)}
        )
    for task in background:
        task.cancel()
    feed.stop()


async def _measure_lag(metrics: IngestMetrics) -> None:
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + LAG_INTERVAL_S
        await asyncio.sleep(LAG_INTERVAL_S)
        metrics.event_loop_lag_s.set(max(0.0, loop.time() - due))


def listen(host: str, port: int, *, setting: str) -> socket.socket:
    """Listen on an address.

    Raises: IngestError if it is taken or not ours; `setting` is then to be changed.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family)
    except OSError as error:
        raise IngestError(
            f"cannot listen: address={host}:{port} error={error.strerror}; choose another server.{setting}"
        ) from error
    # Connections inherit it. asyncio sets it for sockets that it made itself; without it, the second of two answers in
    # a row waits for the client to acknowledge the first, 40 ms on Linux.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def _url(scheme: str, listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
