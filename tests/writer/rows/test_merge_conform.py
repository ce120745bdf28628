"""Decoded rows brought to other columns: only what is sure to keep every value is done."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

from lakefeed.iceberg.arrow import to_arrow_schema
from lakefeed.iceberg.types import Field, ListType, MapType, Schema, StructType, Type
from lakefeed.writer.rows.merge import conform

DAY = dt.date(2026, 11, 16)
MOMENT = dt.datetime(2026, 11, 16, 5, tzinfo=dt.UTC)


def column(type_: Type) -> StructType:
    return StructType((Field(1, "v", type_),))


def struct(type_: Type) -> StructType:
    return StructType((Field(2, "a", type_),))


def rows(values: list[Any], type_: Type) -> pa.Table:
    return pa.Table.from_pylist([{"v": value} for value in values], schema=to_arrow_schema(Schema(0, column(type_))))


PROMOTIONS: list[tuple[str, str, Any]] = [
    ("int", "long", -(2**31)),
    ("float", "double", 1.5),
    ("decimal(9, 2)", "decimal(38, 2)", Decimal("-1234567.89")),
]
OTHERS: list[tuple[str, str, Any]] = [
    ("long", "timestamptz", 1_731_769_200_000),
    ("long", "timestamp", 1_731_769_200_000),
    ("long", "time", 1),
    ("long", "date", 20_000),
    ("int", "date", 20_000),
    ("long", "int", 7),
    ("long", "boolean", 7),
    ("long", "double", 7),
    ("long", "string", 7),
    ("long", "decimal(20, 2)", 7),
    ("double", "long", 7.0),
    ("double", "float", 1.5),
    ("boolean", "long", True),
    ("string", "long", "12"),
    ("string", "binary", "YWJj"),
    ("string", "uuid", "sixteen bytes ok"),
    ("string", "timestamptz", "2026-11-16T05:00:00Z"),
    ("binary", "string", b"abc"),
    ("binary", "fixed[3]", b"abc"),
    ("decimal(9, 2)", "decimal(9, 4)", Decimal("1.5")),
    ("decimal(9, 2)", "decimal(7, 2)", Decimal("1.5")),
    ("decimal(9, 2)", "double", Decimal("1.5")),
    ("date", "timestamp", DAY),
    ("date", "int", DAY),
    ("timestamptz", "timestamp", MOMENT),
    ("timestamptz", "long", MOMENT),
    ("timestamptz", "timestamptz_ns", MOMENT),
]
NESTS = {
    "plain": (lambda type_: type_, lambda value: value),
    "in a struct": (struct, lambda value: {"a": value}),
    "in a list": (lambda type_: ListType(2, type_), lambda value: [value]),
    "in a map": (lambda type_: MapType(2, "string", 3, type_), lambda value: [("k", value)]),
}


@pytest.mark.parametrize("nest", NESTS.values(), ids=NESTS.keys())
@pytest.mark.parametrize(("before", "after", "value"), PROMOTIONS, ids=str)
def test_promotions_keep_the_value(before, after, value, nest):
    as_type, as_value = nest
    old = rows([as_value(value), None], as_type(before))
    assert conform(old, column(as_type(after))).to_pylist() == old.to_pylist()


@pytest.mark.parametrize("nest", NESTS.values(), ids=NESTS.keys())
@pytest.mark.parametrize(("before", "after", "value"), OTHERS, ids=str)
def test_values_of_any_other_type_are_refused(before, after, value, nest):
    as_type, as_value = nest
    with pytest.raises(pa.ArrowInvalid, match="another type"):
        conform(rows([None, as_value(value)], as_type(before)), column(as_type(after)))


@pytest.mark.parametrize(("before", "after", "value"), OTHERS, ids=str)
def test_a_column_without_values_takes_any_type(before, after, value):
    conformed = conform(rows([None, None], before), column(after))
    assert conformed.to_pylist() == [{"v": None}] * 2
    assert conformed.schema.equals(to_arrow_schema(Schema(0, column(after))), check_metadata=True)


@pytest.mark.parametrize(
    ("before", "after", "value"),
    [
        ("string", struct("string"), "a"),
        (struct("string"), "string", {"a": "b"}),
        ("string", ListType(2, "string"), "a"),
        (ListType(2, "string"), "string", ["a"]),
        (struct("string"), MapType(2, "string", 3, "string"), {"a": "b"}),
        (MapType(2, "string", 3, "string"), struct("string"), [("a", "b")]),
        (MapType(2, "string", 3, "string"), MapType(2, "long", 3, "string"), [("1", "b")]),
        (ListType(2, "string"), MapType(2, "string", 3, "string"), ["a"]),
    ],
)
def test_values_of_another_shape_are_refused(before, after, value):
    with pytest.raises(pa.ArrowInvalid, match="another type"):
        conform(rows([value], before), column(after))


def test_keys_of_maps_are_promoted_too():
    old = rows([[(1, "a")]], MapType(2, "int", 3, "string"))
    assert conform(old, column(MapType(2, "long", 3, "string"))).to_pylist() == old.to_pylist()
