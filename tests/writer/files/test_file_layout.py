"""What each data file of a flush holds: its partition, its rows and their order."""

from __future__ import annotations

import datetime as dt

import numpy as np
import pyarrow as pa
import pytest

from lakefeed.iceberg.layout import UNSORTED, SortField, SortOrder, parse_partition, parse_sort
from lakefeed.iceberg.manifests import TableShape
from lakefeed.iceberg.types import Field, Schema, StructType
from lakefeed.writer.files.parquet import join_rows, lay_out, usable_order
from tests.writer.examples import MIDNIGHT, NESTED, nested_rows


def laid_out(tables, *, partition: str = "none", sort: str = "", files: int = 1, schema: Schema = NESTED):
    shape = TableShape(schema, parse_partition(partition, schema), 2)
    return lay_out(join_rows(tables, shape), shape, order=parse_sort(sort, schema), files_for=lambda _: files)


def sequences(planned) -> list[list[int]]:
    return [each.rows["_cdc_sequence"].to_pylist() for each in planned]


def test_no_rows_are_no_files():
    assert laid_out([]) == []
    assert laid_out([nested_rows(0)]) == []


def test_tables_of_one_partition_are_one_file_in_the_order_of_the_log():
    planned = laid_out([nested_rows(2), nested_rows(2, first_sequence=3)], partition="day(_cdc_timestamp)")
    assert sequences(planned) == [[1, 2, 3, 4]]


def test_rows_of_one_partition_are_not_copied():
    table = nested_rows(100)
    (planned,) = laid_out([table], partition="day(_cdc_timestamp)")
    address = table["_cdc_sequence"].chunk(0).buffers()[1].address
    assert planned.rows["_cdc_sequence"].chunk(0).buffers()[1].address == address


def test_each_partition_is_sorted_and_cut_by_itself():
    late = nested_rows(5, first_sequence=6, start=MIDNIGHT + dt.timedelta(days=1))
    planned = laid_out([nested_rows(5), late], partition="day(_cdc_timestamp)", sort="_cdc_sequence desc", files=2)
    assert sequences(planned) == [[5, 4], [3, 2, 1], [10, 9], [8, 7, 6]]
    assert {each.sort_order_id for each in planned} == {1}


def test_there_are_never_more_files_than_rows():
    assert sequences(laid_out([nested_rows(2)], files=100)) == [[1], [2]]


def test_rows_from_before_a_column_came_have_null_in_it():
    schema = Schema(0, StructType((*NESTED.columns.fields, Field(30, "region", "string"))))
    (planned,) = laid_out([nested_rows(1)], partition="identity(region)", schema=schema)
    assert planned.partition == (None,)
    assert planned.rows["region"].to_pylist() == [None]


@pytest.mark.parametrize(
    "field",
    [
        SortField(99, "identity", is_descending=False, nulls_first=True),
        SortField(4, "zorder", is_descending=False, nulls_first=True),
    ],
)
def test_order_that_cannot_be_computed_here_is_left_out_and_not_claimed(field):
    shape = TableShape(NESTED, parse_partition("none", NESTED), 2)
    order = SortOrder(3, (field,))
    assert usable_order(order, shape) == UNSORTED
    (planned,) = lay_out(nested_rows(3), shape, order=order, files_for=lambda _: 1)
    assert (planned.sort_order_id, planned.rows.num_rows) == (0, 3)


def test_ten_thousand_partitions_are_ten_thousand_files_and_no_row_is_lost():
    ids = np.random.default_rng(7).permutation(30_000)
    schema = Schema(0, StructType((Field(1, "_cdc_sequence", "long"), Field(2, "key", "long"))))
    table = pa.table({"_cdc_sequence": ids, "key": ids % 10_000})
    planned = laid_out([table.slice(0, 11_000), table.slice(11_000)], partition="identity(key)", schema=schema)
    assert len(planned) == len({each.partition for each in planned}) == 10_000
    assert all(set(each.rows["key"].to_pylist()) == {each.partition[0]} for each in planned)
    assert sorted(number for each in sequences(planned) for number in each) == list(range(30_000))
