"""Routes of tables, of transactions over several tables, and of scan plans."""

from __future__ import annotations

from functools import partial

from aiohttp import web

from lakefeed.catalog.errors import BadRequest
from lakefeed.catalog.json_fields import JsonObject, maybe_bool, read_object, read_objects, read_text
from lakefeed.catalog.metadata.updates import parse_create, parse_requirements, parse_updates
from lakefeed.catalog.names import TableId
from lakefeed.catalog.planning.tasks import parse_plan_request
from lakefeed.catalog.routes.http import (
    MINIMAL,
    Route,
    accepts_gzip,
    body_entry,
    check_identifier,
    json_response,
    list_entries,
    no_content,
    path_entry,
    prefers,
    query_bool,
    read_body,
    read_json,
    rename_entry,
    replay_no_content,
    services,
)
from lakefeed.catalog.service.load_responses import ALL, REFS, ResponseKey, encode_load, load_etag
from lakefeed.catalog.service.metadata_files import StoredMetadata
from lakefeed.catalog.service.versions import Commit
from lakefeed.catalog.store.outcomes import RequestOutcome

# Tables of one transaction, whose commit queues are all held at once; far beyond what a source changes in one.
TRANSACTION_TABLES_MAX = 1_000
# RFC 7240, section 4.1: the client prefers the plan's id at once, and asks again.
RESPOND_ASYNC = "respond-async"


async def create_table(request: web.Request) -> web.Response:
    """Create a table, or stage its creation."""
    context, body = services(request), await read_json(request)
    table = body_entry(request, TableId, body)
    create = parse_create(body)
    if maybe_bool(body, "stage-create"):
        document = await context.tables.stage(table, create)
        staged = {"metadata-location": None, "metadata": document, "config": context.warehouse.client_config()}
        return json_response(staged)
    return _table_response(request, await context.tables.create(table, create))


async def load_table(request: web.Request) -> web.Response:
    """Load a table. A client that has the current version already gets 304, from the pointer alone."""
    context = services(request)
    snapshots = request.query.get("snapshots", ALL).lower()
    if snapshots not in (ALL, REFS):
        raise BadRequest("Invalid snapshots: expected all or refs")
    pointer = await context.tables.versions.locate(path_entry(request, TableId))
    config = context.client_config
    etag = load_etag(pointer, snapshots, config)
    headers = {"ETag": f'"{etag}"', "Vary": "Accept-Encoding"}
    if any(known.value in (etag, "*") for known in request.if_none_match or ()):
        return web.Response(status=304, headers=headers)
    key = ResponseKey(pointer, snapshots, gzip=accepts_gzip(request.headers.get("Accept-Encoding", "")))
    encoded = await context.load_responses.find_or_encode(key, load=lambda: context.tables.versions.files.load(pointer))
    if encoded.is_gzip:
        headers["Content-Encoding"] = "gzip"
    return web.Response(body=encoded.body(config), headers=headers, content_type="application/json")


async def table_exists(request: web.Request) -> web.Response:
    """Respond 204 if a table exists."""
    await services(request).tables.versions.locate(path_entry(request, TableId))
    return no_content()


async def commit_table(request: web.Request) -> web.Response:
    """Commit to a table."""
    body, table = await read_json(request), path_entry(request, TableId)
    check_identifier(body, table)
    return _commit_response(request, await services(request).tables.commit(table, _parse_commit(body)))


async def drop_table(request: web.Request) -> web.Response:
    """Drop a table, and delete its files if so asked."""
    table, purge = path_entry(request, TableId), query_bool(request, "purgeRequested")
    await services(request).tables.drop(table, purge=purge)
    return no_content()


async def register_table(request: web.Request) -> web.Response:
    """Register a metadata file as a table."""
    body = await read_json(request)
    table, location = body_entry(request, TableId, body), read_text(body, "metadata-location")
    stored = await services(request).tables.register(table, location, overwrite=maybe_bool(body, "overwrite"))
    return _table_response(request, stored)


async def unregister_table(request: web.Request) -> web.Response:
    """Drop a table without its files and respond with its last metadata, to be registered elsewhere."""
    stored = await services(request).tables.unregister(path_entry(request, TableId))
    return _table_response(request, stored, with_config=False)


async def replay_create(request: web.Request, outcome: RequestOutcome) -> web.Response:
    """Respond again to a request that created the table that its body names."""
    table = body_entry(request, TableId, await read_json(request))
    return _table_response(request, await services(request).tables.versions.load_recorded(table, outcome.pointer))


async def replay_commit(request: web.Request, outcome: RequestOutcome) -> web.Response:
    """Respond again to a commit."""
    table = path_entry(request, TableId)
    return _commit_response(request, await services(request).tables.versions.load_recorded(table, outcome.pointer))


