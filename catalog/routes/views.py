"""The view resource."""

from __future__ import annotations

import orjson
from aiohttp import web

from lakefeed.catalog.errors import BadRequest
from lakefeed.catalog.json_fields import JsonObject, read_object, read_objects, read_text
from lakefeed.catalog.metadata.views import parse_create_view, parse_view_requirements, parse_view_updates
from lakefeed.catalog.names import ViewId, check_name, view_from_json, view_from_path
from lakefeed.catalog.routes.http import (
    Route,
    no_content,
    page_answer,
    path_namespace,
    path_part,
    query_page,
    read_json,
    retell_nothing,
    services,
)
from lakefeed.catalog.service.metadata_cache import StoredMetadata
from lakefeed.catalog.service.views import ViewCommit
from lakefeed.catalog.store.protocol import Outcome


async def list_views(request: web.Request) -> web.Response:
    """List the views of a namespace."""
    context = services(request)
    page = query_page(request, context.config)
    found = await context.views.list_views(path_namespace(request), after=page.after, limit=page.fetch)
    return page_answer(
        "identifiers",
        found,
        page,
        show=lambda view: {"namespace": view.namespace, "name": view.name},
        last=lambda view: view.name,
    )


async def create_view(request: web.Request) -> web.Response:
    """Create a view."""
    body = await read_json(request)
    return _view_answer(await services(request).views.create(_named_view(request, body), parse_create_view(body)))


async def load_view(request: web.Request) -> web.Response:
    """Load a view."""
    return _view_answer(await services(request).views.load(_path_view(request)))


async def view_exists(request: web.Request) -> web.Response:
    """Tell whether a view exists."""
    await services(request).views.locate(_path_view(request))
    return no_content()


async def replace_view(request: web.Request) -> web.Response:
    """Commit to a view."""
    body = await read_json(request)
    view = _path_view(request)
    if body.get("identifier") is not None and view_from_json(read_object(body, "identifier")) != view:
        raise BadRequest(f"Invalid identifier: the path says {view}")
    commit = ViewCommit(
        requirements=parse_view_requirements(read_objects(body, "requirements") if "requirements" in body else []),
        updates=parse_view_updates(read_objects(body, "updates")),
    )
    return _view_answer(await services(request).views.commit(view, commit))


async def drop_view(request: web.Request) -> web.Response:
    """Drop a view."""
    await services(request).views.drop(_path_view(request))
    return no_content()


async def rename_view(request: web.Request) -> web.Response:
    """Rename a view, also into another namespace."""
    body = await read_json(request)
    source, destination = (view_from_json(read_object(body, key)) for key in ("source", "destination"))
    await services(request).views.rename(source, destination)
    return no_content()


async def register_view(request: web.Request) -> web.Response:
    """Register a metadata file as a view."""
    body = await read_json(request)
    location = read_text(body, "metadata-location")
    return _view_answer(await services(request).views.register(_named_view(request, body), location))


async def retell_named(request: web.Request, outcome: Outcome) -> web.Response:
    """Answer once more a request that made the view which its body names."""
    view = _named_view(request, await read_json(request))
    return _view_answer(await services(request).views.recall(view, outcome.pointer))


async def retell_replace(request: web.Request, outcome: Outcome) -> web.Response:
    """Answer a commit once more."""
    return _view_answer(await services(request).views.recall(_path_view(request), outcome.pointer))


def _path_view(request: web.Request) -> ViewId:
    return view_from_path(path_part(request, "namespace"), path_part(request, "view"))


def _named_view(request: web.Request, body: JsonObject) -> ViewId:
    return ViewId(path_namespace(request), check_name(body.get("name"), "view name"))


def _view_answer(stored: StoredMetadata) -> web.Response:
    """Answer with a view's metadata, whose bytes go out as they are in the file."""
    parts = (b'{"metadata-location":', orjson.dumps(stored.location), b',"metadata":', stored.raw, b',"config":{}}')
    return web.Response(body=b"".join(parts), content_type="application/json")


_VIEWS = "namespaces/{namespace}/views"
_VIEW = f"{_VIEWS}/{{view}}"

ROUTES = (
    Route("GET", _VIEWS, list_views),
    Route("POST", _VIEWS, create_view, retell_named),
    Route("GET", _VIEW, load_view),
    Route("HEAD", _VIEW, view_exists),
    Route("POST", _VIEW, replace_view, retell_replace),
    Route("DELETE", _VIEW, drop_view, retell_nothing),
    Route("POST", "namespaces/{namespace}/register-view", register_view, retell_named),
    Route("POST", "views/rename", rename_view, retell_nothing),
)
