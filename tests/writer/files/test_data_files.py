from __future__ import annotations

import math
from decimal import Decimal

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyiceberg.io.pyarrow import (
    compute_statistics_plan,
    data_file_statistics_from_parquet_metadata,
    parquet_path_to_id_mapping,
)
from pyiceberg.schema import Schema as PyIcebergSchema

from lakefeed.iceberg.arrow import FIELD_ID_KEY, to_arrow_schema
from lakefeed.iceberg.types import Field, ListType, Schema, StructType, schema_to_json
from lakefeed.writer.config import WriterConfig
from lakefeed.writer.files.parquet import repeating_columns, write_data_file
from tests.writer.examples import NESTED, nested_rows


def write(table: pa.Table, schema: Schema = NESTED, **settings):
    return write_data_file(
        table, schema=schema, location="file:///t/a.parquet", partition=(), config=WriterConfig(**settings)
    )


def pyiceberg_statistics(buffer: pa.Buffer, schema: Schema):
    peer = PyIcebergSchema.model_validate(schema_to_json(schema))
    return data_file_statistics_from_parquet_metadata(
        pq.read_metadata(pa.BufferReader(buffer)),
        compute_statistics_plan(peer, {}),
        parquet_path_to_id_mapping(peer),
    ).to_serialized_dict()


@pytest.mark.parametrize("row_group_rows", [7, 1000])
def test_statistics_are_those_that_pyiceberg_reads_from_the_same_file(row_group_rows):
    buffer, file = write(nested_rows(50), parquet_row_group_rows=row_group_rows)
    peer = pyiceberg_statistics(buffer, NESTED)
    assert file.record_count == peer["record_count"] == 50
    assert file.column_sizes == peer["column_sizes"]
    assert file.value_counts == peer["value_counts"]
    assert file.null_counts == peer["null_value_counts"]
    assert list(file.split_offsets) == peer["split_offsets"]
    assert file.size_bytes == buffer.size
    # PyIceberg bounds top-level columns only.
    in_structs = {12, 13}
    assert {key: value for key, value in file.lower_bounds.items() if key not in in_structs} == peer["lower_bounds"]
    assert {key: value for key, value in file.upper_bounds.items() if key not in in_structs} == peer["upper_bounds"]


def test_bounds_reach_into_structs_and_not_into_lists_and_maps():
    _, file = write(nested_rows(3))
    assert file.lower_bounds[12] == b"city 1"
    assert file.upper_bounds[13] == (3).to_bytes(4, "little")
    assert not {15, 17, 18} & set(file.lower_bounds)


def test_the_file_carries_the_field_ids_of_the_schema_at_every_depth():
    buffer, _ = write(nested_rows(3))
    found = pq.read_schema(pa.BufferReader(buffer))
    columns = [name for name in found.names if name != "scores"]  # pyarrow gives the entries of a map other names
    wanted = to_arrow_schema(NESTED)
    assert all(found.field(name).equals(wanted.field(name), check_metadata=True) for name in columns)
    scores = found.field("scores").type
    assert [field.metadata[FIELD_ID_KEY] for field in (scores.key_field, scores.item_field)] == [b"17", b"18"]


def test_rows_without_field_ids_are_given_them():
    bare = pa.table({"id": pa.array([1, 2], pa.int64())})
    schema = Schema(0, StructType((Field(9, "id", "long", required=True),)))
    buffer, file = write(bare, schema)
    assert pq.read_schema(pa.BufferReader(buffer)).field("id").metadata == {b"PARQUET:field_id": b"9"}
    assert file.value_counts == {9: 2}


def test_duckdb_reads_the_rows_back(tmp_path):
    rows = nested_rows(20)
    buffer, _ = write(rows)
    (tmp_path / "a.parquet").write_bytes(buffer)
    query = f"SELECT _cdc_sequence, price, total, address.zip FROM '{tmp_path}/a.parquet' ORDER BY 1"
    with duckdb.connect() as connection:
        found = connection.execute(query).fetchall()
    assert found[1] == (2, Decimal("0.02"), Decimal("-0.0002"), 2)
    assert len(found) == 20


def test_a_column_of_nulls_has_counts_and_no_bounds():
    schema = Schema(0, StructType((Field(1, "a", "string"),)))
    _, file = write(pa.table({"a": pa.nulls(5, pa.string())}), schema)
    assert (file.null_counts, file.lower_bounds, file.upper_bounds) == ({1: 5}, {}, {})


def test_a_row_group_of_nulls_does_not_hide_the_bounds_of_others():
    schema = Schema(0, StructType((Field(1, "a", "int"),)))
    _, file = write(pa.table({"a": pa.array([None, None, 7, 8], pa.int32())}), schema, parquet_row_group_rows=2)
    assert file.lower_bounds == {1: (7).to_bytes(4, "little")}
    assert file.upper_bounds == {1: (8).to_bytes(4, "little")}


def test_a_value_too_long_for_parquet_statistics_leaves_no_bounds():
    schema = Schema(0, StructType((Field(1, "a", "string"),)))
    _, file = write(pa.table({"a": ["b", "z" * 10_000]}), schema, parquet_row_group_rows=1)
    assert (file.lower_bounds, file.upper_bounds) == ({}, {})


def test_not_a_number_is_in_no_bound():
    schema = Schema(0, StructType((Field(1, "a", "double"),)))
    _, file = write(pa.table({"a": [math.nan, 1.0, 2.0]}), schema)
    assert set(file.lower_bounds) == {1}
    _, file = write(pa.table({"a": [math.nan, math.nan]}), schema)
    assert (file.lower_bounds, file.upper_bounds) == ({}, {})


def test_only_columns_that_repeat_get_a_dictionary():
    assert set(repeating_columns(nested_rows(1000))) == {
        "_cdc_operation",
        "address.city",
        "scores.key_value.key",
    }


@pytest.mark.parametrize("compression", ["zstd", "snappy", "lz4", "gzip", "none"])
def test_every_compression_of_the_settings_can_be_written(compression):
    buffer, _ = write(nested_rows(10), parquet_compression=compression)
    column = pq.read_metadata(pa.BufferReader(buffer)).row_group(0).column(0)
    assert column.compression == {"none": "UNCOMPRESSED"}.get(compression, compression.upper())


def test_an_empty_table_is_a_file_without_bounds():
    _, file = write(nested_rows(0))
    assert (file.record_count, file.lower_bounds) == (0, {})


def test_uuids_have_no_statistics_because_readers_disagree_on_their_order():
    home = StructType((Field(3, "id", "uuid"), Field(4, "zip", "int")))
    schema = Schema(
        0, StructType((Field(1, "a", "uuid"), Field(2, "home", home), Field(5, "ids", ListType(6, "uuid"))))
    )
    low, high = b"\x00" * 16, b"\xff" * 16
    rows = [{"a": low, "home": {"id": low, "zip": 1}, "ids": [low]}, {"a": high, "home": {"id": high, "zip": 2}}]
    buffer, file = write(pa.Table.from_pylist(rows, schema=to_arrow_schema(schema)), schema)
    assert set(file.lower_bounds) == {4}
    group = pq.read_metadata(pa.BufferReader(buffer)).row_group(0)
    assert [group.column(n).is_stats_set for n in range(4)] == [False, False, True, False]