async def replay_unregister(request: web.Request, outcome: RequestOutcome) -> web.Response:
    """Respond again with the last metadata of a table that is not in the catalog any more."""
    return _table_response(
        request, await services(request).tables.versions.files.load(outcome.pointer), with_config=False
    )


async def report_metrics(request: web.Request) -> web.Response:
    """Accept a report and discard it. Spark reports on a table before it exists, so the table is not looked up."""
    await read_body(request)
    return no_content()


async def commit_transaction(request: web.Request) -> web.Response:
    """Commit to all tables named, or to none."""
    changes = read_objects(await read_json(request), "table-changes")
    if not 0 < len(changes) <= TRANSACTION_TABLES_MAX:
        raise BadRequest(f"Invalid table-changes: expected 1 to {TRANSACTION_TABLES_MAX} tables")
    commits: dict[TableId, Commit] = {}
    for change in changes:
        table = TableId.from_json(read_object(change, "identifier"))
        if table in commits:
            raise BadRequest(f"Invalid table-changes: table is named twice: {table}")
        commits[table] = _parse_commit(change)
    await services(request).tables.commit_transaction(commits)
    return no_content()


async def plan_scan(request: web.Request) -> web.Response:
    """Plan a scan. The specification cannot ask for a plan without waiting for it, so HTTP's own preference is used."""
    context, body = services(request), await read_json(request)
    wait_s = 0.0 if prefers(request, RESPOND_ASYNC) else context.config.plan_wait_s
    table = path_entry(request, TableId)
    return _plan_response(await context.planner.plan(table, parse_plan_request(body), wait_s=wait_s))


async def fetch_plan(request: web.Request) -> web.Response:
    """Respond with the state of a plan."""
    table, plan_id = path_entry(request, TableId), request.match_info["plan_id"]
    return _plan_response(await services(request).planner.fetch(table, plan_id))


async def cancel_plan(request: web.Request) -> web.Response:
    """Cancel a plan."""
    await services(request).planner.cancel(path_entry(request, TableId), request.match_info["plan_id"])
    return no_content()


async def fetch_tasks(request: web.Request) -> web.Response:
    """Respond with one page of a plan's tasks."""
    plan_task = read_text(await read_json(request), "plan-task")
    return _plan_response(await services(request).planner.fetch_tasks(path_entry(request, TableId), plan_task))


def _parse_commit(body: JsonObject) -> Commit:
    return Commit(
        requirements=parse_requirements(read_objects(body, "requirements")),
        updates=parse_updates(read_objects(body, "updates")),
    )


def _table_response(request: web.Request, stored: StoredMetadata, *, with_config: bool = True) -> web.Response:
    """Respond with a table's metadata, whose bytes are sent as they are in the file."""
    config = services(request).client_config
    headers = {"ETag": f'"{load_etag(stored.pointer, ALL, config)}"'}
    body = encode_load(stored).body(config if with_config else None)
    return web.Response(body=body, headers=headers, content_type="application/json")


def _commit_response(request: web.Request, stored: StoredMetadata) -> web.Response:
    """Respond to a commit, without the metadata if the writer does not need it: it has the table's whole history."""
    if not prefers(request, MINIMAL):
        return _table_response(request, stored, with_config=False)
    response = json_response({"metadata-location": stored.location})
    response.headers["Preference-Applied"] = MINIMAL
    return response


def _plan_response(body: bytes) -> web.Response:
    return web.Response(body=body, content_type="application/json")


_TABLES = "namespaces/{namespace}/tables"
_TABLE = f"{_TABLES}/{{table}}"
_PLAN = f"{_TABLE}/plan/{{plan-id}}"

ROUTES = (
    Route("GET", _TABLE, load_table),
    Route("HEAD", _TABLE, table_exists),
    Route("POST", _TABLE, commit_table, replay_commit),
    Route("DELETE", _TABLE, drop_table, replay_no_content),
    Route("GET", _TABLES, partial(list_entries, kind=TableId)),
    Route("POST", _TABLES, create_table, replay_create),
    Route("POST", f"{_TABLE}/metrics", report_metrics),
    Route("POST", f"{_TABLE}/unregister", unregister_table, replay_unregister),
    Route("POST", "namespaces/{namespace}/register", register_table, replay_create),
    Route("POST", "tables/rename", partial(rename_entry, kind=TableId), replay_no_content),
    Route("POST", "transactions/commit", commit_transaction, replay_no_content),
    # A plan changes nothing that lasts, so these need no idempotency key.
    Route("POST", f"{_TABLE}/plan", plan_scan),
    Route("GET", _PLAN, fetch_plan),
    Route("DELETE", _PLAN, cancel_plan),
    Route("POST", f"{_TABLE}/tasks", fetch_tasks),
)
