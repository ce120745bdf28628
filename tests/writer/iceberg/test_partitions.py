from __future__ import annotations

import datetime as dt
from decimal import Decimal

import pyarrow as pa
import pytest

from tests.writer.examples import MIDNIGHT, NESTED, nested_rows
from writer.iceberg.partitions import (
    PartitionField,
    PartitionRejected,
    PartitionSpec,
    parse_partition,
    partition_path,
    partition_types,
    spec_from_json,
    spec_to_json,
    split_by_partition,
)

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
    "text", ["day", "day(nowhere)", "day(name)", "hour(born)", "bucket(name)", "identity(address)", ""]
)
def test_a_partition_that_makes_no_sense_is_refused(text):
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
