"""The limits of the data plane, met by real clients of the whole service on loopback."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import select
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidMessage, InvalidStatus

import ingest.server
from ingest.server import WATCH_INTERVAL_S
from ingest.service import Addresses, serving
from ingest.sockets import OPENING_MAX
from tests.ingest.conftest import small_config
from tests.ingest.talking import DEADLINE_S, Talker, insert, talking
from tests.raw_client import CLOSE, PING, TEXT, RawClient, encode_frame, open_raw, text_frame

# Short, but with room for a slow machine to do what is not to be punished.
TIMEOUT_S = 2 * WATCH_INTERVAL_S


@asynccontextmanager
async def limited(directory: Path, **ingest: Any) -> AsyncIterator[Addresses]:
    """The service with some limits changed."""
    config = small_config(directory)
    async with serving(replace(config, ingest=replace(config.ingest, **ingest))) as addresses:
        yield addresses


async def status_of(addresses: Addresses) -> dict[str, Any]:
    timeout = aiohttp.ClientTimeout(total=DEADLINE_S)
    async with aiohttp.ClientSession(addresses.http_url, timeout=timeout) as http, http.get("/status") as answer:
        return await answer.json()


async def until_status(addresses: Addresses, condition: Callable[[dict], object]) -> dict[str, Any]:
    """Look until the status meets a condition."""
    async with asyncio.timeout(DEADLINE_S):
        while not condition(status := await status_of(addresses)):  # noqa: ASYNC110 - over the network there is only looking
            await asyncio.sleep(0.02)
    return status


def refused_count(status: dict[str, Any], name: str) -> int:
    return status["rateLimitMetrics"][name]


async def turned_away(url: str, **headers: str) -> tuple[Any, dict[str, Any]]:
    """Be refused at the door: the answer and its document."""
    with pytest.raises(InvalidStatus) as caught:
        async with connect(url, compression=None, additional_headers=headers):
            pass
    response = caught.value.response
    assert response.status_code == 429
    return response, json.loads(response.body)


def dial(addresses: Addresses) -> socket.socket:
    """Connect and say nothing."""
    target = urlsplit(addresses.ws_url)
    return socket.create_connection((target.hostname, target.port))


@pytest.fixture
def stuck_log(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """A disk that syncs only while the event is set; it is at first."""
    works = threading.Event()
    works.set()
    really_sync = os.fdatasync

    def sync(descriptor: int) -> None:
        assert works.wait(DEADLINE_S)
        really_sync(descriptor)

    monkeypatch.setattr(os, "fdatasync", sync)
    yield works
    works.set()


# -- connections


async def test_client_that_gets_in_is_told_what_is_left_of_the_limit(tmp_path):
    async with (
        limited(tmp_path, connection_rate_per_s=0.01, connection_burst=10) as addresses,
        talking(addresses.ws_url) as client,
    ):
        headers = client.socket.response.headers
        assert (headers["X-RateLimit-Limit"], headers["X-RateLimit-Remaining"]) == ("10", "9")
        assert int(headers["X-RateLimit-Reset"]) > 1_700_000_000


async def test_one_connection_too_many_is_turned_away_and_its_place_is_free_again_later(tmp_path):
    async with limited(tmp_path, connections_max=1) as addresses:
        async with talking(addresses.ws_url) as client:
            response, document = await turned_away(addresses.ws_url)
            assert document["reason"] == "connection_limit"
            assert document["clientIp"] == "127.0.0.xxx"
            assert response.headers["Content-Type"] == "application/json"
            assert int(response.headers["Retry-After"]) == document["retryAfter"] > 0
            assert all(f"X-RateLimit-{name}" in response.headers for name in ("Limit", "Remaining", "Reset"))
            assert (await client.batch(1))["status"] == "ok", "who is in is not disturbed"
            status = await status_of(addresses)
            assert refused_count(status, "connectionsRateLimited") == 1
        await until_status(addresses, lambda status: refused_count(status, "activeConnections") == 0)
        async with talking(addresses.ws_url):
            assert refused_count(await status_of(addresses), "peakConnections") == 1


async def test_new_connections_beyond_the_rate_are_turned_away(tmp_path):
    async with (
        limited(tmp_path, connection_rate_per_s=0.01, connection_burst=1) as addresses,
        talking(addresses.ws_url),
    ):
        response, document = await turned_away(addresses.ws_url)
    assert document["reason"] == "rate_limited"
    assert 1 <= int(response.headers["Retry-After"]) <= 100
    assert response.headers["X-RateLimit-Remaining"] == "0"


async def test_source_named_in_the_header_has_its_own_limit(tmp_path):
    async with limited(tmp_path, connections_per_source_max=1) as addresses:
        headers = {"X-Client-ID": "shop"}
        async with talking(addresses.ws_url, source=None, additional_headers=headers):
            _, document = await turned_away(addresses.ws_url, **headers)
            assert (document["reason"], "of=source" in document["error"]) == ("connection_limit", True)
            async with talking(addresses.ws_url, source="other") as other:
                assert (await other.batch(1))["status"] == "ok"


async def test_source_named_later_has_the_same_limit_and_is_told_so_with_1008(tmp_path):
    async with (
        limited(tmp_path, connections_per_source_max=1) as addresses,
        talking(addresses.ws_url) as first,
        talking(addresses.ws_url, source=None) as second,
    ):
        nack = await second.ask("connect", sourceDoId="shop")
        assert (nack["reason"], nack["shouldRetry"]) == ("connection_limit", True)
        assert await second.closed() == 1008
        assert (await first.batch(1))["status"] == "ok"


async def test_header_of_a_proxy_that_is_not_trusted_changes_nothing(tmp_path):
    async with limited(tmp_path, connections_per_ip_max=1) as addresses:
        headers = {"X-Forwarded-For": "8.8.8.8"}
        async with (
            talking(addresses.ws_url, source="a", additional_headers=headers),
            talking(addresses.ws_url, source="b", additional_headers=headers) as client,
        ):
            assert (await client.batch(1))["status"] == "ok"


@pytest.mark.parametrize("header", ["X-Forwarded-For", "CF-Connecting-IP"])
async def test_clients_behind_a_trusted_proxy_are_limited_by_their_own_address(tmp_path, header):
    async with (
        limited(tmp_path, connections_per_ip_max=1, trusted_proxies="127.0.0.0/8") as addresses,
        talking(addresses.ws_url, source="a", additional_headers={header: "8.8.8.8"}) as client,
    ):
        await client.batch(1)
        _, document = await turned_away(addresses.ws_url, **{header: "8.8.8.8"})
        assert (document["reason"], document["clientIp"]) == ("ip_limit", "8.8.8.xxx")
        async with talking(addresses.ws_url, source="b", additional_headers={header: "8.8.8.9"}):
            status = await status_of(addresses)
    assert refused_count(status, "ipRejections") == 1
    assert [source["remote"] for source in status["sources"]] == ["8.8.8.8"]


async def test_private_addresses_can_be_limited_too(tmp_path):
    async with (
        limited(tmp_path, connections_per_subnet_max=1, limit_private_ips=True) as addresses,
        talking(addresses.ws_url),
    ):
        _, document = await turned_away(addresses.ws_url)
    assert (document["reason"], "of=subnet" in document["error"]) == ("ip_limit", True)


async def test_shard_and_priority_are_shown_in_the_status(tmp_path):
    headers = {"X-Shard-Name": "eu-1", "X-Priority": "high"}
    async with (
        limited(tmp_path) as addresses,
        talking(addresses.ws_url, additional_headers=headers) as client,
    ):
        await client.batch(1)
        (source,) = (await status_of(addresses))["sources"]
    assert (source["sourceShardName"], source["priority"]) == ("eu-1", "high")


async def test_sockets_that_ask_for_nothing_are_bounded_too(tmp_path):
    async with limited(tmp_path, connections_max=1) as addresses:
        with contextlib.ExitStack() as stack:
            sockets = [stack.enter_context(await asyncio.to_thread(dial, addresses)) for _ in range(OPENING_MAX + 10)]
            hung_up, _, _ = await asyncio.to_thread(select.select, sockets, [], [], DEADLINE_S)
            assert 0 < len(hung_up) < 10
        async with asyncio.timeout(DEADLINE_S):
            while not await is_let_in(addresses):  # noqa: ASYNC110 - the sockets are noticed to be gone one by one
                await asyncio.sleep(0.02)


async def is_let_in(addresses: Addresses) -> bool:
    try:
        async with talking(addresses.ws_url) as client:
            return (await client.batch(1))["status"] == "ok"
    except InvalidMessage:
        return False


# -- messages


async def test_batch_beyond_the_rate_is_refused_and_nothing_overtakes_it(tmp_path):
    async with (
        limited(tmp_path, message_rate_per_s=2.0, message_burst=3) as addresses,
        talking(addresses.ws_url) as client,
        talking(addresses.ws_url, source=None) as twin,
    ):
        for number in (1, 2, 3, 4):
            await client.send_batch(number, sequenceNumber=number, correlationId=f"c-{number}")
        answers = [await client.hear() for _ in range(4)]
        assert [answer["type"] for answer in answers] == ["ack", "ack", "nack", "nack"]
        nack = answers[2]
        assert (nack["reason"], nack["shouldRetry"], nack["sequenceNumber"]) == ("rate_limited", True, 3)
        assert (nack["correlationId"], nack["retryDelayMs"] > 0) == ("c-3", True)
        assert (nack["rateLimit"]["limit"], nack["rateLimit"]["remaining"]) == (3, 0)
        behind = await twin.batch(4, sourceDoId="shop")
        assert (behind["type"], behind["reason"]) == ("nack", "invalid_sequence"), "not even by another connection"
        for number in (3, 4):
            ack = await until_taken(client, number)
            assert ack["details"]["eventsProcessed"] == 1
        assert refused_count(await status_of(addresses), "messagesRateLimited") >= 2


async def until_taken(client: Talker, number: int) -> dict[str, Any]:
    """Send a batch again as often as it takes, each time after the delay that was asked for."""
    async with asyncio.timeout(DEADLINE_S):
        while (answer := await client.batch(number, sequenceNumber=number))["type"] != "ack":  # noqa: ASYNC110
            await asyncio.sleep(answer["retryDelayMs"] / 1_000)
    return answer


async def test_refused_first_batch_is_expected_again(tmp_path):
    async with (
        limited(tmp_path, message_rate_per_s=2.0, message_burst=1) as addresses,
        talking(addresses.ws_url) as client,
    ):
        nack = await client.batch(5, sequenceNumber=5)
        assert nack["reason"] == "rate_limited"
        answer = await until_answer(client, lambda: client.batch(6, sequenceNumber=6), "invalid_sequence")
        assert "expected=5" in answer["errorMessage"]
        await until_taken(client, 5)


async def until_answer(client: Talker, ask: Callable[[], Any], reason: str) -> dict[str, Any]:
    async with asyncio.timeout(DEADLINE_S):
        while (answer := await ask()).get("reason") != reason:
            assert answer["type"] == "nack", answer
            await asyncio.sleep(answer["retryDelayMs"] / 1_000)
    return answer


async def test_acks_carry_the_limit_where_there_is_one(tmp_path):
    async with (
        limited(tmp_path, message_rate_per_s=0.01, message_burst=10) as addresses,
        talking(addresses.ws_url) as client,
    ):
        limit = (await client.batch(1))["rateLimit"]
        assert (limit["limit"], limit["remaining"]) == (10, 8)
        assert limit["resetAt"] > 1_700_000_000
    async with limited(tmp_path) as addresses, talking(addresses.ws_url) as client:
        assert "rateLimit" not in await client.batch(2)


async def test_heartbeats_are_limited_apart_from_batches(tmp_path):
    async with limited(tmp_path, heartbeat_rate_per_s=0.5) as addresses, talking(addresses.ws_url) as client:
        answers = [await client.ask("heartbeat", correlationId="h") for _ in range(2)]
        assert [(answer["type"], answer.get("reason")) for answer in answers] == [
            ("pong", None),
            ("nack", "rate_limited"),
        ]
        await client.socket.send("ping")
        assert (await client.hear())["reason"] == "rate_limited"
        assert (await client.batch(1))["status"] == "ok"


async def test_who_does_not_listen_to_refusals_is_closed_with_4002(tmp_path):
    limits = {"message_rate_per_s": 0.01, "message_burst": 2, "refusals_max": 5}
    async with limited(tmp_path, **limits) as addresses, talking(addresses.ws_url, source="neighbour") as neighbour:
        async with talking(addresses.ws_url) as client:
            for number in range(1, 8):
                await client.send_batch(number, sequenceNumber=number)
            answers = [await client.hear() for _ in range(6)]
            assert [answer["type"] for answer in answers] == ["ack"] + ["nack"] * 5
            assert await client.closed() == 4002
        assert (await neighbour.batch(1))["status"] == "ok"
        assert refused_count(await status_of(addresses), "connectionsClosed") == 1


async def test_source_is_limited_by_its_bytes_over_all_its_connections(tmp_path):
    async with (
        limited(tmp_path, source_bytes_per_s=1_000.0) as addresses,
        talking(addresses.ws_url) as twin,
        talking(addresses.ws_url) as client,  # which the source speaks on, having connected here last
    ):
        assert (await client.batch(*range(20)))["status"] == "ok"
        nack = await twin.batch(20)
        assert (nack["reason"], "bytes" in nack["errorMessage"]) == ("rate_limited", True)
        async with talking(addresses.ws_url, source="other") as other:
            assert (await other.batch(1))["status"] == "ok"


async def test_three_events_that_are_too_large_close_with_1008(tmp_path):
    async with limited(tmp_path) as addresses, talking(addresses.ws_url) as client:
        for number in range(3):
            nack = await client.ask("cdc_batch", events=[insert(1, after={"blob": "x" * 140_000})], sequenceNumber=0)
            assert nack["reason"] == "event_too_large", number
        assert await client.closed() == 1008
        assert refused_count(await status_of(addresses), "eventSizeRejections") == 3


# -- silence


async def test_client_that_is_not_heard_any_more_is_closed_with_4000_and_a_quiet_one_is_not(tmp_path):
    async with (
        limited(tmp_path, heartbeat_timeout_s=TIMEOUT_S) as addresses,
        talking(addresses.ws_url) as quiet,  # says nothing either, but its library answers pings
    ):
        dead = await open_raw(addresses.ws_url)
        assert await dead.closed() == (4000, "heartbeat timeout")
        assert (await quiet.batch(1))["status"] == "ok"
        dead.cut()


async def test_message_that_does_not_end_is_closed_with_1008(tmp_path):
    async with limited(tmp_path, message_timeout_s=TIMEOUT_S) as addresses:
        client = await open_raw(addresses.ws_url)
        await client.send(encode_frame(TEXT, b"x" * 1_000, length=10_000))
        assert await client.closed() == (1008, "message did not arrive in time")
        client.cut()


async def send_without_reading(client: RawClient, frame: bytes, sent: list[int] | None = None) -> None:
    """Send for as long as the server takes it, noting each time."""
    with contextlib.suppress(ConnectionError):
        while True:
            await client.send(frame * 100)
            if sent is not None:
                sent.append(1)


async def until_not_read(sent: list[int]) -> None:
    """Wait until the server takes nothing more."""
    async with asyncio.timeout(DEADLINE_S):
        before = -1
        while len(sent) != before:
            before = len(sent)
            await asyncio.sleep(0.5)


@pytest.mark.parametrize(
    "frame",
    [text_frame("heartbeat", correlationId="x" * 250), encode_frame(PING, b"x" * 125)],
    ids=["heartbeats", "pings"],
)
async def test_client_that_does_not_read_its_answers_is_not_read_and_closed_with_1008(tmp_path, frame):
    limits = {"answers_timeout_s": TIMEOUT_S, "heartbeat_rate_per_s": 0.0}
    async with limited(tmp_path, **limits) as addresses, talking(addresses.ws_url) as neighbour:
        client = await open_raw(addresses.ws_url, buffer_bytes=8_192)
        sending = asyncio.ensure_future(send_without_reading(client, frame))
        await until_status(addresses, lambda status: refused_count(status, "connectionsClosed") == 1)
        assert (await neighbour.batch(1))["status"] == "ok"
        sending.cancel()
        assert await client.closed() == (1008, "does not read its answers")
        client.cut()


async def test_stopping_does_not_wait_for_a_client_that_does_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr(ingest.server, "CLOSE_TIMEOUT_S", 0.5)
    async with limited(tmp_path, heartbeat_rate_per_s=0.0, answers_timeout_s=0.0) as addresses:
        client = await open_raw(addresses.ws_url, buffer_bytes=8_192)
        sent: list[int] = []
        sending = asyncio.ensure_future(send_without_reading(client, encode_frame(PING, b"x" * 125), sent))
        await until_not_read(sent)
        assert not sending.done()
    sending.cancel()
    client.cut()


async def test_client_that_waits_because_of_us_is_not_called_silent(tmp_path, stuck_log):
    limits = {
        "heartbeat_timeout_s": TIMEOUT_S,
        "message_timeout_s": TIMEOUT_S,
        "memory_max_bytes": 3 * 1024 * 1024,
        "queue_max_bytes": 100_000,
        "load_shedding": False,
    }
    async with limited(tmp_path, **limits) as addresses, talking(addresses.ws_url) as client:
        stuck_log.clear()
        events = [[insert(number, after={"blob": "x" * 100_000})] for number in range(60)]
        sending = asyncio.ensure_future(send_all(client, events))
        await until_status(addresses, lambda status: status["memory"]["heldBytes"] > 300_000)
        dead = await open_raw(addresses.ws_url)
        assert (await dead.closed())[0] == 4000, "time enough has gone by"
        stuck_log.set()
        answers = [await client.hear() for _ in events]
        await sending
        assert [answer["status"] for answer in answers] == ["ok"] * len(events)
        dead.cut()


async def send_all(client: Talker, batches: list[list[dict[str, Any]]]) -> None:
    for number, events in enumerate(batches):
        await client.say("cdc_batch", events=events, sequenceNumber=number)


# -- load


async def test_critical_load_sheds_normal_batches_and_high_priority_passes(tmp_path, stuck_log):
    async with limited(tmp_path, shed_delay_s=0.2) as addresses:
        high = talking(addresses.ws_url, source="vip", additional_headers={"X-Priority": "high"})
        async with talking(addresses.ws_url) as first, talking(addresses.ws_url, source="late") as normal, high as vip:
            stuck_log.clear()
            await first.send_batch(1)
            status = await until_status(addresses, lambda status: status["loadLevel"] == "critical")
            assert status["degradedMode"] is True
            nack = await normal.batch(1, sequenceNumber=1)
            assert (nack["reason"], nack["shouldRetry"]) == ("load_shedding", True)
            assert 50 <= nack["retryDelayMs"] <= 150
            assert (await normal.batch(2, sequenceNumber=2))["reason"] == "invalid_sequence"
            assert (await normal.ask("heartbeat"))["type"] == "pong"
            await vip.send_batch(1)
            stuck_log.set()
            assert (await vip.hear())["status"] == "ok"
            assert (await first.hear())["status"] == "ok"
            status = await until_status(addresses, lambda status: status["loadLevel"] == "normal")
            assert refused_count(status, "loadSheddingEvents") == 1
            assert (await normal.batch(1, sequenceNumber=1))["details"]["eventsProcessed"] == 1
            assert (await normal.batch(2, sequenceNumber=2))["details"]["eventsProcessed"] == 1


async def test_status_tells_limits_load_and_what_was_refused(tmp_path):
    async with limited(tmp_path) as addresses, talking(addresses.ws_url):
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
    assert status["memory"] == {"heldBytes": 0, "maxBytes": 134_217_728, "pausedConnections": 0}


# -- odd ways to send


async def test_frames_may_come_byte_by_byte_and_neighbours_are_served_meanwhile(tmp_path):
    async with limited(tmp_path) as addresses, talking(addresses.ws_url, source="neighbour") as neighbour:
        client = await open_raw(addresses.ws_url)
        frame = text_frame("cdc_batch", sourceDoId="slow", sequenceNumber=4, events=[insert(1)])
        for place in range(len(frame)):
            await client.send(frame[place : place + 1])
            if place % 50 == 0:
                assert (await neighbour.batch(place))["status"] == "ok"
        ack = await client.answer()
        assert (ack["status"], ack["sequenceNumber"]) == ("ok", 4)
        client.cut()


async def test_batch_that_is_followed_by_goodbye_at_once_is_still_taken(tmp_path):
    async with limited(tmp_path) as addresses:
        client = await open_raw(addresses.ws_url)
        batch = text_frame("cdc_batch", sourceDoId="hasty", events=[insert(7)])
        await client.send(batch + encode_frame(CLOSE, b"\x03\xe8"))
        status = await until_status(addresses, lambda status: status["sources"])
        assert [(source["sourceDoId"], source["lastDurableSequence"]) for source in status["sources"]] == [("hasty", 7)]
        client.cut()


async def test_message_in_many_fragments_is_one_message(tmp_path):
    async with limited(tmp_path) as addresses:
        client = await open_raw(addresses.ws_url)
        body = json.dumps(
            {"type": "cdc_batch", "sourceDoId": "bits", "events": [insert(1, note="y" * 100_000)]}
        ).encode()
        pieces = [body[place : place + 40] for place in range(0, len(body), 40)]
        for number, piece in enumerate(pieces):
            opcode = TEXT if number == 0 else 0
            client.writer.write(encode_frame(opcode, piece, fin=number == len(pieces) - 1))
        assert (await client.answer())["status"] == "ok"
        await until_status(addresses, lambda status: status["memory"]["heldBytes"] == 0)
        client.cut()


async def test_connections_that_vanish_leave_no_bytes_behind(tmp_path, stuck_log):
    async with limited(tmp_path) as addresses, talking(addresses.ws_url, source="neighbour") as neighbour:
        stuck_log.clear()
        for number in range(10):
            client = await open_raw(addresses.ws_url)
            events = [insert(1, after={"blob": "x" * 90_000})]
            frame = text_frame("cdc_batch", sourceDoId=f"s-{number}", events=events)
            await client.send(frame * 3 + frame[: len(frame) // 2])
            await until_status(addresses, lambda status, least=number * 250_000: status["memory"]["heldBytes"] > least)
            client.cut()
        stuck_log.set()
        await until_status(addresses, lambda status: status["memory"]["heldBytes"] == 0)
        assert (await neighbour.batch(1))["status"] == "ok"


async def test_half_open_connection_keeps_nobody_waiting(tmp_path):
    async with limited(tmp_path) as addresses:
        with dial(addresses) as silent, dial(addresses) as slow:
            slow.sendall(b"GET /ws HTTP/1.1\r\nHost: x\r\nUpgr")
            async with talking(addresses.ws_url) as client:
                assert (await client.batch(1))["status"] == "ok"
            assert silent.fileno() > 0
