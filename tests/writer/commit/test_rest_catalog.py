from __future__ import annotations

import asyncio
import contextlib
import socket

import pytest
from aiohttp import web

from lakefeed.contract.changes import TableName
from lakefeed.contract.errors import (
    CatalogError,
    CatalogUnavailable,
    CommitConflict,
    CommitRefused,
    CommitUnknown,
    TableMissing,
)
from lakefeed.iceberg.layout import parse_partition
from lakefeed.writer.commit.plan import Request
from lakefeed.writer.commit.rest_catalog import open_catalog
from tests.writer.examples import NESTED

ORDERS = TableName(("sales", "eu"), "orders/2026")
NO_CHANGE = Request((), ())


@contextlib.asynccontextmanager
async def serve(handler):
    """Serve every path with `handler` on a free loopback port; yields the base URL."""
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handler)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield "http://{}:{}".format(*runner.addresses[0][:2])
    finally:
        await runner.cleanup()


def answer(status, **body):
    async def handle(_: web.Request) -> web.Response:
        return web.json_response(body, status=status)

    return handle


@pytest.mark.parametrize(
    ("status", "on_load", "on_commit"),
    [
        (400, CatalogError, CommitRefused),
        (401, CatalogError, CatalogError),
        (403, CatalogError, CatalogError),
        (404, TableMissing, TableMissing),
        (409, CommitConflict, CommitConflict),
        (429, CatalogUnavailable, CatalogUnavailable),
        (500, CatalogUnavailable, CommitUnknown),
        (503, CatalogUnavailable, CommitUnknown),
        (504, CatalogUnavailable, CommitUnknown),
    ],
)
async def test_each_status_is_an_error_by_what_to_do_next(status, on_load, on_commit):
    error = {"message": "Requirement failed", "type": "X", "code": status}
    async with serve(answer(status, error=error)) as url, open_catalog(url) as catalog:
        with pytest.raises(CatalogError, match=f"Requirement failed: status={status}") as loaded:
            await catalog.load_table(ORDERS)
        with pytest.raises(CatalogError) as committed:
            await catalog.commit_table(ORDERS, NO_CHANGE)
    assert (loaded.type, committed.type) == (on_load, on_commit)


async def test_an_answer_that_is_not_the_catalogs_is_still_understood():
    async def proxy_page(_: web.Request) -> web.Response:
        return web.Response(status=502, text="<html>Bad Gateway</html>")

    async with serve(proxy_page) as url, open_catalog(url) as catalog:
        with pytest.raises(CommitUnknown, match="catalog refused: status=502"):
            await catalog.commit_table(ORDERS, NO_CHANGE)


@pytest.mark.parametrize("status", [200, 203])
async def test_a_page_instead_of_the_catalogs_answer_commits_nothing_though_it_says_yes(status):
    async def maintenance(_: web.Request) -> web.Response:
        return web.Response(status=status, text="<html>Back soon</html>", content_type="text/html")

    async with serve(maintenance) as url, open_catalog(url) as catalog:
        with pytest.raises(CommitUnknown, match="not JSON"):
            await catalog.commit_table(ORDERS, NO_CHANGE, needs_response=False)
        with pytest.raises(CommitUnknown, match="not JSON"):
            await catalog.commit_transaction({ORDERS: NO_CHANGE})
        with pytest.raises(CatalogUnavailable, match="not JSON"):
            await catalog.load_properties(ORDERS.namespace)


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_a_redirect_is_refused_because_the_commit_would_become_a_load(status):
    asked = []

    async def redirect(request: web.Request) -> web.Response:
        asked.append(request.method)
        if request.path.startswith("/moved"):
            return web.json_response({"metadata": {}, "metadata-location": "x"})
        return web.Response(status=status, headers={"Location": "/moved?state=secret"})

    async with serve(redirect) as url, open_catalog(url) as catalog:
        with pytest.raises(CatalogError, match=r"redirects.*location=/moved ") as refused:
            await catalog.commit_table(ORDERS, NO_CHANGE, needs_response=False)
        with pytest.raises(CatalogError, match="redirects"):
            await catalog.load_table(ORDERS)
    assert refused.type is CatalogError
    assert asked == ["POST", "GET"]


async def test_a_catalog_that_does_not_answer_in_time_leaves_the_outcome_unknown():
    async def hang(_: web.Request) -> web.Response:
        await asyncio.Event().wait()
        raise AssertionError

    async with serve(hang) as url, open_catalog(url, timeout_s=0.1) as catalog:
        with pytest.raises(CommitUnknown, match="did not answer"):
            await catalog.commit_table(ORDERS, NO_CHANGE)
        with pytest.raises(CatalogUnavailable, match="did not answer"):
            await catalog.load_table(ORDERS)


async def test_a_connection_lost_while_committing_leaves_the_outcome_unknown():
    async def hang_up(request: web.Request) -> web.Response:
        request.transport.abort()
        return web.Response()

    async with serve(hang_up) as url, open_catalog(url) as catalog:
        with pytest.raises(CommitUnknown, match="did not answer"):
            await catalog.commit_table(ORDERS, NO_CHANGE)


async def test_a_catalog_that_is_down_has_not_committed():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    async with open_catalog(f"http://127.0.0.1:{port}") as catalog:
        with pytest.raises(CatalogUnavailable, match="cannot be reached"):
            await catalog.commit_table(ORDERS, NO_CHANGE)


