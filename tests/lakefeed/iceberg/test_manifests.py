"""Manifests and manifest lists: what they say, what entries inherit, what survives, and what is damaged."""

from __future__ import annotations

import io
import random
from dataclasses import replace
from typing import Any

import fastavro
import pytest
from pyiceberg.io.pyarrow import PyArrowFileIO
from pyiceberg.manifest import (
    DataFileContent,
    ManifestContent,
    ManifestEntryStatus,
    read_manifest_list,
    write_manifest_list,
)

from lakefeed.contract.errors import ManifestUnreadable
from lakefeed.iceberg.arrow import split_by_partition
from lakefeed.iceberg.avro import avro_name, manifest_schema
from lakefeed.iceberg.layout import parse_partition, partition_types
from lakefeed.iceberg.manifests import (
    Content,
    Entry,
    ListHeader,
    Manifest,
    ManifestList,
    Status,
    TableShape,
    apply_manifest,
    apply_row_ids,
    decode_manifest_list,
    describe_manifest,
    encode_manifest,
    encode_manifest_list,
    list_manifests,
    live_file_paths,
    manifest_paths,
    read_entries,
)
from lakefeed.writer.config import WriterConfig
from lakefeed.writer.files.parquet import write_data_file
from tests.seeds import choose_count, choose_seed
from tests.writer.examples import NESTED, nested_rows

IO = PyArrowFileIO()
DAMAGED_FILES = choose_count("DAMAGED_FILES", 1000)
DAMAGED_FILES_SEED = choose_seed("DAMAGED_FILES_SEED", 1)


def make_files(spec, rows=10):
    parts = split_by_partition(nested_rows(rows), spec, NESTED)
    return [
        write_data_file(
            table, schema=NESTED, location=f"file:///d/{i}.parquet", partition=partition, config=WriterConfig()
        )[1]
        for i, (partition, table) in enumerate(parts)
    ]


def make_list(tmp_path, files, shape, *, snapshot_id=77, sequence_number=5):
    """Write a manifest and a list of it; return the list's path and the description of the manifest."""
    encoded = encode_manifest(files, shape=shape, snapshot_id=snapshot_id)
    (tmp_path / "m.avro").write_bytes(encoded)
    manifest = describe_manifest(
        files, shape=shape, snapshot_id=snapshot_id, location=f"file://{tmp_path}/m.avro", size_bytes=len(encoded)
    )
    manifests = apply_manifest(ManifestList(), manifest, sequence_number=sequence_number)
    if shape.format_version == 3:
        manifests, _ = apply_row_ids(manifests, 1000)
    header = ListHeader(snapshot_id, None, sequence_number, shape.format_version, 1000)
    (tmp_path / "list.avro").write_bytes(encode_manifest_list(manifests, header))
    return f"file://{tmp_path}/list.avro"


def read_list(location):
    return list(read_manifest_list(IO.new_input(location)))


@pytest.mark.parametrize("format_version", [2, 3])
def test_pyiceberg_reads_a_list_and_its_manifest(tmp_path, format_version):
    spec = parse_partition("identity(born)", NESTED)
    files = make_files(spec)
    [manifest] = read_list(make_list(tmp_path, files, TableShape(NESTED, spec, format_version)))
    assert manifest.content == ManifestContent.DATA
    assert (manifest.sequence_number, manifest.min_sequence_number, manifest.added_snapshot_id) == (5, 5, 77)
    assert (manifest.added_files_count, manifest.added_rows_count) == (10, 10)
    entries = manifest.fetch_manifest_entry(IO)
    assert [entry.status for entry in entries] == [ManifestEntryStatus.ADDED] * 10
    assert [(entry.snapshot_id, entry.sequence_number) for entry in entries] == [(77, 5)] * 10
    for entry, file in zip(entries, files, strict=True):
        found = entry.data_file
        assert found.content == DataFileContent.DATA
        assert (found.file_path, found.record_count) == (file.location, file.record_count)
        assert (found.file_size_in_bytes, found.split_offsets) == (file.size_bytes, list(file.split_offsets))
        assert tuple(found.partition) == file.partition
        assert found.column_sizes == file.column_sizes
        assert found.value_counts == file.value_counts
        assert found.null_value_counts == file.null_counts
        assert found.lower_bounds == file.lower_bounds
        assert found.upper_bounds == file.upper_bounds


