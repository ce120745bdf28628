"""What becomes of declared columns in a table: added, renamed, widened, or refused so that nothing breaks."""

from __future__ import annotations

from typing import NamedTuple

import pyarrow as pa
import pytest

from lakefeed.iceberg.types import Field, ListType, MapType, StructType
from lakefeed.writer.rows.declaration import declare_columns, parse_declaration
from lakefeed.writer.rows.evolution import FieldIds, SchemaUpdate, initial_columns, own_fields
from lakefeed.writer.rows.groups import Expected
from lakefeed.writer.rows.merge import conform, merge_columns
from tests.writer.sample_rows import declared, decode_group, fit, group, highest_id, own_rows, rescued
from tests.writer.wire.arrow_batches import arrow_group, changes


class Declared(NamedTuple):
    columns: StructType
    last_field_id: int
    changes: tuple[str, ...]
    refusals: tuple[str, ...]


def declare(columns: StructType, types: dict, *, identifier: list[str] | None = None, nanoseconds=False) -> Declared:
    document = parse_declaration({"columns": types, "identifier": identifier or []}, path="t")
    update = SchemaUpdate(columns, highest_id(columns))
    declare_columns(update, document, nanoseconds=nanoseconds)
    return Declared(update.columns, update.last_field_id, tuple(update.changes), tuple(update.refusals))


def own(columns: StructType) -> list[Field]:
    return list(own_fields(columns))


def renamed(type_: str, *, former: str) -> dict:
    return {"type": type_, "renamedFrom": former}


def test_declared_columns_are_added_with_ids_of_their_own():
    start = initial_columns(keep_before=False)
    types = {"id": "int", "home": {"type": "struct", "fields": {"zip": "string"}}, "at": "timestamp_ns", "doc": "json"}
    evolved = declare(start, types, identifier=["id"])
    first = highest_id(start) + 1
    assert own(evolved.columns) == [
        Field(first, "id", "int", doc="key"),
        Field(first + 1, "home", StructType((Field(first + 2, "zip", "string"),))),
        Field(first + 3, "at", "timestamp"),
        Field(first + 4, "doc", "string", doc="json"),
    ]
    assert evolved.last_field_id == first + 4
    assert evolved.changes == ("id int", "home struct", "at timestamp", "doc json")
    assert own(declare(start, types, nanoseconds=True).columns)[2].type == "timestamp_ns"


def test_the_same_declaration_again_changes_nothing():
    types = {
        "id": "long",
        "m": {"type": "map", "key": "int", "value": "date"},
        "customer": renamed("string", former="c"),
    }
    once = declare(initial_columns(keep_before=False), types, identifier=["id"])
    again = declare(once.columns, types, identifier=["id"])
    assert (again.columns, again.changes, again.refusals) == (once.columns, (), ())


@pytest.mark.parametrize(
    ("before", "wanted", "after"),
    [
        ("int", "long", "long"),
        ("float", "double", "double"),
        ("decimal(9, 2)", "decimal(18, 2)", "decimal(18, 2)"),
        ("long", "int", "long"),
        ("decimal(18, 2)", "decimal(9, 2)", "decimal(18, 2)"),
        (ListType(21, "int"), {"type": "list", "element": "long"}, ListType(21, "long")),
        (
            MapType(21, "string", 22, "float"),
            {"type": "map", "key": "string", "value": "double"},
            MapType(21, "string", 22, "double"),
        ),
        (
            ListType(21, StructType((Field(22, "a", "int"),))),
            {"type": "list", "element": {"type": "struct", "fields": {"a": "long", "b": "date"}}},
            ListType(21, StructType((Field(22, "a", "long"), Field(23, "b", "date")))),
        ),
    ],
)
def test_types_become_wider_where_iceberg_allows_it(before, wanted, after):
    evolved = declare(declared(Field(20, "c", before)), {"c": wanted})
    assert own(evolved.columns) == [Field(20, "c", after)]
    assert evolved.refusals == ()


@pytest.mark.parametrize(
    ("field", "wanted", "refusal"),
    [
        (Field(20, "c", "string"), "timestamptz", "c stays string: declared as timestamptz"),
        (Field(20, "c", "decimal(9, 2)"), "decimal(9, 4)", "c stays decimal(9, 2): declared as decimal(9, 4)"),
        (Field(20, "c", "string", doc="json"), "string", "c stays json: declared as string"),
        (Field(20, "c", "string"), "json", "c stays string: declared as json"),
        (Field(20, "c", "long"), {"type": "list", "element": "long"}, "c stays long: declared as list"),
        (Field(20, "C", "long"), "long", "c is not added: its name is another column's, or there are too many columns"),
    ],
)
def test_a_declaration_that_no_table_can_follow_leaves_the_column_as_it_is(field, wanted, refusal):
    evolved = declare(declared(field), {"c": wanted})
    assert (own(evolved.columns), evolved.changes, evolved.refusals) == ([field], (), (refusal,))


