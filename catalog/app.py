"""The catalog as an aiohttp application. Wiring: builds the parts, owns their lifetime, renders every error.

The caller mounts it under /v1; routes here are relative to that.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from aiohttp import web

from lakefeed.aio import Turns
from lakefeed.catalog.config import MEMORY_DATABASE, CatalogConfig, Warehouse
from lakefeed.catalog.errors import BadRequest, CatalogError, MethodNotAllowed, NoSuchRoute, StoreUnusable, error_model
from lakefeed.catalog.json_fields import JsonObject
from lakefeed.catalog.metadata.document import parse_document
from lakefeed.catalog.metadata.views import parse_view_document
from lakefeed.catalog.planning.planner import Planner
from lakefeed.catalog.routes import namespaces, tables, views
from lakefeed.catalog.routes.http import SERVICES, Handler, Services, error_answer, get_config, heeding_key
from lakefeed.catalog.service.files import Files
from lakefeed.catalog.service.idempotency import Idempotency
from lakefeed.catalog.service.metadata_cache import LoadAnswers, MetadataFiles
from lakefeed.catalog.service.purge import Purges
from lakefeed.catalog.service.tables import Tables, Transactions
from lakefeed.catalog.service.versions import Versions
from lakefeed.catalog.service.views import Namespaces, Views
from lakefeed.catalog.store.memory import MemoryStore
from lakefeed.catalog.store.protocol import Store
from lakefeed.catalog.store.sqlite import SqliteStore
from lakefeed.contract.errors import LakefeedError
from lakefeed.locations import Confinement
from lakefeed.storage.store import build_object_store

# --- catalog.store.choice ---------------------------------------------------------------------------------------------
#
# Which store the settings ask for. PostgreSQL's driver is imported only where it is used: it is an optional part.


def build_store(config: CatalogConfig, sqlite_path: Path) -> Store:
    """Build the store, not yet connected.

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


# --- catalog.app ------------------------------------------------------------------------------------------------------


# Those of tables first: aiohttp tries one after the other, and nearly all requests are for tables.
ROUTES = (
    *tables.ROUTES,
    *namespaces.ROUTES,
    *views.ROUTES,
    *namespaces.FUNCTIONS_ROUTES,
    *tables.TRANSACTIONS_ROUTES,
    *tables.PLANNING_ROUTES,
)

_logger = logging.getLogger(__name__)

_INTERNAL_ERROR = CatalogError("Internal server error")


def build_catalog(config: CatalogConfig, warehouse: Warehouse, database: Path) -> web.Application:
    """Build the catalog; `database` is the SQLite file, unless another store is configured.

    It opens when the application that it is mounted on starts.
    """
    store = build_store(config, database)
    return build_app(config, warehouse, store=store, files=build_files(config, warehouse))


def build_files(config: CatalogConfig, warehouse: Warehouse) -> Files:
    """Return the files of the warehouse, not yet open.

    Raises: StorageError if the client library for the warehouse is not installed.
    """
    return Files(build_object_store(warehouse.storage), timeout_s=config.storage_timeout_s)


def build_app(config: CatalogConfig, warehouse: Warehouse, *, store: Store, files: Files) -> web.Application:
    """Build the catalog over any store and files."""
    turns = Turns(waiting_max=config.commit_queue_max)

    def build_versions(parse: Callable[[bytes], JsonObject]) -> Versions:
        return Versions(
            store=store,
            files=MetadataFiles(
                files, parse=parse, max_bytes=config.metadata_max_bytes, cache_bytes=config.metadata_cache_bytes
            ),
            confinement=Confinement(warehouse.location, config.allow_any_location),
            # Nothing is cheaper than to look at a local file; on an object store it is a request for every load.
            verify_files=warehouse.is_local or config.verify_metadata_file,
            new_uuid=lambda: str(uuid.uuid4()),
        )

    app = web.Application(middlewares=[render_errors])
    idempotency = Idempotency(store, config, clock_ms=_clock_ms)
    table_versions = build_versions(parse_document)
    purges = Purges(files, table_versions.files, table_versions.confinement, file_max_bytes=config.metadata_max_bytes)
    table_operations = Tables(table_versions, turns=turns, purges=purges, clock_ms=_clock_ms)
    planner = Planner(table_operations, table_versions, files, config, clock=time.monotonic)
    app[SERVICES] = Services(
        config=config,
        warehouse=warehouse,
        namespaces=Namespaces(store),
        tables=table_operations,
        transactions=Transactions(table_operations, table_versions, turns=turns),
        views=Views(build_versions(parse_view_document), turns=turns, clock_ms=_clock_ms),
        answers=LoadAnswers(warehouse.client_config(), max_bytes=config.response_cache_bytes),
        idempotency=idempotency,
        planner=planner,
        endpoints=tuple(route.endpoint for route in ROUTES),
    )
    app.router.add_route("GET", "/config", get_config)
    for route in ROUTES:
        app.router.add_route(route.method, route.pattern, heeding_key(route))

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
    """Answer every error in Iceberg's shape; unknown ones without detail, which goes to the log."""
    try:
        return await handler(request)
    except LakefeedError as error:
        if error_model(error).status >= CatalogError.status:
            _logger.exception("request_failed", extra=_request_facts(request))
        return _error_answer(error)
    except web.HTTPNotFound:
        return _error_answer(NoSuchRoute(f"No such endpoint: {request.method} {request.path}"))
    except web.HTTPMethodNotAllowed:
        return _error_answer(MethodNotAllowed(f"Method is not supported here: {request.method} {request.path}"))
    except web.HTTPException as error:
        return _error_answer(BadRequest(error.reason))
    except Exception:
        _logger.exception("request_failed", extra=_request_facts(request))
        return _error_answer(_INTERNAL_ERROR)


def _clock_ms() -> int:
    return time.time_ns() // 1_000_000


def _request_facts(request: web.Request) -> dict[str, str]:
    return {"method": request.method, "path": request.path}


def _error_answer(error: LakefeedError) -> web.Response:
    model = error_model(error)
    answer = error_answer(model.status, model.type, str(error))
    answer.headers.update(model.headers)
    return answer
