"""The HTTP surface: config, routes, errors and lists, with raw requests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import requests
from aiohttp import web

from lakefeed.catalog.app import ROUTES, build_catalog
from lakefeed.catalog.config import CatalogConfig, Warehouse
from lakefeed.storage.config import StorageConfig
from tests.catalog.conftest import Client, Server, parsed
from tests.catalog.documents import create_body

Connect = Callable[[Server], Client]


@pytest.fixture
def db(client: Client) -> Client:
    assert client.post("namespaces", {"namespace": ["db"]})[0] == 200
    return client


def error_of(answer: tuple[int, dict]) -> tuple[int, str, str]:
    status, body = answer
    error = body["error"]
    assert body.keys() == {"error"}
    assert error["code"] == status
    return status, error["type"], error["message"]


def test_config_lists_exactly_the_routes_that_are_served(client: Client):
    status, body = client.get("config")
    assert (status, body["defaults"], body["overrides"]) == (200, {}, {})
    assert body["endpoints"] == [route.endpoint for route in ROUTES]
    for endpoint in body["endpoints"]:
        method, template = endpoint.split()
        path = template.removeprefix("/v1/{prefix}/").replace("{namespace}", "none").replace("{table}", "none")
        answer = client.send(method, path, {} if method == "POST" else None)
        assert answer.status_code not in (405, 500), endpoint
        assert "No such endpoint" not in answer.text, endpoint


def test_what_is_not_built_is_neither_served_nor_advertised(client: Client):
    advertised = " ".join(client.get("config")[1]["endpoints"])
    assert error_of(client.get("namespaces/db/tables/t/credentials"))[0] == 404
    assert "credentials" not in advertised


def test_warehouse_is_known_by_name_by_location_or_not_asked_for(client: Client, warehouse: Warehouse):
    for known in ("", "lakefeed", warehouse.location):
        assert client.get("config", params={"warehouse": known})[0] == 200
    status, kind, _ = error_of(client.get("config", params={"warehouse": "other"}))
    assert (status, kind) == (404, "NoSuchWarehouseException")


def test_unknown_path_and_wrong_method_are_errors_in_icebergs_form(client: Client):
    assert error_of(client.get("nothing/here"))[:2] == (404, "NotFoundException")
    assert error_of(client.get(""))[:2] == (404, "NotFoundException")
    assert error_of(client.delete("config"))[:2] == (405, "UnsupportedOperationException")


def test_paths_outside_the_mount_are_left_to_the_enclosing_application(server: Server):
    answer = requests.get(f"{server.url}/other", timeout=10)
    assert (answer.status_code, answer.headers["Content-Type"].split(";")[0]) == (404, "text/plain")


def test_body_over_the_limit_is_refused(start_server: Callable[..., Server], connect: Connect):
    client = connect(start_server(request_max_bytes=1000))
    body = {"namespace": ["db"], "properties": {"x": "y" * 1000}}
    assert error_of(client.post("namespaces", body))[:2] == (413, "BadRequestException")


def test_unexpected_error_is_rendered_without_detail_and_logged(
    start_server: Callable[..., Server], connect: Connect, warehouse: Warehouse, tmp_path: Path, caplog
):
    async def fail(_request: web.Request) -> web.Response:
        raise RuntimeError("secret detail")

    app = build_catalog(CatalogConfig(), warehouse, tmp_path / "c.db")
    app.router.add_route("GET", "/broken", fail)
    client = connect(start_server(app))
    assert error_of(client.get("broken")) == (500, "InternalServerError", "Internal server error")
    assert "secret detail" in caplog.text


def test_missing_names_are_errors_of_their_own_types(db: Client):
    assert error_of(db.get("namespaces/none"))[1:] == ("NoSuchNamespaceException", "Namespace does not exist: none")
    assert error_of(db.get("namespaces/none/tables"))[1] == "NoSuchNamespaceException"
    assert error_of(db.get("namespaces/none/tables/t"))[1:] == ("NoSuchTableException", "Table does not exist: none.t")
    assert error_of(db.get("namespaces/db/tables/t"))[1] == "NoSuchTableException"
    assert error_of(db.post("namespaces/none/tables", create_body()))[1] == "NoSuchNamespaceException"
    commit = {"requirements": [], "updates": []}
    assert error_of(db.post("namespaces/db/tables/t", commit))[1] == "NoSuchTableException"
    assert error_of(db.get("namespaces", params={"parent": "none"}))[2] == "Namespace does not exist: none"
    assert (db.head("namespaces/none"), db.head("namespaces/db/tables/t")) == (404, 404)


def test_head_tells_what_exists_without_a_body(db: Client):
    db.post("namespaces/db/tables", create_body())
    assert (db.head("namespaces/db"), db.head("namespaces/db/tables/t")) == (204, 204)


def test_nested_namespace_needs_its_parent_and_keeps_it_from_being_dropped(client: Client):
    assert error_of(client.post("namespaces", {"namespace": ["a", "b"]}))[2] == "Namespace does not exist: a"
    client.post("namespaces", {"namespace": ["a"]})
    assert client.post("namespaces", {"namespace": ["a", "b"]})[1]["namespace"] == ["a", "b"]
    assert client.get("namespaces/a%1Fb")[1] == {"namespace": ["a", "b"], "properties": {}}
    assert client.get("namespaces")[1]["namespaces"] == [["a"]]
    assert client.get("namespaces", params={"parent": "a"})[1]["namespaces"] == [["a", "b"]]
    assert error_of(client.delete("namespaces/a"))[:2] == (409, "NamespaceNotEmptyException")
    assert client.delete("namespaces/a%1Fb")[0] == 204
    assert client.delete("namespaces/a")[0] == 204


@pytest.mark.parametrize(
    ("name", "spellings"),
    [
        ("x y", ["x+y", "x%20y"]),
        ("x+y", ["x%2By"]),
        ("a +/%2B ü", ["a+%2B%2F%252B+%C3%BC", "a%20%2B%2F%252B%20%C3%BC"]),
    ],
)
def test_names_in_paths_are_encoded_as_in_forms_or_as_in_urls(client: Client, name: str, spellings: list[str]):
    client.post("namespaces", {"namespace": [name]})
    assert client.post("namespaces", {"namespace": [name, name]})[0] == 200
    for level in spellings:
        assert client.get(f"namespaces/{level}%1F{level}")[1]["namespace"] == [name, name]
        tables = f"namespaces/{level}%1F{level}/tables"
        assert client.post(tables, create_body(name))[0] == 200
        loaded = {client.get(f"{tables}/{spelling}")[1]["metadata"]["table-uuid"] for spelling in spellings}
        assert len(loaded) == 1
        assert client.head(f"namespaces/{level}%1F{level}/views/{level}") == 404
        assert client.delete(f"{tables}/{level}")[0] == 204


def test_plus_and_blank_are_two_names(db: Client):
    db.post("namespaces/db/tables", create_body("x+y"))
    assert error_of(db.get("namespaces/db/tables/x+y"))[2] == "Table does not exist: db.x y"
    assert error_of(db.get("namespaces/db/views/x+y"))[2] == "View does not exist: db.x y"
    assert db.head("namespaces/db/tables/x%2By") == 204


def test_property_cannot_be_set_and_removed_at_once(db: Client):
    both = {"removals": ["a"], "updates": {"a": "1"}}
    assert error_of(db.post("namespaces/db/properties", both))[:2] == (422, "UnprocessableEntityException")


def test_pages_follow_each_other_without_gap_though_names_vanish_meanwhile(db: Client):
    for name in "abcde":
        db.post("namespaces/db/tables", create_body(name))
    first = db.get("namespaces/db/tables", params={"pageToken": "", "pageSize": "2"})[1]
    assert [table["name"] for table in first["identifiers"]] == ["a", "b"]
    db.delete("namespaces/db/tables/b")
    token = first["next-page-token"]
    second = db.get("namespaces/db/tables", params={"pageToken": token, "pageSize": "3"})[1]
    assert [table["name"] for table in second["identifiers"]] == ["c", "d", "e"]
    assert second["next-page-token"] is None


def test_namespaces_are_paged_below_their_parent(client: Client):
    for levels in (["p"], ["p", "a"], ["p", "b"], ["p", "c"], ["q"]):
        client.post("namespaces", {"namespace": levels})
    first = client.get("namespaces", params={"parent": "p", "pageToken": "", "pageSize": "2"})[1]
    rest = client.get("namespaces", params={"parent": "p", "pageToken": first["next-page-token"]})[1]
    assert first["namespaces"] + rest["namespaces"] == [["p", "a"], ["p", "b"], ["p", "c"]]


def test_client_that_does_not_page_gets_everything(start_server: Callable[..., Server], connect: Connect):
    client = connect(start_server(page_default_items=2, page_max_items=2))
    for name in "abc":
        client.post("namespaces", {"namespace": [name]})
    everything = client.get("namespaces")[1]
    assert (len(everything["namespaces"]), everything["next-page-token"]) == (3, None)
    assert len(client.get("namespaces", params={"pageToken": "", "pageSize": "100"})[1]["namespaces"]) == 2


def test_parent_that_was_encoded_twice_is_found(client: Client):
    client.post("namespaces", {"namespace": ["a b"]})
    client.post("namespaces", {"namespace": ["a b", "c"]})
    assert client.get("namespaces?parent=a%2520b")[1]["namespaces"] == [["a b", "c"]]


def test_any_metrics_report_is_accepted(db: Client):
    for path in ("namespaces/db/tables/none/metrics", "namespaces/none/tables/none/metrics"):
        assert parsed(db.send("POST", path, data=b"not json"))[0] == 204


def test_s3_clients_get_the_endpoint_but_no_secret():
    storage = StorageConfig(
        warehouse="s3://bucket/lake",
        s3_endpoint="http://s3:9000",
        s3_region="eu-1",
        s3_path_style=True,
        s3_access_key_id="me",
        s3_secret_access_key="hidden",
    )
    assert Warehouse(storage).client_config() == {
        "s3.endpoint": "http://s3:9000",
        "s3.path-style-access": "true",
        "client.region": "eu-1",
        "s3.region": "eu-1",
    }
    assert "hidden" not in repr(storage)
