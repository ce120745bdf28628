"""The limits on connections, met by real clients of the whole service on loopback."""

from __future__ import annotations

import asyncio
import contextlib
import json
import select
from typing import Any

import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidMessage, InvalidStatus

from lakefeed.ingest.service import Addresses
from lakefeed.ingest.websocket.socket import OPENING_MAX
from tests.ingest.limited_service import open_socket, refused_count, serving_with, status_of, wait_for_status
from tests.ingest.ws_client import DEADLINE_S, connected


async def rejected(url: str, **headers: str) -> tuple[Any, dict[str, Any]]:
    """Connect and be rejected; return the response and its document."""
    with pytest.raises(InvalidStatus) as caught:
        async with connect(url, compression=None, additional_headers=headers):
            pass
    response = caught.value.response
    assert response.status_code == 429
    return response, json.loads(response.body)


async def test_accepted_client_gets_the_rate_limit_headers(tmp_path):
    async with (
        serving_with(tmp_path, connection_rate_per_s=0.01, connection_burst=10) as addresses,
        connected(addresses.ws_url) as client,
    ):
        headers = client.socket.response.headers
        assert (headers["X-RateLimit-Limit"], headers["X-RateLimit-Remaining"]) == ("10", "9")
        assert int(headers["X-RateLimit-Reset"]) > 1_700_000_000


async def test_connection_beyond_the_limit_is_rejected_and_its_slot_is_free_again_later(tmp_path):
    async with serving_with(tmp_path, connections_max=1) as addresses:
        async with connected(addresses.ws_url) as client:
            response, document = await rejected(addresses.ws_url)
            assert document["reason"] == "connection_limit"
            assert document["clientIp"] == "127.0.0.xxx"
            assert response.headers["Content-Type"] == "application/json"
            assert int(response.headers["Retry-After"]) == document["retryAfter"] > 0
            assert all(f"X-RateLimit-{name}" in response.headers for name in ("Limit", "Remaining", "Reset"))
            assert (await client.batch(1))["status"] == "ok", "open connections are not disturbed"
            status = await status_of(addresses)
            assert refused_count(status, "connectionsRateLimited") == 1
        await wait_for_status(addresses, lambda status: refused_count(status, "activeConnections") == 0)
        async with connected(addresses.ws_url):
            assert refused_count(await status_of(addresses), "peakConnections") == 1


async def test_new_connections_beyond_the_rate_are_rejected(tmp_path):
    async with (
        serving_with(tmp_path, connection_rate_per_s=0.01, connection_burst=1) as addresses,
        connected(addresses.ws_url),
    ):
        response, document = await rejected(addresses.ws_url)
    assert document["reason"] == "rate_limited"
    assert 1 <= int(response.headers["Retry-After"]) <= 100
    assert response.headers["X-RateLimit-Remaining"] == "0"


async def test_source_named_in_the_header_has_its_own_limit(tmp_path):
    async with serving_with(tmp_path, connections_per_source_max=1) as addresses:
        headers = {"X-Client-ID": "shop"}
        async with connected(addresses.ws_url, source=None, additional_headers=headers):
            _, document = await rejected(addresses.ws_url, **headers)
            assert (document["reason"], "of=source" in document["error"]) == ("connection_limit", True)
            async with connected(addresses.ws_url, source="other") as other:
                assert (await other.batch(1))["status"] == "ok"


async def test_source_named_later_has_the_same_limit_and_is_closed_with_1008(tmp_path):
    async with (
        serving_with(tmp_path, connections_per_source_max=1) as addresses,
        connected(addresses.ws_url) as first,
        connected(addresses.ws_url, source=None) as second,
    ):
        nack = await second.request("connect", sourceDoId="shop")
        assert (nack["reason"], nack["shouldRetry"]) == ("connection_limit", True)
        assert await second.closed() == 1008
        assert (await first.batch(1))["status"] == "ok"


async def test_header_of_a_proxy_that_is_not_trusted_changes_nothing(tmp_path):
    async with serving_with(tmp_path, connections_per_ip_max=1) as addresses:
        headers = {"X-Forwarded-For": "8.8.8.8"}
        async with (
            connected(addresses.ws_url, source="a", additional_headers=headers),
            connected(addresses.ws_url, source="b", additional_headers=headers) as client,
        ):
            assert (await client.batch(1))["status"] == "ok"


@pytest.mark.parametrize("header", ["X-Forwarded-For", "CF-Connecting-IP"])
async def test_clients_behind_a_trusted_proxy_are_limited_by_their_own_address(tmp_path, header):
    async with (
        serving_with(tmp_path, connections_per_ip_max=1, trusted_proxies="127.0.0.0/8") as addresses,
        connected(addresses.ws_url, source="a", additional_headers={header: "8.8.8.8"}) as client,
    ):
        await client.batch(1)
        _, document = await rejected(addresses.ws_url, **{header: "8.8.8.8"})
        assert (document["reason"], document["clientIp"]) == ("ip_limit", "8.8.8.xxx")
        async with connected(addresses.ws_url, source="b", additional_headers={header: "8.8.8.9"}):
            status = await status_of(addresses)
    assert refused_count(status, "ipRejections") == 1
    assert [source["remote"] for source in status["sources"]] == ["8.8.8.8"]


async def test_private_addresses_can_be_limited_too(tmp_path):
    async with (
        serving_with(tmp_path, connections_per_subnet_max=1, limit_private_ips=True) as addresses,
        connected(addresses.ws_url),
    ):
        _, document = await rejected(addresses.ws_url)
    assert (document["reason"], "of=subnet" in document["error"]) == ("ip_limit", True)


async def test_shard_and_priority_are_shown_in_the_status(tmp_path):
    headers = {"X-Shard-Name": "eu-1", "X-Priority": "high"}
    async with (
        serving_with(tmp_path) as addresses,
        connected(addresses.ws_url, additional_headers=headers) as client,
    ):
        await client.batch(1)
        (source,) = (await status_of(addresses))["sources"]
    assert (source["sourceShardName"], source["priority"]) == ("eu-1", "high")


async def test_shard_may_be_named_by_connect_or_by_a_batch_too(tmp_path):
    async with serving_with(tmp_path) as addresses, connected(addresses.ws_url, source=None) as client:
        await client.request("connect", sourceDoId="shop", sourceShardName="eu-2")
        assert [state["sourceShardName"] for state in (await status_of(addresses))["sourceStates"]] == ["eu-2"]
        await client.batch(1, sourceShardName="eu-3" + "x" * 300)
        (state,) = (await status_of(addresses))["sourceStates"]
        assert state["sourceShardName"] == ("eu-3" + "x" * 300)[:255]


async def test_sockets_that_ask_for_nothing_are_bounded_too(tmp_path):
    async with serving_with(tmp_path, connections_max=1) as addresses:
        with contextlib.ExitStack() as stack:
            sockets = [
                stack.enter_context(await asyncio.to_thread(open_socket, addresses)) for _ in range(OPENING_MAX + 10)
            ]
            hung_up, _, _ = await asyncio.to_thread(select.select, sockets, [], [], DEADLINE_S)
            assert 0 < len(hung_up) < 10
        async with asyncio.timeout(DEADLINE_S):
            while not await is_let_in(addresses):  # noqa: ASYNC110 - the sockets are noticed to be gone one by one
                await asyncio.sleep(0.02)


async def is_let_in(addresses: Addresses) -> bool:
    try:
        async with connected(addresses.ws_url) as client:
            return (await client.batch(1))["status"] == "ok"
    except InvalidMessage:
        return False
