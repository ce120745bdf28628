from __future__ import annotations

import datetime as dt
from decimal import Decimal

import pyarrow as pa
import pytest

from lakefeed.iceberg.arrow import split_by_partition, to_arrow_schema
from lakefeed.iceberg.layout import (
    PartitionField,
    PartitionSpec,
    parse_partition,
    partition_path,
    partition_types,
    same_partitioning,
    spec_from_json,
    spec_to_json,
    with_known_ids,
)
from lakefeed.iceberg.terms import PartitionRejected
from lakefeed.iceberg.types import Field, Schema, StructType
from tests.writer.examples import MIDNIGHT, NESTED, nested_rows

DAY = parse_partition("day(_cdc_timestamp)", NESTED)


def day_number(date: dt.date) -> int:
    return (date - dt.date(1970, 1, 1)).days


def test_none_is_a_spec_without_fields():
    assert parse_partition("none", NESTED) == PartitionSpec(0, ())


def test_several_terms_are_numbered_in_order():
    spec = parse_partition("day(_cdc_timestamp), identity(_cdc_operation)", NESTED)
    assert spec.fields == (
        PartitionField(2, 1000, "_cdc_timestamp_day", "day"),
        PartitionField(3, 1001, "_cdc_operation", "identity"),
    )
    assert spec_from_json(spec_to_json(spec)) == spec


@pytest.mark.parametrize(
    "text",
    [
        *("day", "day(nowhere)", "day(name)", "hour(born)", "bucket(name)", "identity(address)", ""),
        *(
            "bucket[0](name)",
            "bucket[4](weight)",
            "day(address.zip)",
            "identity(address.street)",
            "day(born), day(born)",
        ),
    ],
)
def test_invalid_partition_is_refused(text):
    with pytest.raises(PartitionRejected, match="partition"):
        parse_partition(text, NESTED)


def test_rows_of_one_day_are_one_partition_and_not_copied():
    table = nested_rows(10)
    [(partition, rows)] = split_by_partition(table, DAY, NESTED)
    assert partition == (day_number(dt.date(2026, 11, 16)),)
    assert rows is table


def test_rows_are_split_at_midnight_and_keep_their_order():
    table = pa.concat_tables(
        [nested_rows(3, first_sequence=s, start=MIDNIGHT - dt.timedelta(seconds=1)) for s in (1, 4, 7)]
    )
    parts = dict(split_by_partition(table, DAY, NESTED))
    assert {partition: rows["_cdc_sequence"].to_pylist() for partition, rows in parts.items()} == {
        (day_number(dt.date(2026, 11, 15)),): [1, 4, 7],
        (day_number(dt.date(2026, 11, 16)),): [2, 3, 5, 6, 8, 9],
    }


def test_nulls_are_a_partition_of_their_own():
    table = nested_rows(4)
    spec = parse_partition("identity(name)", NESTED)
    parts = {
        partition: rows["_cdc_sequence"].to_pylist() for partition, rows in split_by_partition(table, spec, NESTED)
    }
    assert parts[(None,)] == [3]
    assert len(parts) == 4


def test_all_nulls_are_one_partition():
    table = nested_rows(2)
    table = table.set_column(1, table.schema.field(1), pa.nulls(2, table.schema.field(1).type))
    assert split_by_partition(table, DAY, NESTED) == [((None,), table)]


@pytest.mark.parametrize(("transform", "expected"), [("year", -1), ("month", -1), ("day", -1), ("hour", -1)])
def test_times_before_1970_round_down(transform, expected):
    table = nested_rows(1, start=dt.datetime(1969, 12, 31, 23, 59, 59, 999_999, tzinfo=dt.UTC))
    spec = parse_partition(f"{transform}(_cdc_timestamp)", NESTED)
    assert split_by_partition(table, spec, NESTED)[0][0] == (expected,)