def test_a_renamed_column_keeps_its_id_and_remembers_its_name():
    columns = declared(
        Field(20, "client", "string", doc="who"), Field(21, "home", StructType((Field(22, "code", "int"),)))
    )
    types = {
        "customer": renamed("string", former="client"),
        "home": {"type": "struct", "fields": {"zip": renamed("long", former="code")}},
    }
    evolved = declare(columns, types)
    assert own(evolved.columns) == [
        Field(20, "customer", "string", doc='who; formerly ["client"]'),
        Field(21, "home", StructType((Field(22, "zip", "long", doc='formerly ["code"]'),))),
    ]
    assert evolved.changes == ("customer renamed from client", "home.zip renamed from code", "home.zip int -> long")


def test_a_name_that_another_column_has_is_not_given_twice():
    columns = declared(Field(20, "client", "string"), Field(21, "Customer", "string"))
    evolved = declare(columns, {"customer": renamed("string", former="client")})
    assert own(evolved.columns) == own(columns)
    assert evolved.refusals[0] == "client is not renamed: another column is called customer"


def test_where_both_columns_exist_neither_is_touched():
    columns = declared(Field(20, "client", "string"), Field(21, "customer", "string"))
    assert declare(columns, {"customer": renamed("string", former="client")}).columns == columns


def test_a_rename_back_works():
    columns = declare(declared(Field(20, "a", "int")), {"b": renamed("int", former="a")}).columns
    evolved = declare(columns, {"a": renamed("int", former="b")})
    assert own(evolved.columns) == [Field(20, "a", "int", doc='formerly ["b"]')]


def test_a_rename_may_change_the_case_alone():
    columns = declare(declared(Field(20, "Name", "long")), {"name": renamed("long", former="Name")}).columns
    assert own(columns) == [Field(20, "name", "long", doc='formerly ["Name"]')]
    assert own_rows(fit(group({"Name": 1}, {"name": 2}), columns).table) == [{"name": 1}, {"name": 2}]


RENAMED = declared(
    Field(20, "customer", "long", doc='formerly ["client"]'),
    Field(21, "home", StructType((Field(22, "zip", "long", doc='formerly ["code"]'),))),
)


def test_rows_under_a_former_name_fill_the_renamed_column():
    rows = group({"client": 1, "home": {"code": 2}}, {"customer": 3, "home": {"zip": 4}}, {"client": "x"})
    fitted = fit(rows, RENAMED)
    assert fitted.columns == RENAMED
    assert own_rows(fitted.table) == [
        {"customer": 1, "home": {"zip": 2}},
        {"customer": 3, "home": {"zip": 4}},
        {},
    ]
    assert rescued(fitted.table) == [None, None, {"client": "x"}]


def test_value_under_a_former_name_is_rescued_if_the_row_has_the_new_name_too():
    fitted = fit(group({"client": 1, "customer": 2}), RENAMED)
    assert fitted.columns == RENAMED
    assert (own_rows(fitted.table), rescued(fitted.table)) == ([{"customer": 2}], [{"client": 1}])


def test_values_under_a_former_name_widen_the_column_too():
    columns = declared(Field(20, "customer", "int", doc='formerly ["client"]'))
    assert own(fit(group({"client": 2**40}), columns).columns)[0].type == "long"


def test_arrow_columns_under_a_former_name_fill_the_renamed_column():
    homes = pa.array([{"code": 5}, {"code": None}], pa.struct([("code", pa.int64())]))
    rows = arrow_group(changes({"client": pa.array([1, None], pa.int32()), "home": homes}))
    fitted = rows.fit(Expected(RENAMED), last_field_id=49, refused_for=RENAMED)
    assert fitted.columns == RENAMED
    assert own_rows(fitted.table) == [{"customer": 1, "home": {"zip": 5}}, {"home": {"zip": None}}]


def test_rows_decoded_before_a_rename_conform_to_it():
    before = declared(Field(20, "client", "long"), Field(21, "home", StructType((Field(22, "code", "long"),))))
    table = decode_group(group({"client": 1, "home": {"code": 2}}), before)
    assert own_rows(conform(table, RENAMED)) == [{"customer": 1, "home": {"zip": 2}}]


def test_a_rename_by_the_writer_or_by_the_table_is_one_column_when_both_are_merged():
    old = declared(Field(20, "client", "int", doc="who"))
    new = declared(Field(40, "customer", "long", doc='formerly ["client"]'))
    by_writer = merge_columns(old, new, FieldIds(30))
    assert own(by_writer) == [Field(20, "customer", "long", doc='who; formerly ["client"]')]
    by_table = merge_columns(new, old, FieldIds(40))
    assert own(by_table) == own(new)


def test_maps_and_lists_that_evolved_stay_so_when_merged():
    required = declared(
        Field(20, "m", MapType(21, "string", 22, "int", value_required=True)),
        Field(23, "l", ListType(24, "int", element_required=True)),
    )
    evolved = declared(Field(20, "m", MapType(21, "string", 22, StructType(()))), Field(23, "l", ListType(24, "long")))
    merged = own(merge_columns(required, evolved, FieldIds(24)))
    assert merged[0].type == MapType(21, "string", 22, "int")
    assert merged[1].type == ListType(24, "long")
