from __future__ import annotations

from dataclasses import replace

import orjson
import pytest

from lakefeed.contract.changes import Position, SourceId, Span, TableName
from lakefeed.contract.errors import CatalogError, ColumnsChanged, TableReplaced
from lakefeed.contract.ledger import Ledger, RowFacts
from lakefeed.contract.progress import Progress, ProgressUnreadable
from lakefeed.iceberg.layout import parse_partition, spec_to_json
from lakefeed.iceberg.manifests import DataFile, ManifestList, describe_manifest
from lakefeed.iceberg.types import schema_to_json
from lakefeed.writer.commit.plan import Flush, Outcome, find_flush, plan_append, plan_schema, read_outcome
from lakefeed.writer.commit.state import data_location, metadata_location, table_state_from
from lakefeed.writer.tables.limit import places_of
from tests.writer.examples import NESTED

USERS = TableName(("default",), "users")
SHOP = SourceId("shop")
SPEC = parse_partition("day(_cdc_timestamp)", NESTED)


def make_document(**changes):
    return {
        "format-version": 2,
        "table-uuid": "u-1",
        "location": "file:///w/users/",
        "last-sequence-number": 7,
        "last-updated-ms": 5_000,
        "last-column-id": 18,
        "current-schema-id": 0,
        "schemas": [schema_to_json(NESTED)],
        "default-spec-id": 0,
        "partition-specs": [spec_to_json(SPEC)],
        "last-partition-id": 1000,
        "properties": {},
        **changes,
    }


def with_snapshot(**summary):
    """Make a document whose main branch is at snapshot 42, with retention of its own."""
    return make_document(
        snapshots=[{"snapshot-id": 42, "manifest-list": "file:///w/l.avro", "summary": summary}],
        refs={"main": {"snapshot-id": 42, "type": "branch", "min-snapshots-to-keep": 3}},
    )


def make_flush(first=1, last=10):
    file = DataFile("file:///w/f", (20_000,), 10, 100, {}, {}, {}, {}, {}, (4,))
    spans = {SHOP: Span(Position(0, first), Position(0, last))}
    return Flush(id="f-1", node="n1", log_from=3, log_to=5, spans=spans, files=(file,))


def make_plan(state, flush, *, now_ms=9_000):
    manifest = describe_manifest(flush.files, shape=state.shape, snapshot_id=99, location="file:///w/m", size_bytes=1)
    state = replace(state, manifests=state.manifests or ManifestList())
    return plan_append(state, flush, manifest=manifest, snapshot_id=99, list_location="file:///w/n.avro", now_ms=now_ms)


def updates_of(plan):
    return {update["action"]: update for update in plan.request.updates}


def test_the_first_commit_requires_that_main_does_not_exist():
    plan = make_plan(table_state_from(USERS, make_document()), make_flush())
    assert plan.request.requirements == (
        {"type": "assert-table-uuid", "uuid": "u-1"},
        {"type": "assert-ref-snapshot-id", "ref": "main", "snapshot-id": None},
        {"type": "assert-current-schema-id", "current-schema-id": 0},
    )
    snapshot = updates_of(plan)["add-snapshot"]["snapshot"]
    assert "parent-snapshot-id" not in snapshot
    assert (snapshot["sequence-number"], snapshot["timestamp-ms"], snapshot["schema-id"]) == (8, 9_000, 0)


def test_a_commit_builds_on_main_and_keeps_the_branch_settings():
    plan = make_plan(table_state_from(USERS, with_snapshot()), make_flush())
    updates = updates_of(plan)
    assert plan.request.requirements[1]["snapshot-id"] == 42
    assert updates["add-snapshot"]["snapshot"]["parent-snapshot-id"] == 42
    assert updates["set-snapshot-ref"] == {
        "action": "set-snapshot-ref",
        "ref-name": "main",
        "type": "branch",
        "snapshot-id": 99,
        "min-snapshots-to-keep": 3,
    }