def test_the_partitions_of_a_manifest_are_summarised(tmp_path):
    spec = parse_partition("identity(born), identity(name)", NESTED)
    [manifest] = read_list(make_list(tmp_path, make_files(spec, 3), TableShape(NESTED, spec, 2)))
    born, name = manifest.partitions
    assert (born.contains_null, born.contains_nan) == (False, False)
    assert int.from_bytes(born.upper_bound, "little") - int.from_bytes(born.lower_bound, "little") == 2
    assert name.contains_null
    assert (name.lower_bound, name.upper_bound) == (b"name of the customer 000001", b"name of the customer 000002")


@pytest.mark.parametrize(
    "term", ["none", "identity(price)", "identity(total)", "identity(active)", "identity(blob)", "identity(weight)"]
)
def test_every_type_can_be_a_partition(tmp_path, term):
    spec = parse_partition(term, NESTED)
    files = make_files(spec, 4)
    [manifest] = read_list(make_list(tmp_path, files, TableShape(NESTED, spec, 2)))
    found = [tuple(entry.data_file.partition) for entry in manifest.fetch_manifest_entry(IO)]
    assert found == [file.partition for file in files]


def test_the_manifest_says_what_its_files_were_written_for():
    spec = parse_partition("day(_cdc_timestamp)", NESTED)
    encoded = encode_manifest(make_files(spec), shape=TableShape(NESTED, spec, 2), snapshot_id=1)
    metadata = fastavro.reader(io.BytesIO(encoded)).metadata
    assert {key: metadata[key] for key in ("schema-id", "partition-spec-id", "format-version", "content")} == {
        "schema-id": "0",
        "partition-spec-id": "0",
        "format-version": "2",
        "content": "data",
    }
    assert '"transform":"day"' in metadata["partition-spec"]
    assert '"name":"_cdc_sequence"' in metadata["schema"]


def test_a_list_that_pyiceberg_wrote_is_carried_over_whole(tmp_path):
    spec = parse_partition("none", NESTED)
    ours = read_list(make_list(tmp_path, make_files(spec), TableShape(NESTED, spec, 2)))
    theirs = tmp_path / "theirs.avro"
    with write_manifest_list(2, IO.new_output(f"file://{theirs}"), 77, None, 5, "deflate") as writer:
        writer.add_manifests(ours)
    carried = tmp_path / "carried.avro"
    carried.write_bytes(
        encode_manifest_list(decode_manifest_list(theirs.read_bytes(), "list.avro"), ListHeader(78, 77, 6, 2))
    )
    [found], [wanted] = read_list(f"file://{carried}"), ours
    fields = ["manifest_path", "manifest_length", "partition_spec_id", "content", "sequence_number"]
    fields += ["min_sequence_number", "added_snapshot_id", "partitions", "key_metadata"]
    fields += [f"{kind}_{what}_count" for kind in ("added", "existing", "deleted") for what in ("files", "rows")]
    assert {name: getattr(found, name) for name in fields} == {name: getattr(wanted, name) for name in fields}


def make_entry(**extra):
    return {
        "manifest_path": "file:///m.avro",
        "manifest_length": 1,
        "partition_spec_id": 0,
        "content": 0,
        "sequence_number": 1,
        "min_sequence_number": 1,
        "added_snapshot_id": 1,
        "added_files_count": 1,
        "existing_files_count": 0,
        "deleted_files_count": 0,
        "added_rows_count": 10,
        "existing_rows_count": 5,
        "deleted_rows_count": 0,
        "partitions": None,
        "key_metadata": None,
        **extra,
    }


