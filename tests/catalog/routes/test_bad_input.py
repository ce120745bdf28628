"""Wrong input of every kind is answered 400 (or another 4xx), names the field, and changes nothing."""

from __future__ import annotations

from typing import Any

import pytest
from pyiceberg.table.metadata import TableMetadataUtil
from pyiceberg.view.metadata import ViewMetadata

from tests.catalog.conftest import Client, parsed
from tests.catalog.documents import add_snapshot, create_body, field, schema
from tests.catalog.good_requests import BODIES, NESTED, ORDER, REQUIREMENTS, SPEC, UPDATES, VIEW_UPDATES
from tests.catalog.routes.test_http import error_of
from tests.catalog.routes.test_tables_http import TABLE, TABLES, commit

WRONG = (None, True, 7, 1.5, "text", [], [1], {}, {"x": 1}, 2**70)


@pytest.fixture
def table(client: Client) -> Client:
    client.post("namespaces", {"namespace": ["db"]})
    assert client.post(TABLES, create_body())[0] == 200
    return client


def variants(document: Any) -> list[Any]:
    """Put every wrong value in every place of a document, and leave every field out."""
    found = [value for value in WRONG if value != document]
    if isinstance(document, dict):
        for key, inner in document.items():
            found += [{**document, key: wrong} for wrong in variants(inner)]
            found.append({name: value for name, value in document.items() if name != key})
    if isinstance(document, list):
        for index, inner in enumerate(document):
            found += [[*document[:index], wrong, *document[index + 1 :]] for wrong in variants(inner)]
    return found


def assert_never_a_server_error(client: Client, path: str, bodies: list[Any]) -> None:
    for body in bodies:
        status, answer = client.post(path, body)
        assert status < 500, (body, answer)
        if status >= 400:
            error_of((status, answer))


@pytest.mark.parametrize("update", UPDATES, ids=lambda update: update["action"])
def test_malformed_update_is_no_server_error_and_leaves_a_readable_table(table: Client, update: dict):
    commit(table, add_snapshot(5, 1))
    assert_never_a_server_error(table, TABLE, [{"requirements": [], "updates": [wrong]} for wrong in variants(update)])
    metadata = table.get(TABLE)[1]["metadata"]
    for statistics in metadata["statistics"]:
        for blob in statistics["blob-metadata"]:
            blob["type"] = "deletion-vector-v1"  # Any type is allowed, but PyIceberg reads two.
    TableMetadataUtil.parse_obj(metadata)


def test_malformed_requirements_are_refused(table: Client):
    for requirement in REQUIREMENTS:
        bodies = [{"requirements": [wrong], "updates": []} for wrong in variants(requirement)]
        assert_never_a_server_error(table, TABLE, bodies)


def test_malformed_create_is_never_a_server_error(table: Client):
    body = create_body("x", schema=NESTED, properties={"format-version": "2"}, location=None)
    bodies = variants({**body, "partition-spec": SPEC, "write-order": ORDER, "stage-create": True})
    assert_never_a_server_error(table, TABLES, bodies)


def test_every_operation_that_takes_a_body_is_tried_with_bad_ones(table: Client):
    advertised = table.get("config")[1]["endpoints"]
    posts = {endpoint.removeprefix("POST /v1/{prefix}/") for endpoint in advertised if endpoint.startswith("POST ")}
    assert posts == set(BODIES)


@pytest.mark.parametrize("endpoint", sorted(BODIES))
def test_malformed_body_is_never_a_server_error(table: Client, endpoint: str):
    view = {**BODIES["namespaces/{namespace}/views"], "name": "v"}
    assert table.post("namespaces/db/views", view)[0] == 200
    path = endpoint.format(namespace="db", table="t", view="v")
    assert_never_a_server_error(table, path, variants(BODIES[endpoint]))


@pytest.mark.parametrize("update", VIEW_UPDATES, ids=lambda update: update["action"])
def test_malformed_view_update_is_no_server_error_and_leaves_a_readable_view(table: Client, update: dict):
    view = {**BODIES["namespaces/{namespace}/views"], "name": "v"}
    assert table.post("namespaces/db/views", view)[0] == 200
    path = "namespaces/db/views/v"
    assert_never_a_server_error(table, path, [{"requirements": [], "updates": [wrong]} for wrong in variants(update)])
    ViewMetadata.model_validate(table.get(path)[1]["metadata"])


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'"text"', b"\xff", b"[" * 5000])
def test_body_that_is_no_json_object_is_refused(table: Client, body: bytes):
    for path in ("namespaces", TABLES, TABLE, "tables/rename", "namespaces/db/register", "namespaces/db/properties"):
        assert error_of(parsed(table.send("POST", path, data=body)))[:2] == (400, "BadRequestException")


