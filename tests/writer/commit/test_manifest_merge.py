from __future__ import annotations

import io
from dataclasses import replace
from decimal import Decimal

import fastavro
import pytest

from lakefeed.contract.changes import TableName
from lakefeed.contract.errors import ManifestUnreadable
from lakefeed.iceberg.arrow import split_by_partition
from lakefeed.iceberg.layout import PartitionField, PartitionSpec, parse_partition, spec_to_json
from lakefeed.iceberg.manifests import (
    DataFile,
    Manifest,
    ManifestList,
    TableShape,
    apply_manifest,
    describe_manifest,
    encode_manifest,
    read_entries,
)
from lakefeed.iceberg.types import Field, Schema, StructType
from lakefeed.writer.commit.manifests import (
    OWN_MANIFEST_PREFIX,
    maybe_merge,
    merge_manifests,
    plan_merge,
)
from lakefeed.writer.commit.state import table_state_from
from lakefeed.writer.config import WriterConfig
from lakefeed.writer.files.parquet import write_data_file
from tests.writer.commit.test_commit_plan import make_document
from tests.writer.examples import NESTED, nested_rows

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


def merge(bodies, manifests, shape=SHAPE):
    return merge_manifests(
        bodies, manifests, shape=shape, snapshot_id=9, sequence_number=4, location="file:///m/one.avro"
    )


def merge_all(manifests, encoded):
    return merge([encoded[m["manifest_path"]] for m in manifests.manifests], manifests.manifests)


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
    merged = list(fastavro.reader(io.BytesIO(merge_all(manifests, encoded)[0])))
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
    listed = {**manifest, "sequence_number": 1, "min_sequence_number": 1, "first_row_id": 500}
    merged, _ = merge([data], [listed], replace(SHAPE, format_version=3))
    records = list(fastavro.reader(io.BytesIO(merged)))
    assert [record["data_file"]["first_row_id"] for record in records] == [500, 501]


def test_one_manifest_stands_for_all_that_it_merges():
    manifests, encoded = make_list(3)
    _, one = merge_all(manifests, encoded)
    assert (one["existing_files_count"], one["existing_rows_count"], one["added_files_count"]) == (6, 6, 0)
    assert (one["sequence_number"], one["min_sequence_number"], one["added_snapshot_id"]) == (4, 1, 9)
    [summary] = one["partitions"]
    assert int.from_bytes(summary["lower_bound"], "little") == 10
    assert int.from_bytes(summary["upper_bound"], "little") == 31


THREE = {"commit.manifest.min-count-to-merge": "3"}


class MemoryStore:
    def __init__(self, objects):
        self.objects = objects

    async def read(self, location):
        return self.objects[location]

    async def write(self, location, data):
        self.objects[location] = data


async def test_merged_manifest_takes_the_place_of_all_that_it_merges():
    manifests, encoded = make_list(3)
    kept = {**manifests.manifests[0], "manifest_path": "file:///m/theirs.avro"}
    document = make_document(**{"partition-specs": [spec_to_json(SPEC)], "properties": THREE})
    extra = ({"name": "later", "type": "int"},)
    current = ManifestList((kept, *manifests.manifests), extra)
    state = replace(table_state_from(TableName(("default",), "users"), document), manifests=current)
    store = MemoryStore(encoded)
    after, replaced = await maybe_merge(store, state, snapshot_id=9)
    one, other = after.manifests.manifests
    assert replaced == 3
    assert other is kept
    assert after.manifests.extra_fields == extra
    assert (one["sequence_number"], one["manifest_length"]) == (8, len(store.objects[one["manifest_path"]]))


def merged_manifest(number: int, size_bytes: int = 1_000):
    """A manifest that an earlier merge made, with four files and rows."""
    [manifest] = make_list(1)[0].manifests
    facts = {"added_files_count": 0, "existing_files_count": 4, "added_rows_count": 0, "existing_rows_count": 4}
    path = f"file:///lakefeed-warehouse/lakefeed-{number}.avro"
    return {**manifest, **facts, "manifest_path": path, "manifest_length": size_bytes}


def test_manifests_that_were_merged_are_merged_again_when_they_are_many():
    merged = [merged_manifest(number) for number in range(3)]
    fresh = make_list(2)[0].manifests
    assert list(plan_merge(ManifestList((*fresh, *merged)), SHAPE, THREE)) == merged
    assert plan_merge(ManifestList((*fresh, *merged[:2])), SHAPE, THREE) == ()


def test_fresh_manifests_are_merged_before_merged_ones():
    merged = [merged_manifest(number) for number in range(3)]
    fresh = make_list(3)[0].manifests
    assert plan_merge(ManifestList((*fresh, *merged)), SHAPE, THREE) == fresh


