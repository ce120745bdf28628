"""HTTP: routes, request bodies, paths, pages, preferences and idempotency keys, for all resources; and `GET config`.

One list of routes both registers the handlers and is advertised as `endpoints`, so that the two cannot disagree.
"""

from __future__ import annotations

import base64
import binascii
import functools
import hashlib
import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar
from urllib.parse import unquote_plus

import orjson
from aiohttp import web

from lakefeed.catalog.config import CatalogConfig, Warehouse
from lakefeed.catalog.errors import BadRequest, BodyTooLarge, NoSuchWarehouse
from lakefeed.catalog.json_fields import JsonObject, parse_count, parse_object, read_object
from lakefeed.catalog.names import EntryId, Namespace, check_name, namespace_from_path
from lakefeed.catalog.planning.planner import Planner
from lakefeed.catalog.service.idempotency import Idempotency, parse_key
from lakefeed.catalog.service.load_responses import LoadResponses
from lakefeed.catalog.service.tables import Tables, Views
from lakefeed.catalog.store.outcomes import RequestOutcome
from lakefeed.catalog.store.store import Store

Handler: TypeAlias = Callable[[web.Request], Awaitable[web.StreamResponse]]
Replay: TypeAlias = Callable[[web.Request, RequestOutcome], Awaitable[web.StreamResponse]]

# Who sends a request, as the application that hosts the catalog has authenticated it; absent without authentication.
PRINCIPAL = web.RequestKey("principal", str)

MINIMAL = "return=minimal"

_BODY = web.RequestKey("body", bytes)
_ZERO_WEIGHT = re.compile(r"q\s*=\s*0(\.0*)?", re.IGNORECASE)
# Each kind of client sends the same header again and again; a header has at most 8 KiB.
_ENCODINGS_KEPT = 256

_T = TypeVar("_T")
_Entry = TypeVar("_Entry", bound=EntryId)


@dataclass(frozen=True, slots=True)
class Route:
    """One operation. `path` is written as in the specification, below `/v1/{prefix}/`.

    A route that changes something has `replay`, which responds again to the same request from its recorded outcome.
    """

    method: str
    path: str
    handler: Handler
    replay: Replay | None = None

    @property
    def endpoint(self) -> str:
        """Return the route as clients compare it: with a literal `{prefix}`, although this catalog has none."""
        return f"{self.method} /v1/{{prefix}}/{self.path}"

    @property
    def pattern(self) -> str:
        """Return the route for aiohttp, whose own placeholders do not match braces in names and have no hyphens."""
        return "/" + re.sub(r"{([^}]+)}", lambda name: f"{{{name[1].replace('-', '_')}:[^/]+}}", self.path)


@dataclass(frozen=True, slots=True)
class Services:
    """What handlers work with. `client_config` is the encoded `config` of load responses."""

    config: CatalogConfig
    warehouse: Warehouse
    client_config: bytes
    store: Store
    tables: Tables
    views: Views
    load_responses: LoadResponses
    idempotency: Idempotency
    planner: Planner
    endpoints: tuple[str, ...]


SERVICES = web.AppKey("services", Services)


def services(request: web.Request) -> Services:
    """Return the services of the application that a request reached."""
    return request.app[SERVICES]


async def get_config(request: web.Request) -> web.Response:
    """Describe the one warehouse, whether a client asks for it by name, by location or not at all.

    Raises: NoSuchWarehouse.
    """
    context = services(request)
    asked = request.query.get("warehouse", "")
    if asked and asked not in (context.config.warehouse_name, context.warehouse.location):
        raise NoSuchWarehouse(f"Warehouse does not exist: {asked}")
    return json_response(
        {
            "defaults": {},
            "overrides": {},
            "endpoints": context.endpoints,
            "idempotency-key-lifetime": context.idempotency.lifetime,
        }
    )


def with_idempotency_key(route: Route) -> Handler:
    """Return the handler of a route. One that changes something is run once per Idempotency-Key."""
    replay_outcome = route.replay
    if replay_outcome is None:
        return route.handler

    async def handle(request: web.Request) -> web.StreamResponse:
        text = request.headers.get("Idempotency-Key")
        if text is None:
            return await route.handler(request)
        key, body = parse_key(text), await read_body(request)

        async def replay(outcome: RequestOutcome) -> web.StreamResponse:
            if outcome.refusal is not None:
                return error_response(outcome.refusal.status, outcome.refusal.type, outcome.refusal.message)
            return await replay_outcome(request, outcome)

        return await services(request).idempotency.run_once(
            key,
            hashlib.sha256(b"\0".join((request.method.encode(), request.raw_path.encode(), body))).hexdigest(),
            handle=lambda: route.handler(request),
            replay=replay,
        )

    return handle


async def read_body(request: web.Request) -> bytes:
    """Read a body up to the configured limit, which the hosting application does not know. May be called repeatedly.

    Raises: BadRequest, BodyTooLarge.
    """
    if _BODY in request:
        return request[_BODY]
    max_bytes = services(request).config.request_max_bytes
    body = bytearray()
    try:
        async for chunk in request.content.iter_any():
            body += chunk
            if len(body) > max_bytes:
                raise BodyTooLarge(f"Request body is larger than {max_bytes} bytes")
    except web.RequestPayloadError as error:
        raise BadRequest(f"Cannot read request body: {error}") from error
    request[_BODY] = bytes(body)
    return request[_BODY]


async def read_json(request: web.Request) -> JsonObject:
    """Read a body that must be one JSON object.

    Raises: BadRequest, BodyTooLarge.
    """
    return parse_object(await read_body(request))


