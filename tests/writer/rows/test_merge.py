"""Two versions of a table's columns made one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lakefeed.iceberg.types import Field, ListType, MapType, StructType, Type
from lakefeed.writer.rows.evolution import FieldIds
from lakefeed.writer.rows.merge import (
    contains_all_written,
    dropped_ids,
    field_ids,
    has_other_meaning,
    merge_columns,
    required_ids,
    without_fields,
)


def struct(*fields: Field) -> StructType:
    return StructType(fields)


def merged_type(table: Type, own: Type) -> Type:
    merged = merge_columns(struct(Field(1, "a", table)), struct(Field(9, "a", own)), FieldIds(50))
    return merged.fields[0].type


def test_tables_own_ids_and_order_win():
    table = struct(Field(7, "b", "string"), Field(3, "a", "long"))
    own = struct(Field(1, "a", "long"), Field(2, "b", "string"))
    ids = FieldIds(7)
    assert merge_columns(table, own, ids) == table
    assert ids.last == 7


def test_columns_that_only_the_writer_knows_are_added_at_the_end_with_new_ids():
    table = struct(Field(1, "a", "long"), Field(2, "altered_by_spark", "string"))
    own = struct(
        Field(1, "a", "long"), Field(2, "new", "double", doc="why"), Field(3, "newer", "string", required=True)
    )
    ids = FieldIds(40)
    merged = merge_columns(table, own, ids)
    assert merged.fields[2:] == (Field(41, "new", "double", doc="why"), Field(42, "newer", "string"))
    assert ids.last == 42


def test_nested_types_of_new_columns_are_numbered_throughout():
    new = StructType(
        (
            Field(1, "tags", ListType(2, "string")),
            Field(3, "scores", MapType(4, "string", 5, StructType((Field(6, "n", "long"),)))),
        )
    )
    ids = FieldIds(10)
    merged = merge_columns(struct(Field(1, "a", "long")), struct(Field(1, "b", new)), ids)
    used = list(field_ids(merged))
    assert sorted(used) == [1, *range(11, 18)]
    assert len(set(used)) == len(used)
    assert ids.last == 17


def test_structs_and_lists_of_structs_take_new_fields_inside():
    table = struct(
        Field(1, "home", struct(Field(2, "city", "string"))),
        Field(3, "lines", ListType(4, struct(Field(5, "sku", "string")))),
    )
    own = struct(
        Field(8, "home", struct(Field(9, "city", "string"), Field(10, "zip", "int"))),
        Field(11, "lines", ListType(12, struct(Field(13, "sku", "string"), Field(14, "count", "long")))),
    )
    home, lines = merge_columns(table, own, FieldIds(5)).fields
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
    merged = merge_columns(table, own, FieldIds(2))
    assert [field.required for field in merged.fields] == [False, True]
    assert [field.required for field in merge_columns(own, table, FieldIds(2)).fields] == [False, True]


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


WRITTEN = struct(
    Field(1, "a", "int", required=True),
    Field(2, "home", struct(Field(3, "zip", "decimal(9, 2)"))),
    Field(4, "tags", ListType(5, struct(Field(6, "t", "float")))),
    Field(7, "scores", MapType(8, "string", 9, struct(Field(10, "n", "int")))),
)


def changed(place: int, **changes: object) -> StructType:
    fields = list(WRITTEN.fields)
    fields[place] = replace(fields[place], **changes)
    return StructType(tuple(fields))


@pytest.mark.parametrize(
    "table",
    [
        WRITTEN,
        changed(0, name="b", doc='formerly ["a"]', type="long", required=False),
        changed(1, type=struct(Field(3, "zip", "decimal(12,2)"), Field(11, "city", "string"))),
        changed(1, type=struct(Field(3, "zip", "decimal(9,2)"))),
        changed(2, type=ListType(5, struct(Field(6, "t", "double")))),
        StructType((*reversed(WRITTEN.fields), Field(11, "new", "string"))),
    ],
    ids=["the same", "renamed, wider, optional", "more inside", "spelled otherwise", "wider inside", "order, one more"],
)
def test_files_stay_whole_under_columns_that_evolved_by_ids(table):
    assert contains_all_written(table, WRITTEN)


@pytest.mark.parametrize(
    "table",
    [
        StructType(WRITTEN.fields[1:]),
        changed(0, id=11),
        changed(0, name="b"),
        changed(0, doc="json"),
        changed(0, type="string"),
        changed(1, required=True),
        changed(1, type=struct()),
        changed(2, type=ListType(5, struct(Field(11, "t", "float")))),
        changed(3, type=MapType(8, "string", 9, struct())),
        StructType((*WRITTEN.fields, Field(11, "new", "string", required=True))),
    ],
    ids=[
        "dropped",
        "dropped and added again",
        "renamed, and the former name is not known",
        "text that is JSON now",
        "of another type",
        "required now",
        "dropped inside a struct",
        "dropped inside a list",
        "dropped inside a map",
        "one more that is required",
    ],
)
def test_files_with_values_that_the_columns_do_not_show_are_recognised(table):
    assert not contains_all_written(table, WRITTEN)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (Field(1, "a", "string"), Field(9, "a", "string", doc="json")),
        (Field(1, "a", "string", doc="mine; json"), Field(9, "a", "string", doc="mine")),
        (Field(1, "b", "string"), Field(9, "a", "string", doc='json; formerly ["b"]')),
        (Field(1, "a", "uuid"), Field(1, "a", "fixed[16]")),
        (Field(1, "a", ListType(2, "fixed[16]")), Field(1, "a", ListType(2, "uuid"))),
        (Field(1, "a", MapType(2, "uuid", 3, "long")), Field(1, "a", MapType(2, "fixed[16]", 3, "long"))),
        (Field(1, "a", struct(Field(2, "x", "string"))), Field(1, "a", struct(Field(2, "x", "string", doc="json")))),
    ],
)
def test_columns_with_the_same_arrow_type_and_another_meaning_are_recognised(before, after):
    assert has_other_meaning(struct(before), struct(after))
    assert not has_other_meaning(struct(before), struct(before))
    assert not has_other_meaning(struct(after), struct(after))


def test_new_columns_and_comments_do_not_make_rows_read_otherwise():
    before = struct(Field(1, "a", "string", doc="json"), Field(2, "gone", "string"))
    after = struct(Field(1, "a", "string", doc="why; json; key"), Field(3, "new", "string", doc="json"))
    assert not has_other_meaning(before, after)


def test_lost_are_fields_that_are_gone_at_any_depth_or_have_a_name_that_was_never_theirs():
    after = struct(
        Field(1, "b", "int"),
        Field(2, "house", struct(Field(11, "zip", "long")), doc='formerly ["home"]'),
        Field(4, "tags", ListType(5, struct(Field(6, "u", "float")))),
        Field(7, "scores", MapType(8, "string", 9, struct())),
    )
    assert dropped_ids(WRITTEN, after) == {1, 3, 6, 10}
    assert dropped_ids(WRITTEN, WRITTEN) == frozenset()


def test_a_field_below_an_optional_one_may_be_null():
    inner = struct(Field(2, "x", "long", required=True), Field(3, "y", "long"))
    outer = struct(Field(1, "a", inner, required=True), Field(4, "b", replace_ids(inner, 10)))
    assert list(required_ids(outer)) == [1, 2]


def replace_ids(type_: StructType, by: int) -> StructType:
    return StructType(tuple(replace(field, id=field.id + by) for field in type_.fields))


def test_columns_that_only_the_writer_knows_under_a_name_that_differs_by_case_are_not_added():
    table = struct(Field(1, "ID", "long"), Field(2, "home", struct(Field(3, "Zip", "int")), doc='formerly ["House"]'))
    own = struct(Field(7, "id", "long"), Field(8, "home", struct(Field(9, "zip", "int"))), Field(10, "house", "long"))
    assert merge_columns(table, own, FieldIds(3)) == table
