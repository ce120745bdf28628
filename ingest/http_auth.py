"""The door of the control plane: asks for a token before anything else. Owns the answer 401; auth.py decides."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeAlias

import orjson
from aiohttp import web
from aiohttp.typedefs import Middleware

from ingest.auth import Auth, Refusal

CATALOG_PREFIX = "/v1/"
UNAUTHORIZED = 401

Handler: TypeAlias = Callable[[web.Request], Awaitable[web.StreamResponse]]


def asking_for_token(auth: Auth) -> Middleware:
    """Build the middleware that answers 401, in Iceberg's shape on the catalog's paths."""

    @web.middleware
    async def ask(request: web.Request, handler: Handler) -> web.StreamResponse:
        refusal = auth.admit(request.path, request.headers.get("Authorization"))
        return await handler(request) if refusal is None else _unauthorized(request, refusal)

    return ask


def _unauthorized(request: web.Request, refusal: Refusal) -> web.Response:
    if request.path.startswith(CATALOG_PREFIX):
        error = {"message": refusal.value, "type": "NotAuthorizedException", "code": UNAUTHORIZED}
        body = orjson.dumps({"error": error})
    else:
        body = orjson.dumps({"success": False, "reason": "unauthorized", "error": refusal.value})
    # RFC 6750, section 3: a request without a token is told no error code.
    challenge = 'Bearer realm="lakefeed"' + (', error="invalid_token"' if refusal is Refusal.NOT_VALID else "")
    headers = {"WWW-Authenticate": challenge}
    return web.Response(body=body, status=UNAUTHORIZED, headers=headers, content_type="application/json")
