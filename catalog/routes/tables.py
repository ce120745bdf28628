"""The table resource. Owns headers and conditions of the load answer; its bytes are answers.py's."""

from __future__ import annotations

from aiohttp import web

from lakefeed.catalog.errors import BadRequest
from lakefeed.catalog.json_fields import JsonObject, maybe_bool, read_object, read_objects, read_text
from lakefeed.catalog.metadata.updates import parse_create, parse_requirements, parse_updates
from lakefeed.catalog.names import TableId, check_name, table_from_json
from lakefeed.catalog.planning.tasks import parse_plan_request
from lakefeed.catalog.routes.http import (
    MINIMAL,
    Route,
    accepts_gzip,
    json_answer,
    no_content,
    page_answer,
    path_namespace,
    path_table,
    prefers,
    query_bool,
    query_page,
    read_body,
    read_json,
    retell_nothing,
    services,
    wants_minimal,
)
from lakefeed.catalog.service.metadata_cache import ALL, REFS, Key, StoredMetadata
from lakefeed.catalog.service.tables import Commit
from lakefeed.catalog.store.protocol import Outcome

# --- catalog.routes.tables --------------------------------------------------------------------------------------------


_GZIP_MAGIC = b"\x1f\x8b"


async def list_tables(request: web.Request) -> web.Response:
    """List the tables of a namespace."""
    context = services(request)
    page = query_page(request, context.config)
    found = await context.tables.list_tables(path_namespace(request), after=page.after, limit=page.fetch)
    return page_answer("identifiers", found, page, show=_identifier, last=lambda table: table.name)


async def create_table(request: web.Request) -> web.Response:
    """Create a table, or stage its creation."""
    context, body = services(request), await read_json(request)
    table = _named_table(request, body)
    create = parse_create(body)
    if maybe_bool(body, "stage-create"):
        document = await context.tables.stage(table, create)
        staged = {"metadata-location": None, "metadata": document, "config": context.warehouse.client_config()}
        return json_answer(staged)
    return _table_answer(request, await context.tables.create(table, create))


async def load_table(request: web.Request) -> web.Response:
    """Load a table; a client that has this very version already gets 304, from the pointer alone."""
    context = services(request)
    shown = request.query.get("snapshots", ALL).lower()
    if shown not in (ALL, REFS):
        raise BadRequest("Invalid snapshots: expected all or refs")
    pointer = await context.tables.locate(path_table(request))
    etag = context.answers.etag(pointer, shown)
    headers = {"ETag": f'"{etag}"', "Vary": "Accept-Encoding"}
    if any(known.value in (etag, "*") for known in request.if_none_match or ()):
        return web.Response(status=304, headers=headers)
    packed = accepts_gzip(request.headers.get("Accept-Encoding", ""))
    answer = await context.answers.find_or_build(Key(pointer, shown, packed), load=lambda: context.tables.load(pointer))
    if answer.startswith(_GZIP_MAGIC):
        headers["Content-Encoding"] = "gzip"
    return web.Response(body=answer, headers=headers, content_type="application/json")


async def table_exists(request: web.Request) -> web.Response:
    """Tell whether a table exists."""
    await services(request).tables.locate(path_table(request))
    return no_content()


async def commit_table(request: web.Request) -> web.Response:
    """Commit to a table."""
    body = await read_json(request)
    table = path_table(request)
    if body.get("identifier") is not None and table_from_json(read_object(body, "identifier")) != table:
        raise BadRequest(f"Invalid identifier: the path says {table}")
    return _commit_answer(request, await services(request).tables.commit(table, parse_commit(body)))


async def drop_table(request: web.Request) -> web.Response:
    """Drop a table, and delete its files if so asked."""
    tables, table = services(request).tables, path_table(request)
    await (tables.purge(table) if query_bool(request, "purgeRequested") else tables.drop(table))
    return no_content()


async def rename_table(request: web.Request) -> web.Response:
    """Rename a table, also into another namespace."""
    body = await read_json(request)
    source, destination = (table_from_json(read_object(body, key)) for key in ("source", "destination"))
    await services(request).tables.rename(source, destination)
    return no_content()


async def register_table(request: web.Request) -> web.Response:
    """Register a metadata file as a table."""
    body = await read_json(request)
    table, location = _named_table(request, body), read_text(body, "metadata-location")
    stored = await services(request).tables.register(table, location, overwrite=maybe_bool(body, "overwrite"))
    return _table_answer(request, stored)


async def unregister_table(request: web.Request) -> web.Response:
    """Forget a table and answer with its last metadata; the files stay for whoever registers it next."""
    stored = await services(request).tables.unregister(path_table(request))
    return _table_answer(request, stored, with_config=False)


async def retell_named(request: web.Request, outcome: Outcome) -> web.Response:
    """Answer once more a request that made the table which its body names."""
    table = _named_table(request, await read_json(request))
    return _table_answer(request, await services(request).tables.recall(table, outcome.pointer))


async def retell_commit(request: web.Request, outcome: Outcome) -> web.Response:
    """Answer a commit once more."""
    return _commit_answer(request, await services(request).tables.recall(path_table(request), outcome.pointer))


async def retell_unregister(request: web.Request, outcome: Outcome) -> web.Response:
    """Answer once more with the last metadata of a table that is not ours any more."""
    return _table_answer(request, await services(request).tables.load(outcome.pointer), with_config=False)


async def report_metrics(request: web.Request) -> web.Response:
    """Take a report and forget it. Spark reports on a table before it exists, so the table is not looked up."""
    await read_body(request)
    return no_content()


