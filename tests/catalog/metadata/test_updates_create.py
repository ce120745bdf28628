"""New documents: fresh ids, format versions, defaults; and documents that others wrote."""

from __future__ import annotations

import contextlib
import json

import orjson
import pytest

from lakefeed.catalog.errors import BadRequest, CommitFailed, ValidationFailed
from lakefeed.catalog.metadata.document import check_document, parse_document
from lakefeed.catalog.metadata.updates import create_document
from tests.catalog.documents import LOCATION, NOW_MS, UUID, append, field, new_table, schema, snapshot
from tests.catalog.metadata.test_updates import apply
from tests.catalog.routes.test_bad_input import NESTED, ORDER, SPEC, variants


def test_field_ids_are_assigned_level_by_level_and_carried_into_spec_order_and_identifiers():
    placeholders = schema(
        field(0, "s", {"type": "struct", "fields": [field(9, "x", required=True), field(8, "y")]}, required=True),
        field(1, "l", {"type": "list", "element-id": 7, "element": "string", "element-required": False}),
        field(
            2,
            "m",
            {"type": "map", "key-id": 5, "key": "string", "value-id": 6, "value": "int", "value-required": True},
        ),
        field(3, "id", required=True, doc="key \N{KEY}"),
        **{"identifier-field-ids": [3]},
    )
    sort = {"source-id": 9, "transform": "identity", "direction": "desc", "null-order": "nulls-last"}
    table = new_table(
        schema=placeholders,
        **{
            "partition-spec": {
                "spec-id": 3,
                "fields": [{"source-id": 3, "transform": "bucket[2]", "name": "b", "field-id": 5}],
            },
            "write-order": {"order-id": 7, "fields": [sort]},
        },
    )
    fields = table["schemas"][0]["fields"]
    assert [item["id"] for item in fields] == [1, 2, 3, 4]
    assert [item["id"] for item in fields[0]["type"]["fields"]] == [5, 6]
    assert fields[1]["type"]["element-id"] == 7
    assert (fields[2]["type"]["key-id"], fields[2]["type"]["value-id"]) == (8, 9)
    assert fields[3]["doc"] == "key \N{KEY}"
    assert table["schemas"][0]["identifier-field-ids"] == [4]
    assert table["last-column-id"] == 9
    (partition,) = table["partition-specs"][0]["fields"]
    assert (partition["source-id"], partition["field-id"]) == (4, 1000)
    assert (table["default-spec-id"], table["last-partition-id"]) == (0, 1000)
    assert table["sort-orders"] == [{"order-id": 1, "fields": [{**sort, "source-id": 5}]}]
    assert table["default-sort-order-id"] == 1


@pytest.mark.parametrize("version", [1, 2, 3])
def test_format_version_comes_from_the_property_which_is_not_kept(version: int):
    table = new_table(properties={"format-version": str(version), "a": "b"})
    assert table["format-version"] == version
    assert table["properties"] == {"write.parquet.compression-codec": "zstd", "a": "b"}
    assert ("next-row-id" in table) == (version == 3)
    assert ("last-sequence-number" in table) == (version > 1)


def test_compression_codec_that_was_asked_for_is_kept():
    table = new_table(properties={"write.parquet.compression-codec": "snappy"})
    assert table["properties"]["write.parquet.compression-codec"] == "snappy"


@pytest.mark.parametrize("version", ["4", "0", "two", "", "²"])
def test_format_version_that_does_not_exist_is_refused(version: str):
    with pytest.raises((BadRequest, ValidationFailed)):
        new_table(properties={"format-version": version})


@pytest.mark.parametrize(
    "columns",
    [
        schema(field(1, "a"), field(1, "b")),
        schema(field(1, "a"), field(2, "a")),
        schema(field(1, "a", "text")),
        schema(field(1, "a", "decimal(39, 2)")),
        schema(field(1, "a", "fixed")),
        schema(field(1, "a", "long[3]")),
        schema(field(1, "a", "timestamp_ns")),
        schema(field(1, "a", **{"initial-default": 1})),
        schema(field(1, "a"), **{"identifier-field-ids": [1]}),
        schema(field(1, "a", "double", required=True), **{"identifier-field-ids": [1]}),
        schema(field(1, "a"), **{"identifier-field-ids": [2]}),
        schema(field(2**31, "a")),
    ],
)
def test_schema_that_readers_cannot_use_is_rejected(columns: dict):
    with pytest.raises((BadRequest, ValidationFailed)):
        new_table(schema=columns)


