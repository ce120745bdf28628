"""The service: builds all parts and owns their lifetime. No other module knows all of them.

Start:  log, control plane with the catalog, writer, data plane
Stop:   close the WebSocket with 1001, finish the intake, flush until the deadline, end the tasks, close the log

What is not flushed stays in the log for the next start. `serving_catalog` runs the catalog alone (`lakefeed catalog
serve`), without log, writer and data plane. Any number of catalogs may share one PostgreSQL database, and ingest nodes
commit to them (`iceberg.uri`).
"""

from __future__ import annotations

import asyncio
import functools
import importlib.metadata
import logging
import os
import secrets
import signal
import socket
import time
import uuid
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from aiohttp import web
from prometheus_client import CollectorRegistry

from lakefeed.catalog.app import build_catalog, build_files
from lakefeed.catalog.config import Warehouse
from lakefeed.catalog.routes.http import PRINCIPAL as CATALOG_PRINCIPAL
from lakefeed.catalog.service.metadata_files import Files
from lakefeed.contract.errors import Fenced
from lakefeed.iceberg.layout import parse_partition
from lakefeed.iceberg.types import Schema
from lakefeed.ingest.admission.auth import Auth, build_auth, is_loopback
from lakefeed.ingest.admission.limits import SharedLimits
from lakefeed.ingest.config import Config, load_tokens
from lakefeed.ingest.errors import IngestError
from lakefeed.ingest.http.changes import ROUTES, HttpIngest
from lakefeed.ingest.http.control import Parts, build_control_plane
from lakefeed.ingest.http.gate import PRINCIPAL, Handler, RequestGate, json_response, require_token
from lakefeed.ingest.http.listener import serve_http
from lakefeed.ingest.intake.debezium import DebeziumIntake
from lakefeed.ingest.intake.intake import Intake
from lakefeed.ingest.intake.sources import ResumePositions
from lakefeed.ingest.metrics import IngestMetrics, SourceCollector
from lakefeed.ingest.websocket.handshake import PATH
from lakefeed.ingest.websocket.server import DataPlane
from lakefeed.settings import SettingsError
from lakefeed.storage.config import CLOUD_SCHEMES, StorageConfig
from lakefeed.storage.store import open_store
from lakefeed.writer.commit.committer import Committer
from lakefeed.writer.commit.fencing import Fence, join_catalog
from lakefeed.writer.commit.rest_catalog import CatalogClient, open_catalog, open_foreign_catalog
from lakefeed.writer.commit.sources import ConsumerWatch, load_resume_positions
from lakefeed.writer.config import LogConfig
from lakefeed.writer.metrics import WriterMetrics
from lakefeed.writer.rows.evolution import initial_columns
from lakefeed.writer.tables.context import TableContext
from lakefeed.writer.tables.feed import Feed
from lakefeed.writer.tables.limit import TableLimit
from lakefeed.writer.tables.pending import FlushReason
from lakefeed.writer.wal.log import FileLog

logger = logging.getLogger(__name__)

# How often the event loop's lag is measured; each measurement costs one timer.
LAG_INTERVAL_S = 0.5

# A separate code, so that a supervisor can be set not to restart a service that another one has replaced.
EXIT_FENCED = 3

Announce = Callable[[str, str], None]

DATABASE_NAME = "catalog.sqlite"


@dataclass(frozen=True, slots=True)
class Addresses:
    """Where the service listens, with the actual ports."""

    ws_url: str
    http_url: str


async def run_service(config: Config, *, announce: Announce) -> int:
    """Serve until SIGTERM or SIGINT, and return the exit code."""
    stop = _stop_signal()
    try:
        async with serving(config) as addresses:
            announce(addresses.ws_url, addresses.http_url)
            await stop.wait()
            logger.info("stopping")
    except ExceptionGroup as group:
        if (fenced := group.subgroup(Fenced)) is not None:
            error: BaseException = fenced
            while isinstance(error, BaseExceptionGroup):  # groups may be nested
                error = error.exceptions[0]
            logger.error("fenced", extra={"reason": str(error)})  # noqa: TRY400 - no traceback needed
            return EXIT_FENCED
        logger.error("part_failed", exc_info=group)  # noqa: TRY400 - the group itself is the message
        return 1
    logger.info("stopped")
    return 0


