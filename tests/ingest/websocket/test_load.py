"""Load, and odd ways to send, met by real clients of the whole service on loopback."""

from __future__ import annotations

import json

from tests.ingest.limited_service import open_socket, refused_count, serving_with, status_of, wait_for_status
from tests.ingest.ws_client import connected, insert
from tests.raw_client import CLOSE, TEXT, encode_frame, open_raw, text_frame

# -- load


async def test_critical_load_sheds_normal_batches_and_high_priority_passes(tmp_path, stuck_log):
    async with serving_with(tmp_path, shed_delay_s=0.2) as addresses:
        high = connected(addresses.ws_url, source="vip", additional_headers={"X-Priority": "high"})
        async with (
            connected(addresses.ws_url) as first,
            connected(addresses.ws_url, source="late") as normal,
            high as vip,
        ):
            stuck_log.clear()
            await first.send_batch(1)
            status = await wait_for_status(addresses, lambda status: status["loadLevel"] == "critical")
            assert status["degradedMode"] is True
            nack = await normal.batch(1, sequenceNumber=1)
            assert (nack["reason"], nack["shouldRetry"]) == ("load_shedding", True)
            assert 50 <= nack["retryDelayMs"] <= 150
            assert (await normal.batch(2, sequenceNumber=2))["reason"] == "invalid_sequence"
            assert (await normal.request("heartbeat"))["type"] == "pong"
            await vip.send_batch(1)
            stuck_log.set()
            assert (await vip.receive())["status"] == "ok"
            assert (await first.receive())["status"] == "ok"
            status = await wait_for_status(addresses, lambda status: status["loadLevel"] == "normal")
            assert refused_count(status, "loadSheddingEvents") == 1
            assert (await normal.batch(1, sequenceNumber=1))["details"]["eventsProcessed"] == 1
            assert (await normal.batch(2, sequenceNumber=2))["details"]["eventsProcessed"] == 1


async def test_status_tells_limits_load_and_what_was_refused(tmp_path):
    async with serving_with(tmp_path) as addresses, connected(addresses.ws_url):
        status = await status_of(addresses)
    assert (status["loadLevel"], status["degradedMode"]) == ("normal", False)
    assert status["rateLimits"] == {
        "connectionsPerSecond": 500.0,
        "maxConnections": 2_000,
        "messagesPerSecond": 0.0,
        "burstCapacity": 1_000,
        "sourceBytesPerSecond": 0.0,
        "maxPayloadSize": 262_144,
        "maxEventSize": 131_072,
    }
    assert status["rateLimitMetrics"] == {
        "connectionsRateLimited": 0,
        "ipRejections": 0,
        "messagesRateLimited": 0,
        "payloadRejections": 0,
        "eventSizeRejections": 0,
        "loadSheddingEvents": 0,
        "connectionsClosed": 0,
        "activeConnections": 1,
        "peakConnections": 1,
    }
    assert status["memory"] == {"heldBytes": 0, "maxBytes": 134_217_728, "pausedConnections": 0, "httpHeldBytes": 0}
    assert status["httpIngest"] == {"requests": {}, "served": 0, "waiting": 0, "maxRequests": 256}


# -- odd ways to send


async def test_frames_may_come_byte_by_byte_and_neighbours_are_served_meanwhile(tmp_path):
    async with serving_with(tmp_path) as addresses, connected(addresses.ws_url, source="neighbour") as neighbour:
        client = await open_raw(addresses.ws_url)
        frame = text_frame("cdc_batch", sourceDoId="slow", sequenceNumber=4, events=[insert(1)])
        for place in range(len(frame)):
            await client.send(frame[place : place + 1])
            if place % 50 == 0:
                assert (await neighbour.batch(place))["status"] == "ok"
        ack = await client.answer()
        assert (ack["status"], ack["sequenceNumber"]) == ("ok", 4)
        client.abort()


async def test_batch_that_is_followed_by_goodbye_at_once_is_still_taken(tmp_path):
    async with serving_with(tmp_path) as addresses:
        client = await open_raw(addresses.ws_url)
        batch = text_frame("cdc_batch", sourceDoId="hasty", events=[insert(7)])
        await client.send(batch + encode_frame(CLOSE, b"\x03\xe8"))
        status = await wait_for_status(addresses, lambda status: status["sources"])
        assert [(source["sourceDoId"], source["lastDurableSequence"]) for source in status["sources"]] == [("hasty", 7)]
        client.abort()


async def test_message_in_many_fragments_is_one_message(tmp_path):
    async with serving_with(tmp_path) as addresses:
        client = await open_raw(addresses.ws_url)
        body = json.dumps(
            {"type": "cdc_batch", "sourceDoId": "bits", "events": [insert(1, note="y" * 100_000)]}
        ).encode()
        pieces = [body[place : place + 40] for place in range(0, len(body), 40)]
        for number, piece in enumerate(pieces):
            opcode = TEXT if number == 0 else 0
            client.writer.write(encode_frame(opcode, piece, fin=number == len(pieces) - 1))
        assert (await client.answer())["status"] == "ok"
        await wait_for_status(addresses, lambda status: status["memory"]["heldBytes"] == 0)
        client.abort()


async def test_connections_that_vanish_leave_no_bytes_behind(tmp_path, stuck_log):
    async with serving_with(tmp_path) as addresses, connected(addresses.ws_url, source="neighbour") as neighbour:
        stuck_log.clear()
        for number in range(10):
            client = await open_raw(addresses.ws_url)
            events = [insert(1, after={"blob": "x" * 90_000})]
            frame = text_frame("cdc_batch", sourceDoId=f"s-{number}", events=events)
            await client.send(frame * 3 + frame[: len(frame) // 2])
            await wait_for_status(
                addresses, lambda status, least=number * 250_000: status["memory"]["heldBytes"] > least
            )
            client.abort()
        stuck_log.set()
        await wait_for_status(addresses, lambda status: status["memory"]["heldBytes"] == 0)
        assert (await neighbour.batch(1))["status"] == "ok"


async def test_half_open_connection_blocks_no_other(tmp_path):
    async with serving_with(tmp_path) as addresses:
        with open_socket(addresses) as silent, open_socket(addresses) as slow:
            slow.sendall(b"GET /ws HTTP/1.1\r\nHost: x\r\nUpgr")
            async with connected(addresses.ws_url) as client:
                assert (await client.batch(1))["status"] == "ok"
            assert silent.fileno() > 0
