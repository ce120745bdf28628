"""A client that uses a source name for every id cannot make a table's commits too large: it is refused in time."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp

from lakefeed.ingest.config import Config
from lakefeed.ingest.service import serving
from lakefeed.settings import MIB
from lakefeed.writer.config import LogConfig
from tests.ingest.conftest import small_config
from tests.ingest.ws_client import DEADLINE_S, connected, insert

WORDS = "source: the table has no room for another source"


def config_of(tmp_path: Path, sources_max: int) -> Config:
    return small_config(tmp_path / "data", sources_max=sources_max)


async def post(http: aiohttp.ClientSession, source: str, sequence: int = 1, *, table: str = "a") -> dict[str, Any]:
    batch = {"type": "cdc_batch", "sourceDoId": source, "events": [insert(sequence, table=table)]}
    async with http.post("/cdc", json=batch) as answer:
        return {"code": answer.status, **await answer.json()}


def client_of(url: str) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(url, timeout=aiohttp.ClientTimeout(total=DEADLINE_S))


async def test_a_source_too_many_is_refused_and_known_ones_go_on(tmp_path: Path) -> None:
    async with serving(config_of(tmp_path, 2)) as service, client_of(service.http_url) as http:
        assert [(await post(http, source))["code"] for source in ("s1", "s2")] == [200, 200]
        refused = await post(http, "s3")
        assert (refused["code"], refused["reason"], refused["shouldRetry"]) == (400, "invalid_format", False)
        assert refused["error"].startswith(WORDS)
        assert refused["error"].endswith("raise writer.sources_max: table=a sources_max=2")
        async with connected(service.ws_url, source="s4") as client:
            assert (await client.batch(1, table="a"))["errorMessage"] == refused["error"]
            assert (await client.batch(2, table="b"))["reason"] == "invalid_sequence", "it would overtake the first"
        event = {"before": None, "after": {"id": 1}, "op": "c", "ts_ms": 1, "source": {"table": "a", "db": "default"}}
        async with http.post("/cdc/debezium?source=s5", data=json.dumps(event)) as answer:
            assert (answer.status, (await answer.json())["error"].partition(";")[0]) == (400, WORDS)
        assert (await post(http, "s1", 2))["code"] == 200
        async with http.post("/flush") as answer:
            assert (await answer.json())["eventsFlushed"] == 3
        async with http.get("/health") as answer:
            health = await answer.json()
        assert (answer.status, health["status"]) == (200, "degraded")
        assert health["problems"][0].startswith("table has no room for another source")


async def test_sources_of_a_table_count_after_a_restart_and_a_higher_limit_lets_further_ones_in(tmp_path: Path) -> None:
    async with serving(config_of(tmp_path, 2)) as service, client_of(service.http_url) as http:
        assert [(await post(http, source))["code"] for source in ("s1", "s2")] == [200, 200]
    async with serving(config_of(tmp_path, 2)) as service, client_of(service.http_url) as http:
        assert (await post(http, "s3"))["error"].startswith(WORDS)
        assert (await post(http, "s2", 2))["code"] == 200
    async with serving(config_of(tmp_path, 3)) as service, client_of(service.http_url) as http:
        assert (await post(http, "s3"))["code"] == 200
        assert (await post(http, "s4"))["error"].startswith(WORDS)


async def test_all_sources_that_were_accepted_are_committed_however_long_their_names_are(tmp_path: Path) -> None:
    config = replace(config_of(tmp_path, 2_000), log=LogConfig(segment_max_bytes=32 * MIB))
    async with serving(config) as service, client_of(service.http_url) as http:
        codes = [(await post(http, "\U0001f600" * 250 + f"{number:05d}"))["code"] for number in range(150)]
        assert {codes.count(200), codes.count(400)} == {125, 25}
        async with http.post("/flush") as answer:
            assert (answer.status, (await answer.json())["eventsFlushed"]) == (200, 125)
