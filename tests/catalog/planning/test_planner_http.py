"""Scan planning over HTTP: responses, pages, plans that are fetched later, limits and errors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyiceberg.catalog.rest import RestCatalog
from pyiceberg.table import Table
from pyiceberg.table.snapshots import Operation
from pyiceberg.types import LongType

from tests.catalog.conftest import Client, Server
from tests.catalog.planning.conftest import DAY_US, PATH, PlanResult, all_tasks, append, rows

RunPlan = Callable[..., PlanResult]

OF_DAY_TWO = {
    "type": "and",
    "left": {"type": "gt-eq", "term": "at", "value": 2 * DAY_US},
    "right": {"type": "lt", "term": "at", "value": 3 * DAY_US},
}


def error_of(answer: tuple[int, Any]) -> tuple[int, str, str]:
    status, body = answer
    assert body["error"]["code"] == status
    return status, body["error"]["type"], body["error"]["message"]


def test_scan_without_filter_lists_every_file_of_the_current_snapshot(table: Table, plan: RunPlan):
    planned = plan()
    assert planned.sizes == [1, 2, 3]
    assert planned.first["plan-id"]
    assert "delete-files" not in planned.first


def test_data_file_is_shown_by_the_specification(table: Table, plan: RunPlan):
    [task] = plan(OF_DAY_TWO, stats_fields=["id"]).tasks
    [file] = [file for file in table.inspect.files().to_pylist() if file["record_count"] == 2]
    shown = task["data-file"]
    assert shown["file-path"] == file["file_path"]
    assert (shown["content"], shown["file-format"], shown["spec-id"]) == ("data", "parquet", 0)
    assert shown["partition"] == ["1970-01-03"]
    assert (shown["file-size-in-bytes"], shown["record-count"]) == (file["file_size_in_bytes"], 2)
    assert shown["value-counts"] == {"keys": [1], "values": [2]}
    assert shown["lower-bounds"] == {"keys": [1], "values": ["1400000000000000"]}
    assert shown["upper-bounds"] == {"keys": [1], "values": ["1500000000000000"]}
    assert task["residual-filter"] is True


def test_statistics_are_sent_only_of_the_columns_asked_for(table: Table, plan: RunPlan):
    assert not {"value-counts", "lower-bounds"} & plan().tasks[0]["data-file"].keys()
    assert set(plan(stats_fields=["id", "v"]).tasks[0]["data-file"]["value-counts"]["keys"]) == {1, 3}


def test_files_are_left_out_by_partition_and_by_statistics(table: Table, plan: RunPlan):
    assert plan(OF_DAY_TWO).sizes == [2]
    assert plan({"type": "gt", "term": "id", "value": 20}).sizes == [2, 3]
    assert plan({"type": "starts-with", "term": "v", "value": "v1"}).sizes == [1]
    assert plan({"type": "is-null", "term": "id"}).sizes == []
    assert plan({"type": "eq", "term": {"type": "transform", "transform": "day", "term": "at"}, "value": 3}).sizes == [
        3
    ]
    assert plan({"type": "false"}).sizes == []


def test_residual_is_what_the_reader_has_to_check(table: Table, plan: RunPlan):
    by_id = {"type": "eq", "term": "id", "value": 20}
    [task] = plan({"type": "and", "left": OF_DAY_TWO, "right": by_id}).tasks
    assert task["residual-filter"] == by_id


def test_names_are_matched_without_regard_to_case_if_asked(table: Table, client: Client, plan: RunPlan):
    upper = {"type": "gt", "term": "ID", "value": 20}
    assert plan(upper, case_sensitive=False).sizes == [2, 3]
    assert error_of(client.post(f"{PATH}/plan", {"filter": upper}))[:2] == (400, "ValidationException")


def test_scan_is_of_the_snapshot_named(table: Table, plan: RunPlan):
    first = table.snapshots()[0].snapshot_id
    assert plan(snapshot_id=first).sizes == [1]


def test_scan_uses_the_schema_of_its_snapshot_if_asked(table: Table, client: Client, plan: RunPlan):
    snapshot = table.current_snapshot()
    with table.update_schema() as update:
        update.rename_column("id", "number")
    old, new = ({"type": "gt", "term": name, "value": 20} for name in ("id", "number"))
    assert plan(old, snapshot_id=snapshot.snapshot_id, use_snapshot_schema=True).sizes == [2, 3]
    assert plan(new, snapshot_id=snapshot.snapshot_id).sizes == [2, 3]
    assert error_of(client.post(f"{PATH}/plan", {"filter": old}))[0] == 400


def test_column_that_was_dropped_still_partitions_old_files(pyiceberg: RestCatalog, table: Table, plan: RunPlan):
    with table.update_spec() as update:
        update.remove_field("at_day")
    with table.update_schema() as update:
        update.delete_column("at")
    append(table, rows(4, 40, 41, 42, 43).drop_columns("at"))
    planned = plan({"type": "gt", "term": "id", "value": 21})
    assert planned.sizes == [3, 4]
    assert sorted(map(str, (task["data-file"]["partition"] for task in planned.tasks))) == ["['1970-01-04']", "[]"]


def test_incremental_scan_holds_what_appends_added_after_one_snapshot_up_to_another(table: Table, plan: RunPlan):
    first, second, third = (snapshot.snapshot_id for snapshot in table.snapshots())
    assert plan(start_snapshot_id=first, end_snapshot_id=third).sizes == [2, 3]
    assert plan(start_snapshot_id=first, end_snapshot_id=second).sizes == [2]
    assert plan(start_snapshot_id=third, end_snapshot_id=third).sizes == []
    assert plan(OF_DAY_TWO, start_snapshot_id=first, end_snapshot_id=third).sizes == [2]


def test_incremental_scan_leaves_out_older_files_of_a_merged_manifest(table: Table, plan: RunPlan):
    third = table.current_snapshot().snapshot_id
    merge_manifests(table)
    append(table, rows(4, 40, 41, 42, 43))
    assert len(table.inspect.manifests()) == 1
    assert plan(start_snapshot_id=third, end_snapshot_id=table.current_snapshot().snapshot_id).sizes == [4]


def merge_manifests(table: Table) -> None:
    """Have PyIceberg's appends put all manifests into one."""
    with table.transaction() as transaction:
        transaction.set_properties({"commit.manifest-merge.enabled": "true", "commit.manifest.min-count-to-merge": "2"})