def test_marker_and_rows_are_one_commit():
    plan = make_plan(table_state_from(USERS, make_document()), make_flush())
    updates = updates_of(plan)
    assert updates["set-properties"]["updates"] == {
        "lakefeed.progress": '{"nodes":{"n1":5},"sources":{"shop":[0,10]}}',
        "lakefeed.totals": '{"complete":false,"sources":{}}',
    }
    assert updates["add-snapshot"]["snapshot"]["summary"]["lakefeed.flush-id"] == "f-1"
    assert plan.next_state.progress == Progress({"n1": 5}, {SHOP: Position(0, 10)})


def test_totals_start_at_zero_and_add_up():
    first = make_plan(table_state_from(USERS, make_document()), make_flush()).next_state
    assert (first.summary["total-records"], first.summary["total-delete-files"]) == ("10", "0")
    second = make_plan(first, make_flush(11, 20)).next_state
    assert (second.summary["total-records"], second.summary["total-files-size"]) == ("20", "200")
    assert second.last_sequence_number == 9


def test_a_total_that_another_writer_left_out_stays_out():
    plan = make_plan(table_state_from(USERS, with_snapshot(**{"total-records": "5"})), make_flush())
    assert plan.next_state.summary["total-records"] == "15"
    assert "total-data-files" not in plan.next_state.summary


def test_time_does_not_run_backwards():
    plan = make_plan(table_state_from(USERS, make_document()), make_flush(), now_ms=1_000)
    assert updates_of(plan)["add-snapshot"]["snapshot"]["timestamp-ms"] == 5_000


def test_rows_of_format_3_get_ids_from_the_tables_next_one():
    document = make_document(**{"format-version": 3, "next-row-id": 70})
    plan = make_plan(table_state_from(USERS, document), make_flush())
    snapshot = updates_of(plan)["add-snapshot"]["snapshot"]
    assert (snapshot["first-row-id"], snapshot["added-rows"]) == (70, 10)
    assert plan.next_state.next_row_id == 80
    assert plan.manifests.manifests[0]["first_row_id"] == 70


def test_a_request_is_plain_json():
    plan = make_plan(table_state_from(USERS, with_snapshot()), make_flush())
    assert orjson.loads(orjson.dumps(plan.request.updates))[0]["action"] == "add-snapshot"


