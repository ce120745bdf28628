"""The catalog as an aiohttp application: builds its parts, owns their lifetime, renders every error.

The host mounts it under `/v1`; the routes here are relative to that. The host authenticates each request and stores its
sender under routes.http.PRINCIPAL. The catalog itself serves every request that reaches it.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import orjson
from aiohttp import web

from lakefeed.aio import KeyedLocks
from lakefeed.catalog.config import MEMORY_DATABASE, CatalogConfig, Warehouse
from lakefeed.catalog.errors import BadRequest, CatalogError, MethodNotAllowed, NoSuchRoute, StoreUnusable, error_model
from lakefeed.catalog.json_fields import JsonObject
from lakefeed.catalog.metadata.document import parse_document
from lakefeed.catalog.metadata.views import parse_view_document
from lakefeed.catalog.planning.planner import Planner
from lakefeed.catalog.routes import namespaces, tables, views
from lakefeed.catalog.routes.http import SERVICES, Handler, Services, error_response, get_config, with_idempotency_key
from lakefeed.catalog.service.idempotency import Idempotency
from lakefeed.catalog.service.load_responses import LoadResponses
from lakefeed.catalog.service.metadata_files import Files, MetadataFiles
from lakefeed.catalog.service.purge import Purges
from lakefeed.catalog.service.tables import Tables, Views
from lakefeed.catalog.service.versions import Versions
from lakefeed.catalog.store.sqlite import MemoryStore, SqliteStore
from lakefeed.catalog.store.store import Store
from lakefeed.contract.errors import LakefeedError
from lakefeed.locations import Confinement
from lakefeed.storage.store import build_object_store

# Tables first: aiohttp tries one route after the other, and nearly all requests are for tables.
ROUTES = (*tables.ROUTES, *namespaces.ROUTES, *views.ROUTES)

_logger = logging.getLogger(__name__)


def build_catalog(config: CatalogConfig, warehouse: Warehouse, sqlite_path: Path) -> web.Application:
    """Return the catalog; it opens when the application that hosts it starts.

    Raises: StoreUnusable; StorageError if the client library for the warehouse is not installed.
    """
    store = build_store(config, sqlite_path)
    return build_app(config, warehouse, store=store, files=build_files(config, warehouse))


def build_store(config: CatalogConfig, sqlite_path: Path) -> Store:
    """Return the store that the settings name, not yet open.

    Raises: StoreUnusable.
    """
    if not config.database:
        return SqliteStore(sqlite_path)
    if config.database == MEMORY_DATABASE:
        return MemoryStore()
    try:
        from lakefeed.catalog.store.postgres import PostgresStore  # noqa: PLC0415 - asyncpg may not be installed
    except ModuleNotFoundError as error:
        raise StoreUnusable("catalog.database needs asyncpg: pip install 'lakefeed[postgres]'") from error
    return PostgresStore(config.database, timeout_s=config.database_timeout_s)


def build_files(config: CatalogConfig, warehouse: Warehouse) -> Files:
    """Return the files of the warehouse, not yet open.

    Raises: StorageError if the client library for the warehouse is not installed.
    """
    return Files(build_object_store(warehouse.storage), timeout_s=config.storage_timeout_s)


def build_app(config: CatalogConfig, warehouse: Warehouse, *, store: Store, files: Files) -> web.Application:
    """Return the catalog over any store and files."""

    def build_versions(parse: Callable[[bytes], JsonObject]) -> Versions:
        return Versions(
            store=store,
            files=MetadataFiles(
                files, parse=parse, max_bytes=config.metadata_max_bytes, cache_bytes=config.metadata_cache_bytes
            ),
            confinement=Confinement(warehouse.location, config.allow_any_location),
            # A check costs nothing on a local disk; on an object store it is one request per load.
            verify_files=warehouse.is_local or config.verify_metadata_file,
            new_uuid=lambda: str(uuid.uuid4()),
        )

    commit_queues = KeyedLocks(waiting_max=config.commit_queue_max)
    versions = build_versions(parse_document)
    idempotency = Idempotency(store, config, clock_ms=_clock_ms)
    purges = Purges(versions, max_bytes=config.metadata_max_bytes)
    planner = Planner(versions, config, clock=time.monotonic)

    app = web.Application(middlewares=[render_errors])
    app[SERVICES] = Services(
        config=config,
        warehouse=warehouse,
        client_config=orjson.dumps(warehouse.client_config()),
        store=store,
        tables=Tables(versions, commit_queues=commit_queues, purges=purges, clock_ms=_clock_ms),
        views=Views(build_versions(parse_view_document), commit_queues=commit_queues, clock_ms=_clock_ms),
        load_responses=LoadResponses(max_bytes=config.response_cache_bytes),
        idempotency=idempotency,
        planner=planner,
        endpoints=tuple(route.endpoint for route in ROUTES),
    )
    app.router.add_route("GET", "/config", get_config)
    for route in ROUTES:
        app.router.add_route(route.method, route.pattern, with_idempotency_key(route))

    async def open_parts(_app: web.Application) -> AsyncIterator[None]:
        sweeping: asyncio.Task[None] | None = None
        try:
            await store.open()
            await files.open()
            sweeping = asyncio.create_task(idempotency.sweep_forever(), name="catalog-sweep")
            yield
        finally:
            if sweeping is not None:
                sweeping.cancel()
                await asyncio.wait([sweeping])
            await purges.close()
            await planner.close()
            await files.close()
            await store.close()

    app.cleanup_ctx.append(open_parts)
    return app


@web.middleware
async def render_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Render every error in Iceberg's form. Unknown errors are logged and rendered without detail."""
    try:
        return await handler(request)
    except LakefeedError as error:
        return _render(request, error)
    except web.HTTPNotFound:
        return _render(request, NoSuchRoute(f"No such endpoint: {request.method} {request.path}"))
    except web.HTTPMethodNotAllowed:
        return _render(request, MethodNotAllowed(f"Method is not supported here: {request.method} {request.path}"))
    except web.HTTPException as error:
        return _render(request, BadRequest(error.reason))
    except Exception:  # noqa: BLE001 - the boundary of a request; the traceback is logged
        return _render(request, CatalogError("Internal server error"))


def _render(request: web.Request, error: LakefeedError) -> web.Response:
    model = error_model(error)
    if model.status >= CatalogError.status:
        facts = {"method": request.method, "path": request.path}
        _logger.exception("request_failed", extra=facts)  # noqa: LOG004 - only called by the handlers above
    response = error_response(model.status, model.type, str(error))
    response.headers.update(model.headers)
    return response


def _clock_ms() -> int:
    return time.time_ns() // 1_000_000
