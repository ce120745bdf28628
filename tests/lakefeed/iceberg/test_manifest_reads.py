"""Manifests: what entries inherit, what readers may not trip over, and which delete files apply to a data file."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

import fastavro
import pytest

from lakefeed.catalog.planning.evaluate import Spec
from lakefeed.catalog.planning.tasks import FILE_PATH_ID, DeleteIndex, show_delete_file
from lakefeed.contract.errors import ManifestUnreadable
from lakefeed.iceberg.manifest_reads import Content, Entry, Manifest, Status, decode_entries, decode_manifest_list
from tests.catalog.planning.scans import make_spec

BY_DAY = make_spec([("moment", "day")])
UNPARTITIONED = Spec(1, ())
BY_VOID = replace(make_spec([("moment", "void")]), spec_id=2)
SPECS = {0: BY_DAY, 1: UNPARTITIONED, 2: BY_VOID}

MANIFEST = Manifest(
    "m.avro", False, 0, snapshot_id=7, sequence_number=5, files_count=3, first_row_id=None, summaries=None
)


def avro(name: str, fields: list[tuple[str, Any]], records: list[dict[str, Any]]) -> bytes:
    schema = {"type": "record", "name": name, "fields": [{"name": field, "type": type_} for field, type_ in fields]}
    sink = io.BytesIO()
    fastavro.writer(sink, schema, records)
    return sink.getvalue()


def manifest_bytes(*entries: dict[str, Any], newest: bool = True) -> bytes:
    """Write a manifest, of the newest format or of the first."""
    date = {"type": "int", "logicalType": "date"}
    file_fields = [
        ("file_path", "string"),
        (
            "partition",
            {"type": "record", "name": "r102", "fields": [{"name": "day", "type": ["null", date]}]},
        ),
        ("record_count", "long"),
        *([("first_row_id", ["null", "long"])] if newest else []),
    ]
    file = {"type": "record", "name": "r2", "fields": [{"name": name, "type": type_} for name, type_ in file_fields]}
    fields = [
        ("status", "int"),
        ("snapshot_id", ["null", "long"]),
        *([("sequence_number", ["null", "long"])] if newest else []),
        ("data_file", file),
    ]
    return avro("manifest_entry", fields, [complete(entry) for entry in entries])


def complete(entry: dict[str, Any]) -> dict[str, Any]:
    file = {"file_path": "f", "partition": {"day": None}, "record_count": 10, **entry.get("file", {})}
    return {"status": entry.get("status", 1), **entry, "data_file": file}


def entries_of(data: bytes, **more: Any) -> list[Entry]:
    return list(decode_entries(data, replace(MANIFEST, **more), BY_DAY.read_tuple))


def test_entry_inherits_what_it_leaves_out_and_deleted_ones_are_passed_over():
    data = manifest_bytes(
        {"status": 1}, {"status": 0, "snapshot_id": 3, "sequence_number": 2}, {"status": 2, "snapshot_id": 3}
    )
    assert [(entry.status, entry.snapshot_id, entry.sequence_number) for entry in entries_of(data)] == [
        (Status.ADDED, 7, 5),
        (Status.EXISTING, 3, 2),
    ]


def test_first_row_ids_are_assigned_in_order_to_the_files_that_have_none():
    data = manifest_bytes({}, {"status": 2}, {"file": {"first_row_id": 500}}, {})
    assert [entry.first_row_id for entry in entries_of(data, first_row_id=100)] == [100, 500, 110]
    assert [entry.first_row_id for entry in entries_of(data)] == [None, None, None]


def test_manifest_of_the_first_format_has_no_sequence_numbers():
    [entry] = entries_of(manifest_bytes({"snapshot_id": 3}, newest=False), sequence_number=0)
    assert (entry.snapshot_id, entry.sequence_number, entry.content) == (3, 0, Content.DATA)


def test_partition_beyond_pythons_calendar_is_read():
    [entry] = entries_of(manifest_bytes({"file": {"partition": {"day": 10_000_000}}}))
    assert entry.partition == (10_000_000,)


def test_partition_tuple_of_another_length_than_its_spec_is_told():
    with pytest.raises(ManifestUnreadable, match=r"Cannot read manifest: m\.avro"):
        list(decode_entries(manifest_bytes({}), MANIFEST, UNPARTITIONED.read_tuple))


LIST_FIELDS = [
    ("manifest_path", "string"),
    ("partition_spec_id", "int"),
    ("added_snapshot_id", ["null", "long"]),
    ("added_data_files_count", ["null", "int"]),
    ("existing_data_files_count", ["null", "int"]),
    ("key_metadata", ["null", "bytes"]),
]


def test_manifest_list_of_the_first_format_is_read_with_the_defaults_of_the_specification():
    record = {"manifest_path": "m", "partition_spec_id": 0, "added_snapshot_id": 3}
    counted = {**record, "added_data_files_count": 2, "existing_data_files_count": 1}
    found = decode_manifest_list(avro("manifest_file", LIST_FIELDS, [record, counted]), "list")
    assert [(m.holds_deletes, m.sequence_number, m.files_count) for m in found] == [(False, 0, None), (False, 0, 3)]


def test_encrypted_manifest_cannot_be_planned():
    record = {"manifest_path": "m", "partition_spec_id": 0, "key_metadata": b"k"}
    with pytest.raises(ManifestUnreadable, match="encrypted"):
        decode_manifest_list(avro("manifest_file", LIST_FIELDS, [record]), "list")


def file_of(
    path: str, sequence: int, *, spec: Spec = BY_DAY, day: Any = 1, content: Content = Content.DATA, **more: Any
) -> Entry:
    file = {"file_path": path, "record_count": 1, "file_format": "PARQUET", "file_size_in_bytes": 1, **more}
    partition = (day,) * len(spec.fields)
    return Entry(Status.ADDED, 1, sequence, content, spec.spec_id, file, partition, None)


def deletes_for(data: Entry, *deletes: Entry) -> list[str]:
    return [entry.file["file_path"] for entry in DeleteIndex(deletes, SPECS).find(data)]


POSITION, EQUALITY = Content.POSITION_DELETES, Content.EQUALITY_DELETES


@pytest.mark.parametrize(("sequence", "applies"), [(4, False), (5, True), (6, True)])
def test_position_deletes_apply_to_files_that_are_not_newer(sequence: int, applies: bool):
    assert bool(deletes_for(file_of("f", 5), file_of("d", sequence, content=POSITION))) == applies


@pytest.mark.parametrize(("sequence", "applies"), [(4, False), (5, False), (6, True)])
def test_equality_deletes_apply_to_files_that_are_older(sequence: int, applies: bool):
    assert bool(deletes_for(file_of("f", 5), file_of("d", sequence, content=EQUALITY))) == applies


@pytest.mark.parametrize("content", [POSITION, EQUALITY])
def test_deletes_stay_in_their_partition(content: Content):
    delete = file_of("d", 9, content=content)
    assert deletes_for(file_of("f", 5, day=1), delete) == ["d"]
    assert deletes_for(file_of("f", 5, day=2), delete) == []
    assert deletes_for(file_of("f", 5, spec=UNPARTITIONED), delete) == []


@pytest.mark.parametrize("spec", [UNPARTITIONED, BY_VOID])
def test_equality_deletes_of_an_unpartitioned_spec_apply_everywhere(spec: Spec):
    delete = file_of("d", 9, spec=spec, day=None, content=EQUALITY)
    assert deletes_for(file_of("f", 5, day=2), delete) == ["d"]
    assert deletes_for(file_of("f", 5, spec=UNPARTITIONED), delete) == ["d"]


def test_position_deletes_that_name_their_file_are_for_it_alone():
    named = file_of("named", 9, content=POSITION, referenced_data_file="f")
    bounds = [{"key": FILE_PATH_ID, "value": b"f"}]
    bounded = file_of("bounded", 9, content=POSITION, lower_bounds=bounds, upper_bounds=bounds)
    assert deletes_for(file_of("f", 5), named, bounded) == ["named", "bounded"]
    assert deletes_for(file_of("g", 5), named, bounded) == []


def test_deletion_vector_takes_the_place_of_position_deletes():
    vector = file_of("v", 9, content=POSITION, referenced_data_file="f", content_offset=4, content_size_in_bytes=40)
    older = file_of("d", 8, content=POSITION)
    equality = file_of("e", 9, content=EQUALITY)
    assert deletes_for(file_of("f", 5), older, vector, equality) == ["e", "v"]
    assert deletes_for(file_of("g", 5), older, vector, equality) == ["e", "d"]


def test_files_of_a_nan_partition_meet():
    nan, other = float("nan"), float("-nan")
    assert deletes_for(file_of("f", 5, day=nan), file_of("d", 9, day=other, content=POSITION)) == ["d"]


def test_delete_file_is_shown_with_what_readers_need():
    vector = file_of("v", 9, content=POSITION, referenced_data_file="f", content_offset=4, content_size_in_bytes=40)
    assert show_delete_file(vector, BY_DAY) == {
        "content": "position-deletes",
        "file-path": "v",
        "file-format": "parquet",
        "spec-id": 0,
        "partition": ["1970-01-02"],
        "file-size-in-bytes": 1,
        "record-count": 1,
        "referenced-data-file": "f",
        "content-offset": 4,
        "content-size-in-bytes": 40,
    }
    equality = file_of("e", 9, content=EQUALITY, equality_ids=[1, 2], sort_order_id=0, key_metadata=b"\xab")
    shown = show_delete_file(equality, BY_DAY)
    assert (shown["content"], shown["equality-ids"], shown["sort-order-id"]) == ("equality-deletes", [1, 2], 0)
    assert shown["key-metadata"] == "AB"
