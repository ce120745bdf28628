"""The function resource. The specification has no operation that makes a function, so every namespace has none."""

from __future__ import annotations

from aiohttp import web

from catalog.errors import NoSuchFunction
from catalog.names import check_name, dotted
from catalog.routes.requests import json_answer, path_namespace, path_part, query_page
from catalog.routes.routing import Route, services


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

ROUTES = (
    Route("GET", _FUNCTIONS, list_functions),
    Route("GET", f"{_FUNCTIONS}/{{function}}", load_function),
)