def test_body_that_is_not_encoded_as_it_says_is_refused(table: Client):
    answer = table.send("POST", "namespaces", data=b"no gzip", headers={"Content-Encoding": "gzip"})
    assert error_of(parsed(answer))[:2] == (400, "BadRequestException")


@pytest.mark.parametrize(
    ("path", "params"),
    [
        ("namespaces", {"pageToken": "", "pageSize": "0"}),
        ("namespaces", {"pageToken": "", "pageSize": "many"}),
        ("namespaces", {"pageToken": "???"}),
        ("namespaces", {"pageToken": "/w=="}),
        ("namespaces", {"pageToken": "YQBi"}),  # a zero byte, which PostgreSQL takes in no text
        ("namespaces", {"pageToken": "", "pageSize": "9" * 5_000}),
        (TABLE, {"snapshots": "some"}),
        ("namespaces/a%1F", {}),
        ("namespaces/" + "x" * 600, {}),
        ("namespaces/" + "%1F".join("abcdefghijklmnopqrst"), {}),
        ("namespaces/db/tables/a%1Fb", {}),
    ],
)
def test_bad_path_or_query_is_refused(table: Client, path: str, params: dict):
    assert error_of(table.get(path, params=params))[:2] == (400, "BadRequestException")


# Python refuses to read a number of more than 4,300 digits, with an error of its own.
ENDLESS = "9" * 5_000


def test_endless_number_is_no_server_error(table: Client):
    spec = {**SPEC, "fields": [{**SPEC["fields"][0], "transform": f"bucket[{ENDLESS}]"}]}
    bodies = [
        create_body("x", properties={"format-version": ENDLESS}),
        create_body("x", schema=schema(field(1, "id", f"fixed[{ENDLESS}]"))),
        create_body("x", **{"partition-spec": spec}),
    ]
    assert [error_of(table.post(TABLES, body))[0] for body in bodies] == [400, 400, 400]
    history = {"action": "set-properties", "updates": {"write.metadata.previous-versions-max": ENDLESS}}
    assert [commit(table, history)[0] for _ in range(2)] == [200, 200]
    view = BODIES["namespaces/{namespace}/views"] | {"properties": {"version.history.num-entries": ENDLESS}}
    assert error_of(table.post("namespaces/db/views", view))[0] == 400


@pytest.mark.parametrize("name", ["%FF", "%ED%A0%80", "%00", "a%00b", "%F4%90%80%80"])
def test_name_that_is_no_text_is_no_server_error(table: Client, name: str):
    paths = (
        f"namespaces/{name}",
        f"namespaces/{name}/tables",
        f"namespaces/db/tables/{name}",
        f"namespaces?parent={name}",
    )
    assert all(400 <= table.get(path)[0] < 500 for path in paths)


def test_location_at_which_no_file_can_be_is_no_server_error(table: Client):
    location = table.get(TABLE)[1]["metadata-location"]
    directory = location.rpartition("/")[0]
    places = {f"{directory}/{'x' * 300}": 400, f"{directory}/{'x/' * 3_000}": 400, directory: 404, f"{location}/x": 404}
    for place, status in places.items():
        for kind in ("register", "register-view"):
            assert table.post(f"namespaces/db/{kind}", {"name": "x", "metadata-location": place})[0] == status
    too_long = {"action": "set-location", "location": f"{directory}/{'x' * 300}"}
    assert error_of(commit(table, too_long))[:2] == (400, "BadRequestException")
    assert error_of(table.post(TABLES, create_body("x", location=too_long["location"])))[0] == 400
    assert commit(table, add_snapshot(5, 1))[0] == 200


def test_unknown_updates_and_requirements_are_refused(table: Client):
    assert "unknown action: fly" in error_of(commit(table, {"action": "fly"}))[2]
    assert "unknown type: hope" in error_of(commit(table, requirements=({"type": "hope"},)))[2]
    both = ({"type": "assert-create"}, {"type": "assert-table-uuid", "uuid": "u"})
    assert error_of(commit(table, requirements=both))[0] == 400


def test_deeply_nested_schema_is_refused(table: Client):
    type_: Any = "long"
    for depth in range(300):
        type_ = {"type": "list", "element-id": depth + 2, "element": type_, "element-required": False}
    status, kind, message = error_of(table.post(TABLES, create_body("x", schema=schema(field(1, "deep", type_)))))
    assert (status, kind) == (400, "BadRequestException")
    assert "nested deeper" in message