@pytest.mark.parametrize(
    "type_", ["timestamp_ns", "timestamptz_ns", "unknown", "variant", "geometry", "geography(srid:1, x)"]
)
def test_types_of_v3_need_format_version_3(type_: str):
    table = new_table(schema=schema(field(1, "a", type_)), properties={"format-version": "3"})
    assert table["schemas"][0]["fields"][0]["type"] == type_


@pytest.mark.parametrize(("length", "fits"), [("2147483647", True), ("2147483648", False), ("9" * 5_000, False)])
def test_length_of_a_fixed_type_is_a_number_that_java_can_read(length: str, fits: bool):
    with contextlib.nullcontext() if fits else pytest.raises(BadRequest, match="Cannot parse type string"):
        new_table(schema=schema(field(1, "a", f"fixed[ {length} ]")))


def test_commit_that_creates_needs_only_a_schema():
    updates = [
        {"action": "add-schema", "schema": schema(field(5, "id"))},
        {"action": "set-current-schema", "schema-id": -1},
    ]
    table = create_document(updates, default_uuid=UUID, default_location=LOCATION, now_ms=NOW_MS)
    assert (table["table-uuid"], table["location"], table["last-column-id"]) == (UUID, LOCATION, 5)
    assert table["partition-specs"] == [{"spec-id": 0, "fields": []}]
    assert table["sort-orders"] == [{"order-id": 0, "fields": []}]
    with pytest.raises(ValidationFailed):
        create_document(updates[:1], default_uuid=UUID, default_location=LOCATION, now_ms=NOW_MS)


def test_old_v1_document_is_read_in_the_modern_form():
    old = {
        "format-version": 1,
        "location": LOCATION,
        "last-updated-ms": NOW_MS,
        "last-column-id": 2,
        "schema": {"type": "struct", "fields": [field(1, "id"), field(2, "v", "string")]},
        "partition-spec": [{"source-id": 2, "transform": "identity", "name": "v"}],
        "current-snapshot-id": 1,
        "snapshots": [{"snapshot-id": 1, "timestamp-ms": NOW_MS, "manifests": []}],
        "properties": None,
        "kept": None,
    }
    document = parse_document(json.dumps(old).encode())
    check_document(document)
    assert document["schemas"][0]["schema-id"] == document["current-schema-id"] == 0
    assert document["partition-specs"][0]["fields"][0]["field-id"] == document["last-partition-id"] == 1000
    assert document["refs"] == {"main": {"snapshot-id": 1, "type": "branch"}}
    assert (document["properties"], document["metadata-log"], document["kept"]) == ({}, [], None)


def test_document_of_ours_comes_back_as_it_was():
    table = new_table(properties={"format-version": "3"})
    assert parse_document(orjson.dumps(table)) == table


@pytest.mark.parametrize(
    "damage",
    [
        {"format-version": 4},
        {"current-schema-id": 9},
        {"default-spec-id": 9},
        {"default-sort-order-id": 9},
        {"table-uuid": None},
        {"location": 7},
        {"last-column-id": "2"},
        {"refs": {"main": {"snapshot-id": 5, "type": "branch"}}},
        {"snapshots": [{**snapshot(1, 1), "timestamp-ms": "now"}]},
        {"snapshot-log": [{"snapshot-id": 1}]},
        {"metadata-log": [{"timestamp-ms": 1}]},
    ],
)
def test_damaged_document_is_refused(damage: dict):
    with pytest.raises((BadRequest, ValidationFailed)):
        check_document(parse_document(orjson.dumps(new_table() | damage)))


@pytest.mark.parametrize("version", [1, 2, 3])
def test_document_damaged_anywhere_is_refused_or_still_takes_a_commit(version: int):
    more = {"partition-spec": SPEC, "write-order": ORDER, "properties": {"format-version": str(version)}}
    rows = {"first-row-id": 0, "added-rows": 1}
    table = apply(new_table(schema=NESTED, **more), *append(1, 1, **rows))
    for damaged in variants(table):
        if not isinstance(damaged, dict):
            continue
        try:
            document = parse_document(json.dumps(damaged).encode())
            check_document(document)
        except (BadRequest, ValidationFailed):
            continue
        try:
            apply(document, *append(2, 2, 1, **rows | {"first-row-id": 1}))
        except (BadRequest, ValidationFailed, CommitFailed):
            continue
