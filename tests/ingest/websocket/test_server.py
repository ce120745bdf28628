"""The whole service on loopback: what clients of the data plane hear."""

from __future__ import annotations

import asyncio
import contextlib
import json

import aiohttp
import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from lakefeed.ingest.service import serving
from lakefeed.ingest.websocket import server
from tests.ingest.conftest import small_config
from tests.ingest.control_client import get, metrics_of, read_rows, until
from tests.ingest.ws_client import DEADLINE_S, WsClient, connected, insert

LARGE_FRAME_BYTES = 5 * 1024 * 1024


# -- connect


async def test_connect_of_a_new_source_is_answered_with_limits_and_no_resume_point(service):
    async with connected(service.ws_url, source=None) as client:
        answer = await client.request("connect", sourceDoId="shop", timestamp=5, correlationId="c-1")
    assert answer["type"] == "status"
    assert answer["state"] == "receiving"
    assert answer["correlationId"] == "c-1"
    assert answer["limits"] == {"maxMessageSize": 262_144, "maxEventSize": 131_072}
    assert answer["encodings"] == ["json", "arrow"]
    assert answer["epoch"] == 0
    assert answer["connectedSources"] == 1
    assert answer["buffer"]["utilization"] == 0
    assert "lastDurableSequence" not in answer
    assert "lastCommittedSequence" not in answer


async def test_reconnecting_source_is_told_where_to_resume(service):
    async with connected(service.ws_url) as client:
        await client.batch(1, 2, 3)
    async with connected(service.ws_url, source=None) as client:
        answer = await client.request("connect", sourceDoId="shop")
        assert answer["lastDurableSequence"] == 3
        await client.request("flush_request")
        answer = await client.request("connect", sourceDoId="shop")
        assert (answer["lastDurableSequence"], answer["lastCommittedSequence"]) == (3, 3)


async def test_new_epoch_has_no_resume_point_and_an_epoch_that_is_over_is_refused(service):
    async with connected(service.ws_url) as client:
        await client.batch(7)
        answer = await client.request("connect", sourceDoId="shop", epoch=2)
        assert (answer["epoch"], "lastDurableSequence" in answer) == (2, False)
        assert (await client.batch(1))["status"] == "ok"
        answer = await client.request("connect", sourceDoId="shop", epoch=1)
        assert (answer["type"], answer["reason"], answer["shouldRetry"]) == ("nack", "invalid_sequence", False)
        assert (answer["errorMessage"], answer["epoch"]) == ("epoch: expected at least 2, got 1", 2)
        assert (await client.batch(2))["status"] == "ok", "the refused connect has changed nothing"


async def test_header_names_the_source_of_a_client_that_never_connects(service, http):
    headers = {"X-Client-ID": "from-header"}
    async with connected(service.ws_url, source=None, additional_headers=headers) as client:
        assert (await client.batch(1))["status"] == "ok"
    assert [source["sourceDoId"] for source in (await get(http, "/status"))["sources"]] == ["from-header"]


async def test_header_that_is_no_source_name_is_refused_and_affects_no_other_client(service):
    headers = {"X-Client-ID": "tab\tinside"}
    async with connected(service.ws_url, source=None, additional_headers=headers) as client:
        nack = await client.batch(1)
        assert nack["errorMessage"].startswith("sourceDoId: expected at most 255 characters")
        assert (await client.batch(1, sourceDoId="shop"))["status"] == "ok"


# -- batches


async def test_ack_names_the_batch_and_counts_its_changes(service):
    async with connected(service.ws_url) as client:
        ack = await client.batch(1, 2, sequenceNumber=41, correlationId="c-2")
    assert (ack["type"], ack["status"], ack["sequenceNumber"], ack["correlationId"]) == ("ack", "ok", 41, "c-2")
    assert ack["details"]["eventsProcessed"] == 2
    assert "duplicates" not in ack["details"]
    assert ack["batchId"] == "0"


async def test_what_was_acked_is_in_the_log(tmp_path):
    config = small_config(tmp_path)
    async with serving(config) as addresses, connected(addresses.ws_url) as client:
        await client.batch(1, 2)
        segments = list((tmp_path / "log").glob("*.wal"))
        assert any(b"name 2" in segment.read_bytes() for segment in segments)


