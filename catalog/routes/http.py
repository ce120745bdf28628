"""Reading requests and writing answers. Owns body limits, page tokens and query values; knows no resource."""

from __future__ import annotations

import base64
import binascii
import functools
import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar
from urllib.parse import unquote_plus

import orjson
from aiohttp import web

from lakefeed.catalog.config import CatalogConfig, Warehouse
from lakefeed.catalog.errors import BadRequest, BodyTooLarge, NoSuchWarehouse
from lakefeed.catalog.json_fields import JsonObject, parse_count, parse_object
from lakefeed.catalog.names import Namespace, TableId, check_name, namespace_from_path, table_from_path
from lakefeed.catalog.planning.planner import Planner
from lakefeed.catalog.service.idempotency import Idempotency, fingerprint, parse_key
from lakefeed.catalog.service.metadata_cache import LoadAnswers
from lakefeed.catalog.service.tables import Tables, Transactions
from lakefeed.catalog.service.views import Namespaces, Views
from lakefeed.catalog.store.protocol import Outcome

# --- catalog.routes.routing -------------------------------------------------------------------------------------------
#
# How routes are written down and what handlers share. Owns the form of an endpoint in the config answer.
#
# One list of routes both registers the handlers and is advertised, so the two cannot disagree.


Handler: TypeAlias = Callable[[web.Request], Awaitable[web.StreamResponse]]
Retell: TypeAlias = Callable[[web.Request, Outcome], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, slots=True)
class Route:
    """One operation; `path` is spelled as in the specification, below `/v1/{prefix}/`.

    One that changes something has `retell`, which answers the same request once more from what it came to.
    """

    method: str
    path: str
    handler: Handler
    retell: Retell | None = None

    @property
    def endpoint(self) -> str:
        """Spell the route as clients look for it: with a literal `{prefix}`, though this catalog uses none."""
        return f"{self.method} /v1/{{prefix}}/{self.path}"

    @property
    def pattern(self) -> str:
        """Spell the route for aiohttp, whose own placeholders would not match braces in names nor have hyphens."""
        return "/" + re.sub(r"{([^}]+)}", lambda name: f"{{{name[1].replace('-', '_')}:[^/]+}}", self.path)


@dataclass(frozen=True, slots=True)
class Services:
    """What handlers work with."""

    config: CatalogConfig
    warehouse: Warehouse
    namespaces: Namespaces
    tables: Tables
    views: Views
    transactions: Transactions
    answers: LoadAnswers
    idempotency: Idempotency
    planner: Planner
    endpoints: tuple[str, ...]


SERVICES = web.AppKey("services", Services)


def services(request: web.Request) -> Services:
    """Return the services of the application that a request reached."""
    return request.app[SERVICES]


# --- catalog.routes.requests ------------------------------------------------------------------------------------------


_BODY = web.RequestKey("body", bytes)

_ZERO_WEIGHT = re.compile(r"q\s*=\s*0(\.0*)?", re.IGNORECASE)
# Each kind of client sends one and the same; a header is at most 8 KiB.
_ENCODINGS_KEPT = 256

MINIMAL = "return=minimal"

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Page:
    """Which part of a list is asked for. No limit means all of it, in one answer."""

    after: str
    limit: int | None

    @property
    def fetch(self) -> int | None:
        """Return how many items to fetch: one more than shown, to know whether there are more."""
        return None if self.limit is None else self.limit + 1


