"""A lost log, or another node: the tables' marks say where a source resumes, and each change is in its table once."""

from __future__ import annotations

import asyncio
import json
import shutil
import urllib.request
from dataclasses import replace

import pytest
from websockets.sync.client import connect

from lakefeed.ingest.config import Config
from lakefeed.ingest.service import serving
from lakefeed.storage.config import StorageConfig
from lakefeed.writer.config import IcebergConfig
from tests.clients import open_duckdb
from tests.ingest.conftest import small_config
from tests.ingest.ws_client import connected, insert
from tests.service_process import service_process

QUIET = {"writer.flush_max_age_s": 3600}


def sequences(http_url: str, table: str) -> list[int]:
    with open_duckdb(http_url) as connection:
        query = f"SELECT _cdc_sequence FROM lake.default.{table} ORDER BY 1"
        return [row[0] for row in connection.execute(query).fetchall()]


def request(socket, kind: str, **fields) -> dict:
    socket.send(json.dumps({"type": kind, "sourceDoId": "shop", **fields}))
    while (answer := json.loads(socket.recv(timeout=240))).get("status") == "persisted":
        pass  # a receipt, which comes whenever there was a commit
    return answer


def send(socket, *changes: tuple[int, str]) -> dict:
    events = [{"sequence": n, "operation": "INSERT", "table": table, "after": {"id": n}} for n, table in changes]
    return request(socket, "cdc_batch", events=events)


def flush(http_url: str, table: str) -> None:
    request = urllib.request.Request(f"{http_url}/flush?table=default.{table}", method="POST")
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert json.loads(answer.read())["success"]


@pytest.mark.crash
def test_source_resumes_at_the_table_that_is_behind_after_the_log_was_lost(tmp_path):
    with service_process(tmp_path, QUIET) as service:
        service.start()
        with connect(service.ws_url) as socket:
            send(socket, (1, "a"), (2, "b"))
            flush(service.http_url, "a")
            flush(service.http_url, "b")  # now all of it is committed, and this commit says so
            # `c` is new, and like 3 in `b` only in the log; what follows in `a` is committed.
            send(socket, (3, "b"), (4, "c"), (5, "a"), (6, "a"))
            flush(service.http_url, "a")
        service.kill()
        shutil.rmtree(service.data_dir / "log")
        service.start()
        with connect(service.ws_url) as socket:
            status = request(socket, "connect")
            assert status["lastDurableSequence"] == 2
            assert "lastCommittedSequence" not in status
            assert send(socket, (3, "b"), (4, "c"), (5, "a"), (6, "a"), (7, "a"))["status"] == "ok"
        service.flush()
        assert sequences(service.http_url, "a") == [1, 5, 6, 7]
        assert sequences(service.http_url, "b") == [2, 3]
        assert sequences(service.http_url, "c") == [4]


@pytest.mark.crash
def test_source_resumes_before_a_table_that_was_never_committed_after_the_log_was_lost(tmp_path):
    with service_process(tmp_path, QUIET) as service:
        service.start()
        with connect(service.ws_url) as socket:
            send(socket, (1, "a"))
            service.flush()
            send(socket, (2, "new"), (3, "a"), (4, "a"))
            flush(service.http_url, "a")
        service.kill()
        shutil.rmtree(service.data_dir / "log")
        service.start()
        with connect(service.ws_url) as socket:
            assert request(socket, "connect")["lastDurableSequence"] == 1
            assert send(socket, (2, "new"), (3, "a"), (4, "a"))["status"] == "ok"
            service.flush()
            send(socket, (5, "new"), (6, "a"))
            flush(service.http_url, "new")
            flush(service.http_url, "a")
        assert sequences(service.http_url, "a") == [1, 3, 4, 6]
        assert sequences(service.http_url, "new") == [2, 5]
        service.kill()
        shutil.rmtree(service.data_dir / "log")
        service.start()
        with connect(service.ws_url) as socket:
            assert request(socket, "connect")["lastDurableSequence"] == 6, "nothing is missing any more"