def write_foreign_list(entry, schema_changes):
    """Write a list as another writer would: fields renamed, left out (None) or added by `schema_changes`."""
    base = fastavro.reader(io.BytesIO(encode_manifest_list(ManifestList((make_entry(),)), ListHeader(1, None, 1, 2))))
    fields = {field["name"]: field for field in base.writer_schema["fields"]}
    for name, field in schema_changes.items():
        fields.pop(name, None)
        if field is not None:
            fields[field["name"]] = field
    sink = io.BytesIO()
    fastavro.writer(sink, {"type": "record", "name": "manifest_file", "fields": list(fields.values())}, [entry])
    return sink.getvalue()


def test_unknown_fields_survive_in_the_next_list():
    future = {"name": "future", "type": ["null", "string"], "default": None, "field-id": 599}
    encoded = write_foreign_list(make_entry(future="kept"), {"future": future})
    carried = encode_manifest_list(decode_manifest_list(encoded, "list.avro"), ListHeader(2, 1, 2, 2))
    reader = fastavro.reader(io.BytesIO(carried))
    assert next(reader)["future"] == "kept"
    assert [f["field-id"] for f in reader.writer_schema["fields"] if f["name"] == "future"] == [599]


def test_names_of_older_writers_are_understood_by_field_id():
    older = {"name": "added_data_files_count", "type": "int", "field-id": 504}
    encoded = write_foreign_list(make_entry(added_data_files_count=3), {"added_files_count": older})
    assert decode_manifest_list(encoded, "list.avro").manifests[0]["added_files_count"] == 3


def test_a_list_from_before_an_upgrade_gets_sequence_number_zero():
    encoded = write_foreign_list(make_entry(), {"content": None, "sequence_number": None, "min_sequence_number": None})
    [manifest] = decode_manifest_list(encoded, "list.avro").manifests
    assert (manifest["content"], manifest["sequence_number"], manifest["min_sequence_number"]) == (0, 0, 0)


def test_an_entry_without_counts_is_refused_by_name():
    encoded = write_foreign_list(make_entry(), {"added_files_count": None})
    with pytest.raises(ManifestUnreadable, match="added_files_count"):
        decode_manifest_list(encoded, "list.avro")


@pytest.mark.parametrize("data", [b"", b"not avro", b"Obj\x01"])
def test_what_is_not_a_list_is_refused(data):
    with pytest.raises(ManifestUnreadable, match=r"not a readable manifest or manifest list: list\.avro"):
        decode_manifest_list(data, "list.avro")


@pytest.mark.parametrize("format_version", [2, 3])
def test_named_union_branches_give_the_bytes_that_fastavro_would_write_by_itself(format_version):
    spec = parse_partition("identity(born), identity(price), bucket[4](name)", NESTED)
    shape = TableShape(NESTED, spec, format_version)
    encoded = encode_manifest(make_files(spec), shape=shape, snapshot_id=7)
    reader = fastavro.reader(io.BytesIO(encoded))
    records, sync = list(reader), reader._header["sync"]
    metadata = {key: value for key, value in reader.metadata.items() if not key.startswith("avro.")}
    schema = manifest_schema(spec, partition_types(spec, NESTED), format_version)
    sink = io.BytesIO()
    fastavro.writer(sink, schema, records, codec="deflate", metadata=metadata, sync_marker=sync)
    assert sink.getvalue() == encoded


def make_damaged(data: bytes, rng: random.Random) -> bytes:
    damaged = bytearray(data)
    for _ in range(rng.choice((1, 1, 3))):
        damaged[rng.randrange(len(damaged))] = rng.randrange(256)
    return bytes(damaged[: rng.randrange(len(damaged))] if rng.random() < 0.2 else damaged)


def without_compression(data: bytes) -> bytes:
    """Write a file again without compression, so that damage reaches the decoder instead of the checksum."""
    reader = fastavro.reader(io.BytesIO(data))
    sink = io.BytesIO()
    fastavro.writer(sink, reader.writer_schema, list(reader), codec="null")
    return sink.getvalue()