def _stop_signal() -> asyncio.Event:
    """Return an event that SIGTERM and SIGINT set."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    return stop


@asynccontextmanager
async def serving(config: Config) -> AsyncIterator[Addresses]:
    """Run all parts while the block runs; a failing part ends the block with its error."""
    try:  # a partition that not every table could have is an error before there are tables
        parse_partition(config.writer.partition, Schema(0, initial_columns(keep_before=config.writer.keep_before)))
    except ValueError as error:
        raise SettingsError(f"writer.partition: {error}") from error
    own_token = secrets.token_urlsafe()
    auth = _open_auth(config, own_token=own_token)
    data_dir = make_data_dir(config)
    storage = own_storage(config, data_dir)
    with (
        listen(config.server.host, config.server.http_port, setting="http_port") as listener,
        listen(config.server.host, config.server.ws_port, setting="ws_port") as ws_listener,
        ThreadPoolExecutor(config.writer.decode_threads, thread_name_prefix="decode") as decoders,
        ThreadPoolExecutor(1, thread_name_prefix="parquet") as encoders,
    ):
        http_url = url_of("http", listener)
        registry = CollectorRegistry()
        opening: AbstractAsyncContextManager[CatalogClient]
        if config.iceberg.uri:  # the writer commits to a foreign catalog, if one is configured
            opening = open_foreign_catalog(config.iceberg)
        else:
            token = own_token if auth.is_on else ""
            opening = open_catalog(http_url, token=token, timeout_s=config.iceberg.request_timeout_s)
        async with (
            _open_log(data_dir / "log", config.log) as log,
            open_store(storage) as store,
            opening as catalog_client,
            asyncio.TaskGroup() as tasks,
        ):
            node = config.server.node_id or load_node_id(data_dir)
            fence = Fence(catalog_client, node=node, namespace=(config.writer.default_namespace,))
            table_limit = TableLimit(
                tables_max=config.writer.tables_max,
                sources_max=config.writer.sources_max,
                default_namespace=config.writer.default_namespace,
            )
            context = TableContext(
                node=node,
                config=config.writer,
                committer=Committer(catalog_client, store, fence=fence),
                store=store,
                decoders=decoders,
                encoders=encoders,
                metrics=WriterMetrics(registry),
                clock=time.monotonic,
                tables=config.tables,
                limit=table_limit,
            )
            load = functools.partial(load_resume_positions, catalog_client, note_sources=table_limit.note_sources)
            resume = ResumePositions(load, clock=time.monotonic)
            consumers = ConsumerWatch(catalog_client, clock=time.time)
            parts = _build_parts(
                config,
                log,
                context=context,
                resume=resume,
                consumers=consumers,
                auth=auth,
                tasks=tasks,
                registry=registry,
            )
            rejected = parts.metrics.counts.rejected_connections
            async with serve_http(
                _build_app(config, parts, storage=storage, data_dir=data_dir),
                listener,
                connections_max=config.ingest.http_connections_max,
                body_max_bytes=config.catalog.request_max_bytes,
                own_body_routes=ROUTES,
                on_rejected=lambda: rejected.update(["http_connection_limit"]),
            ):
                await join_catalog(catalog_client, fence)
                if config.writer.transactions and not catalog_client.has_transactions:
                    logger.warning("catalog_has_no_transactions", extra={"ignored": "writer.transactions"})
                if not parts.intake.sources():  # the log is new or was lost: read the positions from the tables
                    await resume.refresh()
                watch = tasks.create_task(fence.run(), name="fence-watch")
                async with _working(config, parts, tasks=tasks, ws_listener=ws_listener) as ws_url:
                    yield Addresses(ws_url=ws_url, http_url=http_url)
                watch.cancel()


def _open_auth(config: Config, *, own_token: str = "") -> Auth:
    """Return the authentication of the settings; warn if other machines can connect without a token."""
    auth = build_auth(load_tokens(config.auth), own_token=own_token)
    if not auth.is_on and not is_loopback(config.server.host):
        logger.warning("listening_without_authentication", extra={"host": config.server.host, "set": "auth.tokens"})
    return auth


@asynccontextmanager
async def _open_log(directory: Path, config: LogConfig) -> AsyncIterator[FileLog]:
    log = FileLog.open(directory, config)
    try:
        yield log
    finally:
        await log.close()


def _build_parts(
    config: Config,
    log: FileLog,
    *,
    context: TableContext,
    resume: ResumePositions,
    consumers: ConsumerWatch,
    auth: Auth,
    tasks: asyncio.TaskGroup,
    registry: CollectorRegistry,
) -> Parts:
    metrics = IngestMetrics(registry)
    limits = SharedLimits(config.ingest, time.time())
    gate = RequestGate(config.ingest, limits)
    # Prometheus reads the gauges of the limits from their owners, when it scrapes.
    metrics.peak_connections.set_function(lambda: limits.slots.peak)
    metrics.held_bytes.set_function(lambda: limits.budget.used_bytes)
    metrics.paused_connections.set_function(lambda: limits.budget.waiting_readers)
    metrics.http_held_bytes.set_function(lambda: gate.held_bytes)
    metrics.http_requests_waiting.set_function(lambda: gate.slots.waiting)
    for route in ROUTES:
        metrics.http_requests_in_flight.labels(route).set_function(functools.partial(gate.in_flight.__getitem__, route))
    intake = Intake(
        log,
        config=config.ingest,
        metrics=metrics,
        resume_positions=resume,
        tracks_transactions=config.writer.transactions,
        table_limit=context.limit,
    )
    feed = Feed(
        log,
        context,
        tasks=tasks,
        marks_at_start=intake.sources(),
        table_max_share=config.log.table_max_share,
    )
    registry.register(
        SourceCollector(
            metrics.counts,
            sources=intake.sources,
            committed=feed.status.committed_position,
            labels_max=config.ingest.source_metrics_max,
        )
    )
    debezium = DebeziumIntake(
        intake, config=config.debezium.to_config(config.tables, config.writer), metrics=metrics, clock=time.time
    )
    return Parts(
        config=config.server,
        ingest_config=config.ingest,
        version=importlib.metadata.version("lakefeed"),
        node=context.node,
        started_at=time.time(),
        data_plane=DataPlane(
            intake, feed, debezium=debezium, config=config.ingest, auth=auth, limits=limits, metrics=metrics
        ),
        request_gate=gate,
        limits=limits,
        intake=intake,
        feed=feed,
        registry=registry,
        metrics=metrics,
        debezium=debezium,
        auth=auth,
        consumers=consumers,
    )


def _build_app(config: Config, parts: Parts, *, storage: StorageConfig, data_dir: Path) -> web.Application:
    """Return the control plane with HTTP ingest and, under /v1, the catalog."""
    app = build_control_plane(parts)
    HttpIngest(
        config.ingest, intake=parts.intake, debezium=parts.debezium, gate=parts.request_gate, metrics=parts.metrics
    ).add_routes(app)
    if not config.iceberg.uri:  # with a foreign catalog, our own would have no tables
        app.add_subapp("/v1", build_own_catalog(config, storage, data_dir))
    return app


@asynccontextmanager
async def _working(
    config: Config, parts: Parts, *, tasks: asyncio.TaskGroup, ws_listener: socket.socket
) -> AsyncIterator[str]:
    """Accept changes while the block runs; then stop in order, so that what was acked is committed or in the log."""
    feed = parts.feed
    intake_task = tasks.create_task(parts.intake.run(), name="intake")
    background = [
        tasks.create_task(feed.run_reader(), name="feed-reader"),
        tasks.create_task(feed.run_applier(), name="feed-applier"),
        tasks.create_task(feed.run_catch_up(), name="feed-catch-up"),
        tasks.create_task(feed.run_timer(), name="feed-timer"),
        tasks.create_task(parts.data_plane.run_receipts(), name="receipts"),
        tasks.create_task(parts.data_plane.run_monitor(), name="ws-monitor"),
        tasks.create_task(_measure_lag(parts.metrics), name="event-loop-lag"),
    ]
    async with parts.data_plane.listen(ws_listener):
        yield url_of("ws", ws_listener) + PATH
    parts.intake.close()
    await intake_task
    try:
        async with asyncio.timeout(config.server.shutdown_deadline_s):
            await feed.flush(reason=FlushReason.SHUTDOWN)
    except TimeoutError:
        logger.warning(
            "flush_left_for_next_start",
            extra={"problems": feed.status.problems(now=time.monotonic(), stalled_after_s=0)},
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

    Raises: IngestError if the address is in use or not ours; the message names the `setting` to change.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family)
    except OSError as error:
        raise IngestError(
            f"cannot listen: address={host}:{port} error={error.strerror}; choose another server.{setting}"
        ) from error
    # Connections inherit it. asyncio sets it only for sockets that it creates. Without it, the second of two replies in
    # a row waits for the client to acknowledge the first, 40 ms on Linux.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def url_of(scheme: str, listener: socket.socket) -> str:
    """Return the URL of a listener."""
    host, port = listener.getsockname()[:2]
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


# -- the catalog alone


async def run_catalog(config: Config, *, announce: Callable[[str], None]) -> int:
    """Serve the catalog until SIGTERM or SIGINT, and return the exit code."""
    stop = _stop_signal()
    async with serving_catalog(config) as url:
        announce(url)
        await stop.wait()
        logger.info("stopping")
    logger.info("stopped")
    return 0


@asynccontextmanager
async def serving_catalog(config: Config) -> AsyncIterator[str]:
    """Serve the catalog while the block runs; yields its URL."""

    async def index(_request: web.Request) -> web.Response:
        version = importlib.metadata.version("lakefeed")
        return json_response(
            {"service": "lakefeed catalog", "version": version, "endpoints": ["/v1/config", "/health"]}
        )

    async def health(_request: web.Request) -> web.Response:
        return json_response({"status": "ready"})  # the store is opened before the service listens

    data_dir = make_data_dir(config)
    app = web.Application(middlewares=[require_token(_open_auth(config))])
    app.router.add_get("/", index)
    for path in ("/health", "/health/ready", "/health/live"):
        app.router.add_get(path, health)
    app.add_subapp("/v1", build_own_catalog(config, own_storage(config, data_dir), data_dir))
    with listen(config.server.host, config.server.http_port, setting="http_port") as listener:
        connections_max, body_max_bytes = config.ingest.http_connections_max, config.catalog.request_max_bytes
        async with serve_http(app, listener, connections_max=connections_max, body_max_bytes=body_max_bytes):
            yield url_of("http", listener)


# -- the catalog and the data directory as the settings describe them


def build_own_catalog(config: Config, storage: StorageConfig, data_dir: Path) -> web.Application:
    """Return the catalog, to be mounted under /v1 behind `require_token`; `storage` names the warehouse as a URI."""
    catalog = build_catalog(config.catalog, Warehouse(storage), data_dir / DATABASE_NAME)
    catalog.middlewares.append(_pass_principal)
    return catalog


@web.middleware
async def _pass_principal(request: web.Request, handler: Handler) -> web.StreamResponse:
    request[CATALOG_PRINCIPAL] = request[PRINCIPAL].name
    return await handler(request)


@asynccontextmanager
async def open_own_files(config: Config) -> AsyncIterator[Files]:
    """Open the storage that the catalog's metadata files are in."""
    files = build_files(config.catalog, Warehouse(own_storage(config, make_data_dir(config))))
    await files.open()
    try:
        yield files
    finally:
        await files.close()


