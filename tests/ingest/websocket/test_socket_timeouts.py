"""Clients that keep the service waiting: that are silent, do not end what they began, or do not read."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest

import lakefeed.ingest.websocket.server
from lakefeed.ingest.admission.limits import SIZE_VIOLATIONS_MAX
from tests.ingest.limited_service import TIMEOUT_S, refused_count, serving_with, wait_for_status
from tests.ingest.ws_client import DEADLINE_S, WsClient, connected, insert
from tests.raw_client import PING, TEXT, RawClient, encode_frame, open_raw, text_frame


async def test_silent_client_is_closed_with_4000_and_one_that_answers_pings_is_not(tmp_path):
    async with (
        serving_with(tmp_path, heartbeat_timeout_s=TIMEOUT_S) as addresses,
        connected(addresses.ws_url) as quiet,  # says nothing either, but its library answers pings
    ):
        dead = await open_raw(addresses.ws_url)
        assert await dead.closed() == (4000, "heartbeat timeout")
        assert (await quiet.batch(1))["status"] == "ok"
        dead.abort()


async def test_message_that_does_not_end_is_closed_with_1008(tmp_path):
    async with serving_with(tmp_path, message_timeout_s=TIMEOUT_S) as addresses:
        client = await open_raw(addresses.ws_url)
        await client.send(encode_frame(TEXT, b"x" * 1_000, length=10_000))
        assert await client.closed() == (1008, "message did not arrive in time")
        client.abort()


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
    limits = {"reply_timeout_s": TIMEOUT_S, "heartbeat_rate_per_s": 0.0}
    async with serving_with(tmp_path, **limits) as addresses, connected(addresses.ws_url) as neighbour:
        client = await open_raw(addresses.ws_url, buffer_bytes=8_192)
        sending = asyncio.ensure_future(send_without_reading(client, frame))
        await wait_for_status(addresses, lambda status: refused_count(status, "connectionsClosed") == 1)
        assert (await neighbour.batch(1))["status"] == "ok"
        sending.cancel()
        assert await client.closed() == (1008, "does not read its answers")
        client.abort()


async def test_client_that_is_to_be_closed_but_takes_no_answer_is_closed_all_the_same(tmp_path, stuck_socket):
    async with serving_with(tmp_path, heartbeat_timeout_s=TIMEOUT_S) as addresses:
        client = await open_raw(addresses.ws_url)
        stuck_socket.clear()
        for _ in range(SIZE_VIOLATIONS_MAX):
            events = [insert(1, after={"blob": "x" * 140_000})]
            await client.send(text_frame("cdc_batch", sourceDoId="shop", sequenceNumber=0, events=events))
        assert await client.closed() == (1008, "too many size violations")
        stuck_socket.set()
        client.abort()


async def test_stopping_does_not_wait_for_a_client_that_does_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr(lakefeed.ingest.websocket.server, "CLOSE_TIMEOUT_S", 0.5)
    async with serving_with(tmp_path, heartbeat_rate_per_s=0.0, reply_timeout_s=0.0) as addresses:
        client = await open_raw(addresses.ws_url, buffer_bytes=8_192)
        sent: list[int] = []
        sending = asyncio.ensure_future(send_without_reading(client, encode_frame(PING, b"x" * 125), sent))
        await until_not_read(sent)
        assert not sending.done()
    sending.cancel()
    client.abort()


async def test_client_that_waits_because_of_us_is_not_called_silent(tmp_path, stuck_log):
    limits = {
        "heartbeat_timeout_s": TIMEOUT_S,
        "message_timeout_s": TIMEOUT_S,
        "memory_max_bytes": 3 * 1024 * 1024,
        "queue_max_bytes": 100_000,
        "load_shedding": False,
    }
    async with serving_with(tmp_path, **limits) as addresses, connected(addresses.ws_url) as client:
        stuck_log.clear()
        events = [[insert(number, after={"blob": "x" * 100_000})] for number in range(60)]
        sending = asyncio.ensure_future(send_all(client, events))
        await wait_for_status(addresses, lambda status: status["memory"]["heldBytes"] > 300_000)
        dead = await open_raw(addresses.ws_url)
        assert (await dead.closed())[0] == 4000, "time enough has gone by"
        stuck_log.set()
        answers = [await client.receive() for _ in events]
        await sending
        assert [answer["status"] for answer in answers] == ["ok"] * len(events)
        dead.abort()


async def send_all(client: WsClient, batches: list[list[dict[str, Any]]]) -> None:
    for number, events in enumerate(batches):
        await client.send("cdc_batch", events=events, sequenceNumber=number)
