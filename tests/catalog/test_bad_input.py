"""Wrong input of every kind is answered 400 (or another 4xx), names the field, and changes nothing."""

from __future__ import annotations

from typing import Any

import pytest
from pyiceberg.table.metadata import TableMetadataUtil
from pyiceberg.view.metadata import ViewMetadata

from tests.catalog.conftest import Client, parsed
from tests.catalog.documents import UUID, add_snapshot, create_body, field, schema, set_main, snapshot
from tests.catalog.test_http import error_of
from tests.catalog.test_tables_http import TABLE, TABLES, commit

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


NESTED = schema(
    field(1, "id", required=True),
    field(2, "s", {"type": "struct", "fields": [field(3, "x", "decimal(9, 2)")]}),
    field(4, "l", {"type": "list", "element-id": 5, "element": "string", "element-required": False}),
    field(6, "m", {"type": "map", "key-id": 7, "key": "string", "value-id": 8, "value": "int", "value-required": True}),
    **{"identifier-field-ids": [1]},
)
SPEC = {"spec-id": 0, "fields": [{"source-id": 1, "field-id": 1000, "transform": "bucket[4]", "name": "b"}]}
ORDER = {
    "order-id": 1,
    "fields": [{"source-id": 1, "transform": "identity", "direction": "asc", "null-order": "nulls-first"}],
}
STATISTICS = {
    "snapshot-id": 5,
    "statistics-path": "p",
    "file-size-in-bytes": 1,
    "file-footer-size-in-bytes": 1,
    "blob-metadata": [{"type": "b", "snapshot-id": 5, "sequence-number": 1, "fields": [1]}],
}
UPDATES = [
    {"action": "assign-uuid", "uuid": UUID},
    {"action": "upgrade-format-version", "format-version": 2},
    {"action": "add-schema", "schema": NESTED},
    {"action": "set-current-schema", "schema-id": 0},
    {"action": "remove-schemas", "schema-ids": [9]},
    {"action": "add-spec", "spec": SPEC},
    {"action": "set-default-spec", "spec-id": 0},
    {"action": "remove-partition-specs", "spec-ids": [9]},
    {"action": "add-sort-order", "sort-order": ORDER},
    {"action": "set-default-sort-order", "sort-order-id": 0},
    {"action": "add-snapshot", "snapshot": snapshot(1, 1, 5)},
    {**set_main(1), "min-snapshots-to-keep": 1, "max-ref-age-ms": 1},
    {"action": "remove-snapshots", "snapshot-ids": [9]},
    {"action": "remove-snapshot-ref", "ref-name": "none"},
    {"action": "set-statistics", "statistics": STATISTICS},
    {"action": "remove-statistics", "snapshot-id": 9},
    {"action": "set-partition-statistics", "partition-statistics": STATISTICS},
    {"action": "remove-partition-statistics", "snapshot-id": 9},
    {"action": "set-location", "location": "file:///x"},
    {"action": "set-properties", "updates": {"a": "b"}},
    {"action": "remove-properties", "removals": ["none"]},
    {"action": "add-encryption-key", "encryption-key": {"key-id": "k", "encrypted-key-metadata": "AA=="}},
    {"action": "remove-encryption-key", "key-id": "none"},
]
REQUIREMENTS = [
    {"type": "assert-create"},
    {"type": "assert-table-uuid", "uuid": "u"},
    {"type": "assert-ref-snapshot-id", "ref": "main", "snapshot-id": 1},
    {"type": "assert-last-assigned-field-id", "last-assigned-field-id": 1},
    {"type": "assert-current-schema-id", "current-schema-id": 1},
    {"type": "assert-last-assigned-partition-id", "last-assigned-partition-id": 1},
    {"type": "assert-default-spec-id", "default-spec-id": 1},
    {"type": "assert-default-sort-order-id", "default-sort-order-id": 1},
]


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


IDENTIFIER = {"namespace": ["db"], "name": "t"}
VERSION = {
    "version-id": 1,
    "timestamp-ms": 1,
    "schema-id": -1,
    "summary": {"engine-name": "spark"},
    "representations": [{"type": "sql", "sql": "SELECT 1", "dialect": "spark"}],
    "default-catalog": None,
    "default-namespace": ["db"],
}
VIEW_UPDATES = [
    {"action": "assign-uuid", "uuid": UUID},
    {"action": "upgrade-format-version", "format-version": 1},
    {"action": "add-schema", "schema": NESTED},
    {"action": "add-view-version", "view-version": VERSION},
    {"action": "set-current-view-version", "view-version-id": -1},
    {"action": "set-location", "location": "file:///x"},
    {"action": "set-properties", "updates": {"a": "b"}},
    {"action": "remove-properties", "removals": ["none"]},
]
FILTER = {"type": "and", "left": {"type": "eq", "term": "id", "value": 1}, "right": {"type": "is-null", "term": "id"}}
# A good body of every operation that takes one, by its endpoint; {view} and {table} exist.
BODIES: dict[str, Any] = {
    "namespaces": {"namespace": ["a"], "properties": {"a": "b"}},
    "namespaces/{namespace}/properties": {"removals": ["a"], "updates": {"b": "c"}},
    "namespaces/{namespace}/tables": create_body("x"),
    "namespaces/{namespace}/tables/{table}": {"identifier": IDENTIFIER, "requirements": [], "updates": []},
    "namespaces/{namespace}/tables/{table}/unregister": {},
    "namespaces/{namespace}/tables/{table}/metrics": {"report-type": "scan-report", "table-name": "t"},
    "namespaces/{namespace}/tables/{table}/plan": {
        "snapshot-id": 5,
        "select": ["id"],
        "filter": FILTER,
        "case-sensitive": True,
        "use-snapshot-schema": False,
        "start-snapshot-id": 1,
        "end-snapshot-id": 5,
        "stats-fields": ["id"],
        "min-rows-requested": 1,
    },
    "namespaces/{namespace}/tables/{table}/tasks": {"plan-task": "task"},
    "namespaces/{namespace}/register": {"name": "t", "metadata-location": "file:///x", "overwrite": True},
    "tables/rename": {"source": IDENTIFIER, "destination": {**IDENTIFIER, "name": "u"}},
    "transactions/commit": {
        "table-changes": [{"identifier": IDENTIFIER, "requirements": REQUIREMENTS[:2], "updates": UPDATES[:2]}]
    },
    "namespaces/{namespace}/views": {"name": "x", "schema": NESTED, "view-version": VERSION, "properties": {}},
    "namespaces/{namespace}/views/{view}": {
        "identifier": {**IDENTIFIER, "name": "v"},
        "requirements": [{"type": "assert-view-uuid", "uuid": UUID}],
        "updates": VIEW_UPDATES[:1],
    },
    "namespaces/{namespace}/register-view": {"name": "x", "metadata-location": "file:///x"},
    "views/rename": {
        "source": {**IDENTIFIER, "name": "v"},
        "destination": {**IDENTIFIER, "name": "w"},
    },
}


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
