"""Manifests and manifest lists: each side reads what the other wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pyiceberg.io.pyarrow import PyArrowFileIO
from pyiceberg.manifest import (
    DataFile as PeerDataFile,
)
from pyiceberg.manifest import (
    DataFileContent,
    FileFormat,
    ManifestEntry,
    ManifestEntryStatus,
    read_manifest_list,
    write_manifest,
    write_manifest_list,
)
from pyiceberg.partitioning import PartitionSpec as PeerSpec
from pyiceberg.schema import Schema as PeerSchema
from pyiceberg.typedef import Record

from lakefeed.iceberg.layout import PartitionField, PartitionSpec, spec_to_json
from lakefeed.iceberg.manifests import (
    DataFile,
    ListHeader,
    ManifestList,
    TableShape,
    apply_manifest,
    apply_row_ids,
    decode_manifest_list,
    describe_manifest,
    encode_manifest,
    encode_manifest_list,
    list_manifests,
    read_entries,
)
from lakefeed.iceberg.types import Field, Schema, StructType, schema_to_json
from tests.pyiceberg.samples import VALUES, from_peer, to_peer

IO = PyArrowFileIO()
SNAPSHOT = 4_567_890_123_456_789_012
TYPES = sorted(VALUES)
PEER_CANNOT_READ = {"double", "timestamp_ns", "timestamptz_ns"}


def shape_of(type_: str, format_version: int = 2) -> TableShape:
    schema = Schema(0, StructType((Field(1, "c", type_),)))
    return TableShape(schema, PartitionSpec(0, (PartitionField(1, 1000, "c", "identity"),)), format_version)


def make_file(type_: str, value: Any, number: int) -> DataFile:
    counts = {1: number + 1}
    bounds = {1: bytes([number % 256, 1])}
    partition = (to_peer(type_, value) if type_ != "uuid" else value,)
    return DataFile(f"s3://b/{number}", partition, 5, 99, counts, counts, {1: 0}, bounds, bounds, (4, 400), 3)


def make_files(type_: str) -> list[DataFile]:
    return [make_file(type_, value, number) for number, value in enumerate([*VALUES[type_][:20], None])]


def write_ours(folder: Path, type_: str, format_version: int) -> str:
    shape, files = shape_of(type_, format_version), make_files(type_)
    encoded = encode_manifest(files, shape=shape, snapshot_id=SNAPSHOT)
    (folder / "ours.avro").write_bytes(encoded)
    location = f"file://{folder}/ours.avro"
    described = describe_manifest(files, shape=shape, snapshot_id=SNAPSHOT, location=location, size_bytes=len(encoded))
    current, _ = apply_row_ids(apply_manifest(ManifestList(), described, sequence_number=7), 100)
    header = ListHeader(SNAPSHOT, None, 7, format_version, 100)
    (folder / "our-list.avro").write_bytes(encode_manifest_list(current, header))
    return f"file://{folder}/our-list.avro"


def write_theirs(folder: Path, type_: str) -> str:
    shape, files = shape_of(type_), make_files(type_)
    schema = PeerSchema.model_validate(schema_to_json(shape.schema))
    spec = PeerSpec.model_validate(spec_to_json(shape.spec))
    output = IO.new_output(f"file://{folder}/theirs.avro")
    with write_manifest(2, spec, schema, output, SNAPSHOT, "deflate") as writer:
        for file in files:
            status = ManifestEntryStatus.ADDED
            writer.add(ManifestEntry.from_args(status=status, snapshot_id=SNAPSHOT, data_file=peer_file(type_, file)))
    with write_manifest_list(2, IO.new_output(f"file://{folder}/their-list.avro"), SNAPSHOT, None, 7, "deflate") as out:
        out.add_manifests([writer.to_manifest_file()])
    return f"{folder}/their-list.avro"


def peer_file(type_: str, file: DataFile) -> PeerDataFile:
    [value] = file.partition
    return PeerDataFile.from_args(
        content=DataFileContent.DATA,
        file_path=file.location,
        file_format=FileFormat.PARQUET,
        partition=Record(to_peer(type_, value) if type_ == "uuid" else value),
        record_count=file.record_count,
        file_size_in_bytes=file.size_bytes,
        column_sizes=dict(file.column_sizes),
        value_counts=dict(file.value_counts),
        null_value_counts=dict(file.null_counts),
        nan_value_counts={},
        lower_bounds=dict(file.lower_bounds),
        upper_bounds=dict(file.upper_bounds),
        split_offsets=list(file.split_offsets),
        equality_ids=None,
        sort_order_id=file.sort_order_id,
    )


@pytest.mark.parametrize("format_version", [2, 3])
@pytest.mark.parametrize("type_", sorted(VALUES.keys() - PEER_CANNOT_READ))
def test_pyiceberg_reads_what_we_wrote(tmp_path, type_, format_version):
    [manifest] = read_manifest_list(IO.new_input(write_ours(tmp_path, type_, format_version)))
    entries = manifest.fetch_manifest_entry(IO)
    for entry, file in zip(entries, make_files(type_), strict=True):
        found = entry.data_file
        assert (entry.status, entry.snapshot_id, entry.sequence_number) == (ManifestEntryStatus.ADDED, SNAPSHOT, 7)
        assert (found.file_path, found.record_count, found.file_size_in_bytes) == (file.location, 5, 99)
        assert [from_peer(type_, value) for value in found.partition] == [from_peer(type_, v) for v in file.partition]
        assert (found.lower_bounds, found.upper_bounds) == (file.lower_bounds, file.upper_bounds)
        assert (found.value_counts, found.null_value_counts) == (file.value_counts, file.null_counts)
        assert (found.column_sizes, found.split_offsets) == (file.column_sizes, list(file.split_offsets))
        assert found.sort_order_id == file.sort_order_id


@pytest.mark.parametrize("type_", TYPES)
def test_we_read_what_pyiceberg_wrote_as_what_we_wrote(tmp_path, type_):
    their_list = Path(write_theirs(tmp_path, type_)).read_bytes()
    our_list = Path(write_ours(tmp_path, type_, 2).removeprefix("file://")).read_bytes()
    [theirs], [ours] = (list_manifests(data, "list") for data in (their_list, our_list))
    assert theirs.summaries == ours.summaries
    assert (theirs.snapshot_id, theirs.files_count, theirs.sequence_number) == (SNAPSHOT, len(make_files(type_)), 7)
    found, wanted = (
        list(read_entries((tmp_path / name).read_bytes(), manifest, [type_]))
        for name, manifest in (("theirs.avro", theirs), ("ours.avro", ours))
    )
    assert [(e.status, e.snapshot_id, e.sequence_number, e.content, e.partition) for e in found] == [
        (e.status, e.snapshot_id, e.sequence_number, e.content, e.partition) for e in wanted
    ]
    same = wanted[0].file.keys() - {"partition", "nan_value_counts"}
    assert [{name: e.file[name] for name in same} for e in found] == [
        {name: e.file[name] for name in same} for e in wanted
    ]
    carried = decode_manifest_list(their_list, "list")
    assert carried.extra_fields == ()
    [again] = list_manifests(encode_manifest_list(carried, ListHeader(8, 7, 8, 2)), "again")
    assert again == theirs


@pytest.mark.xfail(strict=True, reason="PyIceberg writes no manifests of format 3 (#1551, #3620)")
def test_pyiceberg_writes_manifests_of_format_3(tmp_path):
    shape = shape_of("long")
    schema = PeerSchema.model_validate(schema_to_json(shape.schema))
    spec = PeerSpec.model_validate(spec_to_json(shape.spec))
    with write_manifest(3, spec, schema, IO.new_output(f"file://{tmp_path}/m.avro"), SNAPSHOT, "deflate"):
        pass


@pytest.mark.xfail(strict=True, raises=AttributeError, reason="PyIceberg drops row ids of format 3 (#1551, #3620)")
def test_pyiceberg_keeps_row_ids(tmp_path):
    [manifest] = read_manifest_list(IO.new_input(write_ours(tmp_path, "long", 3)))
    assert manifest.first_row_id == 100


@pytest.mark.xfail(strict=True, raises=ValueError, reason="PyIceberg does not know nanoseconds in Avro files")
@pytest.mark.parametrize("type_", ["timestamp_ns", "timestamptz_ns"])
def test_pyiceberg_reads_partitions_of_nanoseconds(tmp_path, type_):
    [manifest] = read_manifest_list(IO.new_input(write_ours(tmp_path, type_, 3)))
    manifest.fetch_manifest_entry(IO)


@pytest.mark.xfail(strict=True, reason="PyIceberg 0.12 rounds doubles in Avro to 32 bits (#3808)")
def test_pyiceberg_reads_doubles_exactly(tmp_path):
    [manifest] = read_manifest_list(IO.new_input(write_ours(tmp_path, "double", 2)))
    values = [entry.data_file.partition[0] for entry in manifest.fetch_manifest_entry(IO)]
    assert values == [*VALUES["double"][:20], None]