@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/"])
async def test_the_prefix_that_the_catalog_asks_for_goes_into_every_path(suffix):
    seen = []

    async def record(request: web.Request) -> web.Response:
        seen.append((request.raw_path, request.headers.get("Authorization")))
        return web.json_response({"defaults": {}, "overrides": {"prefix": "a/b"}, "metadata": {}})

    async with serve(record) as url, open_catalog(f"{url}{suffix}", warehouse="my lake", token="t") as catalog:
        await catalog.load_config()
        await catalog.load_table(ORDERS)
    assert seen == [
        ("/v1/config?warehouse=my+lake", "Bearer t"),
        ("/v1/a/b/namespaces/sales%1Feu/tables/orders%2F2026", "Bearer t"),
    ]


async def test_a_namespace_is_created_from_the_top_and_may_exist():
    seen = []

    async def record(request: web.Request) -> web.Response:
        seen.append((await request.json())["namespace"])
        return web.json_response({}, status=409 if len(seen) == 1 else 200)

    async with serve(record) as url, open_catalog(url) as catalog:
        await catalog.ensure_namespace(("sales", "eu"))
    assert seen == [["sales"], ["sales", "eu"]]


@pytest.mark.parametrize("exists", [True, False])
async def test_a_namespace_that_may_not_be_created_will_do_if_it_is_there(exists):
    async def forbid(request: web.Request) -> web.Response:
        status = 403 if request.method == "POST" else 200 if exists else 404
        return web.json_response({} if status == 200 else {"error": {"message": "no right"}}, status=status)

    expected = contextlib.nullcontext() if exists else pytest.raises(CatalogError, match=r"no right.*status=403")
    async with serve(forbid) as url, open_catalog(url) as catalog:
        with expected:
            await catalog.ensure_namespace(("sales",))


async def test_a_table_is_created_with_columns_partitions_and_properties():
    seen = []

    async def record(request: web.Request) -> web.Response:
        seen.append(await request.json())
        return web.json_response({"metadata": {"x": 1}, "metadata-location": "here"})

    spec = parse_partition("day(_cdc_timestamp)", NESTED)
    async with serve(record) as url, open_catalog(url) as catalog:
        table = await catalog.create_table(ORDERS, schema=NESTED, spec=spec, properties={"a": "b"})
    [body] = seen
    assert table == {"x": 1}
    assert (body["name"], body["properties"]) == ("orders/2026", {"a": "b"})
    assert body["partition-spec"]["fields"][0]["transform"] == "day"
    assert body["schema"]["fields"][0]["name"] == "_cdc_sequence"


async def test_tables_are_listed_page_by_page():
    pages = {None: (["a", "b"], "next"), "next": (["c"], None)}

    async def handle(request: web.Request) -> web.Response:
        names, token = pages[request.query.get("pageToken")]
        identifiers = [{"namespace": ["sales", "eu"], "name": name} for name in names]
        return web.json_response({"identifiers": identifiers, "next-page-token": token})

    async with serve(handle) as url, open_catalog(url) as catalog:
        found = await catalog.list_tables(("sales", "eu"))
    assert found == [TableName(("sales", "eu"), name) for name in ("a", "b", "c")]


async def test_what_the_catalog_asks_for_in_its_configuration_is_kept_to():
    seen = []

    async def record(request: web.Request) -> web.Response:
        seen.append((request.raw_path, request.headers.get("X-Realm")))
        base = f"{request.url.origin()}/moved"
        overrides = {"uri": base, "prefix": "p", "namespace-separator": "%2E", "header.X-Realm": "lake"}
        return web.json_response({"defaults": {"prefix": "other"}, "overrides": overrides, "metadata": {}})

    async with serve(record) as url, open_catalog(url) as catalog:
        await catalog.load_config()
        await catalog.load_table(ORDERS)
    assert seen == [
        ("/v1/config", None),
        ("/moved/v1/p/namespaces/sales.eu/tables/orders%2F2026", "lake"),
    ]


@pytest.mark.parametrize(
    ("endpoints", "has"),
    [
        (None, True),
        (["POST /v1/{prefix}/transactions/commit"], True),
        (["GET /v1/{prefix}/namespaces"], False),
    ],
)
async def test_a_catalog_that_lists_its_endpoints_has_only_those(endpoints, has):
    async def config(_: web.Request) -> web.Response:
        return web.json_response({} if endpoints is None else {"endpoints": endpoints})

    async with serve(config) as url, open_catalog(url) as catalog:
        await catalog.load_config()
        assert catalog.has_transactions is has


async def test_a_transaction_names_every_table_with_its_requirements_and_updates():
    seen = []

    async def record(request: web.Request) -> web.Response:
        seen.append((request.path, await request.json()))
        return web.Response(status=204)

    request = Request(({"type": "assert-table-uuid", "uuid": "u"},), ({"action": "set-properties", "updates": {}},))
    async with serve(record) as url, open_catalog(url) as catalog:
        await catalog.commit_transaction({ORDERS: request})
    change = {
        "identifier": {"namespace": ["sales", "eu"], "name": "orders/2026"},
        "requirements": [{"type": "assert-table-uuid", "uuid": "u"}],
        "updates": [{"action": "set-properties", "updates": {}}],
    }
    assert seen == [("/v1/transactions/commit", {"table-changes": [change]})]


async def test_a_commit_that_needs_no_response_asks_for_a_minimal_one():
    seen = []

    async def record(request: web.Request) -> web.Response:
        seen.append(request.headers.get("Prefer"))
        return web.json_response({})

    async with serve(record) as url, open_catalog(url) as catalog:
        await catalog.commit_table(ORDERS, NO_CHANGE)
        await catalog.commit_table(ORDERS, NO_CHANGE, needs_response=False)
    assert seen == [None, "return=minimal"]