def test_incremental_scan_passes_over_snapshots_that_are_no_appends(pyiceberg: RestCatalog, plan: RunPlan):
    pyiceberg.create_namespace("db")
    table = pyiceberg.create_table("db.t", rows(1, 1).schema)
    for content in (rows(1, 10), rows(2, 20, 21)):
        table.append(content)
    first = table.snapshots()[0].snapshot_id
    table.delete("id = 20")
    assert table.current_snapshot().summary.operation == Operation.OVERWRITE  # and so it added a file of one row
    table.append(rows(3, 30, 31, 32))
    assert plan(start_snapshot_id=first, end_snapshot_id=table.current_snapshot().snapshot_id).sizes == [2, 3]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"snapshot-id": 1}, "Cannot find snapshot with ID 1"),
        ({"snapshot-id": 1, "start-snapshot-id": 2, "end-snapshot-id": 3}, "cannot be used with"),
        ({"start-snapshot-id": 2}, "must be given together"),
        ({"end-snapshot-id": 2}, "must be given together"),
        ({"min-rows-requested": -1}, "must not be negative"),
        ({"select": "id"}, "expected a list"),
        ({"stats-fields": ["none"]}, "Cannot find field 'none'"),
        ({"case-sensitive": "yes"}, "expected a boolean"),
        ({"filter": {"type": "eq", "term": "none", "value": 1}}, "Cannot find field 'none'"),
        ({"filter": {"type": "eq", "term": "id", "value": "x"}}, "Invalid value for conversion to type long"),
        ({"filter": {"type": "perhaps"}}, "unknown type"),
        ({"filter": 7}, "expected an object"),
    ],
)
def test_invalid_plan_request_is_rejected(table: Table, client: Client, body: Any, message: str):
    status, _, text = error_of(client.post(f"{PATH}/plan", body))
    assert (status, message in text) == (400, True), text


def test_snapshot_that_is_no_ancestor_cannot_start_a_scan(table: Table, client: Client):
    first, last = table.snapshots()[0].snapshot_id, table.current_snapshot().snapshot_id
    status, _, text = error_of(client.post(f"{PATH}/plan", {"start-snapshot-id": last, "end-snapshot-id": first}))
    assert (status, "is not an ancestor" in text) == (400, True)


def test_empty_table_has_no_tasks(pyiceberg: RestCatalog, plan: RunPlan):
    pyiceberg.create_namespace("db")
    pyiceberg.create_table("db.t", rows(1, 1).schema)
    assert plan({"type": "gt", "term": "id", "value": 1}).first["file-scan-tasks"] == []


@pytest.mark.parametrize(
    ("method", "path"), [("POST", "plan"), ("GET", "plan/x"), ("DELETE", "plan/x"), ("POST", "tasks")]
)
def test_every_route_reports_a_missing_table(client: Client, method: str, path: str):
    answer = client.send(method, f"{PATH}/{path}", {"plan-task": "x"} if method == "POST" else None)
    assert error_of((answer.status_code, answer.json()))[:2] == (404, "NoSuchTableException")