async def test_acks_keep_the_order_of_their_batches_with_a_hundred_in_flight(service):
    async with connected(service.ws_url) as client:
        for number in range(100):
            await client.send_batch(number, sequenceNumber=number)
        acks = [await client.receive() for _ in range(100)]
    assert [ack["sequenceNumber"] for ack in acks] == list(range(100))
    assert {ack["status"] for ack in acks} == {"ok"}


async def test_batch_sent_again_is_a_duplicate_and_a_batch_that_overlaps_is_trimmed(service):
    async with connected(service.ws_url) as client:
        await client.batch(1, 2, sequenceNumber=1)
        again = await client.batch(1, 2, sequenceNumber=1, isRetry=True)
        assert (again["status"], again["lastDurableSequence"]) == ("duplicate", 2)
        overlapping = await client.batch(2, 3, 4, sequenceNumber=2)
        assert (overlapping["status"], overlapping["details"]["eventsProcessed"]) == ("ok", 2)
        assert overlapping["details"]["duplicates"] == 1
        await client.request("flush_request")
    assert [row[0] for row in await read_rows(service, "users")] == [1, 2, 3, 4]


async def test_empty_batch_is_acked(service):
    async with connected(service.ws_url) as client:
        ack = await client.batch(sequenceNumber=9)
    assert (ack["status"], ack["sequenceNumber"], ack["details"]["eventsProcessed"]) == ("ok", 9, 0)


async def test_frames_may_be_binary(service):
    async with connected(service.ws_url) as client:
        await client.socket.send(json.dumps({"type": "cdc_batch", "events": [insert(1)]}).encode())
        assert (await client.receive())["status"] == "ok"


async def test_hole_in_the_batch_numbers_is_answered_with_the_number_expected(service):
    async with connected(service.ws_url) as client:
        await client.batch(1, sequenceNumber=1)
        nack = await client.batch(3, sequenceNumber=3)
        assert (nack["type"], nack["reason"], nack["shouldRetry"]) == ("nack", "invalid_sequence", True)
        assert (nack["sequenceNumber"], "expected=2" in nack["errorMessage"]) == (3, True)
        assert (await client.batch(2, sequenceNumber=2))["status"] == "ok"
        assert (await client.batch(3, sequenceNumber=3))["status"] == "ok"


# -- bad input affects no other client

BAD_FRAMES = {
    "wrong value": ({"type": "cdc_batch", "events": [insert(1, operation="UPSERT")]}, "events[0].operation: expected"),
    "wrong type": ({"type": "cdc_batch", "events": [insert(1, table=5)]}, "events[0].table: expected str, got int"),
    "missing field": ({"type": "cdc_batch"}, "object missing required field events"),
    "unknown message": ({"type": "subscribe"}, "type: expected one of connect, cdc_batch"),
    "not an object": ([1, 2], "expected object, got array"),
    "bad table name": ({"type": "cdc_batch", "events": [insert(1, table="a/b")]}, "events[0].table: expected a name"),
    "falling sequences": ({"type": "cdc_batch", "events": [insert(2), insert(1)]}, "events[1].sequence: expected more"),
    "other source": ({"type": "cdc_batch", "sourceDoId": "x", "events": [insert(1)]}, "sourceDoId: this connection"),
}


@pytest.mark.parametrize("name", BAD_FRAMES)
async def test_bad_frame_gets_a_nack_that_names_field_and_rule_and_affects_no_other_client(service, name):
    document, words = BAD_FRAMES[name]
    async with connected(service.ws_url) as client, connected(service.ws_url, source="neighbour") as neighbour:
        await neighbour.send_batch(1)
        await client.socket.send(json.dumps(document))
        nack = await client.receive()
        assert (nack["type"], nack["reason"], nack["shouldRetry"]) == ("nack", "invalid_format", False)
        assert nack["errorMessage"].startswith(words)
        assert (await client.batch(1))["status"] == "ok", "the connection goes on"
        assert (await neighbour.receive())["status"] == "ok"
        assert (await neighbour.batch(2))["status"] == "ok"