def make_data_dir(config: Config) -> Path:
    """Create the directory that holds everything of this node, and return its path."""
    data_dir = Path(config.server.data_dir).resolve()
    data_dir.mkdir(parents=True, exist_ok=True)
    return data_dir


def own_storage(config: Config, data_dir: Path) -> StorageConfig:
    """Return the storage with the warehouse as the URI under which tables are placed."""
    given = config.storage.warehouse
    scheme, _, rest = given.partition("://")
    if scheme in {"s3a", "s3n"}:  # Hadoop's names for S3
        uri = f"s3://{rest.rstrip('/')}"
    elif given.startswith(("s3://", "file:///", *CLOUD_SCHEMES)):
        uri = given.rstrip("/")
    else:
        uri = f"file://{Path(given).resolve() if given else data_dir / 'warehouse'}"
    return replace(config.storage, warehouse=uri)


def load_node_id(data_dir: Path) -> str:
    """Return this node's name, created at the first start: progress markers in tables refer to it."""
    path = data_dir / "node-id"
    if not path.exists():
        partial = path.with_suffix(".partial")
        with partial.open("w", encoding="utf-8") as file:
            file.write(f"node-{uuid.uuid4()}\n")
            file.flush()
            os.fsync(file.fileno())  # a power loss must not leave an empty name
        partial.replace(path)
    return path.read_text(encoding="utf-8").strip()
