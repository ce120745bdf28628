from __future__ import annotations

import io

import fastavro
import pytest

from tests.writer.examples import NESTED, nested_rows
from writer.config import WriterConfig
from writer.data_files import write_data_file
from writer.iceberg.manifest_merge import OWN_MANIFEST_PREFIX, apply_merge, decode_entries, plan_merge
from writer.iceberg.manifests import (
    ManifestList,
    ManifestUnreadable,
    TableShape,
    apply_manifest,
    describe_manifest,
    encode_entries,
    encode_manifest,
)
from writer.iceberg.partitions import parse_partition, split_by_partition

SPEC = parse_partition("identity(_cdc_sequence)", NESTED)
SHAPE = TableShape(NESTED, SPEC, 2)


def make_manifest(first_sequence, *, snapshot_id, name=f"{OWN_MANIFEST_PREFIX}x.avro"):
    """Encode a manifest of two files, one row each, and describe it."""
    files = [
        write_data_file(part, schema=NESTED, location="file:///f", partition=partition, config=WriterConfig())[1]
        for partition, part in split_by_partition(nested_rows(2, first_sequence=first_sequence), SPEC, NESTED)
    ]
    encoded = encode_manifest(files, shape=SHAPE, snapshot_id=snapshot_id)
    location = f"file:///m/{snapshot_id}/{name}"
    return encoded, describe_manifest(
        files, shape=SHAPE, snapshot_id=snapshot_id, location=location, size_bytes=len(encoded)
    )


def make_list(count, **settings):
    """Make a list of `count` manifests, as commits 1 to `count` leave it, and the bytes of each."""
    manifests, encoded = ManifestList(), {}
    for number in range(1, count + 1):
        data, manifest = make_manifest(10 * number, snapshot_id=number, **settings)
        encoded[manifest["manifest_path"]] = data
        manifests = apply_manifest(manifests, manifest, sequence_number=number)
    return manifests, encoded


@pytest.mark.parametrize(("count", "merged"), [(2, 0), (3, 3), (4, 4)])
def test_manifests_are_merged_when_the_table_has_as_many_as_it_allows(count, merged):
    manifests, _ = make_list(count)
    assert len(plan_merge(manifests, SHAPE, {"commit.manifest.min-count-to-merge": "3"})) == merged


def test_a_hundred_is_the_limit_where_the_table_names_none():
    manifests, _ = make_list(1)
    many = ManifestList(manifests.manifests * 99)
    assert plan_merge(many, SHAPE, {}) == ()
    assert len(plan_merge(ManifestList(manifests.manifests * 100), SHAPE, {})) == 100


def test_a_table_can_forbid_merging():
    manifests, _ = make_list(3)
    properties = {"commit.manifest.min-count-to-merge": "2", "commit.manifest-merge.enabled": "false"}
    assert plan_merge(manifests, SHAPE, properties) == ()


@pytest.mark.parametrize(
    "change",
    [
        {"content": 1},
        {"partition_spec_id": 7},
        {"existing_files_count": 1},
        {"deleted_files_count": 1},
        {"key_metadata": b"k"},
        {"manifest_path": "file:///lakefeed-warehouse/theirs-m0.avro"},
    ],
)
def test_what_is_not_a_plain_manifest_of_ours_is_left_alone(change):
    manifests, _ = make_list(3)
    first, *others = manifests.manifests
    changed = ManifestList(({**first, **change}, *others))
    assert list(plan_merge(changed, SHAPE, {"commit.manifest.min-count-to-merge": "2"})) == others


def test_entries_keep_the_snapshot_and_sequence_they_came_with():
    manifests, encoded = make_list(2)
    entries = [
        entry
        for manifest in manifests.manifests
        for entry in decode_entries(encoded[manifest["manifest_path"]], manifest)
    ]
    merged = list(fastavro.reader(io.BytesIO(encode_entries(entries, SHAPE))))
    assert [entry["status"] for entry in merged] == [0] * 4
    assert [(e["snapshot_id"], e["sequence_number"], e["file_sequence_number"]) for e in merged] == [
        (2, 2, 2),
        (2, 2, 2),
        (1, 1, 1),
        (1, 1, 1),
    ]
    assert [entry["data_file"]["partition"]["_cdc_sequence"] for entry in merged] == [20, 21, 10, 11]


def test_row_ids_that_were_inherited_are_written_out():
    data, manifest = make_manifest(1, snapshot_id=1)
    entries = decode_entries(data, {**manifest, "sequence_number": 1, "first_row_id": 500})
    assert [entry["data_file"]["first_row_id"] for entry in entries] == [500, 501]


def test_one_manifest_stands_for_all_that_it_merges():
    manifests, _ = make_list(3)
    kept = {**manifests.manifests[0], "manifest_path": "file:///m/theirs.avro"}
    current = ManifestList((kept, *manifests.manifests))
    after = apply_merge(
        current,
        manifests.manifests,
        shape=SHAPE,
        snapshot_id=9,
        sequence_number=4,
        location="file:///m/one.avro",
        size_bytes=123,
    )
    one, other = after.manifests
    assert other is kept
    assert (one["existing_files_count"], one["existing_rows_count"], one["added_files_count"]) == (6, 6, 0)
    assert (one["sequence_number"], one["min_sequence_number"], one["added_snapshot_id"]) == (4, 1, 9)
    [summary] = one["partitions"]
    assert int.from_bytes(summary["lower_bound"], "little") == 10
    assert int.from_bytes(summary["upper_bound"], "little") == 31


def test_a_damaged_manifest_is_told():
    data, manifest = make_manifest(1, snapshot_id=1)
    with pytest.raises(ManifestUnreadable):
        decode_entries(data[: len(data) // 2], {**manifest, "sequence_number": 1})