@pytest.mark.parametrize("compressed", [True, False])
def test_damaged_files_raise_one_error_or_are_read(compressed):
    spec = parse_partition("identity(born), identity(price)", NESTED)
    shape = TableShape(NESTED, spec, 3)
    manifest = encode_manifest(make_files(spec, 3), shape=shape, snapshot_id=7)
    listed = encode_manifest_list(ManifestList((make_entry(), make_entry())), ListHeader(1, None, 1, 3))
    if not compressed:
        manifest, listed = without_compression(manifest), without_compression(listed)
    types = partition_types(spec, NESTED)
    readers = [
        (manifest, lambda data: list(read_entries(data, MANIFEST, types))),
        (manifest, lambda data: live_file_paths(data, "m.avro")),
        (listed, lambda data: list_manifests(data, "list.avro")),
        (listed, lambda data: decode_manifest_list(data, "list.avro")),
        (listed, lambda data: manifest_paths(data, "list.avro")),
    ]
    refused = 0
    for number in range(DAMAGED_FILES):
        rng = random.Random(f"{DAMAGED_FILES_SEED}/{number}")
        data, read = rng.choice(readers)
        try:
            read(make_damaged(data, rng))
        except ManifestUnreadable:
            refused += 1
        except BaseException as error:
            raise AssertionError(f"DAMAGED_FILES_SEED={DAMAGED_FILES_SEED} file number {number}") from error
    assert refused > DAMAGED_FILES // 4


def test_row_ids_are_given_once_and_to_data_only():
    manifests = ManifestList((make_entry(), make_entry(first_row_id=7), make_entry(content=1), make_entry()))
    numbered, next_row_id = apply_row_ids(manifests, 100)
    assert [manifest.get("first_row_id") for manifest in numbered.manifests] == [100, 7, None, 115]
    assert next_row_id == 130


@pytest.mark.parametrize(
    ("name", "expected"), [("a.b", "a_x2Eb"), ("2nd", "_2nd"), ("plain_day", "plain_day"), ("é", "_xE9")]
)
def test_names_that_avro_does_not_take_are_rewritten(name, expected):
    assert avro_name(name) == expected


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
    return list(read_entries(data, replace(MANIFEST, **more), ["date"]))


def test_entry_inherits_what_it_leaves_out():
    data = manifest_bytes(
        {"status": 1}, {"status": 0, "snapshot_id": 3, "sequence_number": 2}, {"status": 2, "snapshot_id": 3}
    )
    found = entries_of(data)
    assert [(e.status, e.snapshot_id, e.sequence_number, e.file_sequence_number) for e in found] == [
        (Status.ADDED, 7, 5, 5),
        (Status.EXISTING, 3, 2, 5),
        (Status.DELETED, 3, 5, 5),
    ]


def test_first_row_ids_are_assigned_in_order_to_the_files_that_have_none():
    data = manifest_bytes({}, {"status": 2}, {"file": {"first_row_id": 500}}, {})
    assert [entry.first_row_id for entry in entries_of(data, first_row_id=100)] == [100, None, 500, 110]
    assert [entry.first_row_id for entry in entries_of(data)] == [None] * 4


def test_manifest_of_the_first_format_has_no_sequence_numbers():
    [entry] = entries_of(manifest_bytes({"snapshot_id": 3}, newest=False), sequence_number=0)
    assert (entry.snapshot_id, entry.sequence_number, entry.content) == (3, 0, Content.DATA)


def test_partition_beyond_pythons_calendar_is_read():
    [entry] = entries_of(manifest_bytes({"file": {"partition": {"day": 10_000_000}}}))
    assert entry.partition == (10_000_000,)


def test_partition_tuple_of_another_length_than_its_spec_is_reported():
    with pytest.raises(ManifestUnreadable, match=r"m\.avro"):
        list(read_entries(manifest_bytes({}), MANIFEST, ["date", "int"]))


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
    found = list_manifests(avro("manifest_file", LIST_FIELDS, [record, counted]), "list")
    assert [(m.holds_deletes, m.sequence_number, m.files_count) for m in found] == [(False, 0, None), (False, 0, 3)]


def test_encrypted_manifest_cannot_be_read():
    record = {"manifest_path": "m", "partition_spec_id": 0, "key_metadata": b"k"}
    with pytest.raises(ManifestUnreadable, match="encrypted"):
        list_manifests(avro("manifest_file", LIST_FIELDS, [record]), "list")
