from __future__ import annotations

import math
from decimal import Decimal

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lakefeed.iceberg.arrow import apply_order, to_arrow_type
from lakefeed.iceberg.layout import UNSORTED, SortField, SortOrder, order_from_json, order_to_json, parse_sort
from lakefeed.iceberg.terms import SortRejected
from lakefeed.iceberg.types import Field, Schema, StructType
from tests.writer.examples import NESTED, nested_rows

SCHEMA = Schema(0, StructType((Field(1, "a", "double"), Field(2, "b", "string"), Field(3, "n", "long"))))


def rows(**columns) -> pa.Table:
    size = len(next(iter(columns.values())))
    columns = {"a": [None] * size, "b": [None] * size, "n": list(range(size)), **columns}
    types = {"a": pa.float64(), "b": pa.string(), "n": pa.int64()}
    return pa.table({name: pa.array(values, types[name]) for name, values in columns.items()})


def order_of(text: str, **columns) -> list[int]:
    return apply_order(rows(**columns), parse_sort(text, SCHEMA), SCHEMA)["n"].to_pylist()


def test_setting_names_columns_directions_and_where_nulls_go():
    order = parse_sort("name, weight desc, born DESC NULLS FIRST, bucket[4](price) asc nulls last", NESTED)
    assert order.fields == (
        SortField(4, "identity", is_descending=False, nulls_first=True),
        SortField(7, "identity", is_descending=True, nulls_first=False),
        SortField(9, "identity", is_descending=True, nulls_first=True),
        SortField(5, "bucket[4]", is_descending=False, nulls_first=False),
    )
    assert order_from_json(order_to_json(order)) == order


def test_empty_setting_is_the_order_without_keys():
    assert parse_sort(" ", NESTED) == UNSORTED == SortOrder(0, ())


@pytest.mark.parametrize("text", ["nowhere", "name up", "address", "year(name)", "name,", "day(born", "name nulls"])
def test_invalid_order_is_refused(text):
    with pytest.raises(SortRejected, match="sort"):
        parse_sort(text, NESTED)


def test_field_inside_a_struct_can_be_a_key():
    table = nested_rows(4).take([2, 0, 3, 1])
    assert apply_order(table, parse_sort("address.zip", NESTED), NESTED)["_cdc_sequence"].to_pylist() == [1, 2, 3, 4]


def test_rows_that_are_equal_keep_their_order():
    assert order_of("b", b=["y", "x", "y", "x"]) == [1, 3, 0, 2]
    assert order_of("b desc", b=["y", "x", "y", "x"]) == [0, 2, 1, 3]


def test_rows_in_order_are_not_copied():
    table = rows(a=[1.0, 2.0])
    assert apply_order(table, parse_sort("a", SCHEMA), SCHEMA) is table
    assert apply_order(table, UNSORTED, SCHEMA) is table


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a", [2, 1, 3, 0]),
        ("a nulls last", [1, 3, 0, 2]),
        ("a desc", [0, 3, 1, 2]),
        ("a desc nulls first", [2, 0, 3, 1]),
    ],
)
def test_nan_sorts_above_all_numbers_and_nulls_as_the_order_says(text, expected):
    assert order_of(text, a=[math.nan, -1.0, None, math.inf]) == expected


@given(st.lists(st.tuples(st.none() | st.integers(-3, 3), st.none() | st.sampled_from(["", "a", "\U0001f40b", "é"]))))
def test_order_is_that_of_python(pairs):
    found = order_of("a desc, b", a=[None if a is None else float(a) for a, _ in pairs], b=[b for _, b in pairs])

    def key(index):
        a, b = pairs[index]
        return (a is None, -(a or 0), b is not None, (b or "").encode())

    assert found == sorted(range(len(pairs)), key=key)


def test_every_primitive_type_can_be_a_key():
    types = ["boolean", "int", "float", "decimal(30,2)", "date", "time", "timestamptz", "uuid", "binary", "fixed[3]"]
    schema = Schema(0, StructType(tuple(Field(i + 1, f"c{i}", type_) for i, type_ in enumerate(types))))
    lows = [False, 1, 1.0, Decimal(1), 1, 1, 1, b"a" * 16, b"a", b"aaa"]
    highs = [True, 2, 2.0, Decimal(2), 2, 2, 2, b"b" * 16, b"b", b"bbb"]
    arrow = pa.schema([(f.name, to_arrow_type(f.type)) for f in schema.columns.fields])
    table = pa.table(
        [pa.array([high, low], type_) for high, low, type_ in zip(highs, lows, arrow.types, strict=True)], arrow
    )
    for field in schema.columns.fields:
        assert apply_order(table, parse_sort(field.name, schema), schema).equals(table.take([1, 0])), field
