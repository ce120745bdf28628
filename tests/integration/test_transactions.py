"""Source transactions over the wire, through the whole service: in all of their tables or in none."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from lakefeed.ingest.service import Addresses, serving
from lakefeed.writer.config import IcebergConfig
from tests.clients import open_pyiceberg
from tests.fakes import OldCatalog
from tests.ingest.conftest import small_config
from tests.ingest.debezium.recordings import load
from tests.ingest.ws_client import connected, insert
from tests.integration.debezium_replay import changes_in, in_batches
from tests.integration.test_debezium_http import service as debezium_service

pytestmark = pytest.mark.integration

DEADLINE_S = 240.0
ACCOUNTS, LEDGER = "accounts", "ledger"


@contextlib.asynccontextmanager
async def serving_together(directory: Path, **writer: Any) -> AsyncIterator[Addresses]:
    config = small_config(directory, **{"transactions": True, "transaction_max_wait_s": 3600.0, **writer})
    async with serving(config) as addresses:
        yield addresses


def change(sequence: int, table: str, *, end: bool = False) -> dict[str, Any]:
    return insert(sequence, table=table, metadata={"transaction": {"id": "t1", "end": end}})


def sequences(url: str, table: str) -> list[int]:
    with contextlib.closing(open_pyiceberg(url)) as catalog:
        if not catalog.table_exists(f"default.{table}"):
            return []
        return sorted(catalog.load_table(f"default.{table}").scan().to_arrow()["_cdc_sequence"].to_pylist())


async def contents(addresses: Addresses) -> tuple[list[int], list[int]]:
    found = [await asyncio.to_thread(sequences, addresses.http_url, table) for table in (ACCOUNTS, LEDGER)]
    return found[0], found[1]


async def flush(addresses: Addresses) -> dict[str, Any]:
    async with (
        asyncio.timeout(DEADLINE_S),
        aiohttp.ClientSession() as http,
        http.post(f"{addresses.http_url}/flush") as response,
    ):
        return await response.json()


async def test_transaction_over_three_batches_is_committed_with_its_last_one(tmp_path):
    async with serving_together(tmp_path) as addresses, connected(addresses.ws_url) as client:
        await client.batch(events=[insert(1, table=ACCOUNTS)], sequenceNumber=0)
        await client.batch(events=[change(2, ACCOUNTS)], sequenceNumber=1)
        await client.batch(events=[change(3, LEDGER)], sequenceNumber=2)
        assert (await flush(addresses))["success"]
        assert await contents(addresses) == ([1], [])
        assert (await client.receive_receipt(0))["sequenceNumber"] == 0, "what is open is not called committed"
        await client.batch(events=[change(4, LEDGER, end=True)], sequenceNumber=3)
        assert (await flush(addresses))["success"]
        assert await contents(addresses) == ([1, 2], [3, 4])
        assert (await client.receive_receipt(3))["lastCommittedSequence"] == 4


async def test_stop_leaves_an_open_transaction_in_the_log_for_the_next_start(tmp_path):
    async with serving_together(tmp_path) as addresses, connected(addresses.ws_url) as client:
        await client.batch(events=[insert(1, table=LEDGER), change(2, ACCOUNTS)])
    async with serving_together(tmp_path) as addresses, connected(addresses.ws_url) as client:
        assert await contents(addresses) == ([], [])
        await client.batch(events=[change(3, LEDGER, end=True)])
        await flush(addresses)
        assert await contents(addresses) == ([2], [1, 3])


@pytest.mark.parametrize("size", [1, 7])
async def test_recording_of_debezium_folds_to_the_rows_of_the_source(tmp_path, size):
    """Each event in a request of its own, or some together, so that requests end inside of transactions."""
    settings = {"transactions": True, "transaction_max_wait_s": 3600.0, "flush_max_age_s": 0.05}
    async with debezium_service(tmp_path, **settings) as at_work:
        requests = load("v2") if size == 1 else in_batches(load("v2"), size)
        assert await at_work.send(requests) == changes_in("v2")
        assert await at_work.differences("v2") == []
        assert "lakefeed_writer_split_transactions_total{" not in await at_work.get("/metrics")


async def test_a_catalog_without_transactions_is_reported_at_startup_and_tables_are_committed_one_by_one(
    tmp_path, caplog
):
    async with serving(small_config(tmp_path / "elsewhere")) as elsewhere:
        async with OldCatalog(elsewhere.http_url) as catalog:
            own = small_config(tmp_path / "here", transactions=True)
            config = replace(own, iceberg=IcebergConfig(uri=catalog.url))
            with caplog.at_level(logging.WARNING):
                async with serving(config) as addresses, connected(addresses.ws_url) as client:
                    await client.batch(events=[change(1, ACCOUNTS), change(2, LEDGER)])
                    assert (await flush(addresses))["success"]
        assert await contents(elsewhere) == ([1], [2])
    assert "catalog_has_no_transactions" in [record.message for record in caplog.records]
