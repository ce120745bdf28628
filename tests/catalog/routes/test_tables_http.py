"""Tables over HTTP with raw requests: create, load, commit, register, drop."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from lakefeed.catalog.config import Warehouse
from lakefeed.locations import parse_location
from tests.catalog.conftest import Client, Server
from tests.catalog.documents import append, create_body, field, require_main, schema, set_main
from tests.catalog.routes.test_http import Connect, error_of

TABLES = "namespaces/db/tables"
TABLE = "namespaces/db/tables/t"


@pytest.fixture
def db(client: Client) -> Client:
    client.post("namespaces", {"namespace": ["db"]})
    return client


@pytest.fixture
def table(db: Client) -> Client:
    assert db.post(TABLES, create_body())[0] == 200
    return db


def path_of(location: str) -> Path:
    return Path(parse_location(location).path)


def commit(client: Client, *updates: dict, requirements: tuple[dict, ...] = ()) -> tuple[int, dict]:
    return client.post(TABLE, {"requirements": list(requirements), "updates": list(updates)})


def set_property(name: str, value: str) -> dict:
    return {"action": "set-properties", "updates": {name: value}}


def test_new_table_has_metadata_in_a_file_and_directories_to_write_to(db: Client, warehouse: Warehouse):
    status, body = db.post(TABLES, create_body())
    location = body["metadata"]["location"]
    assert status == 200
    assert location == f"{warehouse.location}/db/t-{body['metadata']['table-uuid']}"
    assert json.loads(path_of(body["metadata-location"]).read_bytes()) == body["metadata"]
    assert path_of(body["metadata-location"]).name.startswith("00000-")
    assert path_of(f"{location}/data").is_dir()
    assert db.get(TABLE)[1] == body
    assert body["config"] == {}


def test_new_table_with_the_old_name_of_a_renamed_one_gets_its_own_location(table: Client):
    first = table.get(TABLE)[1]["metadata"]["location"]
    rename = {"source": {"namespace": ["db"], "name": "t"}, "destination": {"namespace": ["db"], "name": "u"}}
    assert table.post("tables/rename", rename)[0] == 204
    assert table.post(TABLES, create_body())[1]["metadata"]["location"] != first
    assert table.get("namespaces/db/tables/u")[1]["metadata"]["location"] == first


def test_rename_to_a_name_in_use_or_a_missing_namespace_is_rejected(table: Client):
    table.post(TABLES, create_body("u"))

    def rename(source: str, *destination: str) -> tuple[int, str, str]:
        target = {"namespace": list(destination[:-1]), "name": destination[-1]}
        return error_of(
            table.post("tables/rename", {"source": {"namespace": ["db"], "name": source}, "destination": target})
        )

    assert rename("t", "db", "u") == (409, "AlreadyExistsException", "Cannot rename db.t to db.u. Table already exists")
    assert rename("none", "db", "x")[:2] == (404, "NoSuchTableException")
    assert rename("t", "none", "x")[:2] == (404, "NoSuchNamespaceException")


def test_staged_create_stores_nothing_until_it_is_committed(db: Client):
    status, body = db.post(TABLES, create_body(**{"stage-create": True}))
    assert (status, body["metadata-location"]) == (200, None)
    assert path_of(body["metadata"]["location"] + "/metadata").is_dir()
    assert db.head(TABLE) == 404
    metadata = body["metadata"]
    updates = [
        {"action": "assign-uuid", "uuid": metadata["table-uuid"]},
        {"action": "upgrade-format-version", "format-version": 2},
        {"action": "add-schema", "schema": metadata["schemas"][0]},
        {"action": "add-spec", "spec": metadata["partition-specs"][0]},
        {"action": "set-default-spec", "spec-id": -1},
        {"action": "set-location", "location": metadata["location"]},
        {"action": "set-current-schema", "schema-id": -1},
        *append(7, 1),
    ]
    create = ({"type": "assert-create"},)
    status, body = commit(db, *updates, requirements=create)
    assert (status, body["metadata"]["table-uuid"]) == (200, metadata["table-uuid"])
    assert body["metadata"]["current-snapshot-id"] == 7
    assert body["metadata"]["metadata-log"] == []
    assert "config" not in body
    answer = error_of(commit(db, *updates, requirements=create))
    assert answer == (409, "CommitFailedException", "Requirement failed: table already exists")
    assert error_of(db.post(TABLES, create_body(**{"stage-create": True})))[1] == "AlreadyExistsException"


def test_commit_writes_the_next_version_and_logs_the_one_before(table: Client):
    before = table.get(TABLE)[1]
    status, after = commit(table, *append(1, 1), requirements=(require_main(None),))
    assert status == 200
    assert path_of(after["metadata-location"]).name.startswith("00001-")
    logged = after["metadata"]["metadata-log"]
    assert [entry["metadata-file"] for entry in logged] == [before["metadata-location"]]
    assert table.get(TABLE)[1]["metadata"] == after["metadata"]


def test_failed_requirement_is_a_conflict_and_changes_nothing(table: Client):
    before = table.get(TABLE)[1]
    answer = error_of(commit(table, *append(1, 1), requirements=(require_main(5),)))
    assert answer[:2] == (409, "CommitFailedException")
    assert answer[2].startswith("Requirement failed: branch or tag main is missing")
    assert table.get(TABLE)[1] == before


def test_commit_without_effect_writes_no_file(table: Client):
    before = table.get(TABLE)[1]
    status, after = commit(table, {"action": "remove-properties", "removals": ["none"]})
    assert (status, after["metadata-location"]) == (200, before["metadata-location"])
    assert len(list(path_of(before["metadata-location"]).parent.iterdir())) == 1


def test_unknown_fields_survive_a_commit_and_a_restart(
    db: Client, start_server: Callable[..., Server], connect: Connect
):
    made = db.post(TABLES, create_body("made"))[1]
    document = {**made["metadata"], "future-field": {"deep": [1, None, "é"]}, "future-null": None}
    document["schemas"][0]["fields"][0]["future-mark"] = 7
    place = path_of(made["metadata-location"]).with_name("00004-foreign.metadata.json")
    place.write_text(json.dumps(document))
    assert db.post("namespaces/db/register", {"name": "t", "metadata-location": f"file://{place}"})[0] == 200
    assert commit(db, set_property("a", "1"))[0] == 200
    reloaded = connect(start_server()).get(TABLE)[1]
    assert reloaded["metadata"]["future-field"] == {"deep": [1, None, "é"]}
    assert "future-null" in reloaded["metadata"]
    assert reloaded["metadata"]["schemas"][0]["fields"][0]["future-mark"] == 7
    assert path_of(reloaded["metadata-location"]).name.startswith("00005-")


def test_v3_table_counts_rows_from_zero_and_refuses_ids_given_out_before(db: Client):
    body = db.post(TABLES, create_body(properties={"format-version": "3"}))[1]
    assert (body["metadata"]["format-version"], body["metadata"]["next-row-id"]) == (3, 0)
    assert body["metadata"]["current-snapshot-id"] is None
    assert "format-version" not in body["metadata"]["properties"]
    rows = {"first-row-id": 0, "added-rows": 100}
    assert commit(db, *append(1, 1, **rows))[1]["metadata"]["next-row-id"] == 100
    assert error_of(commit(db, *append(2, 2, 1, **rows)))[:2] == (409, "CommitFailedException")


def test_load_can_leave_out_snapshots_that_nothing_points_at(table: Client):
    commit(table, *append(1, 1))
    commit(table, *append(2, 2, 1))
    shown = table.get(f"{TABLE}?snapshots=refs")[1]["metadata"]["snapshots"]
    assert [snapshot["snapshot-id"] for snapshot in shown] == [2]
    status, after = commit(table, *append(3, 3, 2))
    assert (status, len(after["metadata"]["snapshots"])) == (200, 3)


def test_client_that_has_the_version_already_gets_304(table: Client):
    answer = table.send("GET", TABLE)
    etag = answer.headers["ETag"]
    again = table.send("GET", TABLE, headers={"If-None-Match": etag})
    assert (again.status_code, again.content, again.headers["ETag"]) == (304, b"", etag)
    refs = table.send("GET", f"{TABLE}?snapshots=refs", headers={"If-None-Match": etag})
    assert refs.status_code == 200
    committed = table.send("POST", TABLE, {"requirements": [], "updates": append(1, 1)})
    assert table.send("GET", TABLE, headers={"If-None-Match": etag}).status_code == 200
    newest = committed.headers["ETag"]
    assert table.send("GET", TABLE, headers={"If-None-Match": f'W/"other", {newest}'}).status_code == 304


def test_metadata_log_is_cut_and_files_that_leave_it_are_deleted_when_asked(table: Client):
    limits = {
        "write.metadata.previous-versions-max": "2",
        "write.metadata.delete-after-commit.enabled": "true",
    }
    first = table.get(TABLE)[1]["metadata-location"]
    commit(table, {"action": "set-properties", "updates": limits})
    for number in range(3):
        _, body = commit(table, set_property("n", str(number)))
    logged = [entry["metadata-file"] for entry in body["metadata"]["metadata-log"]]
    kept = sorted(path.name for path in path_of(first).parent.iterdir())
    assert len(logged) == 2
    assert kept == sorted(path_of(location).name for location in (*logged, body["metadata-location"]))


def test_metadata_goes_where_the_table_says(db: Client, warehouse: Warehouse):
    place = f"{warehouse.location}/elsewhere"
    body = db.post(TABLES, create_body(properties={"write.metadata.path": place}))[1]
    assert body["metadata-location"].startswith(f"{place}/00000-")


def test_location_outside_the_warehouse_is_refused_everywhere(table: Client, tmp_path: Path, warehouse: Warehouse):
    outside = f"file://{tmp_path}/outside"
    sneaky = f"{warehouse.location}/../outside"
    assert error_of(table.post(TABLES, create_body("x", location=outside)))[:2] == (403, "ForbiddenException")
    assert error_of(table.post(TABLES, create_body("x", location=sneaky)))[0] == 400
    assert error_of(table.post(TABLES, create_body("x", location=warehouse.location)))[0] == 403
    assert error_of(table.post(TABLES, create_body("x", location="s3://bucket/x")))[0] == 400
    assert error_of(commit(table, {"action": "set-location", "location": outside}))[0] == 403
    assert error_of(commit(table, set_property("write.metadata.path", outside)))[0] == 403
    register = {"name": "x", "metadata-location": f"{outside}/00000-x.metadata.json"}
    assert error_of(table.post("namespaces/db/register", register))[0] == 403
    assert not (tmp_path / "outside").exists()


def test_location_outside_the_warehouse_can_be_allowed_and_is_kept_as_written(
    start_server: Callable[..., Server], connect: Connect, tmp_path: Path
):
    client = connect(start_server(allow_any_location=True))
    client.post("namespaces", {"namespace": ["db"]})
    body = client.post(TABLES, create_body(location=f"file:{tmp_path}/outside/"))[1]
    assert body["metadata"]["location"] == f"file:{tmp_path}/outside"
    assert path_of(body["metadata-location"]).is_relative_to(tmp_path / "outside")


def test_register_refuses_what_is_taken_missing_or_no_metadata(table: Client):
    location = table.get(TABLE)[1]["metadata-location"]
    place = path_of(location)
    place.with_name("bad.metadata.json").write_text("{}")

    def register(name: str, file: Path) -> tuple[int, str, str]:
        return error_of(table.post("namespaces/db/register", {"name": name, "metadata-location": f"file://{file}"}))

    assert register("t", place) == (409, "AlreadyExistsException", "Table already exists: db.t")
    missing = place.with_name("none.metadata.json")
    expected = (404, "NotFoundException", f"Failed to open input stream for file: file://{missing}")
    assert register("u", missing) == expected
    assert register("u", place.with_name("bad.metadata.json"))[0] == 400


def test_register_can_overwrite_with_an_older_version(table: Client):
    old = table.get(TABLE)[1]["metadata-location"]
    commit(table, *append(1, 1))
    body = {"name": "t", "metadata-location": old, "overwrite": True}
    assert table.post("namespaces/db/register", body)[0] == 200
    assert table.get(TABLE)[1]["metadata-location"] == old


def test_registering_reads_the_file_anew_though_one_of_its_name_was_known(table: Client):
    """Writers without a catalog count v1, v2, v3: a table that is made again has the file names of the one before."""
    loaded = table.get(TABLE)[1]
    place = path_of(loaded["metadata-location"]).with_name("v1.metadata.json")
    body = {"name": "hadoop", "metadata-location": f"file://{place}"}
    for owner in ("first", "second"):
        place.write_text(json.dumps(loaded["metadata"] | {"properties": {"owner": owner}}))
        assert table.post("namespaces/db/register", body)[0] == 200
        assert table.get("namespaces/db/tables/hadoop")[1]["metadata"]["properties"] == {"owner": owner}
        assert table.delete("namespaces/db/tables/hadoop")[0] == 204


def test_other_content_under_a_known_name_has_another_tag_and_reaches_every_process(
    table: Client, start_server: Callable[..., Server], connect: Connect
):
    loaded = table.get(TABLE)[1]
    place = path_of(loaded["metadata-location"]).with_name("v1.metadata.json")
    body = {"name": "hadoop", "metadata-location": f"file://{place}", "overwrite": True}
    clients = [table, connect(start_server())]
    tags = []
    for owner in ("first", "second"):
        place.write_text(json.dumps(loaded["metadata"] | {"properties": {"owner": owner}}))
        registered = table.send("POST", "namespaces/db/register", body)
        tags.append(registered.headers["ETag"])
        for client in clients:
            answer = client.send("GET", "namespaces/db/tables/hadoop", headers={"If-None-Match": tags[0]})
            if owner == "second":
                assert answer.status_code == 200
                assert answer.json()["metadata"]["properties"] == {"owner": owner}
            current = client.send("GET", "namespaces/db/tables/hadoop", headers={"If-None-Match": tags[-1]})
            assert (current.status_code, current.headers["ETag"]) == (304, tags[-1])
            assert client.get("namespaces/db/tables/hadoop")[1]["metadata"]["properties"] == {"owner": owner}
    assert tags[0] != tags[1]


def test_file_that_was_written_over_is_served_and_committed_to_only_when_it_is_registered_again(
    table: Client, start_server: Callable[..., Server], connect: Connect
):
    loaded = table.get(TABLE)[1]
    place = path_of(loaded["metadata-location"]).with_name("v1.metadata.json")
    path, register = "namespaces/db/tables/hadoop", {"name": "hadoop", "metadata-location": f"file://{place}"}
    key = {"Idempotency-Key": "0198f3a0-1111-7000-8000-000000000001"}
    place.write_text(json.dumps(loaded["metadata"] | {"properties": {"owner": "first"}}))
    assert table.post("namespaces/db/register", register, headers=key)[0] == 200
    place.write_text(json.dumps(loaded["metadata"] | {"properties": {"owner": "second"}}))
    cold = connect(start_server())
    update = {"requirements": [], "updates": [set_property("a", "1")]}
    message = f"Metadata file has other content than was registered, register it again: file://{place}"
    for answer in (cold.get(path), cold.post(path, update), cold.delete(f"{path}?purgeRequested=true")):
        assert error_of(answer) == (500, "InternalServerError", message)
    assert cold.post("namespaces/db/register", register | {"overwrite": True})[0] == 200
    assert cold.post("namespaces/db/register", register, headers=key)[1]["metadata"]["properties"]["owner"] == "second"
    assert cold.post(path, update)[1]["metadata"]["properties"] == {"owner": "second", "a": "1"}


def test_location_of_a_registered_table_may_end_in_a_slash(table: Client):
    loaded = table.get(TABLE)[1]
    place = path_of(loaded["metadata-location"]).with_name("v1.metadata.json")
    place.write_text(json.dumps(loaded["metadata"] | {"location": loaded["metadata"]["location"] + "/"}))
    assert table.post("namespaces/db/register", {"name": "u", "metadata-location": f"file://{place}"})[0] == 200
    update = {"action": "set-properties", "updates": {"a": "b"}}
    status, answer = table.post("namespaces/db/tables/u", {"requirements": [], "updates": [update]})
    assert (status, "//metadata" in answer["metadata-location"]) == (200, False)


def test_gzipped_metadata_of_other_writers_is_registered(table: Client):
    loaded = table.get(TABLE)[1]
    packed = path_of(loaded["metadata-location"]).with_name("00009-x.gz.metadata.json")
    packed.write_bytes(gzip.compress(json.dumps(loaded["metadata"]).encode()))
    status, body = table.post("namespaces/db/register", {"name": "g", "metadata-location": f"file://{packed}"})
    assert (status, body["metadata"]) == (200, loaded["metadata"])


@pytest.mark.parametrize("purge", ["", "?purgeRequested=False"])
def test_drop_forgets_the_table_and_keeps_its_files(table: Client, purge: str):
    location = table.get(TABLE)[1]["metadata-location"]
    assert table.delete(TABLE + purge)[0] == 204
    assert table.head(TABLE) == 404
    assert path_of(location).is_file()
    assert error_of(table.delete(TABLE))[1] == "NoSuchTableException"


def test_missing_metadata_file_is_noticed_where_that_is_asked_for(
    start_server: Callable[..., Server], connect: Connect
):
    client = connect(start_server(verify_metadata_file=True))
    client.post("namespaces", {"namespace": ["db"]})
    location = client.post(TABLES, create_body())[1]["metadata-location"]
    assert client.get(TABLE)[0] == 200
    path_of(location).unlink()
    expected = (404, "NotFoundException", f"Failed to open input stream for file: {location}")
    assert error_of(client.get(TABLE)) == expected


def test_append_only_table_refuses_other_snapshots_and_going_back(table: Client):
    commit(table, set_property("lakefeed.append-only", "true"))
    commit(table, *append(1, 1))
    assert commit(table, *append(2, 2, 1, operation="replace"))[0] == 200
    for operation in ("overwrite", "delete"):
        status, kind, message = error_of(commit(table, *append(3, 3, 2, operation=operation)))
        assert (status, kind) == (400, "ValidationException")
        assert "lakefeed.append-only" in message
    both = (set_property("lakefeed.append-only", "false"), *append(3, 3, 2, operation="overwrite"))
    assert error_of(commit(table, *both))[0] == 400
    assert error_of(commit(table, set_main(1)))[0] == 400
    assert error_of(commit(table, *append(3, 3)))[0] == 400
    assert commit(table, both[0])[0] == 200
    assert commit(table, *both[1:])[0] == 200


def test_identifier_in_a_commit_must_be_that_of_the_path(table: Client):
    body = {"requirements": [], "updates": [], "identifier": {"namespace": ["db"], "name": "t"}}
    assert table.post(TABLE, body)[0] == 200
    body["identifier"]["name"] = "u"
    assert error_of(table.post(TABLE, body))[0] == 400


def test_namespace_with_a_location_places_its_tables_there(client: Client, warehouse: Warehouse):
    place = f"{warehouse.location}/my/place"
    client.post("namespaces", {"namespace": ["db"], "properties": {"location": place}})
    assert client.post(TABLES, create_body())[1]["metadata"]["location"].startswith(f"{place}/t-")


def test_variant_column_is_refused_before_v3(db: Client):
    columns = {"schema": schema(field(1, "v", "variant"))}
    assert "variant is not supported until v3" in error_of(db.post(TABLES, create_body(**columns)))[2]
    assert db.post(TABLES, create_body(**columns, properties={"format-version": "3"}))[0] == 200


def test_unregistered_table_is_gone_and_its_metadata_can_be_registered_again(table: Client):
    before = table.get(TABLE)[1]
    status, body = table.post(f"{TABLE}/unregister")
    assert status == 200
    assert body == {key: before[key] for key in ("metadata-location", "metadata")}
    assert error_of(commit(table, set_property("a", "1")))[:2] == (404, "NoSuchTableException")
    assert error_of(table.post(f"{TABLE}/unregister"))[:2] == (404, "NoSuchTableException")
    registered = {"name": "again", "metadata-location": body["metadata-location"]}
    assert table.post("namespaces/db/register", registered)[0] == 200


def test_namespaces_have_no_functions(db: Client):
    assert db.get("namespaces/db/functions") == (200, {"identifiers": [], "next-page-token": None})
    assert error_of(db.get("namespaces/db/functions/f"))[:2] == (404, "NoSuchFunctionException")
    assert error_of(db.get("namespaces/none/functions"))[:2] == (404, "NoSuchNamespaceException")


@pytest.mark.parametrize("preference", ["return=minimal", "respond-async, Return=Minimal; foo=bar"])
def test_commit_returns_no_history_if_the_client_prefers_a_minimal_response(client: Client, preference: str):
    client.post("namespaces", {"namespace": ["db"]})
    client.post("namespaces/db/tables", create_body())
    body = {"requirements": [], "updates": append(1, 1)}
    answer = client.send("POST", "namespaces/db/tables/t", body, headers={"Prefer": preference})
    location = client.get("namespaces/db/tables/t")[1]["metadata-location"]
    assert (answer.status_code, answer.json()) == (200, {"metadata-location": location})
    assert answer.headers["Preference-Applied"] == "return=minimal"


def test_commit_returns_the_history_by_default(client: Client):
    client.post("namespaces", {"namespace": ["db"]})
    client.post("namespaces/db/tables", create_body())
    body = {"requirements": [], "updates": append(1, 1)}
    answer = client.send("POST", "namespaces/db/tables/t", body, headers={"Prefer": "return=representation"})
    assert answer.json()["metadata"]["snapshots"][0]["snapshot-id"] == 1