@pytest.mark.crash
def test_source_resumes_before_a_table_that_was_not_committed_in_its_new_epoch(tmp_path):
    with service_process(tmp_path, QUIET) as service:
        service.start()
        with connect(service.ws_url) as socket:
            send(socket, (1, "a"), (2, "b"))
            service.flush()
        with connect(service.ws_url) as socket:
            request(socket, "connect", epoch=1)
            send(socket, (1, "b"), (2, "a"), (3, "a"))
            flush(service.http_url, "a")
        service.kill()
        shutil.rmtree(service.data_dir / "log")
        service.start()
        with connect(service.ws_url) as socket:
            assert request(socket, "connect", epoch=0)["errorMessage"] == "epoch: expected at least 1, got 0"
            assert request(socket, "connect", epoch=1).get("lastDurableSequence", 0) == 0
            assert send(socket, (1, "b"), (2, "a"), (3, "a"))["status"] == "ok"
        service.flush()
        assert sequences(service.http_url, "a") == [1, 2, 3]
        assert sequences(service.http_url, "b") == [1, 2]


async def test_what_only_a_first_node_has_is_not_passed_over_by_a_second_one(tmp_path):
    lake = replace(small_config(tmp_path / "lake"), storage=StorageConfig(warehouse=str(tmp_path / "files")))
    async with serving(lake) as catalog:
        one, two = (_beside(lake, catalog.http_url, tmp_path / name) for name in ("one", "two"))
        async with serving(one) as first:
            async with connected(first.ws_url) as client:
                await client.batch(1, table="a")
                await client.request("flush_request")
                await client.batch(2, table="b")  # its first, and only in the log of this node
                await client.batch(3, 4, table="a")
            await asyncio.to_thread(flush, first.http_url, "a")
            async with serving(two) as second, connected(second.ws_url, source=None) as client:
                status = await client.request("connect", sourceDoId="shop")
                assert status["lastDurableSequence"] == 1
                events = [insert(2, table="b"), insert(3, table="a"), insert(4, table="a"), insert(5, table="b")]
                kept = [event for event in events if event["sequence"] > status["lastDurableSequence"]]
                await client.request("cdc_batch", events=kept)
                await client.request("flush_request")
            # It stops here, and commits what it still has.
        assert await asyncio.to_thread(sequences, catalog.http_url, "b") == [2, 5]
        assert await asyncio.to_thread(sequences, catalog.http_url, "a") == [1, 3, 4]


async def test_source_goes_to_a_second_node_and_is_in_the_table_once(tmp_path):
    first = replace(small_config(tmp_path / "one"), storage=StorageConfig(warehouse=str(tmp_path / "lake")))
    async with serving(first) as one:
        second = _beside(first, one.http_url, tmp_path / "two")
        async with serving(second) as two:
            async with connected(one.ws_url, source=None) as client:
                await client.request("connect", sourceDoId="shop", epoch=1)
                await client.batch(1, 2, 3, table="moved")
                await client.request("flush_request")
                await client.batch(4, table="moved")  # durable on the first node only
            async with connected(two.ws_url, source=None) as client:
                nack = await client.request("connect", sourceDoId="other")
                assert nack["type"] == "status", "a source that nobody knows is new"
            async with connected(two.ws_url, source=None) as client:
                # The second node looked before there was anything to see, so it may tell less than there is.
                status = await client.request("connect", sourceDoId="shop", epoch=1)
                assert status.get("lastDurableSequence", -1) <= 3
                await client.batch(2, 3, 4, 5, table="moved")
                await client.request("flush_request")
            async with connected(one.ws_url, source=None) as client:
                await client.request("flush_request")
            assert await asyncio.to_thread(sequences, one.http_url, "moved") == [1, 2, 3, 4, 5]
        # A start looks at once.
        shutil.rmtree(tmp_path / "two" / "log")
        async with serving(second) as two, connected(two.ws_url, source=None) as client:
            refused = await client.request("connect", sourceDoId="shop", epoch=0)
            assert refused["errorMessage"] == "epoch: expected at least 1, got 0"
            status = await client.request("connect", sourceDoId="shop", epoch=1)
            assert status["lastDurableSequence"] == 5


def _beside(first: Config, catalog_url: str, data_dir) -> Config:
    config = small_config(data_dir)
    return replace(config, storage=first.storage, iceberg=IcebergConfig(uri=catalog_url))