async def read_body(request: web.Request) -> bytes:
    """Read a body up to the configured limit, which an enclosing application cannot know. It can be read repeatedly.

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


def path_namespace(request: web.Request) -> Namespace:
    """Read the namespace from the path."""
    return namespace_from_path(path_part(request, "namespace"))


def path_table(request: web.Request) -> TableId:
    """Read the table from the path."""
    return table_from_path(path_part(request, "namespace"), path_part(request, "table"))


def path_part(request: web.Request, name: str) -> str:
    """Read a name from the path, decoded as Iceberg's own client and reference server have it: as in a form.

    There `+` is a blank, and a plus comes as `%2B`. aiohttp decodes as the path of a URL, in which both are a plus, so
    that a part with one has to be read again as it was sent.
    """
    part = request.match_info[name]
    resource = request.match_info.route.resource
    if "+" not in part or resource is None:
        return part
    # A slash within a name is encoded, so the parts stand where the route has them.
    position = resource.canonical.split("/").index(f"{{{name}}}")
    return unquote_plus(request.rel_url.raw_path.split("/")[position])


def query_page(request: web.Request, config: CatalogConfig) -> Page:
    """Read which page is asked for. Without `pageToken` a client does not page and gets everything.

    Raises: BadRequest.
    """
    size = _page_size(request.query.get("pageSize"), config)
    token = request.query.get("pageToken")
    if token is None:
        return Page(after="", limit=None)
    return Page(after=_decode_token(token), limit=size)


def query_bool(request: web.Request, name: str) -> bool:
    """Read a boolean query value; PyIceberg writes it with a capital.

    Raises: BadRequest.
    """
    text = request.query.get(name, "false").lower()
    if text not in ("true", "false", ""):
        raise BadRequest(f"Invalid {name}: expected true or false")
    return text == "true"


def wants_minimal(request: web.Request) -> bool:
    """Tell whether the client prefers an answer without the resource that it changed (RFC 7240, section 4.2)."""
    return prefers(request, MINIMAL)


def prefers(request: web.Request, preference: str) -> bool:
    """Tell whether a request states a preference (RFC 7240)."""
    stated = ",".join(request.headers.getall("Prefer", []))
    return any(part.partition(";")[0].strip().lower() == preference for part in stated.split(","))


@functools.lru_cache(_ENCODINGS_KEPT)
def accepts_gzip(header: str) -> bool:
    """Tell whether an Accept-Encoding header names gzip, and not with a weight of zero (RFC 9110, section 12.5.3)."""
    weights = {
        coding.strip().lower(): weight for coding, _, weight in (part.partition(";") for part in header.split(","))
    }
    return "gzip" in weights and _ZERO_WEIGHT.fullmatch(weights["gzip"].strip()) is None


def page_answer(
    key: str, items: Sequence[_T], page: Page, *, show: Callable[[_T], Any], last: Callable[[_T], str]
) -> web.Response:
    """Answer with one page. The token names the last item shown, so drops meanwhile skip nothing."""
    shown = items if page.limit is None else items[: page.limit]
    more = len(shown) < len(items)
    token = _encode_token(last(shown[-1])) if more else None
    return json_answer({key: [show(item) for item in shown], "next-page-token": token})


def json_answer(document: Any, *, status: int = 200) -> web.Response:
    """Answer with a JSON document."""
    return web.Response(status=status, body=orjson.dumps(document), content_type="application/json")


def no_content() -> web.Response:
    """Answer that it is done and there is nothing to say."""
    return web.Response(status=204)


async def retell_nothing(_request: web.Request, _outcome: Outcome) -> web.Response:
    """Answer once more a request whose answer says no more than that it is done."""
    return no_content()


def error_answer(status: int, error_type: str, message: str) -> web.Response:
    """Answer with an error in Iceberg's shape."""
    return json_answer({"error": {"message": message, "type": error_type, "code": status}}, status=status)


def _page_size(text: str | None, config: CatalogConfig) -> int:
    if text is None:
        return config.page_default_items
    size = parse_count(text)
    if not size:
        raise BadRequest("Invalid pageSize: expected a positive integer of 32 bits")
    return min(size, config.page_max_items)


def _encode_token(name: str) -> str:
    return base64.urlsafe_b64encode(name.encode()).decode()


def _decode_token(token: str) -> str:
    try:
        name = base64.b64decode(token, altchars=b"-_", validate=True).decode()
        return name and check_name(name, "pageToken")
    except (binascii.Error, ValueError) as error:
        raise BadRequest("Invalid pageToken") from error


# --- catalog.routes.keyed ---------------------------------------------------------------------------------------------
#
# Handlers of requests that change something, made to heed the Idempotency-Key header.


HEADER = "Idempotency-Key"


def heeding_key(route: Route) -> Handler:
    """Give the handler of a route; one that changes something does so once per key."""
    retell = route.retell
    if retell is None:
        return route.handler

    async def handle(request: web.Request) -> web.StreamResponse:
        text = request.headers.get(HEADER)
        if text is None:
            return await route.handler(request)
        key, body = parse_key(text), await read_body(request)

        async def tell(outcome: Outcome) -> web.StreamResponse:
            if outcome.refusal is not None:
                return error_answer(outcome.refusal.status, outcome.refusal.type, outcome.refusal.message)
            return await retell(request, outcome)

        return await services(request).idempotency.once(
            key,
            fingerprint(request.method, request.raw_path, body),
            do=lambda: route.handler(request),
            tell=tell,
        )

    return handle


# --- catalog.routes.config --------------------------------------------------------------------------------------------
#
# GET config: which warehouse this is and what it can do.


async def get_config(request: web.Request) -> web.Response:
    """Answer for our one warehouse, asked for by name, by location or not at all.

    Raises: NoSuchWarehouse.
    """
    context = services(request)
    asked = request.query.get("warehouse", "")
    if asked and asked not in (context.config.warehouse_name, context.warehouse.location):
        raise NoSuchWarehouse(f"Warehouse does not exist: {asked}")
    return json_answer(
        {
            "defaults": {},
            "overrides": {},
            "endpoints": context.endpoints,
            "idempotency-key-lifetime": context.idempotency.lifetime,
        }
    )
