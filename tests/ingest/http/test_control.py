"""The whole service on loopback: what flushes answer, and what the control plane shows."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil

import aiohttp

from lakefeed.ingest.service import serving
from lakefeed.writer.tables.feed import Feed
from tests.ingest.conftest import small_config
from tests.ingest.control_client import get, metrics_of, post, read_rows, until
from tests.ingest.ws_client import connected

# -- flushing


async def test_flush_request_is_answered_after_the_commit_with_the_snapshot(service):
    async with connected(service.ws_url) as client:
        await client.batch(1, 2)
        answer = await client.request("flush_request", correlationId="f")
        assert (answer["type"], answer["correlationId"]) == ("flush_response", "f")
        result = answer["result"]
        assert (result["success"], result["eventsFlushed"], result["batchesFlushed"]) == (True, 2, 1)
        assert result["tables"]["default.users"]["rows"] == 2
        assert result["tables"]["default.users"]["snapshotId"] > 0
        assert [path.rpartition(".")[2] for path in result["paths"]] == ["parquet"]
    assert await read_rows(service, "users") == [(1, "shop", 1, "name 1"), (2, "shop", 2, "name 2")]


async def test_flush_request_covers_batches_sent_before_it_without_waiting_for_their_acks(service):
    async with connected(service.ws_url) as client:
        for number in range(30):
            await client.send_batch(number, sequenceNumber=number)
        await client.send("flush_request")
        answers = [await client.receive() for _ in range(31)]
    (flushed,) = [answer for answer in answers if answer["type"] == "flush_response"]
    assert flushed["result"]["eventsFlushed"] == 30


async def test_flush_over_http_commits_all_tables_or_one(service, http):
    async with connected(service.ws_url) as client:
        await client.batch(1, table="users")
        await client.batch(2, table="sales.orders")
        one = await post(http, "/flush?table=users")
        assert list(one["tables"]) == ["default.users"]
        assert one["eventsFlushed"] == 1
        every = await post(http, "/flush")
        assert every["tables"]["sales.orders"]["rows"] == 1
        assert every["tables"]["default.users"]["rows"] == 0
        assert (await post(http, "/flush?table=sales.orders"))["eventsFlushed"] == 0


async def test_flush_of_one_table_waits_until_what_was_acked_is_read_from_the_log(tmp_path, monkeypatch):
    held = asyncio.Event()
    read_on = Feed.run_reader

    async def hold(feed: Feed) -> None:
        await held.wait()
        await read_on(feed)

    monkeypatch.setattr(Feed, "run_reader", hold)
    async with (
        serving(small_config(tmp_path)) as addresses,
        aiohttp.ClientSession(addresses.http_url) as http,
        connected(addresses.ws_url) as client,
    ):
        await client.batch(1, table="fresh")
        flushing = asyncio.create_task(post(http, "/flush?table=fresh"))
        await asyncio.wait([flushing], timeout=0.2)  # an answer would be here by now
        held.set()
        assert (await flushing)["eventsFlushed"] == 1


async def test_flush_of_an_unknown_table_is_answered_404(service, http):
    answer = await post(http, "/flush?table=nowhere", status=404)
    assert answer == {"success": False, "error": "no such table here: table=nowhere"}


async def test_flush_with_nothing_to_do_succeeds(service, http):
    answer = await post(http, "/flush")
    assert (answer["success"], answer["eventsFlushed"], answer["tables"]) == (True, 0, {})


async def test_table_flushes_by_age_without_being_asked(tmp_path):
    config = small_config(tmp_path, flush_max_age_s=0.05)
    async with serving(config) as addresses, connected(addresses.ws_url) as client:
        await client.batch(1)
        status = await until(
            lambda: client.request("connect", sourceDoId="shop"), lambda status: status.get("lastCommittedSequence")
        )
        assert status["lastCommittedSequence"] == 1


# -- the control plane


async def test_status_shows_sources_tables_log_and_buffer(service, http):
    async with connected(service.ws_url) as client:
        await client.batch(1, 2, table="users")
        await client.request("flush_request")
        await client.batch(3, table="users")
        status = await until(lambda: get(http, "/status"), lambda status: status["buffer"]["eventCount"])
    assert (status["state"], status["connections"], status["connectedSources"]) == ("receiving", 1, 1)
    assert status["problems"] == []
    (source,) = status["sources"]
    assert (source["sourceDoId"], source["connected"]) == ("shop", True)
    assert (source["lastDurableSequence"], source["lastCommittedSequence"]) == (3, 2)
    assert (source["batchesReceived"], source["eventsReceived"]) == (2, 3)
    (state,) = status["sourceStates"]
    assert (state["sourceDoId"], state["lastReceivedSequence"], state["lastAckedSequence"]) == ("shop", 3, 3)
    assert status["dedupStats"] == {"totalChecks": 3, "duplicatesFound": 0, "entriesTracked": 1}
    assert status["lastFlushTime"] > 0
    (table,) = status["tables"]
    assert (table["table"], table["bufferedRows"], table["committedRows"]) == ("default.users", 1, 2)
    assert (table["problem"], table["lastFlushReason"]) == (None, "request")
    assert (status["log"]["durableEnd"], status["log"]["uncommittedRecords"]) == (2, 1)
    assert status["log"]["bytes"] > 0


async def test_state_is_idle_receiving_or_error(service, http, monkeypatch):
    assert (await get(http, "/status"))["state"] == "idle"
    async with connected(service.ws_url) as client:
        assert (await get(http, "/status"))["state"] == "receiving"

        def fail(_: int) -> None:
            raise OSError(errno.EIO, "injected")

        monkeypatch.setattr(os, "fdatasync", fail)
        assert (await client.batch(1))["reason"] == "internal_error"
        assert (await get(http, "/status"))["state"] == "error"
        assert (await client.request("connect", sourceDoId="shop"))["state"] == "error"


async def test_state_is_recovering_until_what_the_last_service_left_is_read(tmp_path, monkeypatch):
    config = small_config(tmp_path)
    held = asyncio.Event()
    read_on = Feed.run_reader

    async def hold(feed: Feed) -> None:
        await held.wait()
        await read_on(feed)

    async with serving(config) as addresses, connected(addresses.ws_url) as client:
        await client.batch(1)
        monkeypatch.setattr(Feed, "run_reader", hold)
        shutil.copytree(tmp_path, tmp_path.with_name("copy"))
    async with (
        serving(small_config(tmp_path.with_name("copy"))) as addresses,
        connected(addresses.ws_url, source=None) as client,
    ):
        assert (await client.request("connect", sourceDoId="shop"))["state"] == "recovering"
        held.set()
        await until(lambda: client.request("connect", sourceDoId="shop"), lambda status: status["state"] == "receiving")


async def test_health_is_live_and_ready(http):
    assert await get(http, "/health/live") == {"status": "live"}
    assert await get(http, "/health/ready") == {"status": "ready", "problems": []}
    assert await get(http, "/health") == {"status": "ready", "problems": []}


async def test_index_lists_the_endpoints_and_each_is_there(http):
    index = await get(http, "/")
    assert index["service"] == "lakefeed"
    for path in index["endpoints"]:
        async with http.get(path) as answer:
            is_there = answer.status in (200, 405) or "no such table here" in await answer.text()
            assert is_there, path


def has_gauges(found: dict[str, float]) -> bool:
    """Tell whether the timer has set the gauges after the commit and after the last batch was buffered."""
    names = ("lakefeed_writer_last_commit_age_seconds", "lakefeed_writer_oldest_uncommitted_age_seconds")
    return all(found.get(f'{name}{{table="default.users"}}', 0) > 0 for name in names)


async def test_metrics_tell_the_four_states_apart(service, http):
    async with connected(service.ws_url) as client:
        await client.batch(1, 2)
        await client.batch(1, 2)
        await client.request("flush_request")
        await client.batch(3)
        await client.socket.send("{")
        await client.receive()
        found = await until(lambda: metrics_of(http), has_gauges)
    assert found["lakefeed_ingest_received_changes_total"] == 5
    assert found["lakefeed_ingest_durable_changes_total"] == 3
    assert found["lakefeed_ingest_duplicate_changes_total"] == 2
    assert found['lakefeed_writer_committed_changes_total{table="default.users"}'] == 2
    assert found["lakefeed_ingest_received_bytes_total"] > found["lakefeed_ingest_durable_bytes_total"] > 0
    assert found['lakefeed_writer_committed_bytes_total{table="default.users"}'] > 0
    assert found['lakefeed_writer_committed_files_total{table="default.users"}'] == 1
    assert found['lakefeed_ingest_nacks_total{reason="invalid_format"}'] == 1
    assert found["lakefeed_ingest_connections"] == 1
    assert found["lakefeed_ingest_ack_seconds_count"] == 3
    assert found["lakefeed_writer_flush_seconds_count"] == 1
    assert found["lakefeed_writer_commit_seconds_count"] == 1
    assert found['lakefeed_writer_flushes_total{reason="request"}'] == 1
    assert found["lakefeed_writer_log_bytes"] > 0
    assert found["lakefeed_writer_buffered_bytes"] > 0
    assert found["lakefeed_writer_log_uncommitted_records"] == 1
    assert found["lakefeed_ingest_event_loop_lag_seconds"] >= 0


async def test_connect_tells_when_the_last_flush_was(service):
    async with connected(service.ws_url) as client:
        assert "lastFlushTime" not in await client.request("connect", sourceDoId="shop")
        await client.batch(1)
        await client.request("flush_request")
        await client.receive_receipt(0)
        assert (await client.request("connect", sourceDoId="shop"))["lastFlushTime"] > 0