def parse_commit(body: JsonObject) -> Commit:
    """Read the requirements and updates of one table.

    Raises: BadRequest.
    """
    return Commit(
        requirements=parse_requirements(read_objects(body, "requirements")),
        updates=parse_updates(read_objects(body, "updates")),
    )


def _named_table(request: web.Request, body: JsonObject) -> TableId:
    return TableId(path_namespace(request), check_name(body.get("name"), "table name"))


def _identifier(table: TableId) -> JsonObject:
    return {"namespace": table.namespace, "name": table.name}


def _table_answer(request: web.Request, stored: StoredMetadata, *, with_config: bool = True) -> web.Response:
    """Answer with a table's metadata, whose bytes go out as they are in the file."""
    answers = services(request).answers
    headers = {"ETag": f'"{answers.etag(stored.pointer, ALL)}"'}
    body = answers.build(stored, with_config=with_config)
    return web.Response(body=body, headers=headers, content_type="application/json")


def _commit_answer(request: web.Request, stored: StoredMetadata) -> web.Response:
    return _minimal_answer(stored) if wants_minimal(request) else _table_answer(request, stored, with_config=False)


def _minimal_answer(stored: StoredMetadata) -> web.Response:
    """Answer a writer who knows what it wrote: the metadata is the table's whole history, sent with every commit."""
    answer = json_answer({"metadata-location": stored.location})
    answer.headers["Preference-Applied"] = MINIMAL
    return answer


_TABLES = "namespaces/{namespace}/tables"
_TABLE = f"{_TABLES}/{{table}}"

ROUTES = (
    Route("GET", _TABLE, load_table),
    Route("HEAD", _TABLE, table_exists),
    Route("POST", _TABLE, commit_table, retell_commit),
    Route("DELETE", _TABLE, drop_table, retell_nothing),
    Route("GET", _TABLES, list_tables),
    Route("POST", _TABLES, create_table, retell_named),
    Route("POST", f"{_TABLE}/metrics", report_metrics),
    Route("POST", f"{_TABLE}/unregister", unregister_table, retell_unregister),
    Route("POST", "namespaces/{namespace}/register", register_table, retell_named),
    Route("POST", "tables/rename", rename_table, retell_nothing),
)


# --- catalog.routes.transactions --------------------------------------------------------------------------------------
#
# The transaction resource: one request that commits to several tables.


# Each holds its turn while the others wait for theirs; far beyond what a source changes in one transaction.
TABLES_MAX = 1_000


async def commit_transaction(request: web.Request) -> web.Response:
    """Commit to all tables named, or to none."""
    await services(request).transactions.commit(parse_changes(await read_json(request)))
    return no_content()


def parse_changes(body: JsonObject) -> dict[TableId, Commit]:
    """Read the commits of a transaction by table.

    Raises: BadRequest.
    """
    changes = read_objects(body, "table-changes")
    if not 0 < len(changes) <= TABLES_MAX:
        raise BadRequest(f"Invalid table-changes: expected 1 to {TABLES_MAX} tables")
    commits: dict[TableId, Commit] = {}
    for change in changes:
        table = table_from_json(read_object(change, "identifier"))
        if table in commits:
            raise BadRequest(f"Invalid table-changes: table is named twice: {table}")
        commits[table] = parse_commit(change)
    return commits


TRANSACTIONS_ROUTES = (Route("POST", "transactions/commit", commit_transaction, retell_nothing),)


# --- catalog.routes.planning ------------------------------------------------------------------------------------------
#
# The plan resource: a scan that is planned here, and the pages of its tasks. Owns headers, not plans.


# RFC 7240, section 4.1: the client would rather have the plan's id at once and ask again.
RESPOND_ASYNC = "respond-async"


async def plan_scan(request: web.Request) -> web.Response:
    """Plan a scan. The specification has no word for planning without waiting, so HTTP's own is heeded."""
    context, body = services(request), await read_json(request)
    wait_s = 0.0 if prefers(request, RESPOND_ASYNC) else context.config.plan_wait_s
    return _answer(await context.planner.plan(path_table(request), parse_plan_request(body), wait_s=wait_s))


async def fetch_plan(request: web.Request) -> web.Response:
    """Tell what has become of a plan."""
    return _answer(await services(request).planner.fetch(path_table(request), request.match_info["plan_id"]))


async def cancel_plan(request: web.Request) -> web.Response:
    """Give up a plan."""
    await services(request).planner.cancel(path_table(request), request.match_info["plan_id"])
    return no_content()


async def fetch_tasks(request: web.Request) -> web.Response:
    """Fetch one page of a plan's tasks."""
    plan_task = read_text(await read_json(request), "plan-task")
    return _answer(await services(request).planner.fetch_tasks(path_table(request), plan_task))


def _answer(body: bytes) -> web.Response:
    return web.Response(body=body, content_type="application/json")


_PLANNING_TABLE = "namespaces/{namespace}/tables/{table}"
_PLAN = f"{_PLANNING_TABLE}/plan/{{plan-id}}"

# A plan changes nothing that lasts, so none of these has to heed an idempotency key.
PLANNING_ROUTES = (
    Route("POST", f"{_PLANNING_TABLE}/plan", plan_scan),
    Route("GET", _PLAN, fetch_plan),
    Route("DELETE", _PLAN, cancel_plan),
    Route("POST", f"{_PLANNING_TABLE}/tasks", fetch_tasks),
)
