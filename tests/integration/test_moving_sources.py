"""A source that changes nodes: the next node refuses a batch if changes before it are on the first node only."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp
import pyarrow as pa
import pytest

from lakefeed.ingest.config import Config
from lakefeed.ingest.service import Addresses, serving
from lakefeed.storage.config import StorageConfig
from lakefeed.writer.config import IcebergConfig
from tests.clients import open_duckdb
from tests.ingest.conftest import small_config
from tests.ingest.http_ingest import HttpClient
from tests.ingest.ws_client import DEADLINE_S, WsClient, connected
from tests.writer.wire.arrow_batches import stream_of

FIRST, SECOND = range(1, 11), range(11, 21)


@dataclass(frozen=True, slots=True)
class TwoNodes:
    """Two nodes with one catalog. Neither commits unless it is asked to."""

    one: Addresses
    two: Addresses
    catalog_url: str

    async def sequences(self) -> list[int]:
        def read() -> list[int]:
            with open_duckdb(self.catalog_url) as connection:
                query = "SELECT _cdc_sequence FROM lake.default.users ORDER BY 1"
                return [row[0] for row in connection.execute(query).fetchall()]

        return await asyncio.to_thread(read)

    async def flush(self, node: Addresses) -> None:
        async with connected(node.ws_url, source=None) as client:
            assert (await client.request("flush_request"))["result"]["success"]


@pytest.fixture
async def nodes(tmp_path: Path) -> AsyncIterator[TwoNodes]:
    lake = replace(small_config(tmp_path / "lake"), storage=StorageConfig(warehouse=str(tmp_path / "files")))

    def beside(name: str) -> Config:
        return replace(small_config(tmp_path / name), storage=lake.storage, iceberg=IcebergConfig(uri=catalog.http_url))

    async with serving(lake) as catalog, serving(beside("one")) as one, serving(beside("two")) as two:
        yield TwoNodes(one, two, catalog.http_url)


@asynccontextmanager
async def http(node: Addresses) -> AsyncIterator[HttpClient]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=DEADLINE_S)) as session:
        yield HttpClient(session, node.http_url)


async def send_json(client: WsClient, sequences: range, previous: int | None) -> dict[str, Any]:
    return await client.batch(*sequences, previousSequence=previous)


async def send_arrow(client: WsClient, sequences: range, previous: int | None) -> dict[str, Any]:
    rows = pa.table({"_cdc_sequence": pa.array(sequences, pa.int64()), "id": pa.array(sequences, pa.int64())})
    more = {} if previous is None else {"previous_sequence": previous}
    await client.socket.send(stream_of(rows, table="users", **more))
    return await client.receive()


@pytest.mark.parametrize("send", [send_json, send_arrow])
async def test_changes_that_only_the_first_node_has_are_requested_again_and_are_in_the_table_once(nodes, send):
    async with connected(nodes.one.ws_url) as client:
        assert (await send(client, FIRST, None))["status"] == "ok"
    async with connected(nodes.two.ws_url) as client:
        nack = await send(client, SECOND, 10)
        assert (nack["type"], nack["reason"], nack["shouldRetry"]) == ("nack", "missing_changes", True)
        assert "lastDurableSequence" not in nack, "nothing of the source is known here"
        assert (await send(client, FIRST, None))["status"] == "ok"
        assert (await send(client, SECOND, 10))["status"] == "ok"
    await nodes.flush(nodes.two)
    await nodes.flush(nodes.one)  # it has 1 to 10 as well
    assert await nodes.sequences() == [*FIRST, *SECOND]


async def test_changes_that_only_the_first_node_has_are_requested_again_over_http(nodes):
    async with http(nodes.one) as client:
        assert (await client.batch(*FIRST)).status == 200
    async with http(nodes.two) as client:
        refused = await client.batch(*SECOND, previousSequence=10)
        assert (refused.status, refused.document["reason"]) == (409, "missing_changes")
        assert (refused.document["shouldRetry"], "lastDurableSequence" in refused.document) == (True, False)
        assert (await client.batch(*FIRST)).status == 200
        assert (await client.batch(*SECOND, previousSequence=10)).document["lastDurableSequence"] == 20
    await nodes.flush(nodes.two)
    await nodes.flush(nodes.one)
    assert await nodes.sequences() == [*FIRST, *SECOND]


async def test_numbered_rows_over_http_name_the_row_before_them(nodes):
    rows = [{"id": each} for each in SECOND]
    async with http(nodes.one) as client:
        assert (await client.rows(*({"id": each} for each in FIRST), sequence=1)).status == 200
    async with http(nodes.two) as client:
        refused = await client.rows(*rows, sequence=11, previousSequence=10)
        assert (refused.status, refused.document["reason"]) == (409, "missing_changes")
    await nodes.flush(nodes.one)
    async with http(nodes.two) as client:
        assert (await client.rows(*rows, sequence=11, previousSequence=10)).status == 200
    await nodes.flush(nodes.two)
    assert await nodes.sequences() == [*FIRST, *SECOND]


async def test_changes_that_the_first_node_commits_meanwhile_are_found_in_the_tables(nodes):
    async with connected(nodes.one.ws_url) as client:
        assert (await send_json(client, FIRST, None))["status"] == "ok"
    async with connected(nodes.two.ws_url) as client:
        assert (await send_json(client, SECOND, 10))["reason"] == "missing_changes"
        await nodes.flush(nodes.one)
        assert (await send_json(client, range(13, 21), 12))["lastDurableSequence"] == 10, "where to resume"
        assert (await send_json(client, SECOND, 10))["status"] == "ok"
        assert (await send_json(client, range(21, 22), 20))["status"] == "ok"
    async with connected(nodes.one.ws_url) as client:  # it knows 1 to 10 from its own log
        assert (await send_json(client, range(22, 23), 21))["lastDurableSequence"] == 10
        await nodes.flush(nodes.two)
        assert (await send_json(client, range(22, 23), 21))["status"] == "ok"
    await nodes.flush(nodes.one)
    assert await nodes.sequences() == list(range(1, 23))


async def test_source_that_knows_that_all_is_committed_needs_no_predecessor(nodes):
    async with connected(nodes.one.ws_url) as client:
        assert (await send_json(client, FIRST, None))["status"] == "ok"
        assert (await client.request("flush_request"))["result"]["success"]
    async with connected(nodes.two.ws_url) as client:
        assert (await send_json(client, SECOND, None))["status"] == "ok"
    await nodes.flush(nodes.two)
    assert await nodes.sequences() == [*FIRST, *SECOND]


async def test_predecessor_that_is_not_a_sequence_below_the_batch_is_refused(tmp_path):
    row = pa.table({"_cdc_sequence": pa.array([11], pa.int64())})
    async with serving(small_config(tmp_path)) as node, connected(node.ws_url) as client, http(node) as web:
        for wrong in (-1, 1.5, "10", True, [], 2**63, 11, 12):
            text = json.dumps(wrong)
            nack = await client.batch(11, previousSequence=wrong)
            assert (nack["reason"], nack["errorMessage"][:26]) == ("invalid_format", "previousSequence: expected"), (
                wrong
            )
            await client.socket.send(stream_of(row, previous_sequence=text))
            nack = await client.receive()
            expected = ("invalid_format", "lakefeed.previous-sequence: expected")
            assert (nack["reason"], nack["errorMessage"][:36]) == expected, wrong
            refused = await web.batch(11, source="web", previousSequence=wrong)
            assert (refused.status, refused.document["error"][:26]) == (400, "previousSequence: expected"), wrong
            refused = await web.rows({"id": 1}, source="rows", sequence=11, previousSequence=text)
            assert (refused.status, refused.document["error"][:26]) == (400, "previousSequence: expected"), wrong
        assert (await client.batch(11))["status"] == "ok"


async def test_predecessor_of_rows_that_the_service_numbers_is_refused(tmp_path):
    async with serving(small_config(tmp_path)) as node, http(node) as client:
        refused = await client.rows({"id": 1}, previousSequence=10)
        assert refused == (
            400,
            {
                "success": False,
                "reason": "invalid_format",
                "error": "previousSequence: expected only together with sequence",
                "shouldRetry": False,
            },
        )
