"""No request, however damaged, causes a server error: generated ones of every operation, on each kind of database.

`BAD_REQUESTS` and `BAD_REQUESTS_SEED` set how many are sent and which.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import logging
import random
from collections import Counter
from collections.abc import Callable, Iterator
from urllib.parse import urlsplit

import pytest

from tests.catalog.bad_requests import Request, RequestFuzzer, choose_operation
from tests.catalog.conftest import Client, Server
from tests.catalog.documents import create_body
from tests.catalog.good_requests import BODIES, OPERATIONS
from tests.catalog.routes.test_http import error_of
from tests.seeds import choose_count, choose_seed

REQUESTS = {"sqlite": choose_count("BAD_REQUESTS", 1_500), "postgres": choose_count("BAD_REQUESTS", 500)}
FAULTS_MAX = 3
# After so many requests the table and the view are created again, because their state may reject all others.
RENEW_INTERVAL = 50
TAKING_AWAY = {
    *("POST tables/rename", "POST views/rename"),
    "POST namespaces/{namespace}/tables/{table}/unregister",
}
# Each of these changes a name that others use.
REPEATING_NAMES = {
    "POST namespaces/{namespace}/tables",
    "POST namespaces/{namespace}/views",
    "POST namespaces/{namespace}/register",
    "POST namespaces/{namespace}/register-view",
}
# Not reached by valid requests: there are no functions, and no plan here has a second page.
NEVER_FOUND = {
    "GET namespaces/{namespace}/functions/{function}",
    "POST namespaces/{namespace}/tables/{table}/tasks",
}


class Wire:
    """Sends requests just as they are, over one connection for as long as the server keeps it."""

    def __init__(self, url: str) -> None:
        self._connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=60)

    def send(self, request: Request) -> tuple[int, bytes]:
        with contextlib.suppress(http.client.RemoteDisconnected, BrokenPipeError, ConnectionResetError):
            return self._send(request)
        self._connection.close()  # an idle connection that the server closed
        return self._send(request)

    def _send(self, request: Request) -> tuple[int, bytes]:
        self._connection.request(request.method, request.target, body=request.body, headers=request.headers)
        answer = self._connection.getresponse()
        return answer.status, answer.read()

    def close(self) -> None:
        self._connection.close()


class Catalog:
    """Keeps `db.t` and `db.v` in existence, and the values that only the catalog knows."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self.known: dict[str, str] = {}

    def renew(self) -> None:
        client = self._client
        for path in ("tables/t", "tables/u", "tables/x", "views/v", "views/w", "views/x"):
            client.delete(f"namespaces/db/{path}")
        client.delete("namespaces/a")
        for name in ("db", "empty"):
            client.post("namespaces", {"namespace": [name]})
        view = {**BODIES["namespaces/{namespace}/views"], "name": "v"}
        table_answer = client.post("namespaces/db/tables", create_body("t"))
        view_answer = client.post("namespaces/db/views", view)
        assert (table_answer[0], view_answer[0]) == (200, 200), (table_answer, view_answer)
        self.known["register"] = table_answer[1]["metadata-location"]
        self.known["register-view"] = view_answer[1]["metadata-location"]

    def learn(self, request: Request, status: int, body: bytes) -> None:
        """Record the plan that a request made; create again what a request may have removed."""
        if request.operation.endswith("/plan") and status == 200:
            self.known["plan-id"] = json.loads(body)["plan-id"]
        elif status < 300 and (request.method == "DELETE" or request.operation in TAKING_AWAY):
            self.renew()


@pytest.fixture(params=["sqlite", "postgres"])
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def running(request: pytest.FixtureRequest, kind: str, start_server: Callable[..., Server]) -> Server:
    return start_server(database=request.getfixturevalue("make_postgres")() if kind == "postgres" else "")


@pytest.fixture
def catalog(running: Server, connect: Callable[[Server], Client]) -> Catalog:
    made = Catalog(connect(running))
    made.renew()
    return made


@pytest.fixture
def wire(running: Server) -> Iterator[Wire]:
    with contextlib.closing(Wire(running.url)) as opened:
        yield opened


def check_answer(request: Request, status: int, body: bytes) -> None:
    shown = (request.method, request.target[:300], request.headers, (request.body or b"")[:2_000], status, body[:500])
    assert status < 500, shown
    # Malformed HTTP never reaches the catalog, and HEAD has no body.
    if status >= 400 and request.method != "HEAD" and body.startswith(b"{"):
        error_of((status, json.loads(body)))


def test_operations_are_all_that_the_catalog_has(client: Client):
    endpoints = client.get("config")[1]["endpoints"]
    assert set(OPERATIONS) - {"GET config"} == {endpoint.replace("/v1/{prefix}/", "") for endpoint in endpoints}


def test_good_request_of_every_operation_is_done(catalog: Catalog, wire: Wire):
    fuzzer, done = RequestFuzzer(random.Random(1), catalog.known), set()
    # The plan is there before it is asked for, and asked for before it is given up.
    for operation in sorted(OPERATIONS, key=lambda each: (not each.endswith("/plan"), each[0] != "G", each)):
        request = fuzzer.make(operation, faults=0)
        status, body = wire.send(request)
        check_answer(request, status, body)
        catalog.learn(request, status, body)
        if status < 300:
            done.add(operation)
        if operation in REPEATING_NAMES:
            catalog.renew()
    assert done == set(OPERATIONS) - NEVER_FOUND


def test_damaged_request_of_any_operation_is_no_server_error(
    catalog: Catalog, wire: Wire, kind: str, caplog: pytest.LogCaptureFixture
):
    rng = random.Random(choose_seed("BAD_REQUESTS_SEED", 1))
    fuzzer, tried, answered = RequestFuzzer(rng, catalog.known), Counter[str](), Counter[int]()
    with caplog.at_level(logging.ERROR):
        for number in range(REQUESTS[kind]):
            if number % RENEW_INTERVAL == 0:
                catalog.renew()
            request = fuzzer.make(choose_operation(rng), faults=rng.randint(1, FAULTS_MAX))
            status, body = wire.send(request)
            check_answer(request, status, body)
            tried[request.operation] += 1
            answered[status] += 1
            catalog.learn(request, status, body)
    print(f"answers: {dict(answered)}")
    assert set(tried) == set(OPERATIONS)
    assert "request_failed" not in caplog.text