async def test_broken_json_gets_a_nack(service):
    async with connected(service.ws_url) as client:
        for frame in ("{", "", "\x00", '{"type":"heartbeat"', b"\xff\xfe"):
            await client.socket.send(frame)
            nack = await client.receive()
            assert nack["reason"] == "invalid_format"
            assert nack["errorMessage"].startswith("not valid JSON: ")
        assert (await client.batch(1))["status"] == "ok"


async def test_too_large_an_event_gets_a_nack_that_does_not_ask_for_it_again(service):
    async with connected(service.ws_url) as client:
        events = [insert(1), insert(2, after={"blob": "x" * 140_000})]
        nack = await client.request("cdc_batch", events=events, sequenceNumber=7, correlationId="c")
        assert (nack["reason"], nack["shouldRetry"]) == ("event_too_large", False)
        assert nack["errorMessage"].startswith("events[1]: expected at most 131072 bytes, got 14")
        assert (nack["maxSize"], nack["actualSize"] > 140_000) == (131_072, True)
        assert nack["receivedSize"] == nack["actualSize"]
        assert (nack["sequenceNumber"], nack["correlationId"]) == (7, "c")


async def test_too_large_a_frame_closes_only_its_connection_with_1009(service, http):
    async with connected(service.ws_url, source="neighbour") as neighbour:
        client = WsClient(await connect(service.ws_url, compression=None))
        with contextlib.suppress(ConnectionClosed):
            await client.socket.send("x" * LARGE_FRAME_BYTES)
        assert await client.closed() == 1009
        assert (await neighbour.batch(1))["status"] == "ok"
        # The server counts the connection when its reader sees the end, which may be after the client does.
        await until(lambda: get(http, "/status"), lambda status: status["rateLimitMetrics"]["payloadRejections"] == 1)


async def test_nothing_overtakes_a_malformed_batch_even_if_it_was_the_first(service):
    async with connected(service.ws_url) as client:
        await client.send("cdc_batch", sequenceNumber=0, events=[insert(1, operation="UPSERT")])
        await client.send_batch(2, sequenceNumber=1)
        first, second = await client.receive(), await client.receive()
        assert (first["reason"], first["sequenceNumber"]) == ("invalid_format", 0)
        assert (second["reason"], "expected=0" in second["errorMessage"]) == ("invalid_sequence", True)
        assert (await client.batch(1, sequenceNumber=0))["details"]["eventsProcessed"] == 1
        assert (await client.batch(2, sequenceNumber=1))["details"]["eventsProcessed"] == 1


async def test_unknown_path_is_answered_404(service):
    with pytest.raises(InvalidStatus) as caught:
        async with connected(service.ws_url.replace("/ws", "/other")):
            pass
    assert caught.value.response.status_code == 404
    assert b"/ws" in caught.value.response.body


REFUSED = {
    "version": {"type": "connect", "sourceDoId": "shop", "protocolVersion": 2},
    "epoch": {"type": "connect", "sourceDoId": "shop", "epoch": 1},
    "other source": {"type": "connect", "sourceDoId": "other"},
    "hole": {"type": "cdc_batch", "sequenceNumber": 9, "events": [insert(9)]},
    "hole before events of debezium": {"type": "debezium_batch", "sequenceNumber": 9, "events": []},
    "malformed event of debezium": {"type": "debezium_batch", "sequenceNumber": 1, "events": [5]},
    "malformed batch": {"type": "cdc_batch", "sequenceNumber": 1, "events": [5]},
    "unknown message": {"type": "subscribe"},
}


@pytest.mark.parametrize("name", REFUSED)
async def test_every_refusal_carries_the_correlation_of_what_it_refuses(service, name):
    async with connected(service.ws_url, source=None) as client:
        await client.request("connect", sourceDoId="shop", epoch=2)
        await client.batch(1, sequenceNumber=0)
        await client.socket.send(json.dumps({**REFUSED[name], "correlationId": "c-9"}))
        nack = await client.receive()
        assert (nack["type"], nack["correlationId"]) == ("nack", "c-9")