def test_missing_plan_and_missing_task_are_reported(table: Table, client: Client):
    assert error_of(client.get(f"{PATH}/plan/none"))[:2] == (404, "NoSuchPlanIdException")
    assert error_of(client.delete(f"{PATH}/plan/none"))[:2] == (404, "NoSuchPlanIdException")
    _, first = client.post(f"{PATH}/plan", {})
    for task in (
        "none",
        "none/1",
        f"{first['plan-id']}/7",
        f"{first['plan-id']}/x",
        f"{first['plan-id']}/{'1' * 9999}",
        first["plan-id"],
    ):
        assert error_of(client.post(f"{PATH}/tasks", {"plan-task": task}))[:2] == (404, "NoSuchPlanTaskException")


def test_plan_of_one_table_is_not_shown_through_another(table: Table, pyiceberg: RestCatalog, client: Client):
    pyiceberg.create_table("db.other", rows(1, 1).schema)
    _, first = client.post(f"{PATH}/plan", {})
    assert client.get(f"{PATH}/plan/{first['plan-id']}")[0] == 200
    answer = client.get(f"namespaces/db/tables/other/plan/{first['plan-id']}")
    assert error_of(answer)[:2] == (404, "NoSuchPlanIdException")


def test_large_scan_comes_in_pages_that_hold_every_file_once(
    start_server: Callable[..., Server], connect: Callable[[Server], Client], table: Table
):
    append(table, rows(4, 40, 41, 42, 43))
    for page_files in (1, 2, 3):
        client = connect(start_server(plan_page_files=page_files))
        _, first = client.post(f"{PATH}/plan", {})
        assert len(first["file-scan-tasks"]) <= page_files
        tasks = all_tasks(client, first)
        assert sorted(task["data-file"]["record-count"] for task in tasks) == [1, 2, 3, 4]


def test_one_manifest_of_many_files_is_cut_into_pages(
    start_server: Callable[..., Server], connect: Callable[[Server], Client], table: Table
):
    merge_manifests(table)
    append(table, rows(4, 40, 41, 42, 43))
    assert len(table.inspect.manifests()) == 1
    client = connect(start_server(plan_page_files=2))
    _, first = client.post(f"{PATH}/plan", {})
    assert len(first["plan-tasks"]) == 1
    assert sorted(task["data-file"]["record-count"] for task in all_tasks(client, first)) == [1, 2, 3, 4]


def test_no_more_pages_are_offered_than_the_rows_requested_need(
    start_server: Callable[..., Server], connect: Callable[[Server], Client], table: Table
):
    client = connect(start_server(plan_page_files=1))
    _, first = client.post(f"{PATH}/plan", {"min-rows-requested": 2})
    assert (len(first["file-scan-tasks"]), "plan-tasks" in first) == (1, False)
    # It is unknown how many rows of a file match that still has to be checked.
    unsettled = {"type": "in", "term": "id", "values": [10, 20, 30, 32]}
    _, first = client.post(f"{PATH}/plan", {"min-rows-requested": 2, "filter": unsettled})
    assert len(all_tasks(client, first)) == 3


def test_plan_that_is_not_waited_for_is_fetched_later(table: Table, client: Client):
    _, submitted = client.post(f"{PATH}/plan", {"filter": OF_DAY_TWO}, headers={"Prefer": "respond-async"})
    assert submitted.keys() == {"status", "plan-id"}
    assert submitted["status"] == "submitted"
    answer = poll(client, submitted["plan-id"])
    assert answer["status"] == "completed"
    assert [task["data-file"]["record-count"] for task in answer["file-scan-tasks"]] == [2]


def poll(client: Client, plan_id: str) -> dict[str, Any]:
    """Fetch the plan until it is no longer running."""
    for _ in range(1000):
        status, answer = client.get(f"{PATH}/plan/{plan_id}")
        assert status == 200
        if answer["status"] != "submitted":
            return answer
        assert answer == {"status": "submitted"}
    raise AssertionError("the plan never ended")


def test_plan_that_takes_longer_than_the_wait_is_answered_with_its_id(
    start_server: Callable[..., Server], connect: Callable[[Server], Client], table: Table
):
    client = connect(start_server(plan_wait_s=0))
    _, submitted = client.post(f"{PATH}/plan", {})
    assert submitted["status"] == "submitted"
    assert len(all_tasks(client, poll(client, submitted["plan-id"]))) == 3


def test_failed_plan_reports_its_error(table: Table, client: Client):
    missing = Path(table.current_snapshot().manifest_list.removeprefix("file://"))
    missing.unlink()
    assert error_of(client.post(f"{PATH}/plan", {}))[:2] == (404, "NotFoundException")
    _, submitted = client.post(f"{PATH}/plan", {}, headers={"Prefer": "respond-async"})
    failed = poll(client, submitted["plan-id"])
    assert (failed["status"], failed["error"]["type"], failed["error"]["code"]) == ("failed", "NotFoundException", 404)