def test_manifests_of_half_the_target_size_are_left_alone():
    sizes = {**THREE, "commit.manifest.target-size-bytes": "2000"}
    merged = [merged_manifest(number, size_bytes=1_000 - (number > 0)) for number in range(4)]
    assert list(plan_merge(ManifestList(tuple(merged)), SHAPE, sizes)) == merged[2:]
    assert plan_merge(ManifestList(tuple(merged[:3])), SHAPE, sizes) == ()


def test_a_merge_takes_the_oldest_that_fit_the_target_size():
    sizes = {**THREE, "commit.manifest.target-size-bytes": "5000"}
    merged = tuple(merged_manifest(number, size_bytes=2_000) for number in range(6))
    assert plan_merge(ManifestList(merged), SHAPE, sizes) == merged[4:]


def test_counts_of_a_second_merge_are_those_of_all_files():
    manifests, encoded = make_list(1)
    [body] = encoded.values()
    _, one = merge([body, body], [merged_manifest(1), *manifests.manifests])
    assert (one["existing_files_count"], one["existing_rows_count"]) == (4 + 2, 4 + 2)
    assert (one["added_files_count"], one["added_rows_count"]) == (0, 0)


@pytest.mark.parametrize("text", ["", "many", "-5", "1.5"])
def test_a_limit_that_is_no_number_counts_as_not_set(text):
    manifests, _ = make_list(1)
    properties = {"commit.manifest.min-count-to-merge": text}
    assert plan_merge(ManifestList(manifests.manifests * 99), SHAPE, properties) == ()
    assert len(plan_merge(ManifestList(manifests.manifests * 100), SHAPE, properties)) == 100


def test_a_damaged_manifest_is_reported_by_its_location():
    data, manifest = make_manifest(1, snapshot_id=1)
    with pytest.raises(ManifestUnreadable, match=manifest["manifest_path"]):
        merge([data[: len(data) // 2]], [{**manifest, "sequence_number": 1}])


# Of each type that Python's own calendar does not hold, and of decimals, whose bytes have their type's size.
@pytest.mark.parametrize(
    ("type_", "values"),
    [
        ("date", [-(2**31), 2_932_897, None, 0]),
        ("timestamp", [-(2**63), 2**63 - 1, 253_402_300_800_000_000, 0]),
        ("timestamptz", [-(2**63), 2**63 - 1, None]),
        ("timestamp_ns", [-(2**63), 2**63 - 1]),
        ("decimal(9,2)", [Decimal("-1.50"), Decimal("9999999.99"), None]),
        ("decimal(38,0)", [Decimal(-(10**38) + 1), Decimal(10**38 - 1)]),
        ("uuid", [b"\x00" * 16, b"\xff" * 16]),
        ("double", [float("nan"), -1.5, None]),
    ],
)
def test_partitions_of_every_value_are_merged_and_summarised_as_if_written_together(type_, values):
    schema = Schema(0, StructType((Field(1, "c", type_),)))
    shape = TableShape(schema, PartitionSpec(0, (PartitionField(1, 1000, "c", "identity"),)), 2)
    files = [DataFile(f"file:///{at}", (value,), 1, 1, {}, {}, {}, {}, {}, ()) for at, value in enumerate(values)]

    def described(part):
        return describe_manifest(part, shape=shape, snapshot_id=1, location="file:///m", size_bytes=1)

    bodies = [encode_manifest([file], shape=shape, snapshot_id=1) for file in files]
    listed = [{**described([file]), "sequence_number": 1, "min_sequence_number": 1} for file in files]
    merged, one = merge(bodies, listed, shape)

    assert one["partitions"] == described(files)["partitions"]
    together = encode_manifest(files, shape=shape, snapshot_id=1)
    found, wanted = (
        [repr(entry.partition) for entry in read_entries(data, Manifest.of(listed[0]), [type_])]
        for data in (merged, together)
    )
    assert found == wanted


def test_partition_of_a_decimal_that_was_widened_since_is_merged():
    def shape_of(type_):
        schema = Schema(0, StructType((Field(1, "c", type_),)))
        return TableShape(schema, PartitionSpec(0, (PartitionField(1, 1000, "c", "identity"),)), 2)

    file = DataFile("file:///f", (Decimal("-1.50"),), 1, 1, {}, {}, {}, {}, {}, ())
    older = shape_of("decimal(9, 2)")
    listed = describe_manifest([file], shape=older, snapshot_id=1, location="file:///m", size_bytes=1)
    body = encode_manifest([file], shape=older, snapshot_id=1)
    numbers = {"sequence_number": 1, "min_sequence_number": 1}
    merged, _ = merge([body], [{**listed, **numbers}], shape_of("decimal(30, 2)"))
    [record] = fastavro.reader(io.BytesIO(merged))
    assert record["data_file"]["partition"] == {"c": Decimal("-1.50")}
