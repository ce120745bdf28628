"""Columns of an input fit a table exactly, after a change of the table, or not at all."""

from __future__ import annotations

import json

import pytest
from pyspark.sql import types as t
from pyspark.sql.types import StructField, StructType

from lakefeed.pipeline.backfill.types import SchemaFit, fit_columns
from lakefeed.pipeline.spark.tables import type_sql

LINE = StructType([StructField("sku", t.StringType()), StructField("count", t.IntegerType())])


def one(type_: t.DataType, name: str = "c") -> StructType:
    return StructType([StructField(name, type_)])


def fit(given: t.DataType, known: t.DataType) -> SchemaFit:
    return fit_columns(one(given), one(known))


@pytest.mark.parametrize(
    ("given", "known"),
    [
        (t.LongType(), t.LongType()),
        (t.ShortType(), t.IntegerType()),
        (t.IntegerType(), t.LongType()),
        (t.FloatType(), t.DoubleType()),
        (t.IntegerType(), t.DoubleType()),
        (t.DecimalType(9, 2), t.DecimalType(12, 3)),
        (t.LongType(), t.DecimalType(19, 0)),
        (t.VarcharType(10), t.StringType()),
        (t.ArrayType(t.IntegerType(), containsNull=False), t.ArrayType(t.LongType())),
        (t.MapType(t.StringType(), LINE), t.MapType(t.StringType(), LINE)),
    ],
    ids=str,
)
def test_a_type_that_the_column_represents_exactly_needs_no_change(given: t.DataType, known: t.DataType) -> None:
    found = fit(given, known)
    assert (found.problems, found.changes) == ([], [])


