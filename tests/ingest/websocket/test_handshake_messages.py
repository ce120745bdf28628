"""The limits on messages, met by real clients of the whole service on loopback."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from lakefeed.ingest.service import serving
from tests.ingest.conftest import small_config
from tests.ingest.limited_service import refused_count, serving_with, status_of
from tests.ingest.ws_client import DEADLINE_S, WsClient, connected, insert


async def test_batch_beyond_the_rate_is_refused_and_nothing_overtakes_it(tmp_path):
    async with (
        serving_with(tmp_path, message_rate_per_s=2.0, message_burst=3) as addresses,
        connected(addresses.ws_url) as client,
        connected(addresses.ws_url, source=None) as twin,
    ):
        for number in (1, 2, 3, 4):
            await client.send_batch(number, sequenceNumber=number, correlationId=f"c-{number}")
        answers = [await client.receive() for _ in range(4)]
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


async def until_taken(client: WsClient, number: int) -> dict[str, Any]:
    """Send a batch again as often as it takes, each time after the delay that was asked for."""
    async with asyncio.timeout(DEADLINE_S):
        while (answer := await client.batch(number, sequenceNumber=number))["type"] != "ack":  # noqa: ASYNC110
            await asyncio.sleep(answer["retryDelayMs"] / 1_000)
    return answer


async def test_refused_first_batch_is_expected_again(tmp_path):
    async with (
        serving_with(tmp_path, message_rate_per_s=2.0, message_burst=1) as addresses,
        connected(addresses.ws_url) as client,
    ):
        nack = await client.batch(5, sequenceNumber=5)
        assert nack["reason"] == "rate_limited"
        answer = await until_answer(client, lambda: client.batch(6, sequenceNumber=6), "invalid_sequence")
        assert "expected=5" in answer["errorMessage"]
        await until_taken(client, 5)


async def until_answer(client: WsClient, ask: Callable[[], Any], reason: str) -> dict[str, Any]:
    async with asyncio.timeout(DEADLINE_S):
        while (answer := await ask()).get("reason") != reason:
            assert answer["type"] == "nack", answer
            await asyncio.sleep(answer["retryDelayMs"] / 1_000)
    return answer


async def test_acks_carry_the_limit_where_there_is_one(tmp_path):
    async with (
        serving_with(tmp_path, message_rate_per_s=0.01, message_burst=10) as addresses,
        connected(addresses.ws_url) as client,
    ):
        ack = await client.batch(1)
        limit = ack["rateLimit"]
        assert (limit["limit"], limit["remaining"]) == (10, 8)
        assert limit["resetAt"] > 1_700_000_000
        assert (ack["details"]["bucketCapacity"], ack["details"]["remainingTokens"]) == (10, 8)
    async with serving_with(tmp_path) as addresses, connected(addresses.ws_url) as client:
        ack = await client.batch(2)
        assert "rateLimit" not in ack
        assert not {"bucketCapacity", "remainingTokens"} & ack["details"].keys()


async def test_heartbeats_are_limited_apart_from_batches(tmp_path):
    async with serving_with(tmp_path, heartbeat_rate_per_s=0.5) as addresses, connected(addresses.ws_url) as client:
        answers = [await client.request("heartbeat", correlationId="h") for _ in range(2)]
        assert [(answer["type"], answer.get("reason")) for answer in answers] == [
            ("pong", None),
            ("nack", "rate_limited"),
        ]
        await client.socket.send("ping")
        assert (await client.receive())["reason"] == "rate_limited"
        assert (await client.batch(1))["status"] == "ok"


async def test_client_that_ignores_refusals_is_closed_with_4002(tmp_path):
    limits = {"message_rate_per_s": 0.01, "message_burst": 2, "refusals_max": 5}
    async with (
        serving_with(tmp_path, **limits) as addresses,
        connected(addresses.ws_url, source="neighbour") as neighbour,
    ):
        async with connected(addresses.ws_url) as client:
            for number in range(1, 8):
                await client.send_batch(number, sequenceNumber=number)
            answers = [await client.receive() for _ in range(6)]
            assert [answer["type"] for answer in answers] == ["ack"] + ["nack"] * 5
            assert await client.closed() == 4002
        assert (await neighbour.batch(1))["status"] == "ok"
        assert refused_count(await status_of(addresses), "connectionsClosed") == 1


async def test_source_is_limited_by_its_bytes_over_all_its_connections(tmp_path):
    async with (
        serving_with(tmp_path, source_bytes_per_s=1_000.0) as addresses,
        connected(addresses.ws_url) as twin,
        connected(addresses.ws_url) as client,  # which the source speaks on, having connected here last
    ):
        assert (await client.batch(*range(20)))["status"] == "ok"
        nack = await twin.batch(20)
        assert (nack["reason"], "bytes" in nack["errorMessage"]) == ("rate_limited", True)
        async with connected(addresses.ws_url, source="other") as other:
            assert (await other.batch(1))["status"] == "ok"


async def test_three_events_that_are_too_large_close_with_1008(tmp_path):
    async with serving_with(tmp_path) as addresses, connected(addresses.ws_url) as client:
        for number in range(3):
            nack = await client.request(
                "cdc_batch", events=[insert(1, after={"blob": "x" * 140_000})], sequenceNumber=0
            )
            assert nack["reason"] == "event_too_large", number
        assert await client.closed() == 1008
        assert refused_count(await status_of(addresses), "eventSizeRejections") == 3


async def test_client_that_resends_too_early_while_the_log_is_full_is_closed_with_4002(tmp_path):
    config = small_config(tmp_path)
    limits = replace(config.ingest, refusals_max=3, load_shedding=False)
    log = replace(config.log, max_bytes=2 * config.log.segment_max_bytes)
    async with serving(replace(config, ingest=limits, log=log)) as addresses:
        async with connected(addresses.ws_url) as client:
            refused, nack = await until_full(client)
            assert (nack["shouldRetry"], nack["maxSize"]) == (True, log.max_bytes)
            for _ in range(3):
                nack = await send_large(client, refused)
                assert nack["reason"] == "buffer_full"
            assert await client.closed() == 4002, "at once, though it sends nothing more"
        assert refused_count(await status_of(addresses), "connectionsClosed") == 1
        async with connected(addresses.ws_url, source="neighbour") as neighbour:
            assert (await neighbour.request("heartbeat"))["type"] == "pong"


async def send_large(client: WsClient, number: int) -> dict[str, Any]:
    return await client.request(
        "cdc_batch", sequenceNumber=number, events=[insert(number, after={"blob": "x" * 120_000})]
    )


async def until_full(client: WsClient) -> tuple[int, dict[str, Any]]:
    """Send until the log has no room: the batch that was refused, and its nack."""
    for number in range(100):
        answer = await send_large(client, number)
        if answer["type"] == "nack":
            assert answer["reason"] == "buffer_full"
            return number, answer
    raise AssertionError("the log was never full")
