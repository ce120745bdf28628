"""The plan resource: a scan that is planned here, and the pages of its tasks. Owns headers, not plans."""

from __future__ import annotations

from aiohttp import web

from catalog.fields import read_text
from catalog.planning.requests import parse_plan_request
from catalog.routes.requests import no_content, path_table, prefers, read_json
from catalog.routes.routing import Route, services

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


_TABLE = "namespaces/{namespace}/tables/{table}"
_PLAN = f"{_TABLE}/plan/{{plan-id}}"

# A plan changes nothing that lasts, so none of these has to heed an idempotency key.
ROUTES = (
    Route("POST", f"{_TABLE}/plan", plan_scan),
    Route("GET", _PLAN, fetch_plan),
    Route("DELETE", _PLAN, cancel_plan),
    Route("POST", f"{_TABLE}/tasks", fetch_tasks),
)
