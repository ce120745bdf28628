"""Authentication: the decision by itself, and then on every listener of a service that requires tokens."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace

import aiohttp
import pytest
from click.testing import CliRunner
from pyiceberg.exceptions import UnauthorizedError
from websockets.asyncio.client import connect

from lakefeed.ingest.admission.auth import (
    ANONYMOUS,
    SERVICE,
    TOKEN_INVALID,
    TOKEN_MISSING,
    Auth,
    Principal,
    build_auth,
    choose_subprotocol,
    is_loopback,
)
from lakefeed.ingest.cli.main import main
from lakefeed.ingest.config import AuthConfig, load_tokens
from lakefeed.ingest.service import Addresses, serving
from lakefeed.settings import SettingsError
from tests.clients import open_duckdb, open_pyiceberg
from tests.ingest.conftest import small_config
from tests.ingest.ws_client import DEADLINE_S, connected

TOKEN = "the-first-of-two-tokens"
OTHER = "the-second-of-two/tokens=="
BEARER = {"Authorization": f"Bearer {TOKEN}"}

# -- the decision


def test_without_tokens_every_caller_is_anonymous():
    assert Auth().admit("/status", None) is ANONYMOUS
    assert Auth().admit_websocket("/ws", None, ["bearer.whatever"]) is ANONYMOUS


@pytest.mark.parametrize(
    ("header", "name"),
    [(f"Bearer {TOKEN}", "token-1"), (f"bearer {TOKEN}", "token-1"), (f"BEARER  {OTHER} ", "token-2")],
)
def test_each_token_admits_its_principal(header, name):
    assert build_auth([TOKEN, OTHER]).admit("/status", header) == Principal(name)


def test_token_of_the_service_admits_only_if_tokens_are_required():
    assert build_auth([TOKEN], own_token=OTHER).admit("/v1/config", f"Bearer {OTHER}") is SERVICE
    assert not build_auth([], own_token=OTHER).is_on


@pytest.mark.parametrize("header", [None, "", "Bearer", "Bearer ", f"Basic {TOKEN}", TOKEN])
def test_request_without_a_token_is_told_that_one_is_required(header):
    assert build_auth([TOKEN]).admit("/status", header) is TOKEN_MISSING


@pytest.mark.parametrize("token", ["x", TOKEN[:-1], TOKEN + "x", TOKEN.upper(), "\udcff" * 20, f"{TOKEN},{TOKEN}"])
def test_request_with_another_token_is_refused(token):
    assert build_auth([TOKEN, OTHER]).admit("/status", f"Bearer {token}") is TOKEN_INVALID


def test_only_the_liveness_check_needs_no_token():
    auth = build_auth([TOKEN])
    assert auth.admit("/health/live", None) is ANONYMOUS
    for path in ("/", "/health", "/health/ready", "/health/live/", "/health/live/..", "/metrics", "/v1/config", "/cdc"):
        assert auth.admit(path, None) is TOKEN_MISSING


def test_browser_sends_its_token_as_a_subprotocol_and_another_one_is_selected():
    auth = build_auth([TOKEN])
    offered = ["lakefeed", f"bearer.{TOKEN}"]
    assert auth.admit_websocket("/ws", None, offered) == Principal("token-1")
    assert auth.admit_websocket("/ws", None, ["bearer.wrong"]) is TOKEN_INVALID
    assert auth.admit_websocket("/ws", None, ["lakefeed"]) is TOKEN_MISSING
    assert auth.admit_websocket("/ws", "Bearer wrong", offered) is TOKEN_INVALID, "a header takes precedence"
    assert choose_subprotocol(offered) == "lakefeed"
    assert choose_subprotocol([]) is None


def test_tokens_are_not_kept_as_they_are():
    assert TOKEN not in repr(build_auth([TOKEN]))
    assert TOKEN.encode() not in b"".join(digest for digest, _ in build_auth([TOKEN])._principals)


# -- where tokens come from


def test_tokens_of_the_file_are_added_to_those_of_the_settings(tmp_path):
    file = tmp_path / "tokens"
    file.write_text(f"# of the shop\n{OTHER}\n\n")
    assert load_tokens(AuthConfig(tokens=(TOKEN,), tokens_file=str(file))) == (TOKEN, OTHER)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "auth.tokens_file cannot be read"),
        ("\n# none\n", "auth.tokens_file has no token in it"),
        ("not a token at all", "auth.tokens_file: a token must be letters"),
    ],
)
def test_token_file_without_a_usable_token_is_an_error_at_the_start(tmp_path, content, words):
    file = tmp_path / "tokens"
    if content is not None:
        file.write_text(content)
    with pytest.raises(SettingsError, match=words):
        load_tokens(AuthConfig(tokens_file=str(file)))


@pytest.mark.parametrize(
    ("host", "expected"),
    [("127.0.0.1", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("10.0.0.1", False), ("::", False)],
)
def test_loopback_is_told_from_what_others_can_reach(host, expected):
    assert is_loopback(host) is expected


# -- every door


@pytest.fixture
async def guarded(tmp_path) -> AsyncIterator[Addresses]:
    config = replace(small_config(tmp_path), auth=AuthConfig(tokens=(TOKEN, OTHER)))
    async with serving(config) as addresses:
        yield addresses


@pytest.fixture
async def http(guarded: Addresses) -> AsyncIterator[aiohttp.ClientSession]:
    timeout = aiohttp.ClientTimeout(total=DEADLINE_S)
    async with aiohttp.ClientSession(guarded.http_url, timeout=timeout) as session:
        yield session


async def test_socket_without_a_valid_token_is_closed_with_4001_and_takes_nothing(guarded, http):
    for headers in ({}, {"Authorization": "Bearer wrong"}):
        async with connect(guarded.ws_url, additional_headers={**headers, "X-Client-ID": "shop"}) as socket:
            async with asyncio.timeout(DEADLINE_S):
                await socket.wait_closed()
        assert (socket.close_code, str(socket.close_reason).partition(":")[0]) == (4001, "authentication failed")
    async with http.get("/status", headers=BEARER) as answer:
        assert (await answer.json())["sources"] == []


@pytest.mark.parametrize(
    "options",
    [{"additional_headers": BEARER}, {"subprotocols": ["lakefeed", f"bearer.{TOKEN}"]}],
    ids=["header", "sub"],
)
async def test_socket_with_a_token_works_from_batch_to_receipt(guarded, options):
    async with connected(guarded.ws_url, **options) as client:
        ack = await client.batch(1, 2)
        await client.request("flush_request")
        assert (await client.receive_receipt(ack["sequenceNumber"]))["tables"].keys() == {"default.users"}


@pytest.mark.parametrize(
    ("method", "path"),
    [
        *(("GET", path) for path in ("/", "/status", "/health", "/health/ready", "/metrics", "/nowhere")),
        *(("POST", path) for path in ("/flush", "/cdc", "/cdc/debezium")),
    ],
)
async def test_control_plane_answers_401_without_a_token(http, method, path):
    async with http.request(method, path) as answer:
        assert (answer.status, answer.headers["WWW-Authenticate"]) == (401, 'Bearer realm="lakefeed"')
        assert (await answer.json())["reason"] == "unauthorized"
    async with http.request(method, path, headers=BEARER) as answer:
        assert answer.status != 401


@pytest.mark.parametrize("path", ["/v1/config", "/v1/namespaces", "/v1/nowhere"])
async def test_catalog_answers_401_in_icebergs_shape(http, path):
    async with http.get(path, headers={"Authorization": "Bearer wrong"}) as answer:
        assert answer.status == 401
        assert answer.headers["WWW-Authenticate"] == 'Bearer realm="lakefeed", error="invalid_token"'
        error = (await answer.json())["error"]
    assert (error["type"], error["code"]) == ("NotAuthorizedException", 401)


async def test_sign_of_life_needs_no_token(http):
    async with http.get("/health/live") as answer:
        assert answer.status == 200


async def test_readers_and_the_command_line_get_in_with_a_token(guarded, tmp_path):
    file = tmp_path / "rows.ndjson"
    file.write_text('{"id": 1}\n{"id": 2}\n')

    def use() -> None:
        run = CliRunner().invoke
        push = ["push", str(file), "--table", "users", "--url", guarded.ws_url]
        refused = run(main, push)
        assert refused.exit_code != 0
        assert "4001" in refused.output
        assert run(main, [*push, "--token", OTHER]).exit_code == 0
        status = run(main, ["status", "--json", "--url", guarded.http_url], env={"LAKEFEED_TOKEN": TOKEN})
        assert json.loads(status.output)["tables"][0]["table"] == "default.users"
        assert run(main, ["flush", "--url", guarded.http_url]).exit_code != 0
        assert run(main, ["flush", "--url", guarded.http_url, "--token", TOKEN]).exit_code == 0
        quarantine = ["quarantine", "list", "--json", "--url", guarded.http_url]
        refused = run(main, quarantine)
        assert (refused.exit_code, "401" in refused.output) == (1, True)
        assert json.loads(run(main, [*quarantine, "--token", TOKEN]).output) == []
        assert json.loads(run(main, quarantine, env={"LAKEFEED_TOKEN": OTHER}).output) == []
        with open_duckdb(guarded.http_url, token=TOKEN) as connection:
            assert connection.execute("SELECT count(*) FROM lake.default.users").fetchone() == (2,)
        with pytest.raises(UnauthorizedError):
            open_pyiceberg(guarded.http_url)
        with open_pyiceberg(guarded.http_url, token=TOKEN) as catalog:
            assert catalog.list_tables("default") == [("default", "users")]

    await asyncio.to_thread(use)


async def test_listening_to_the_world_without_tokens_is_warned_about(tmp_path, caplog):
    config = small_config(tmp_path)
    async with serving(replace(config, server=replace(config.server, host="0.0.0.0"))):
        assert "listening_without_authentication" in caplog.messages
