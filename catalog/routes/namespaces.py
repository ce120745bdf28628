"""The namespace resource."""

from __future__ import annotations

from aiohttp import web

from lakefeed.catalog.errors import NoSuchFunction
from lakefeed.catalog.json_fields import maybe_text_map, maybe_texts
from lakefeed.catalog.names import check_name, dotted, namespace_from_json
from lakefeed.catalog.routes.http import (
    Route,
    json_answer,
    no_content,
    page_answer,
    path_namespace,
    path_part,
    query_page,
    read_json,
    retell_nothing,
    services,
)
from lakefeed.catalog.service.views import PropertiesChange, summarise_change
from lakefeed.catalog.store.protocol import Outcome

# --- catalog.routes.namespaces ----------------------------------------------------------------------------------------


async def list_namespaces(request: web.Request) -> web.Response:
    """List the namespaces below a parent, or the top ones."""
    context = services(request)
    page = query_page(request, context.config)
    parent = request.query.get("parent", "")
    found = await context.namespaces.children(parent, after=page.after, limit=page.fetch)
    return page_answer("namespaces", found, page, show=list, last=lambda namespace: namespace[-1])


async def create_namespace(request: web.Request) -> web.Response:
    """Create a namespace."""
    body = await read_json(request)
    namespace, properties = namespace_from_json(body), maybe_text_map(body, "properties")
    await services(request).namespaces.create(namespace, properties)
    return json_answer({"namespace": namespace, "properties": properties})


async def retell_create(request: web.Request, _outcome: Outcome) -> web.Response:
    """Answer a create once more: it says what was asked for."""
    body = await read_json(request)
    return json_answer({"namespace": namespace_from_json(body), "properties": maybe_text_map(body, "properties")})


async def load_namespace(request: web.Request) -> web.Response:
    """Load a namespace's properties."""
    namespace = path_namespace(request)
    properties = await services(request).namespaces.load(namespace)
    return json_answer({"namespace": namespace, "properties": properties})


async def namespace_exists(request: web.Request) -> web.Response:
    """Tell whether a namespace exists."""
    await services(request).namespaces.load(path_namespace(request))
    return no_content()


async def drop_namespace(request: web.Request) -> web.Response:
    """Drop an empty namespace."""
    await services(request).namespaces.drop(path_namespace(request))
    return no_content()


async def update_properties(request: web.Request) -> web.Response:
    """Set and remove properties of a namespace."""
    body = await read_json(request)
    change = await services(request).namespaces.update_properties(
        path_namespace(request), removals=maybe_texts(body, "removals"), updates=maybe_text_map(body, "updates")
    )
    return _change_answer(change)


async def retell_update(request: web.Request, outcome: Outcome) -> web.Response:
    """Answer an update of properties once more."""
    body = await read_json(request)
    removals, updates = maybe_texts(body, "removals"), maybe_text_map(body, "updates")
    return _change_answer(summarise_change(removals=removals, updates=updates, removed=outcome.removed))


def _change_answer(change: PropertiesChange) -> web.Response:
    return json_answer({"updated": change.updated, "removed": change.removed, "missing": change.missing})


ROUTES = (
    Route("GET", "namespaces", list_namespaces),
    Route("POST", "namespaces", create_namespace, retell_create),
    Route("GET", "namespaces/{namespace}", load_namespace),
    Route("HEAD", "namespaces/{namespace}", namespace_exists),
    Route("DELETE", "namespaces/{namespace}", drop_namespace, retell_nothing),
    Route("POST", "namespaces/{namespace}/properties", update_properties, retell_update),
)


# --- catalog.routes.functions -----------------------------------------------------------------------------------------
#
# The function resource. The specification has no operation that makes a function, so every namespace has none.


async def list_functions(request: web.Request) -> web.Response:
    """List the functions of a namespace that exists: none."""
    context = services(request)
    query_page(request, context.config)
    await context.namespaces.load(path_namespace(request))
    return json_answer({"identifiers": [], "next-page-token": None})


async def load_function(request: web.Request) -> web.Response:
    """Answer that there is no such function."""
    namespace = path_namespace(request)
    name = check_name(path_part(request, "function"), "function name")
    raise NoSuchFunction(f"Function does not exist: {dotted(namespace)}.{name}")


_FUNCTIONS = "namespaces/{namespace}/functions"

FUNCTIONS_ROUTES = (
    Route("GET", _FUNCTIONS, list_functions),
    Route("GET", f"{_FUNCTIONS}/{{function}}", load_function),
)
