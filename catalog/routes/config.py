"""GET config: which warehouse this is and what it can do."""

from __future__ import annotations

from aiohttp import web

from catalog.errors import NoSuchWarehouse
from catalog.routes.requests import json_answer
from catalog.routes.routing import services


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
