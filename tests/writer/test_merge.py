"""Two versions of a table's columns made one."""

from __future__ import annotations

import pytest

from writer.merge import field_ids, merge_columns, without_fields
from writer.types import Field, ListType, MapType, StructType, Type


def struct(*fields: Field) -> StructType:
    return StructType(fields)


def merged_type(table: Type, own: Type) -> Type:
    merged = merge_columns(struct(Field(1, "a", table)), struct(Field(9, "a", own)), last_field_id=50)
    return merged.columns.fields[0].type


def test_tables_own_ids_and_order_win():
    table = struct(Field(7, "b", "string"), Field(3, "a", "long"))
    own = struct(Field(1, "a", "long"), Field(2, "b", "string"))
    merged = merge_columns(table, own, last_field_id=7)
    assert merged.columns == table
    assert merged.last_field_id == 7


def test_columns_that_only_the_writer_knows_are_added_behind_with_fresh_ids():
    table = struct(Field(1, "a", "long"), Field(2, "altered_by_spark", "string"))
    own = struct(Field(1, "a", "long"), Field(2, "new", "double", doc="why"), Field(3, "newer", "string"))
    merged = merge_columns(table, own, last_field_id=40)
    assert merged.columns.fields[2:] == (Field(41, "new", "double", doc="why"), Field(42, "newer", "string"))
    assert merged.last_field_id == 42


def test_nested_types_of_new_columns_are_numbered_throughout():
    new = StructType(
        (
            Field(1, "tags", ListType(2, "string")),
            Field(3, "scores", MapType(4, "string", 5, StructType((Field(6, "n", "long"),)))),
        )
    )
    merged = merge_columns(struct(Field(1, "a", "long")), struct(Field(1, "b", new)), last_field_id=10)
    ids = list(field_ids(merged.columns))
    assert sorted(ids) == [1, *range(11, 18)]
    assert len(set(ids)) == len(ids)
    assert merged.last_field_id == 17


def test_structs_and_lists_of_structs_take_new_fields_inside():
    table = struct(
        Field(1, "home", struct(Field(2, "city", "string"))),
        Field(3, "lines", ListType(4, struct(Field(5, "sku", "string")))),
    )
    own = struct(
        Field(8, "home", struct(Field(9, "city", "string"), Field(10, "zip", "int"))),
        Field(11, "lines", ListType(12, struct(Field(13, "sku", "string"), Field(14, "count", "long")))),
    )
    merged = merge_columns(table, own, last_field_id=5)
    home, lines = merged.columns.fields
    assert home.type == struct(Field(2, "city", "string"), Field(6, "zip", "int"))
    assert lines.type == ListType(4, struct(Field(5, "sku", "string"), Field(7, "count", "long")))


@pytest.mark.parametrize(
    ("table", "own"),
    [("int", "long"), ("float", "double"), ("decimal(9,2)", "decimal(12,2)")],
)
def test_wider_of_two_types_is_kept_so_that_buffered_values_still_fit(table, own):
    assert merged_type(table, own) == own
    assert merged_type(own, table) == own
    assert merged_type(ListType(2, table), ListType(8, own)) == ListType(2, own)


@pytest.mark.parametrize(
    ("table", "own"),
    [
        ("string", "long"),
        ("long", "double"),
        ("decimal(9,2)", "decimal(12,3)"),
        ("date", "timestamptz"),
        ("string", struct(Field(9, "x", "long"))),
    ],
)
def test_tables_type_wins_where_no_promotion_leads_from_it(table, own):
    assert merged_type(table, own) == table


def test_column_that_either_allows_to_be_missing_may_be_missing():
    table = struct(Field(1, "a", "long", required=True), Field(2, "b", "long", required=True))
    own = struct(Field(1, "a", "long"), Field(2, "b", "long", required=True))
    merged = merge_columns(table, own, last_field_id=2).columns
    assert [field.required for field in merged.fields] == [False, True]
    assert [field.required for field in merge_columns(own, table, last_field_id=2).columns.fields] == [False, True]


def test_ids_of_every_nested_field_are_found():
    columns = struct(
        Field(1, "a", "long"),
        Field(2, "b", ListType(3, struct(Field(4, "c", "long")))),
        Field(5, "d", MapType(6, "string", 7, ListType(8, "long"))),
    )
    assert sorted(field_ids(columns)) == list(range(1, 9))


def test_fields_are_left_out_by_their_ids_at_any_depth():
    own = struct(
        Field(1, "home", struct(Field(2, "city", "string"), Field(3, "zip", "int"))),
        Field(4, "lines", ListType(5, struct(Field(6, "sku", "string"), Field(7, "count", "long")))),
        Field(8, "rates", MapType(9, "string", 10, struct(Field(11, "x", "double"), Field(12, "y", "double")))),
        Field(13, "note", "string"),
    )
    left = without_fields(own, {3, 7, 11, 13})
    assert set(field_ids(left)) == {1, 2, 4, 5, 6, 8, 9, 10, 12}
    assert without_fields(own, ()) == own
