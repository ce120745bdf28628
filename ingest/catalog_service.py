"""The catalog by itself: `lakefeed catalog serve`. Owns its lifetime; no log, no writer, no data plane.

Any number of these may stand before one PostgreSQL, and ingest nodes commit to them (`iceberg.uri`).
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import logging
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

import orjson
from aiohttp import web

from ingest.auth import auth_from
from ingest.auth_settings import is_loopback, load_tokens
from ingest.catalog_mount import build_own_catalog
from ingest.config import Config
from ingest.data_directory import make_data_dir, warehouse_location
from ingest.http_auth import asking_for_token
from ingest.http_listener import HttpLimits, serve_http
from ingest.service import CONTROL_PLANE_SHUTDOWN_S, listen, url_of

logger = logging.getLogger(__name__)


async def run_catalog(config: Config, *, announce: Callable[[str], None]) -> int:
    """Serve until SIGTERM or SIGINT; the exit code."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with serving_catalog(config) as url:
        announce(url)
        await stop.wait()
        logger.info("stopping")
    logger.info("stopped")
    return 0


@asynccontextmanager
async def serving_catalog(config: Config) -> AsyncIterator[str]:
    """Serve the catalog while the block runs, at the address that is given."""
    auth = auth_from(load_tokens(config.auth))
    if not auth.is_on and not is_loopback(config.server.host):
        logger.warning("listening_without_authentication", extra={"host": config.server.host, "set": "auth.tokens"})
    data_dir = make_data_dir(config)
    storage = replace(config.storage, warehouse=warehouse_location(config, data_dir))
    app = web.Application(middlewares=[asking_for_token(auth)])
    app.router.add_get("/", _index)
    for path in ("/health", "/health/ready", "/health/live"):
        app.router.add_get(path, _health)
    app.add_subapp("/v1", build_own_catalog(config, storage, data_dir))
    limits = HttpLimits(
        connections_max=config.ingest.http_connections_max,
        unpacked_max_bytes=config.catalog.request_max_bytes,
        shutdown_s=CONTROL_PLANE_SHUTDOWN_S,
    )
    with listen(config.server.host, config.server.http_port, setting="http_port") as listener:
        async with serve_http(app, listener, limits=limits):
            yield url_of("http", listener)


async def _index(request: web.Request) -> web.Response:
    del request
    version = importlib.metadata.version("lakefeed")
    return _json({"service": "lakefeed catalog", "version": version, "endpoints": ["/v1/config", "/health"]})


async def _health(request: web.Request) -> web.Response:
    """Answer: whoever can be reached serves, because the store is opened before the address is listened on."""
    del request
    return _json({"status": "ready"})


def _json(document: object) -> web.Response:
    return web.Response(body=orjson.dumps(document), content_type="application/json")