@pytest.mark.parametrize(
    ("given", "known", "change"),
    [
        (t.LongType(), t.IntegerType(), "ALTER COLUMN `c` TYPE bigint"),
        (t.DoubleType(), t.FloatType(), "ALTER COLUMN `c` TYPE double"),
        (t.DecimalType(12, 2), t.DecimalType(9, 2), "ALTER COLUMN `c` TYPE decimal(12,2)"),
        (t.LongType(), t.DecimalType(9, 2), "ALTER COLUMN `c` TYPE decimal(21,2)"),
        (t.ArrayType(t.LongType()), t.ArrayType(t.IntegerType()), "ALTER COLUMN `c`.element TYPE bigint"),
        (StructType([*LINE.fields, StructField("x y", t.DateType())]), LINE, "ADD COLUMN `c`.`x y` date"),
        (
            t.MapType(t.StringType(), one(t.LongType(), "count")),
            t.MapType(t.StringType(), LINE),
            "ALTER COLUMN `c`.value.`count` TYPE bigint",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_type_that_iceberg_can_widen_is_widened_first(given: t.DataType, known: t.DataType, change: str) -> None:
    found = fit(given, known)
    assert (found.problems, found.changes) == ([], [change])


@pytest.mark.parametrize(
    ("given", "known"),
    [
        (t.LongType(), t.DoubleType()),
        (t.DoubleType(), t.LongType()),
        (t.LongType(), t.StringType()),
        (t.DecimalType(9, 3), t.DecimalType(9, 2)),
        (t.DecimalType(38, 0), t.DecimalType(9, 2)),
        (t.TimestampNTZType(), t.TimestampType()),
        (t.DateType(), t.TimestampType()),
        (LINE, t.StringType()),
        (t.ArrayType(t.StringType()), t.ArrayType(t.LongType())),
        (t.MapType(t.LongType(), LINE), t.MapType(t.IntegerType(), LINE)),
        (t.BinaryType(), t.StringType()),
    ],
    ids=str,
)
def test_a_type_that_does_not_fit_is_a_problem_that_names_the_column(given: t.DataType, known: t.DataType) -> None:
    found = fit(given, known)
    assert found.columns == []
    assert "column=c" in found.problems[0]


def test_names_are_matched_without_case_and_new_columns_are_added() -> None:
    given = StructType([StructField("ID", t.ByteType()), StructField("odd `name`", LINE)])
    found = fit_columns(given, one(t.LongType(), "id"))
    assert [(each.given, each.name) for each in found.columns] == [("ID", "id"), ("odd `name`", "odd `name`")]
    assert found.changes == ["ADD COLUMN `odd ``name``` STRUCT<`sku`: string, `count`: int>"]


def renamed(name: str, *former: str, type_: t.DataType | None = None) -> StructField:
    return StructField(name, type_ or t.LongType(), True, {"comment": f"key; formerly {json.dumps(former)}"})


def test_a_former_name_matches_the_column_that_had_it() -> None:
    known = StructType([renamed("customer", "client", "who"), StructField("id", t.LongType())])
    for given in ("client", "WHO"):
        found = fit_columns(one(t.LongType(), given), known)
        assert [(each.given, each.name) for each in found.columns] == [(given, "customer")]
        assert (found.changes, found.problems) == ([], [])
    # Text and wider types find their column in the same way.
    [column] = fit_columns(one(t.StringType(), "client"), known).columns
    assert (column.name, column.is_text) == ("customer", True)
    narrow = StructType([renamed("customer", "client", type_=t.IntegerType())])
    assert fit_columns(one(t.LongType(), "client"), narrow).changes == ["ALTER COLUMN `customer` TYPE bigint"]


def test_a_former_name_that_another_column_has_now_matches_that_column() -> None:
    known = StructType([renamed("customer", "client"), StructField("client", t.LongType())])
    found = fit_columns(one(t.LongType(), "client"), known)
    assert [(each.given, each.name) for each in found.columns] == [("client", "client")]


def test_a_column_under_two_of_its_names_is_a_problem() -> None:
    known = StructType([renamed("customer", "client")])
    for names in (("client", "customer"), ("customer", "client")):
        given = StructType([StructField(name, t.LongType()) for name in names])
        [problem] = fit_columns(given, known).problems
        assert "columns=" + ",".join(names) in problem


def test_fields_of_structs_are_found_under_former_names_too() -> None:
    known = one(StructType([renamed("x", "y"), StructField("z", t.LongType())]))
    found = fit_columns(one(one(t.IntegerType(), "y")), known)
    assert (found.changes, found.problems) == ([], [])
    assert found.columns[0].convert is not None, "it has to get its new name"
    both = StructType([StructField(name, t.LongType()) for name in ("y", "x")])
    assert "two fields match one: fields=y,x" in fit_columns(one(both), known).problems[0]


@pytest.mark.parametrize("name", ["_cdc_sequence", "_CDC_new", "_file", "", "a\nb", "x" * 256])
def test_reserved_names_are_a_problem(name: str) -> None:
    assert len(fit_columns(one(t.LongType(), name), StructType()).problems) == 1


def test_two_columns_that_differ_by_case_are_a_problem() -> None:
    given = StructType([StructField("a", t.LongType()), StructField("A", t.LongType())])
    assert "the same name" in fit_columns(given, StructType()).problems[0]


def test_types_without_a_type_in_tables_are_a_problem() -> None:
    for type_ in (t.NullType(), t.DayTimeIntervalType(), StructType(), t.ArrayType(t.NullType())):
        assert "type=" in fit_columns(one(type_), StructType()).problems[0]


def test_text_fits_columns_of_every_plain_type_and_declared_types() -> None:
    for type_ in (t.LongType(), t.DecimalType(9, 2), t.TimestampType(), t.BooleanType(), t.BinaryType()):
        [column] = fit(t.StringType(), type_).columns
        assert (column.is_text, column.type) == (True, type_)
    [column] = fit_columns(one(t.StringType()), StructType(), declared=one(t.ShortType())).columns
    assert (column.is_text, column.type) == (True, t.IntegerType())
    [column] = fit_columns(one(t.StringType()), one(t.StringType()), uuids={"c"}).columns
    assert column.is_text


def test_types_are_written_with_their_names_quoted() -> None:
    nested = t.MapType(t.StringType(), t.ArrayType(one(t.DecimalType(9, 2), "a`b")))
    assert type_sql(nested) == "MAP<string, ARRAY<STRUCT<`a``b`: decimal(9,2)>>>"