@pytest.mark.parametrize(
    "name", ["device-%05d", "%058d", '"' * 14 + "%05d", '"' * 250 + "%05d", "\U0001f600" * 250 + "%05d"]
)
def test_a_commit_with_ten_thousand_sources_has_at_most_a_kibibyte_for_each_place_that_they_take(name):
    most = (1 << 63) - 1
    sources, position = [SourceId(name % number) for number in range(10_000)], Position(most, most)
    operations = dict.fromkeys(("INSERT", "UPDATE", "DELETE", "TRUNCATE"), most // 4)
    flush = replace(
        make_flush(),
        spans=dict.fromkeys(sources, Span(position, position)),
        complete=dict.fromkeys(sources, position),
        ledger=Ledger(
            dict.fromkeys(sources, RowFacts(most, most, most, operations, (1 << 64) - 1)), dict.fromkeys(sources, most)
        ),
    )
    request = make_plan(table_state_from(USERS, make_document()), flush).request
    size = len(orjson.dumps({"requirements": request.requirements, "updates": request.updates}))
    assert size <= 1024 * sum(map(places_of, sources)) + 4096


def test_a_schema_requires_that_no_column_came_in_between():
    request = plan_schema(table_state_from(USERS, make_document()), NESTED)
    assert [list(requirement.values()) for requirement in request.requirements] == [
        ["assert-table-uuid", "u-1"],
        ["assert-current-schema-id", 0],
        ["assert-last-assigned-field-id", 18],
    ]
    assert [update["action"] for update in request.updates] == ["add-schema", "set-current-schema"]


@pytest.mark.parametrize(
    ("changes", "outcome"),
    [
        ({}, Outcome.RETRY),
        ({"properties": {"lakefeed.progress": '{"sources":{"shop":[0,0],"bank":[0,99]}}'}}, Outcome.RETRY),
        ({"properties": {"lakefeed.progress": '{"sources":{"shop":[0,4]}}'}}, Outcome.OVERTAKEN),
        ({"properties": {"lakefeed.progress": '{"sources":{"shop":[1,0]}}'}}, Outcome.OVERTAKEN),
        (
            {
                "properties": {"lakefeed.progress": '{"sources":{"shop":[0,30]}}'},
                "snapshots": [
                    {"snapshot-id": 5, "summary": {"lakefeed.flush-id": "f-1"}},
                    {"snapshot-id": 6, "summary": {"lakefeed.flush-id": "f-2"}},
                ],
            },
            Outcome.LANDED,
        ),
    ],
)
def test_a_reloaded_table_says_what_became_of_a_flush(changes, outcome):
    base = table_state_from(USERS, make_document())
    document = make_document(**changes)
    assert read_outcome(base, table_state_from(USERS, document), document, make_flush()) is outcome


def test_a_flush_is_found_wherever_it_is_in_the_history():
    snapshots = [{"snapshot-id": 5, "summary": {"lakefeed.flush-id": "f-1"}}, {"snapshot-id": 6}]
    assert find_flush({"snapshots": snapshots}, "f-1") == 5
    assert find_flush({"snapshots": snapshots}, "f-9") is None
    assert find_flush({}, "f-1") is None


def test_another_table_under_the_same_name_is_recognised():
    base = table_state_from(USERS, make_document())
    document = make_document(**{"table-uuid": "u-2"})
    with pytest.raises(TableReplaced, match="found=u-2"):
        read_outcome(base, table_state_from(USERS, document), document, make_flush())


def without_column(**changes):
    """Make a document whose table has lost its first column."""
    schema = schema_to_json(NESTED)
    return make_document(schemas=[{**schema, "fields": schema["fields"][1:]}], **changes)


def test_a_dropped_column_of_the_files_is_an_error():
    base, document = table_state_from(USERS, make_document()), without_column()
    with pytest.raises(ColumnsChanged, match="flush=f-1") as raised:
        read_outcome(base, table_state_from(USERS, document), document, make_flush())
    assert raised.value.table == USERS


def test_a_flush_that_landed_before_the_column_went_has_landed():
    snapshots = [{"snapshot-id": 42, "manifest-list": "l", "summary": {"lakefeed.flush-id": "f-1"}}]
    base, document = table_state_from(USERS, make_document()), without_column(snapshots=snapshots)
    assert read_outcome(base, table_state_from(USERS, document), document, make_flush()) is Outcome.LANDED


def test_files_go_under_the_table_unless_it_says_otherwise():
    state = table_state_from(USERS, make_document())
    assert (
        data_location(state, (20_773,), "a.parquet") == "file:///w/users/data/_cdc_timestamp_day=2026-11-16/a.parquet"
    )
    assert metadata_location(state, "m.avro") == "file:///w/users/metadata/m.avro"
    elsewhere = {"write.data.path": "s3://b/d/", "write.metadata.path": "s3://b/m"}
    state = table_state_from(USERS, make_document(properties=elsewhere))
    assert data_location(state, (None,), "a.parquet") == "s3://b/d/_cdc_timestamp_day=null/a.parquet"
    assert metadata_location(state, "m.avro") == "s3://b/m/m.avro"


def test_a_table_of_format_1_is_refused():
    with pytest.raises(CatalogError, match="format=1"):
        table_state_from(USERS, make_document(**{"format-version": 1}))


def test_a_damaged_marker_keeps_us_from_the_table():
    with pytest.raises(ProgressUnreadable):
        table_state_from(USERS, make_document(properties={"lakefeed.progress": "?"}))