def test_plan_whose_first_page_failed_is_not_kept(
    start_server: Callable[..., Server], connect: Callable[[Server], Client], table: Table
):
    client = connect(start_server(plans_max=1))
    for manifest in table.inspect.manifests()["path"].to_pylist():
        Path(manifest.removeprefix("file://")).unlink()
    for _ in range(3):
        assert error_of(client.post(f"{PATH}/plan", {}))[:2] == (404, "NotFoundException")


@pytest.mark.parametrize("damage", [b"", b"nothing of the kind", b"Obj\x01"])
def test_damaged_manifest_makes_a_scan_unplannable(table: Table, client: Client, damage: bytes):
    Path(table.current_snapshot().manifest_list.removeprefix("file://")).write_bytes(damage)
    assert error_of(client.post(f"{PATH}/plan", {}))[:2] == (406, "UnsupportedOperationException")


def test_cancelled_plan_is_gone_with_its_tasks(
    start_server: Callable[..., Server], connect: Callable[[Server], Client], table: Table
):
    client = connect(start_server(plan_page_files=1))
    _, first = client.post(f"{PATH}/plan", {})
    assert client.delete(f"{PATH}/plan/{first['plan-id']}") == (204, None)
    assert client.get(f"{PATH}/plan/{first['plan-id']}")[0] == 404
    assert client.post(f"{PATH}/tasks", {"plan-task": first["plan-tasks"][0]})[0] == 404
    assert client.delete(f"{PATH}/plan/{first['plan-id']}")[0] == 404


def test_running_plan_can_be_cancelled(table: Table, client: Client):
    _, submitted = client.post(f"{PATH}/plan", {}, headers={"Prefer": "respond-async"})
    assert client.delete(f"{PATH}/plan/{submitted['plan-id']}")[0] == 204
    assert client.get(f"{PATH}/plan/{submitted['plan-id']}")[0] == 404


def test_plans_beyond_the_limit_are_refused_until_one_is_spent_or_cancelled(
    start_server: Callable[..., Server], connect: Callable[[Server], Client], table: Table
):
    client = connect(start_server(plans_max=1, plan_page_files=1))
    _, first = client.post(f"{PATH}/plan", {})
    answer = client.send("POST", f"{PATH}/plan", {})
    assert (answer.status_code, answer.headers["Retry-After"]) == (429, "1")
    assert len(all_tasks(client, first)) == 3
    _, second = client.post(f"{PATH}/plan", {})
    client.delete(f"{PATH}/plan/{second['plan-id']}")
    assert client.post(f"{PATH}/plan", {})[0] == 200


def test_scan_of_more_manifests_than_may_be_held_is_left_to_the_client(
    start_server: Callable[..., Server], connect: Callable[[Server], Client], table: Table
):
    client = connect(start_server(plans_held_max_files=2))
    assert error_of(client.post(f"{PATH}/plan", {}))[:2] == (406, "UnsupportedOperationException")


def test_manifest_outside_the_warehouse_is_not_read(table: Table, client: Client, tmp_path: Path):
    (tmp_path / "secret").write_text("secret")
    snapshot = {
        "snapshot-id": 5,
        "sequence-number": 9,
        "timestamp-ms": 2_000_000_000_000,
        "manifest-list": f"file://{tmp_path}/secret",
        "summary": {"operation": "append"},
    }
    updates = [{"action": "add-snapshot", "snapshot": snapshot}]
    assert client.post(PATH, {"requirements": [], "updates": updates})[0] == 200
    assert error_of(client.post(f"{PATH}/plan", {"snapshot-id": 5}))[:2] == (403, "ForbiddenException")


def test_files_of_another_spec_are_evaluated_by_its_own_fields(table: Table, plan: RunPlan):
    with table.update_spec() as update:
        update.remove_field("at_day")
        update.add_identity("v")
    append(table, rows(2, 25))
    planned = plan({"type": "eq", "term": "v", "value": "v25"})
    assert [task["data-file"]["partition"] for task in planned.tasks] == [["v25"]]
    assert planned.tasks[0]["residual-filter"] is True
    assert plan(OF_DAY_TWO).sizes == [1, 2]


def test_column_that_was_widened_is_pruned_by_old_bounds(pyiceberg: RestCatalog, plan: RunPlan):
    pyiceberg.create_namespace("db")
    table = pyiceberg.create_table("db.t", pa.schema([("n", pa.int32())]))
    append(table, pa.table({"n": pa.array([1, 2], pa.int32())}))
    with table.update_schema() as update:
        update.update_column("n", field_type=LongType())
    append(table, pa.table({"n": pa.array([2**40], pa.int64())}))
    assert plan({"type": "gt", "term": "n", "value": 5}).sizes == [1]
    assert plan({"type": "lt", "term": "n", "value": 5}).sizes == [2]
