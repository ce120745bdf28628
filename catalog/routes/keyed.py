"""Handlers of requests that change something, made to heed the Idempotency-Key header."""

from __future__ import annotations

from aiohttp import web

from catalog.idempotency import fingerprint, parse_key
from catalog.routes.requests import error_answer, read_body
from catalog.routes.routing import Handler, Route, services
from catalog.store.claims import Outcome

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
