"""`GET /explain/flush`: why the last flush happened, and when the next will."""

from __future__ import annotations

from dataclasses import replace

import aiohttp

from lakefeed.ingest.service import serving
from lakefeed.writer.rows.table_settings import TableSections
from tests.ingest.conftest import small_config
from tests.ingest.ws_client import connected


async def test_explanation_is_of_the_table_that_is_asked_for(tmp_path):
    config = replace(small_config(tmp_path / "data"), tables=TableSections({"sales.*": {"flush_max_changes": 2}}))
    async with serving(config) as service, aiohttp.ClientSession(service.http_url) as http:
        async with http.get("/explain/flush", params={"table": "sales.orders"}) as answer:
            assert (answer.status, (await answer.json())["error"]) == (404, "no such table here: table=sales.orders")
        async with connected(service.ws_url) as client:
            await client.batch(1, 2, table="sales.orders")
            await client.receive_receipt(0)  # committed without being asked for: two changes are enough here
        async with http.get("/explain/flush", params={"table": "sales.orders"}) as answer:
            told = await answer.json()
    assert (told["table"], told["last"]["reason"], told["last"]["rows"]) == ("sales.orders", "changes", 2)
    assert (told["next"], told["bufferedRows"]) == (None, 0)