def path_part(request: web.Request, name: str) -> str:
    """Read a name from the path, decoded like a form, as Iceberg's own client and reference server do.

    In a form `+` is a blank, and a plus is `%2B`. aiohttp decodes both as a plus, as in the path of a URL, so a part
    with a plus is read again from the raw path.
    """
    part = request.match_info[name]
    resource = request.match_info.route.resource
    if "+" not in part or resource is None:
        return part
    # A slash within a name is encoded, so the parts of the raw path are those of the route.
    position = resource.canonical.split("/").index(f"{{{name}}}")
    return unquote_plus(request.rel_url.raw_path.split("/")[position])


def path_namespace(request: web.Request) -> Namespace:
    """Read the namespace from the path."""
    return namespace_from_path(path_part(request, "namespace"))


def path_entry(request: web.Request, kind: type[_Entry]) -> _Entry:
    """Read the identifier of a table or view from the path."""
    return kind.checked(path_namespace(request), path_part(request, kind.kind.lower()))


def body_entry(request: web.Request, kind: type[_Entry], body: JsonObject) -> _Entry:
    """Read the identifier of a new table or view: its namespace from the path, its name from the body."""
    return kind.checked(path_namespace(request), body.get("name"))


def check_identifier(body: JsonObject, entry: EntryId) -> None:
    """Check that a commit's body, if it has an identifier, has that of the path.

    Raises: BadRequest.
    """
    if body.get("identifier") is not None and type(entry).from_json(read_object(body, "identifier")) != entry:
        raise BadRequest(f"Invalid identifier: the path says {entry}")


def query_bool(request: web.Request, name: str) -> bool:
    """Read a boolean query value; PyIceberg writes it with a capital.

    Raises: BadRequest.
    """
    text = request.query.get(name, "false").lower()
    if text not in ("true", "false", ""):
        raise BadRequest(f"Invalid {name}: expected true or false")
    return text == "true"


def prefers(request: web.Request, preference: str) -> bool:
    """Return whether a request states a preference (RFC 7240)."""
    stated = ",".join(request.headers.getall("Prefer", []))
    return any(part.partition(";")[0].strip().lower() == preference for part in stated.split(","))


@functools.lru_cache(_ENCODINGS_KEPT)
def accepts_gzip(header: str) -> bool:
    """Return whether an Accept-Encoding header names gzip with a weight above zero (RFC 9110, section 12.5.3)."""
    weights = {
        coding.strip().lower(): weight for coding, _, weight in (part.partition(";") for part in header.split(","))
    }
    return "gzip" in weights and _ZERO_WEIGHT.fullmatch(weights["gzip"].strip()) is None


@dataclass(frozen=True, slots=True)
class Page:
    """Which part of a list a client asks for. Without a limit it gets everything in one response."""

    after: str
    limit: int | None

    @property
    def fetch(self) -> int | None:
        """Return how many items to fetch: one more than shown, to see whether there are more."""
        return None if self.limit is None else self.limit + 1


def query_page(request: web.Request) -> Page:
    """Read which page a client asks for. Without `pageToken` it does not page and gets everything.

    Raises: BadRequest.
    """
    config, text = services(request).config, request.query.get("pageSize")
    size = config.page_default_items if text is None else parse_count(text)
    if not size:
        raise BadRequest("Invalid pageSize: expected a positive integer of 32 bits")
    token = request.query.get("pageToken")
    if token is None:
        return Page(after="", limit=None)
    try:
        after = base64.b64decode(token, altchars=b"-_", validate=True).decode()
    except (binascii.Error, ValueError) as error:
        raise BadRequest("Invalid pageToken") from error
    return Page(after=after and check_name(after, "pageToken"), limit=min(size, config.page_max_items))


def page_response(
    key: str, items: Sequence[_T], page: Page, *, show: Callable[[_T], Any], name: Callable[[_T], str]
) -> web.Response:
    """Respond with one page. The token has the name of the last item shown, so that drops meanwhile skip nothing."""
    shown = items if page.limit is None else items[: page.limit]
    more = len(shown) < len(items)
    token = base64.urlsafe_b64encode(name(shown[-1]).encode()).decode() if more else None
    return json_response({key: [show(item) for item in shown], "next-page-token": token})


async def list_entries(request: web.Request, kind: type[EntryId]) -> web.Response:
    """Respond with one page of a namespace's tables or views."""
    page, namespace = query_page(request), path_namespace(request)
    found = await services(request).store.list_entries(kind, namespace, after=page.after, limit=page.fetch)
    return page_response("identifiers", found, page, show=lambda entry: entry.to_json(), name=lambda entry: entry.name)


async def rename_entry(request: web.Request, kind: type[EntryId]) -> web.Response:
    """Rename a table or view, also into another namespace. Its files stay where they are."""
    body = await read_json(request)
    source, destination = (kind.from_json(read_object(body, key)) for key in ("source", "destination"))
    await services(request).store.rename_entry(source, destination)
    return no_content()


def json_response(document: Any, *, status: int = 200) -> web.Response:
    """Respond with a JSON document."""
    return web.Response(status=status, body=orjson.dumps(document), content_type="application/json")


def error_response(status: int, error_type: str, message: str) -> web.Response:
    """Respond with an error in Iceberg's form."""
    return json_response({"error": {"message": message, "type": error_type, "code": status}}, status=status)


def no_content() -> web.Response:
    """Respond without a body."""
    return web.Response(status=204)


async def replay_no_content(_request: web.Request, _outcome: RequestOutcome) -> web.Response:
    """Respond again to a request whose response has no body."""
    return no_content()
