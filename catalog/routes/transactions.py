"""The transaction resource: one request that commits to several tables."""

from __future__ import annotations

from aiohttp import web

from catalog.errors import BadRequest
from catalog.fields import JsonObject, read_object, read_objects
from catalog.names import TableId, table_from_json
from catalog.routes.requests import no_content, read_json, retell_nothing
from catalog.routes.routing import Route, services
from catalog.routes.tables import parse_commit
from catalog.tables import Commit

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


ROUTES = (Route("POST", "transactions/commit", commit_transaction, retell_nothing),)
