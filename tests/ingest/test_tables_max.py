"""A client that names a table for every id is refused over WebSocket and HTTP, and no other client is affected."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import aiohttp
import pytest

from lakefeed.ingest.config import Config
from lakefeed.ingest.service import serving
from lakefeed.writer.tables.feed import Feed
from tests.clients import open_duckdb
from tests.ingest.conftest import small_config
from tests.ingest.ws_client import DEADLINE_S, connected, insert

WORDS = "table: no room for another table"


def config_of(tmp_path: Path, tables_max: int, **writer: object) -> Config:
    return small_config(tmp_path / "data", tables_max=tables_max, **writer)


async def test_batch_with_a_table_too_many_is_refused_whole_and_known_tables_go_on(tmp_path: Path) -> None:
    async with serving(config_of(tmp_path, 2)) as service, connected(service.ws_url) as client:
        assert (await client.batch(1, table="a"))["status"] == "ok"
        assert (await client.batch(2, table="default.b"))["status"] == "ok"
        nack = await client.request("cdc_batch", events=[insert(3, table="b"), insert(4, table="b_4711")])
        assert (nack["type"], nack["reason"], nack["shouldRetry"]) == ("nack", "invalid_format", True)
        assert nack["errorMessage"].startswith(WORDS)
        assert nack["errorMessage"].endswith("writer.tables_max: table=b_4711 known=2 tables_max=2")
        assert (await client.batch(3, table="b"))["status"] == "ok"
        flushed = await client.request("flush_request")
        assert {table: each["rows"] for table, each in flushed["result"]["tables"].items()} == {
            "default.a": 1,
            "default.b": 2,
        }


async def test_what_was_refused_is_taken_once_there_is_room_and_nothing_of_its_source_overtakes_it(
    tmp_path: Path,
) -> None:
    async with serving(config_of(tmp_path, 1)) as service, connected(service.ws_url) as client:
        assert (await client.batch(3, table="a"))["status"] == "ok"
        assert (await client.batch(4, table="b"))["shouldRetry"]
        assert (await client.batch(5, table="a"))["type"] == "nack"
    async with serving(config_of(tmp_path, 2)) as service, connected(service.ws_url) as client:
        assert (await client.batch(4, table="b"))["status"] == "ok"
        assert (await client.batch(5, table="a"))["status"] == "ok"
        assert (await client.request("flush_request"))["result"]["success"]
        assert [await asyncio.to_thread(sequences, service.http_url, table) for table in "ab"] == [[3, 5], [4]]


async def test_requests_over_http_are_refused_in_the_same_words(tmp_path: Path) -> None:
    timeout = aiohttp.ClientTimeout(total=DEADLINE_S)
    async with (
        serving(config_of(tmp_path, 1)) as service,
        aiohttp.ClientSession(service.http_url, timeout=timeout) as http,
    ):
        batch = {"type": "cdc_batch", "sourceDoId": "shop", "events": [insert(1, table="a")]}
        async with http.post("/cdc", json=batch) as answer:
            assert answer.status == 200
        batch["events"] = [insert(2, table="a_2")]
        async with http.post("/cdc", json=batch) as answer:
            assert (answer.status, (await answer.json())["error"].partition(";")[0]) == (400, WORDS)
        event = {"before": None, "after": {"id": 1}, "op": "c", "ts_ms": 1, "source": {"table": "a_3", "db": "d"}}
        async with http.post("/cdc/debezium?source=other", data=json.dumps(event)) as answer:
            assert (answer.status, (await answer.json())["error"].partition(";")[0]) == (400, WORDS)


async def test_tables_that_the_log_already_holds_are_written_though_the_limit_is_lower_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def flush_nothing(*_: object, **__: object) -> None:
        raise TimeoutError

    config = config_of(tmp_path, 3)
    with monkeypatch.context() as patched:
        patched.setattr(Feed, "flush", flush_nothing)  # however fast the machine is, the rows stay in the log
        async with serving(config) as service, connected(service.ws_url) as client:
            for sequence, table in enumerate(("a", "b", "c")):
                await client.batch(sequence, table=table)
    async with serving(replace(config, writer=replace(config.writer, tables_max=1))) as service:
        async with connected(service.ws_url) as client:
            assert (await client.request("flush_request"))["result"]["success"]
            assert (await client.batch(3, table="d"))["errorMessage"].endswith("table=d known=3 tables_max=1")
            assert (await client.batch(3, table="c"))["status"] == "ok"
            await client.request("flush_request")
        assert [await asyncio.to_thread(sequences, service.http_url, table) for table in "abc"] == [[0], [1], [2, 3]]


def sequences(http_url: str, table: str) -> list[int]:
    with open_duckdb(http_url) as connection:
        query = f"SELECT _cdc_sequence FROM lake.default.{table} ORDER BY 1"
        return [row[0] for row in connection.execute(query).fetchall()]