@pytest.mark.parametrize(
    ("term", "path"),
    [
        ("year(_cdc_timestamp)", "_cdc_timestamp_year=2026"),
        ("month(_cdc_timestamp)", "_cdc_timestamp_month=2026-11"),
        ("day(_cdc_timestamp)", "_cdc_timestamp_day=2026-11-16"),
        ("hour(_cdc_timestamp)", "_cdc_timestamp_hour=2026-11-16-00"),
        ("identity(born)", "born=2000-01-02"),
        ("identity(price)", "price=0.01"),
        ("identity(name)", "name=name+of+the+customer+000001"),
        ("identity(active)", "active=false"),
        ("truncate[4](name)", "name_trunc_4=name"),
        ("bucket[16](born)", "born_bucket_16=14"),
        ("identity(address.zip)", "address.zip=1"),
        ("none", ""),
    ],
)
def test_paths_name_the_partition_as_other_writers_do(term, path):
    spec = parse_partition(term, NESTED)
    [(partition, _)] = split_by_partition(nested_rows(1), spec, NESTED)
    assert partition_path(partition, spec, NESTED) == path


def test_a_null_has_a_path_too():
    assert partition_path((None,), DAY, NESTED) == "_cdc_timestamp_day=null"


def test_a_nested_column_and_a_dropped_one_can_be_in_a_spec():
    spec = PartitionSpec(3, (PartitionField(13, 1000, "zip", "identity"), PartitionField(2, 1001, "old", "void")))
    assert partition_types(spec, NESTED) == ("int", "timestamptz")
    assert [partition for partition, _ in split_by_partition(nested_rows(2), spec, NESTED)] == [(1, None), (2, None)]


def test_decimals_stay_decimals():
    spec = parse_partition("identity(price)", NESTED)
    assert split_by_partition(nested_rows(1), spec, NESTED)[0][0] == (Decimal("0.01"),)


def test_no_rows_are_no_partitions():
    assert split_by_partition(nested_rows(0), DAY, NESTED) == []


def test_value_too_long_for_a_path_is_cut_there_and_nowhere_else():
    spec = parse_partition("identity(name)", NESTED)
    for name in ("x" * 5_000, "\U0001f40b" * 200, "/" * 300):
        assert len(partition_path((name,), spec, NESTED)) <= 200
    rows = nested_rows(1).set_column(3, "name", [["x" * 5_000]])
    assert split_by_partition(rows, spec, NESTED)[0][0] == ("x" * 5_000,)


def test_values_that_share_a_bucket_only_at_the_ends_are_not_taken_for_one_partition():
    spec = parse_partition("bucket[2](_cdc_sequence)", NESTED)
    parts = {
        partition: rows["_cdc_sequence"].to_pylist()
        for partition, rows in split_by_partition(nested_rows(4), spec, NESTED)
    }
    assert parts == {(0,): [1, 2, 4], (1,): [3]}


def test_times_that_python_cannot_hold_are_partitioned():
    schema = Schema(0, StructType((Field(1, "at", "timestamp_ns"), Field(2, "on", "timestamp"))))
    columns = {"at": pa.array([1, 86_400_000_000_001]), "on": pa.array([-(2**62), 2**62])}
    table = pa.table({name: values.cast(to_arrow_schema(schema).field(name).type) for name, values in columns.items()})
    spec = parse_partition("day(at), year(on)", schema)
    assert [partition for partition, _ in split_by_partition(table, spec, schema)] == [(0, -146_139), (1, 146_138)]


def test_specs_are_the_same_by_what_they_do_and_not_by_their_names():
    day = parse_partition("day(_cdc_timestamp)", NESTED)
    renamed = PartitionSpec(7, (PartitionField(2, 1005, "when", "day"), PartitionField(3, 1001, "gone", "void")))
    assert same_partitioning(day, renamed)
    assert not same_partitioning(day, parse_partition("hour(_cdc_timestamp)", NESTED))
    assert not same_partitioning(day, parse_partition("none", NESTED))


def test_field_that_an_older_spec_had_keeps_its_id_and_name():
    older = PartitionSpec(0, (PartitionField(2, 1003, "when", "day"),))
    spec = parse_partition("identity(name), day(_cdc_timestamp), bucket[4](name)", NESTED)
    assert with_known_ids(spec, [older], last_field_id=1007).fields == (
        PartitionField(4, 1008, "name", "identity"),
        PartitionField(2, 1003, "when", "day"),
        PartitionField(4, 1009, "name_bucket_4", "bucket[4]"),
    )


def test_transform_of_several_columns_is_read_and_refused_only_when_rows_come():
    field = {"source-ids": [1, 2], "field-id": 1000, "name": "both", "transform": "bucket[4]"}
    spec = spec_from_json({"spec-id": 3, "fields": [field]})
    with pytest.raises(PartitionRejected, match="field=both"):
        split_by_partition(nested_rows(1), spec, NESTED)
