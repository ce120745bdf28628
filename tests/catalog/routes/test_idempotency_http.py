"""Requests that are repeated under their Idempotency-Key: handled once, with the same response."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from requests import Response

from lakefeed.catalog.app import ROUTES, build_app
from lakefeed.catalog.config import MEMORY_DATABASE, CatalogConfig, Warehouse
from lakefeed.catalog.errors import StoreFailed
from lakefeed.catalog.names import EntryId, Pointer, TableId
from lakefeed.catalog.store.sqlite import SqliteStore
from tests.catalog.conftest import Client, Server, parsed
from tests.catalog.documents import append, create_body, require_main
from tests.catalog.local_files import LocalFiles
from tests.catalog.routes.test_http import Connect, error_of
from tests.catalog.routes.test_tables_http import TABLE, TABLES, path_of, set_property
from tests.catalog.service.test_tables_concurrency import in_parallel
from tests.catalog.service.test_tables_transactions import change
from tests.catalog.service.test_tables_views import VIEW, VIEWS, replaced_by, version, view_body
from tests.catalog.service.test_tables_views import query as view_query


def new_key() -> dict[str, str]:
    return {"Idempotency-Key": str(uuid.uuid4())}


def commit_body(*updates: dict, requirements: tuple[dict, ...] = ()) -> dict[str, Any]:
    return {"requirements": list(requirements), "updates": list(updates)}


def rename(source: str, destination: str) -> dict[str, Any]:
    names = {"source": source, "destination": destination}
    return {side: {"namespace": ["db"], "name": name} for side, name in names.items()}


def location_of(client: Client, path: str) -> str:
    return client.get(path)[1]["metadata-location"]


# Every operation that changes something, in a state in which a second change would be visible, and its preparation.
Prepare = Callable[[Client], Any]
MUTATIONS: dict[str, tuple[str, str, Prepare, Callable[[Any], Any]]] = {
    "create namespace": (
        *("POST", "namespaces"),
        lambda _: None,
        lambda _: {"namespace": ["new"], "properties": {"a": "1"}},
    ),
    "update properties": (
        *("POST", "namespaces/db/properties"),
        lambda _: None,
        lambda _: {"removals": ["owner", "none"], "updates": {"b": "2"}},
    ),
    "drop namespace": (
        *("DELETE", "namespaces/gone"),
        lambda client: client.post("namespaces", {"namespace": ["gone"]}),
        lambda _: None,
    ),
    "create table": ("POST", TABLES, lambda _: None, lambda _: create_body("new")),
    "commit": (
        *("POST", TABLE),
        lambda _: None,
        lambda _: commit_body(*append(1, 1), requirements=(require_main(None),)),
    ),
    "rename table": ("POST", "tables/rename", lambda _: None, lambda _: rename("t", "other")),
    "drop table": ("DELETE", f"{TABLE}?purgeRequested=true", lambda _: None, lambda _: None),
    "unregister": ("POST", f"{TABLE}/unregister", lambda _: None, lambda _: None),
    "register table": (
        *("POST", "namespaces/db/register"),
        lambda client: location_of(client, TABLE),
        lambda location: {"name": "copy", "metadata-location": location},
    ),
    "create view": ("POST", VIEWS, lambda _: None, lambda _: view_body("new")),
    "replace view": ("POST", VIEW, lambda _: None, lambda _: replaced_by(version(view_query("SELECT 2"), number=2))),
    "rename view": ("POST", "views/rename", lambda _: None, lambda _: rename("v", "other")),
    "drop view": ("DELETE", VIEW, lambda _: None, lambda _: None),
    "register view": (
        *("POST", "namespaces/db/register-view"),
        lambda client: location_of(client, VIEW),
        lambda location: {"name": "copy", "metadata-location": location},
    ),
    "transaction": (
        *("POST", "transactions/commit"),
        lambda client: client.post(TABLES, create_body("u")),
        lambda _: {"table-changes": [change("t", 1), change("u", 1)]},
    ),
}


def fill(client: Client) -> None:
    client.post("namespaces", {"namespace": ["db"], "properties": {"owner": "me"}})
    assert client.post(TABLES, create_body())[0] == 200
    assert client.post(VIEWS, view_body())[0] == 200


def everything(client: Client) -> dict[str, Any]:
    """Return everything that the catalog holds."""
    held: dict[str, Any] = {}
    for levels in client.get("namespaces")[1]["namespaces"]:
        path = f"namespaces/{levels[0]}"
        held[path] = client.get(path)[1]
        for kind in ("tables", "views"):
            for entry in client.get(f"{path}/{kind}")[1]["identifiers"]:
                name = f"{path}/{kind}/{entry['name']}"
                held[name] = location_of(client, name)
    return held


@pytest.fixture(params=["sqlite", "postgres", "memory"])
def database(request: pytest.FixtureRequest) -> str:
    if request.param == "postgres":
        return request.getfixturevalue("make_postgres")()
    return MEMORY_DATABASE if request.param == "memory" else ""


@pytest.fixture
def filled(client: Client) -> Client:
    fill(client)
    return client


def test_every_route_that_changes_something_is_tried_here():
    changing = {(route.method, route.path) for route in ROUTES if route.replay is not None}
    names = {TABLE: f"{TABLES}/{{table}}", VIEW: f"{VIEWS}/{{view}}", "namespaces/gone": "namespaces/{namespace}"}
    tried = set()
    for method, path, _, _ in MUTATIONS.values():
        template = path.partition("?")[0]
        for name, pattern in names.items():
            template = template.replace(name, pattern)
        tried.add((method, template.replace("namespaces/db", "namespaces/{namespace}")))
    assert tried == changing
    unchanging = {"metrics", "plan", "tasks", "{plan-id}"}
    left = {route for route in ROUTES if route.method in ("POST", "DELETE") and route.replay is None}
    assert {route.path.rpartition("/")[2] for route in left} <= unchanging


def clear(client: Client) -> None:
    for path in (path for path in everything(client) if path.count("/") > 1):
        client.delete(path)
    for levels in client.get("namespaces")[1]["namespaces"]:
        assert client.delete(f"namespaces/{levels[0]}")[0] == 204


def test_repeated_mutation_is_made_once_and_gets_the_same_response(
    database: str, start_server: Callable[..., Server], connect: Connect
):
    server = start_server(database=database)
    client, sent = connect(server), []
    for name, (method, path, prepare, body_of) in MUTATIONS.items():
        clear(client)
        fill(client)
        request = (method, path, body_of(prepare(client)))
        headers, before = new_key(), everything(client)
        first = client.send(*request, headers=headers)
        assert first.status_code in (200, 204), (name, first.text)
        made = everything(client)
        assert made != before, name
        check_told_again(client, request, headers, first)
        assert everything(client) == made, name
        sent.append((request, headers, first))
    if database != MEMORY_DATABASE:
        server.stop()
        later = connect(start_server(database=database))
        for request, headers, first in sent:
            check_told_again(later, request, headers, first)
        assert everything(later) == made


def check_told_again(client: Client, request: tuple[str, str, Any], headers: dict[str, str], first: Response) -> None:
    again = client.send(*request, headers=headers)
    assert (again.status_code, again.content) == (first.status_code, first.content), request
    assert again.headers.get("ETag") == first.headers.get("ETag")


def test_repeated_commit_returns_its_own_outcome_after_later_commits(filled: Client):
    headers, body = new_key(), commit_body(set_property("a", "1"))
    first = parsed(filled.send("POST", TABLE, body, headers=headers))
    later = filled.post(TABLE, commit_body(set_property("a", "2")))[1]
    assert parsed(filled.send("POST", TABLE, body, headers=headers)) == first
    assert first[1]["metadata"]["properties"]["a"] == "1"
    assert location_of(filled, TABLE) == later["metadata-location"]


def test_repeated_commit_whose_metadata_file_is_gone_returns_the_current_state(filled: Client):
    keep_none = {"write.metadata.previous-versions-max": "1", "write.metadata.delete-after-commit.enabled": "true"}
    filled.post(TABLE, commit_body({"action": "set-properties", "updates": keep_none}))
    headers, body = new_key(), commit_body(set_property("a", "1"))
    first = parsed(filled.send("POST", TABLE, body, headers=headers))[1]
    for value in ("2", "3"):
        current = filled.post(TABLE, commit_body(set_property("a", value)))[1]
    assert not path_of(first["metadata-location"]).exists()
    status, repeated = parsed(filled.send("POST", TABLE, body, headers=headers))
    assert (status, repeated) == (200, current)


def test_repeated_commit_may_ask_for_the_short_response(filled: Client):
    headers, body = new_key(), commit_body(set_property("a", "1"))
    first = parsed(filled.send("POST", TABLE, body, headers=headers))[1]
    short = filled.send("POST", TABLE, body, headers=headers | {"Prefer": "return=minimal"})
    assert short.json() == {"metadata-location": first["metadata-location"]}


def test_commit_that_changed_nothing_has_an_outcome(filled: Client):
    body = commit_body(requirements=(require_main(None),))
    headers = new_key()
    first = parsed(filled.send("POST", TABLE, body, headers=headers))
    assert filled.post(TABLE, commit_body(*append(1, 1)))[0] == 200
    assert parsed(filled.send("POST", TABLE, body, headers=headers)) == first
    assert parsed(filled.send("POST", TABLE, body, headers=new_key()))[0] == 409


@pytest.mark.parametrize(
    ("path", "body", "cure"),
    [
        (
            "namespaces/later/tables",
            create_body("t"),
            ("POST", "namespaces", {"namespace": ["later"]}),
        ),
        (TABLES, create_body("t"), ("DELETE", TABLE, None)),
        (TABLE, commit_body(requirements=(require_main(7),)), ("POST", TABLE, commit_body(*append(7, 1)))),
        ("namespaces", {"namespace": ["db"]}, None),
        (TABLE, {"updates": 1}, None),
    ],
    ids=["404", "409-exists", "409-requirement", "409-namespace", "400"],
)
def test_recorded_errors_are_returned_again_even_if_the_request_would_succeed_now(
    filled: Client, path: str, body: Any, cure: tuple[str, str, Any] | None
):
    headers = new_key()
    first = parsed(filled.send("POST", path, body, headers=headers))
    error_of(first)
    if cure is not None:
        assert filled.send(*cure).status_code in (200, 204)
        assert parsed(filled.send("POST", path, body, headers=headers)) == first
        assert filled.send("POST", path, body, headers=new_key()).status_code == 200
    assert parsed(filled.send("POST", path, body, headers=headers)) == first


def test_a_key_that_is_no_uuid_is_refused_and_nothing_is_done(filled: Client):
    for key in ("", "key", "1234", str(uuid.uuid4())[:-1], uuid.uuid4().hex):
        answer = parsed(filled.send("POST", "namespaces", {"namespace": ["new"]}, headers={"Idempotency-Key": key}))
        assert error_of(answer)[:2] == (400, "BadRequestException")
    assert filled.head("namespaces/new") == 404


def test_a_key_used_for_another_request_is_refused_and_nothing_is_done(filled: Client):
    headers = new_key()
    assert filled.send("POST", "namespaces", {"namespace": ["one"]}, headers=headers).status_code == 200
    for method, path, body in (
        ("POST", "namespaces", {"namespace": ["two"]}),
        ("DELETE", "namespaces/one", None),
        ("DELETE", f"{TABLE}?purgeRequested=true", None),
    ):
        answer = parsed(filled.send(method, path, body, headers=headers))
        assert error_of(answer)[:2] == (422, "UnprocessableEntityException")
    assert [filled.head(path) for path in ("namespaces/one", "namespaces/two", TABLE)] == [204, 404, 204]


def test_keys_do_not_concern_reads(filled: Client):
    headers = {"Idempotency-Key": "not even a key"}
    assert filled.send("GET", TABLE, headers=headers).status_code == 200


def test_a_staged_create_stores_nothing_under_its_key(filled: Client):
    headers, body = new_key(), create_body("new") | {"stage-create": True}
    for _ in range(2):
        assert filled.send("POST", TABLES, body, headers=headers).status_code == 200
    assert filled.head(f"{TABLES}/new") == 404


def test_the_lifetime_of_keys_is_announced(start_server: Callable[..., Server], connect: Connect):
    assert connect(start_server()).get("config")[1]["idempotency-key-lifetime"] == "PT1800S"
    assert connect(start_server(idempotency_lifetime_s=7)).get("config")[1]["idempotency-key-lifetime"] == "PT7S"


@pytest.mark.parametrize("processes", [1, 2])
def test_of_concurrent_requests_under_one_key_one_is_handled_and_all_get_its_outcome(
    start_server: Callable[..., Server], connect: Connect, lasting_database: str, processes: int
):
    servers = [start_server(database=lasting_database) for _ in range(processes)]
    clients = [connect(servers[number % processes]) for number in range(12)]
    fill(clients[0])
    headers, body = new_key(), commit_body(*append(1, 1), requirements=(require_main(None),))
    answers = in_parallel(12, lambda number: parsed(clients[number].send("POST", TABLE, body, headers=headers)))
    assert [status for status, _ in answers] == [200] * 12
    assert len({answer["metadata-location"] for _, answer in answers}) == 1
    current = clients[0].get(TABLE)[1]
    assert current["metadata-location"] == answers[0][1]["metadata-location"]
    assert len(list(path_of(current["metadata-location"]).parent.iterdir())) == 2


class SilentStore(SqliteStore):
    """The real store, which makes a swap, or not, and then fails every call until `heal`."""

    lands: bool | None = None
    is_silent = False

    async def swap_pointer(
        self, table: TableId, *, expected: Pointer, new: Pointer, prepare: Callable[[], None] | None = None
    ) -> bool:
        if self.lands is not None:
            if self.lands:
                await super().swap_pointer(table, expected=expected, new=new, prepare=prepare)
            self.is_silent = True
            raise StoreFailed("injected")
        return await super().swap_pointer(table, expected=expected, new=new, prepare=prepare)

    async def load_pointer(self, entry: EntryId) -> Pointer | None:
        if self.is_silent:
            raise StoreFailed("injected")
        return await super().load_pointer(entry)

    def heal(self) -> None:
        self.lands, self.is_silent = None, False


@pytest.fixture
def silent(tmp_path: Path) -> SilentStore:
    return SilentStore(tmp_path / "silent.db")


@pytest.mark.parametrize("lands", [True, False])
def test_unknown_outcome_is_never_recorded(
    silent: SilentStore, warehouse: Warehouse, start_server, connect: Connect, lands: bool
):
    client = connect(start_server(build_app(CatalogConfig(), warehouse, store=silent, files=LocalFiles())))
    fill(client)
    headers, body = new_key(), commit_body(*append(1, 1), requirements=(require_main(None),))
    silent.lands = lands
    answer = parsed(client.send("POST", TABLE, body, headers=headers))
    assert error_of(answer)[:2] == (500, "CommitStateUnknownException")
    silent.heal()
    status, repeated = parsed(client.send("POST", TABLE, body, headers=headers))
    assert status == 200
    assert [each["snapshot-id"] for each in repeated["metadata"]["snapshots"]] == [1]
    assert location_of(client, TABLE) == repeated["metadata-location"]
