"""Views over HTTP with raw requests, and their document rules."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lakefeed.locations import parse_location
from tests.catalog.conftest import Client
from tests.catalog.documents import create_body, field, schema
from tests.catalog.routes.test_http import error_of

VIEWS = "namespaces/db/views"
VIEW = "namespaces/db/views/v"


def query(sql: str = "SELECT 1", dialect: str = "spark") -> dict[str, str]:
    return {"type": "sql", "sql": sql, "dialect": dialect}


def version(*queries: dict[str, str], number: int = 1, schema_id: int = 0) -> dict[str, Any]:
    return {
        "version-id": number,
        "timestamp-ms": 1_700_000_000_000,
        "schema-id": schema_id,
        "summary": {"engine-name": "spark"},
        "representations": list(queries or [query()]),
        "default-namespace": ["db"],
    }


def view_body(name: str = "v", *queries: dict[str, str], **more: Any) -> dict[str, Any]:
    return {"name": name, "schema": schema(field(7, "a")), "view-version": version(*queries), "properties": {}, **more}


def replaced_by(new: dict[str, Any], *more: dict[str, Any], uuid: str | None = None) -> dict[str, Any]:
    updates = [*more, {"action": "add-view-version", "view-version": new}]
    updates.append({"action": "set-current-view-version", "view-version-id": -1})
    requirements = [{"type": "assert-view-uuid", "uuid": uuid}] if uuid else []
    return {"requirements": requirements, "updates": updates}


def set_properties(**properties: str) -> dict[str, Any]:
    return {"action": "set-properties", "updates": {name.replace("_", "."): text for name, text in properties.items()}}


@pytest.fixture
def db(client: Client) -> Client:
    client.post("namespaces", {"namespace": ["db"]})
    return client


@pytest.fixture
def view(db: Client) -> Client:
    assert db.post(VIEWS, view_body())[0] == 200
    return db


def test_new_view_has_its_first_version_and_keeps_the_field_ids_it_was_sent(db: Client):
    status, body = db.post(VIEWS, view_body(properties={"owner": "me"}))
    document = body["metadata"]
    assert status == 200
    assert document["schemas"] == [{**schema(field(7, "a")), "schema-id": 0}]
    assert document["current-version-id"] == 1
    assert [entry["version-id"] for entry in document["version-log"]] == [1]
    assert document["properties"] == {"owner": "me"}
    assert Path(parse_location(body["metadata-location"]).path).is_file()
    assert db.get(VIEW) == (200, body)
    assert db.head(VIEW) == 204


def test_view_is_listed_renamed_dropped_and_registered_again(view: Client):
    location = view.get(VIEW)[1]["metadata-location"]
    rename = {"source": {"namespace": ["db"], "name": "v"}, "destination": {"namespace": ["db"], "name": "w"}}
    assert view.get(VIEWS)[1]["identifiers"] == [{"namespace": ["db"], "name": "v"}]
    assert view.get("namespaces/db/tables")[1]["identifiers"] == []
    assert view.post("views/rename", rename)[0] == 204
    assert error_of(view.get(VIEW)) == (404, "NoSuchViewException", "View does not exist: db.v")
    assert view.delete(f"{VIEWS}/w")[0] == 204
    assert view.get(VIEWS)[1]["identifiers"] == []
    register = {"name": "again", "metadata-location": location}
    assert view.post("namespaces/db/register-view", register)[0] == 200
    assert view.get(f"{VIEWS}/again")[1]["metadata-location"] == location
    assert error_of(view.post("namespaces/db/register-view", register))[:2] == (409, "AlreadyExistsException")


def test_tables_and_views_share_their_names(view: Client):
    view.post("namespaces/db/tables", create_body("t"))
    taken = error_of(view.post("namespaces/db/tables", create_body("v")))
    assert taken == (409, "AlreadyExistsException", "View with same name already exists: db.v")
    staged = view.post("namespaces/db/tables", {**create_body("v"), "stage-create": True})
    assert error_of(staged)[2] == "View with same name already exists: db.v"
    taken = error_of(view.post(VIEWS, view_body("t")))
    assert taken == (409, "AlreadyExistsException", "Table with same name already exists: db.t")
    assert error_of(view.post(VIEWS, view_body("v")))[2] == "View already exists: db.v"
    rename = {"source": {"namespace": ["db"], "name": "v"}, "destination": {"namespace": ["db"], "name": "t"}}
    assert error_of(view.post("views/rename", rename))[2] == "Cannot rename db.v to db.t. Table already exists"
    rename = {"source": {"namespace": ["db"], "name": "t"}, "destination": {"namespace": ["db"], "name": "v"}}
    assert error_of(view.post("tables/rename", rename))[2] == "Cannot rename db.t to db.v. View already exists"
    assert error_of(view.get(f"{VIEWS}/t"))[1] == "NoSuchViewException"
    assert error_of(view.get("namespaces/db/tables/v"))[1] == "NoSuchTableException"
    assert error_of(view.delete("namespaces/db"))[:2] == (409, "NamespaceNotEmptyException")


def test_two_replaces_that_send_the_same_version_number_get_two(view: Client):
    for sql in ("SELECT 2", "SELECT 3"):
        assert view.post(VIEW, replaced_by(version(query(sql), number=2)))[0] == 200
    document = view.get(VIEW)[1]["metadata"]
    assert [known["version-id"] for known in document["versions"]] == [1, 2, 3]
    assert document["current-version-id"] == 3
    assert [entry["version-id"] for entry in document["version-log"]] == [1, 2, 3]


def test_replace_with_an_old_version_finds_it_again(view: Client):
    view.post(VIEW, replaced_by(version(query("SELECT 2"), number=2)))
    document = view.post(VIEW, replaced_by(version(number=3)))[1]["metadata"]
    assert [known["version-id"] for known in document["versions"]] == [1, 2]
    assert document["current-version-id"] == 1
    assert [entry["version-id"] for entry in document["version-log"]] == [1, 2, 1]


def test_commit_that_changes_nothing_writes_no_file(view: Client):
    before = view.get(VIEW)[1]["metadata-location"]
    assert view.post(VIEW, replaced_by(version(number=1)))[1]["metadata-location"] == before
    assert view.post(VIEW, {"updates": [set_properties(a="1")]})[1]["metadata-location"] != before


def test_replace_of_another_view_of_that_name_is_a_conflict(view: Client):
    answer = view.post(VIEW, replaced_by(version(number=2), uuid="00000000-0000-0000-0000-000000000000"))
    status, kind, message = error_of(answer)
    assert (status, kind) == (409, "CommitFailedException")
    assert message.startswith("Requirement failed: view UUID does not match")


def test_replace_that_loses_a_dialect_is_refused_unless_allowed(view: Client):
    other = replaced_by(version(query(dialect="trino"), number=2))
    status, kind, message = error_of(view.post(VIEW, other))
    assert (status, kind) == (400, "IllegalArgumentException")
    assert "loss of view dialects" in message
    allowed = {"action": "set-properties", "updates": {"replace.drop-dialect.allowed": "true"}}
    assert view.post(VIEW, replaced_by(version(query(dialect="trino"), number=2), allowed))[0] == 200


def test_only_the_newest_versions_are_kept_and_the_log_ends_there(view: Client):
    keep = {"action": "set-properties", "updates": {"version.history.num-entries": "2"}}
    view.post(VIEW, {"updates": [keep]})
    for number in (2, 3, 4):
        document = view.post(VIEW, replaced_by(version(query(f"SELECT {number}"), number=number)))[1]["metadata"]
    assert [known["version-id"] for known in document["versions"]] == [3, 4]
    assert [entry["version-id"] for entry in document["version-log"]] == [3, 4]


@pytest.mark.parametrize(
    ("body", "kind", "words"),
    [
        (view_body("v", query(), query()), "IllegalArgumentException", "multiple queries for dialect spark"),
        ({"name": "v", "schema": schema()}, "BadRequestException", "view-version"),
        (view_body("v") | {"schema": {"type": "list"}}, "BadRequestException", "type must be struct"),
        (view_body(""), "BadRequestException", "view name"),
    ],
)
def test_bad_view_is_refused_with_its_rule(db: Client, body: dict[str, Any], kind: str, words: str):
    status, found, message = error_of(db.post(VIEWS, body))
    assert (status, found) == (400, kind)
    assert words in message


@pytest.mark.parametrize(
    ("update", "words"),
    [
        ({"action": "add-snapshot"}, "unknown action: add-snapshot"),
        ({"action": "set-current-view-version", "view-version-id": 9}, "unknown version: 9"),
        ({"action": "set-current-view-version", "view-version-id": -1}, "no current version id has been set"),
        ({"action": "add-view-version", "view-version": version(schema_id=9)}, "unknown schema: 9"),
        ({"action": "add-view-version", "view-version": version(schema_id=-1)}, "no schema has been added"),
        ({"action": "assign-uuid", "uuid": "00000000-0000-0000-0000-000000000000"}, "Cannot reassign uuid"),
        ({"action": "upgrade-format-version", "format-version": 2}, "unsupported format version: v2"),
        ({"action": "set-properties", "updates": {"version.history.num-entries": "0"}}, "must be positive"),
    ],
)
def test_bad_view_update_is_refused_with_its_rule(view: Client, update: dict[str, Any], words: str):
    status, _, message = error_of(view.post(VIEW, {"updates": [update]}))
    assert status == 400
    assert words in message


def test_view_in_a_missing_namespace_is_refused_by_what_is_missing(client: Client):
    assert error_of(client.post(VIEWS, view_body()))[1] == "NoSuchNamespaceException"
    assert error_of(client.get(VIEW))[1] == "NoSuchViewException"
    assert error_of(client.get(VIEWS))[1] == "NoSuchNamespaceException"
