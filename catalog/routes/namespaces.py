"""Routes of namespaces, and of functions, of which every namespace has none."""

from __future__ import annotations

from aiohttp import web

from lakefeed.catalog.errors import NoSuchFunction
from lakefeed.catalog.json_fields import maybe_text_map, maybe_texts
from lakefeed.catalog.names import check_name, dotted, namespace_from_json
from lakefeed.catalog.routes.http import (
    Route,
    identifiers_response,
    json_response,
    no_content,
    page_response,
    path_namespace,
    path_part,
    query_page,
    read_json,
    replay_no_content,
    services,
)
from lakefeed.catalog.service.namespaces import PropertiesChange, summarise_change
from lakefeed.catalog.store.outcomes import RequestOutcome


async def list_namespaces(request: web.Request) -> web.Response:
    """List the namespaces below a parent, or at the top."""
    page, parent = query_page(request), request.query.get("parent", "")
    found = await services(request).namespaces.list_children(parent, after=page.after, limit=page.fetch)
    return page_response("namespaces", found, page, show=list, name=lambda namespace: namespace[-1])


async def create_namespace(request: web.Request) -> web.Response:
    """Create a namespace."""
    body = await read_json(request)
    await services(request).namespaces.create(namespace_from_json(body), maybe_text_map(body, "properties"))
    return await replay_create(request, RequestOutcome())


async def replay_create(request: web.Request, _outcome: RequestOutcome) -> web.Response:
    """Respond to a create, which repeats what was asked for."""
    body = await read_json(request)
    return json_response({"namespace": namespace_from_json(body), "properties": maybe_text_map(body, "properties")})


async def load_namespace(request: web.Request) -> web.Response:
    """Load a namespace's properties."""
    namespace = path_namespace(request)
    properties = await services(request).namespaces.load(namespace)
    return json_response({"namespace": namespace, "properties": properties})


async def namespace_exists(request: web.Request) -> web.Response:
    """Respond 204 if a namespace exists."""
    await services(request).namespaces.load(path_namespace(request))
    return no_content()


async def drop_namespace(request: web.Request) -> web.Response:
    """Drop an empty namespace."""
    await services(request).namespaces.drop(path_namespace(request))
    return no_content()


async def update_properties(request: web.Request) -> web.Response:
    """Set and remove properties of a namespace."""
    body = await read_json(request)
    removals, updates = maybe_texts(body, "removals"), maybe_text_map(body, "updates")
    namespaces, namespace = services(request).namespaces, path_namespace(request)
    return _change_response(await namespaces.update_properties(namespace, removals=removals, updates=updates))


async def replay_update(request: web.Request, outcome: RequestOutcome) -> web.Response:
    """Respond again to an update of properties."""
    body = await read_json(request)
    removals, updates = maybe_texts(body, "removals"), maybe_text_map(body, "updates")
    return _change_response(summarise_change(removals=removals, updates=updates, removed=outcome.removed))


async def list_functions(request: web.Request) -> web.Response:
    """List the functions of an existing namespace: none, because no operation of the specification creates one."""
    page = query_page(request)
    await services(request).namespaces.load(path_namespace(request))
    return identifiers_response([], page)


async def load_function(request: web.Request) -> web.Response:
    """Respond that the function does not exist."""
    namespace = path_namespace(request)
    name = check_name(path_part(request, "function"), "function name")
    raise NoSuchFunction(f"Function does not exist: {dotted(namespace)}.{name}")


def _change_response(change: PropertiesChange) -> web.Response:
    return json_response({"updated": change.updated, "removed": change.removed, "missing": change.missing})


_NAMESPACE = "namespaces/{namespace}"

ROUTES = (
    Route("GET", "namespaces", list_namespaces),
    Route("POST", "namespaces", create_namespace, replay_create),
    Route("GET", _NAMESPACE, load_namespace),
    Route("HEAD", _NAMESPACE, namespace_exists),
    Route("DELETE", _NAMESPACE, drop_namespace, replay_no_content),
    Route("POST", f"{_NAMESPACE}/properties", update_properties, replay_update),
    Route("GET", f"{_NAMESPACE}/functions", list_functions),
    Route("GET", f"{_NAMESPACE}/functions/{{function}}", load_function),
)
