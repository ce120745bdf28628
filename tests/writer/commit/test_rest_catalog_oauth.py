from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import aiohttp
import pytest
from aiohttp import web

from lakefeed.contract.changes import TableName
from lakefeed.contract.errors import CatalogError, CatalogUnavailable
from lakefeed.writer.commit.rest_catalog import OAuthCredentials, open_foreign_catalog
from lakefeed.writer.config import IcebergConfig

ORDERS = TableName(("default",), "orders")
SECRET = "hush-hush"


class TokenServer:
    """A token server and a catalog that takes only its newest token."""

    def __init__(self):
        self.url = ""
        self.forms = []
        self.seen = []
        self.life_s = 3600
        self.status = 200
        self.valid = ""
        self.takes_tokens = True
        self.answer = None
        self.asked = asyncio.Event()
        self.gate = asyncio.Event()
        self.gate.set()

    async def tokens(self, request):
        self.forms.append(dict(await request.post()))
        self.asked.set()
        await self.gate.wait()
        if self.answer is not None:
            return web.Response(body=self.answer)
        if self.status != 200:
            return web.json_response({"error": "invalid_client", "error_description": "who is it"}, status=self.status)
        self.valid = f"token-{len(self.forms)}"
        return web.json_response({"access_token": self.valid, "token_type": "bearer", "expires_in": self.life_s})

    async def catalog(self, request):
        self.seen.append((request.path, request.headers.get("Authorization"), request.headers.get("X-Realm")))
        if not self.takes_tokens or request.headers.get("Authorization") != f"Bearer {self.valid}":
            return web.json_response({"error": {"message": "who are you"}}, status=401)
        return web.json_response({"overrides": {}, "metadata": {}})


@asynccontextmanager
async def serving():
    server = TokenServer()
    app = web.Application()
    app.router.add_post("/v1/oauth/tokens", server.tokens)
    app.router.add_post("/elsewhere", server.tokens)
    app.router.add_route("*", "/v1/{path:.*}", server.catalog)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    server.url = "http://{}:{}".format(*runner.addresses[0][:2])
    try:
        yield server
    finally:
        await runner.cleanup()


def settings(server, **more):
    return IcebergConfig(uri=server.url, credential=f"lakefeed:{SECRET}", request_timeout_s=5.0, **more)


async def test_a_token_is_fetched_once_and_sent_with_every_request():
    async with serving() as server, open_foreign_catalog(settings(server, headers="X-Realm: lake")) as catalog:
        await catalog.load_config()
        await catalog.load_table(ORDERS)
    assert server.forms == [
        {
            "grant_type": "client_credentials",
            "client_id": "lakefeed",
            "client_secret": SECRET,
            "scope": "catalog",
        }
    ]
    assert [seen[1:] for seen in server.seen] == [("Bearer token-1", "lake")] * 2


async def test_tokens_can_come_from_another_server_under_another_scope():
    async with serving() as server:
        config = settings(server, oauth2_server_uri=f"{server.url}/elsewhere", scope="")
        async with open_foreign_catalog(config) as catalog:
            await catalog.load_config()
    assert "scope" not in server.forms[0]


async def test_a_token_that_was_revoked_is_replaced_and_the_request_repeated():
    async with serving() as server, open_foreign_catalog(settings(server)) as catalog:
        await catalog.load_config()
        server.valid = "another"
        await catalog.load_table(ORDERS)
    assert [authorization for _, authorization, _ in server.seen] == [
        "Bearer token-1",
        "Bearer token-1",
        "Bearer token-2",
    ]


async def test_a_catalog_that_refuses_new_tokens_too_is_not_asked_for_ever():
    async with serving() as server, open_foreign_catalog(settings(server)) as catalog:
        await catalog.load_config()
        server.takes_tokens = False
        with pytest.raises(CatalogError, match="who are you: status=401"):
            await catalog.load_table(ORDERS)
    assert [authorization for _, authorization, _ in server.seen[1:]] == ["Bearer token-1", "Bearer token-2"]


async def test_a_token_of_the_settings_is_sent_as_it_is_and_a_401_is_an_error():
    async with serving() as server:
        server.valid = "given"
        async with open_foreign_catalog(IcebergConfig(uri=server.url, token="given")) as catalog:
            await catalog.load_config()
            server.valid = "another"
            with pytest.raises(CatalogError, match="status=401"):
                await catalog.load_table(ORDERS)
    assert server.forms == []


class Clock:
    now = 1000.0

    def __call__(self):
        return self.now


@asynccontextmanager
async def open_token(server, clock=None):
    client = {"token_uri": f"{server.url}/elsewhere", "credential": f"lakefeed:{SECRET}"}
    async with aiohttp.ClientSession() as session:
        yield OAuthCredentials(session, **client, timeout_s=5.0, clock=clock or Clock())


async def test_a_token_is_renewed_before_it_expires():
    clock = Clock()
    async with serving() as server, open_token(server, clock) as token:
        server.life_s = 100
        assert await token.header() == "Bearer token-1"
        clock.now += 79
        assert await token.header() == "Bearer token-1"
        clock.now += 2
        assert await token.header() == "Bearer token-2"


async def test_one_renewal_runs_at_a_time_and_all_get_its_token():
    async with serving() as server, open_token(server) as token:
        server.gate.clear()
        waiting = [asyncio.create_task(token.header()) for _ in range(20)]
        async with asyncio.timeout(10):
            await server.asked.wait()
        server.gate.set()
        assert set(await asyncio.gather(*waiting)) == {"Bearer token-1"}
    assert len(server.forms) == 1


@pytest.mark.parametrize(
    ("status", "error"), [(401, CatalogError), (503, CatalogUnavailable), (429, CatalogUnavailable)]
)
async def test_the_error_of_a_token_server_contains_no_secrets(status, error):
    async with serving() as server, open_token(server) as token:
        server.status = status
        with pytest.raises(CatalogError, match=f"token server .*status={status}") as raised:
            await token.header()
    assert raised.type is error
    assert SECRET not in str(raised.value)


@pytest.mark.parametrize("answer", [b"<html>", b"[]", b"{}", b'{"access_token": 7}'])
async def test_an_answer_without_a_token_is_an_error(answer):
    async with serving() as server, open_token(server) as token:
        server.answer = answer
        with pytest.raises(CatalogError, match="without a token"):
            await token.header()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"uri": "ftp://x"}, "uri must start with http"),
        ({"uri": "http://x", "token": "t", "credential": "a:b"}, "exclude each other"),
        ({"uri": "http://x", "credential": "alone"}, "client-id:client-secret"),
        ({"token": "t"}, "uri must be set"),
        ({"uri": "http://x", "headers": "no value"}, "headers must be"),
        ({"uri": "http://x", "request_timeout_s": 0.0}, "must be above 0"),
    ],
)
def test_settings_that_contradict_themselves_are_refused(given, message):
    with pytest.raises(ValueError, match=message):
        IcebergConfig(**given)


def test_secrets_are_not_shown():
    config = IcebergConfig(uri="http://x", token="hush", headers="X-Key: hush")
    assert "hush" not in repr(config)