async def test_handler_that_fails_closes_only_its_connection_with_1011(service, http, monkeypatch, caplog):
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("a defect of ours")

    async with connected(service.ws_url) as client, connected(service.ws_url, source="neighbour") as neighbour:
        await client.batch(1)
        monkeypatch.setattr(server, "Pong", fail)
        await client.send("heartbeat")
        assert await client.closed() == 1011
        monkeypatch.undo()
        assert (await neighbour.request("heartbeat"))["type"] == "pong"
        assert (await neighbour.batch(1))["status"] == "ok"
    failed = [record for record in caplog.records if record.message == "connection_failed"]
    assert [(record.source, record.exc_info is not None) for record in failed] == [("shop", True)]
    assert (await metrics_of(http))['lakefeed_ingest_closed_connections_total{code="1011"}'] == 1


# -- heartbeats and disconnects


async def test_ping_gets_a_pong_and_a_heartbeat_its_own_time_back(service):
    async with connected(service.ws_url, source=None) as client:
        await client.socket.send("ping")
        async with asyncio.timeout(DEADLINE_S):
            assert await client.socket.recv() == "pong"
        pong = await client.request("heartbeat", timestamp=1234, correlationId="h")
    assert (pong["type"], pong["timestamp"], pong["correlationId"]) == ("pong", 1234, "h")
    assert pong["serverTime"] > 1_700_000_000_000


async def test_disconnect_is_answered_after_everything_before_it_with_1000(service):
    async with connected(service.ws_url) as client:
        for number in range(20):
            await client.send_batch(number, sequenceNumber=number)
        await client.send("flush_request")
        await client.send("disconnect", reason="done")
        answers = [await client.receive() for _ in range(21)]
        assert await client.closed() == 1000
    assert [answer["sequenceNumber"] for answer in answers if answer["type"] == "ack"] == list(range(20))
    assert [answer["result"]["eventsFlushed"] for answer in answers if answer["type"] == "flush_response"] == [20]


async def test_client_that_leaves_with_unread_replies_affects_no_other(service, http):
    async with connected(service.ws_url) as client:
        for number in range(50):
            await client.send_batch(number, sequenceNumber=number)
        client.socket.transport.abort()
    async with connected(service.ws_url, source="neighbour") as neighbour:
        assert (await neighbour.batch(1))["status"] == "ok"
        await until(lambda: get(http, "/status"), lambda status: status["connections"] == 1)
    async with connected(service.ws_url, source=None) as client:
        durable = (await client.request("connect", sourceDoId="shop")).get("lastDurableSequence", -1)
        assert (await client.batch(*range(durable + 1, 51)))["status"] == "ok"
        await client.request("flush_request")
    assert [row[0] for row in await read_rows(service, "users") if row[1] == "shop"] == list(range(51))


async def test_stopping_commits_what_was_acked_and_closes_with_1001(tmp_path):
    config = small_config(tmp_path)
    client = None
    async with contextlib.AsyncExitStack() as connections:
        async with serving(config) as addresses:
            client = await connections.enter_async_context(connected(addresses.ws_url))
            await client.batch(1, 2, 3)
        assert await client.closed() == 1001
    async with serving(config) as addresses:
        assert [row[0] for row in await read_rows(addresses, "users")] == [1, 2, 3]
        async with aiohttp.ClientSession(addresses.http_url) as http:
            assert (await get(http, "/status"))["log"]["uncommittedRecords"] == 0


async def test_restarted_service_knows_its_sources_and_its_tables(tmp_path):
    config = small_config(tmp_path)
    async with serving(config) as addresses, connected(addresses.ws_url) as client:
        await client.batch(1, 2, 3)
    async with serving(config) as addresses, connected(addresses.ws_url, source=None) as client:
        assert (await client.request("connect", sourceDoId="shop"))["lastDurableSequence"] == 3
        assert (await client.batch(2, 3, 4))["details"]["eventsProcessed"] == 1
        await client.request("flush_request")
        assert [row[0] for row in await read_rows(addresses, "users")] == [1, 2, 3, 4]
