"""Routes of namespaces and functions. There are no functions, because no operation of the specification creates one."""

from __future__ import annotations

from urllib.parse import unquote

from aiohttp import web

from lakefeed.catalog.errors import NoSuchFunction, NoSuchNamespace, Unprocessable
from lakefeed.catalog.json_fields import maybe_text_map, maybe_texts
from lakefeed.catalog.names import check_name, dotted, namespace_from_json, namespace_from_path
from lakefeed.catalog.routes.http import (
    Route,
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
from lakefeed.catalog.store.outcomes import RequestOutcome


async def list_namespaces(request: web.Request) -> web.Response:
    """List the namespaces below a parent, or at the top."""
    store, page, parent = services(request).store, query_page(request), request.query.get("parent", "")
    namespace = namespace_from_path(parent) if parent else ()
    try:
        found = await store.list_namespaces(namespace, after=page.after, limit=page.fetch)
    except NoSuchNamespace:
        # PyIceberg encodes this parameter twice: if the parent is missing, decode its name once more.
        decoded = unquote(parent)
        if decoded == parent:
            raise
        found = await store.list_namespaces(namespace_from_path(decoded), after=page.after, limit=page.fetch)
    return page_response("namespaces", found, page, show=list, name=lambda namespace: namespace[-1])


async def create_namespace(request: web.Request) -> web.Response:
    """Create a namespace."""
    body = await read_json(request)
    await services(request).store.create_namespace(namespace_from_json(body), maybe_text_map(body, "properties"))
    return await replay_create(request, RequestOutcome())


async def replay_create(request: web.Request, _outcome: RequestOutcome) -> web.Response:
    """Respond to a create with the name and properties of the request."""
    body = await read_json(request)
    return json_response({"namespace": namespace_from_json(body), "properties": maybe_text_map(body, "properties")})


async def load_namespace(request: web.Request) -> web.Response:
    """Load a namespace's properties."""
    namespace = path_namespace(request)
    properties = await services(request).store.load_namespace(namespace)
    return json_response({"namespace": namespace, "properties": properties})


async def namespace_exists(request: web.Request) -> web.Response:
    """Respond 204 if a namespace exists."""
    await services(request).store.load_namespace(path_namespace(request))
    return no_content()


async def drop_namespace(request: web.Request) -> web.Response:
    """Drop an empty namespace."""
    await services(request).store.drop_namespace(path_namespace(request))
    return no_content()


async def update_properties(request: web.Request) -> web.Response:
    """Set and remove properties of a namespace in one step."""
    body, namespace = await read_json(request), path_namespace(request)
    removals, updates = maybe_texts(body, "removals"), maybe_text_map(body, "updates")
    both = sorted(set(removals) & updates.keys())
    if both:
        raise Unprocessable(f"Invalid namespace update, cannot simultaneously set and remove keys: {', '.join(both)}")
    removed = await services(request).store.update_namespace(namespace, removals=removals, updates=updates)
    return await replay_update(request, RequestOutcome(removed=tuple(removed)))


async def replay_update(request: web.Request, outcome: RequestOutcome) -> web.Response:
    """Respond to an update of properties: which were set, which were removed, and which were missing."""
    body = await read_json(request)
    removals = dict.fromkeys(maybe_texts(body, "removals"))
    return json_response(
        {
            "updated": list(maybe_text_map(body, "updates")),
            "removed": [name for name in removals if name in outcome.removed],
            "missing": [name for name in removals if name not in outcome.removed],
        }
    )


async def list_functions(request: web.Request) -> web.Response:
    """List the functions of an existing namespace: always an empty list."""
    page = query_page(request)
    await services(request).store.load_namespace(path_namespace(request))
    return page_response("identifiers", [], page, show=str, name=str)


async def load_function(request: web.Request) -> web.Response:
    """Respond that the function does not exist."""
    namespace = path_namespace(request)
    name = check_name(path_part(request, "function"), "function name")
    raise NoSuchFunction(f"Function does not exist: {dotted(namespace)}.{name}")


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
