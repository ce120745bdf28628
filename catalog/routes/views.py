"""Routes of views."""

from __future__ import annotations

from functools import partial

from aiohttp import web

from lakefeed.catalog.json_fields import read_objects, read_text
from lakefeed.catalog.metadata.views import parse_create_view, parse_view_requirements, parse_view_updates
from lakefeed.catalog.names import ViewId
from lakefeed.catalog.routes.http import (
    Route,
    body_entry,
    check_identifier,
    list_entries,
    no_content,
    path_entry,
    read_json,
    rename_entry,
    replay_no_content,
    services,
)
from lakefeed.catalog.service.load_responses import encode_load
from lakefeed.catalog.service.metadata_files import StoredMetadata
from lakefeed.catalog.service.versions import Commit
from lakefeed.catalog.store.outcomes import RequestOutcome


async def create_view(request: web.Request) -> web.Response:
    """Create a view."""
    body = await read_json(request)
    view = body_entry(request, ViewId, body)
    return _view_response(await services(request).views.create(view, parse_create_view(body)))


async def load_view(request: web.Request) -> web.Response:
    """Load a view."""
    versions = services(request).views.versions
    pointer = await versions.locate(path_entry(request, ViewId))
    return _view_response(await versions.files.load(pointer))


async def view_exists(request: web.Request) -> web.Response:
    """Respond 204 if a view exists."""
    await services(request).views.versions.locate(path_entry(request, ViewId))
    return no_content()


async def replace_view(request: web.Request) -> web.Response:
    """Commit to a view."""
    body, view = await read_json(request), path_entry(request, ViewId)
    check_identifier(body, view)
    commit = Commit(
        requirements=parse_view_requirements(read_objects(body, "requirements") if "requirements" in body else []),
        updates=parse_view_updates(read_objects(body, "updates")),
    )
    return _view_response(await services(request).views.commit(view, commit))


async def drop_view(request: web.Request) -> web.Response:
    """Drop a view."""
    await services(request).views.drop(path_entry(request, ViewId))
    return no_content()


async def register_view(request: web.Request) -> web.Response:
    """Register a metadata file as a view."""
    body = await read_json(request)
    location = read_text(body, "metadata-location")
    return _view_response(await services(request).views.register(body_entry(request, ViewId, body), location))


async def replay_create(request: web.Request, outcome: RequestOutcome) -> web.Response:
    """Respond again to a request that created the view that its body names."""
    view = body_entry(request, ViewId, await read_json(request))
    return _view_response(await services(request).views.versions.load_recorded(view, outcome.pointer))


async def replay_replace(request: web.Request, outcome: RequestOutcome) -> web.Response:
    """Respond again to a commit."""
    return _view_response(
        await services(request).views.versions.load_recorded(path_entry(request, ViewId), outcome.pointer)
    )


def _view_response(stored: StoredMetadata) -> web.Response:
    """Respond with a view's metadata, whose bytes are sent as they are in the file."""
    return web.Response(body=encode_load(stored).body(b"{}"), content_type="application/json")


_VIEWS = "namespaces/{namespace}/views"
_VIEW = f"{_VIEWS}/{{view}}"

ROUTES = (
    Route("GET", _VIEWS, partial(list_entries, kind=ViewId)),
    Route("POST", _VIEWS, create_view, replay_create),
    Route("GET", _VIEW, load_view),
    Route("HEAD", _VIEW, view_exists),
    Route("POST", _VIEW, replace_view, replay_replace),
    Route("DELETE", _VIEW, drop_view, replay_no_content),
    Route("POST", "namespaces/{namespace}/register-view", register_view, replay_create),
    Route("POST", "views/rename", partial(rename_entry, kind=ViewId), replay_no_content),
)
