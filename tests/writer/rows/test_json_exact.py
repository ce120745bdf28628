import json

import pytest

from lakefeed.contract import changes as names
from lakefeed.iceberg.types import Field, ListType, MapType, StructType, Type
from lakefeed.writer.rows import evolution
from lakefeed.writer.rows.evolution import initial_columns, own_fields
from lakefeed.writer.rows.json_exact import FIT_CHUNK_ROWS
from lakefeed.writer.rows.merge import conform
from tests.writer.sample_rows import declared, decode_group, fit, group, highest_id, own_rows, raw_group, rescued


def types(columns: StructType) -> dict[str, Type]:
    """Types of the own columns by name, `json` for JSON text and structs as dictionaries."""
    return {field.name: _plain(field) for field in own_fields(columns)}


def _plain(field: Field):
    match field.type:
        case StructType(fields):
            return {each.name: _plain(each) for each in fields}
        case ListType(element=element):
            return [_plain(Field(0, "element", element))]
    return field.doc or field.type


def test_initial_columns_are_ours_and_before_is_optional():
    assert [field.name for field in initial_columns(keep_before=True).fields] == list(names.ALL)
    assert names.BEFORE not in [field.name for field in initial_columns(keep_before=False).fields]
    required = [field.name for field in initial_columns(keep_before=True).fields if field.required]
    assert required == [*names.ALL[:6]]
    assert highest_id(initial_columns(keep_before=True)) == 12


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1, 2**62], "long"),
        ([1, 1.5], "double"),
        ([1.0], "double"),
        ([True], "boolean"),
        (["2024-01-01T00:00:00Z"], "string"),
        (["123e4567-e89b-12d3-a456-426614174000"], "string"),
        (["__bigint__:5"], "long"),
        ([2**64], "json"),
        ([0.5, 2**53 + 1], "double"),
        ([1, "x"], "json"),
        ([1, None, {}], "json"),
        ([{"x": 1}, {"y": "t"}, {}], {"x": "long", "y": "string"}),
        ([{"x": 1}, {"x": "t"}], "json"),
        ([{"o": {"x": 1}}, {"o": {"x": "t"}}], {"o": "json"}),
        ([{"x": 1, "X": 2}], "json"),
        ([{"": 1}], "json"),
        ([[1], [], [2.5]], ["double"]),
        ([[1, "x"]], "json"),
        ([[{"x": 1}, {"y": [True]}]], [{"x": "long", "y": ["boolean"]}]),
        ([[[1]]], [["long"]]),
    ],
)
def test_new_columns_get_the_general_type_of_all_their_values(values, expected):
    assert types(fit(group(*({"c": value} for value in values))).columns) == {"c": expected}


@pytest.mark.parametrize("value", [None, {}, [], [None], {"x": None}, [{}], {"x": []}])
def test_values_without_a_type_make_no_column_but_are_not_lost(value):
    fitted = fit(group({"c": value}))
    assert types(fitted.columns) == {}
    assert rescued(fitted.table) == [None if value is None else {"c": value}]


def test_documents_become_json_text():
    deep = json.loads("[" * 20 + "1" + "]" * 20)
    wide = {str(n): n for n in range(evolution.STRUCT_MAX_FIELDS + 1)}
    fitted = fit(group({"deep": {"x": deep}, "wide": wide}))
    assert types(fitted.columns)["wide"] == "json"
    assert "json" in json.dumps(types(fitted.columns)["deep"])
    assert json.loads(own_rows(fitted.table)[0]["wide"]) == wide


def test_nesting_does_not_grow_deeper_row_by_row():
    columns, value = initial_columns(keep_before=False), {"x": 1}
    for _ in range(names.NESTING_MAX_DEPTH + 8):
        value = {"x" * (len(value) + 1): 1, "d": value}
        columns = fit(group(value), columns).columns
    assert json.dumps(types(columns)).count("{") <= names.NESTING_MAX_DEPTH


def test_json_columns_hold_any_value_as_compact_text():
    columns = declared(Field(20, "c", "string", doc="json"))
    rows = raw_group('{"c": {"a" : 1.50}}', '{"c":"t"}', '{"c":null}', '{"c":12345678901234567890123}')
    table = fit(rows, columns).table
    assert table["c"].to_pylist() == ['{"a":1.50}', '"t"', None, "12345678901234567890123"]


def test_the_next_group_of_the_same_shape_is_fast_again():
    rows = group({"id": 1, "o": {"l": [{"x": 1, "n": None}]}, "n": None}, {"id": 2, "big": "__bigint__:5"})
    first = fit(rows)
    again = decode_group(rows, first.columns)
    assert again.equals(first.table)


def test_new_fields_get_new_ids_and_existing_ids_stay():
    first = fit(group({"a": {"x": 1}, "l": [{"y": 1}]}))
    second = fit(group({"a": {"z": "t"}, "l": [{"w": True}], "b": 1}), first.columns)
    assert types(second.columns) == {
        "a": {"x": "long", "z": "string"},
        "l": [{"y": "long", "w": "boolean"}],
        "b": "long",
    }
    assert second.columns.field("a").id == first.columns.field("a").id
    assert second.columns.field("a").type.fields[0] == first.columns.field("a").type.fields[0]
    ids = list(_ids(second.columns))
    assert len(set(ids)) == len(ids)
    assert second.last_field_id == max(ids)
    assert set(second.changes) == {"a.z string", "l.element.w boolean", "b long"}


def _ids(type_: Type):
    match type_:
        case StructType(fields):
            for field in fields:
                yield field.id
                yield from _ids(field.type)
        case ListType(element_id, element, _):
            yield element_id
            yield from _ids(element)


@pytest.mark.parametrize(
    ("before", "value", "after"),
    [
        ("int", 2**31, "long"),
        ("float", 0.1234567890123, "double"),
        ("decimal(5, 2)", "12345.67", "decimal(7, 2)"),
        (ListType(21, "int"), [2**31], ListType(21, "long")),
        (MapType(21, "string", 22, "int"), {"k": 2**31}, MapType(21, "string", 22, "long")),
    ],
)
def test_declared_types_widen_for_values_that_need_it(before, value, after):
    fitted = fit(group({"c": value}), declared(Field(20, "c", before)))
    assert fitted.columns.field("c").type == after
    assert rescued(fitted.table) == [None]


@pytest.mark.parametrize(
    ("type_", "value"),
    [
        ("long", 1.5),
        ("long", "12"),
        ("string", 5),
        ("boolean", 0),
        ("double", 2**53 + 1),
        ("decimal(5, 2)", "1.234"),
        ("decimal(38, 2)", "1" * 37),
        ("timestamptz", "2024-01-01T00:00:00"),
        ("uuid", "x"),
        (ListType(21, "long"), [1, "x"]),
        (ListType(21, "long"), 1),
        (MapType(21, "long", 22, "long"), {"x": 1}),
        (StructType((Field(21, "x", "long"),)), [1]),
    ],
)
def test_values_that_fit_nothing_are_rescued_and_their_column_is_null(type_, value):
    columns = declared(Field(20, "c", type_), Field(30, "id", "long"))
    fitted = fit(group({"c": value, "id": 1}), columns)
    assert fitted.columns == columns
    assert own_rows(fitted.table) == [{"id": 1}]
    assert rescued(fitted.table) == [{"c": value}]


def test_only_the_misfit_of_a_struct_is_rescued():
    columns = declared(Field(20, "p", StructType((Field(21, "x", "long"), Field(22, "y", "long")))))
    table = fit(group({"p": {"x": 1, "y": "t"}}), columns).table
    assert (own_rows(table), rescued(table)) == ([{"p": {"x": 1, "y": None}}], [{"p": {"y": "t"}}])


def test_rescued_numbers_keep_their_text():
    columns = declared(Field(20, "c", "boolean"))
    rows = raw_group('{"c":1.50}', '{"c":1e400}', '{"c":-0}', '{"c":123456789012345678901234567890}')
    assert fit(rows, columns).table[names.RESCUED].to_pylist() == [
        '{"c":1.50}',
        '{"c":1e400}',
        '{"c":-0}',
        '{"c":123456789012345678901234567890}',
    ]


def test_integral_numbers_fit_an_integer_column_however_they_are_written():
    table = fit(raw_group('{"c":1.0}', '{"c":1e3}', '{"c":"__bigint__:7"}'), declared(Field(20, "c", "long"))).table
    assert (table["c"].to_pylist(), rescued(table)) == ([1, 1000, 7], [None, None, None])


def test_maps_are_filled_from_objects():
    columns = declared(Field(20, "c", MapType(21, "string", 22, "timestamptz")))
    table = fit(group({"c": {"k": "2024-01-01T00:00:00Z"}}, {"c": {}}, {}), columns).table
    assert [None if row is None else len(row) for row in table["c"].to_pylist()] == [1, 0, None]


@pytest.mark.parametrize(
    "name",
    ["", "_cdc_sequence", "_CDC_new", "_file", "_pos", "ID", "a\u0000b", "x" * 256],
)
def test_fields_whose_name_no_column_can_have_are_rescued(name):
    fitted = fit(group({"id": 1, name: 5}))
    assert types(fitted.columns) == {"id": "long"}
    assert rescued(fitted.table) == [{"": {"": 5}} if not name else {name: 5}]


def test_a_name_that_spells_another_columns_path_is_rescued():
    fitted = fit(group({"a": {"b": 1}, "a.b": 2, "c.d": 3}))
    assert types(fitted.columns) == {"a": {"b": "long"}, "c.d": "long"}
    assert rescued(fitted.table) == [{"a.b": 2}]


@pytest.mark.parametrize(
    ("image", "expected"),
    [
        ("[1]", '{"":[1]}'),
        ('"text"', '{"":"text"}'),
        ('{"a": 1, "a": 2}', '{"":{"a": 1, "a": 2}}'),
        (b'{"a":"\xff"}', '{"":{"_cdc_base64":"eyJhIjoi/yJ9"}}'),
    ],
)
def test_rows_that_are_no_objects_are_rescued_whole(image, expected):
    table = fit(raw_group(image, '{"a":1}')).table
    assert table[names.RESCUED].to_pylist() == [expected, None]
    assert own_rows(table) == [{}, {"a": 1}]


def test_rows_nested_as_deeply_as_admission_allows_are_kept():
    deep = '{"a":' + "[" * 880 + "1" + "]" * 880 + "}"
    fitted = fit(raw_group(deep, '{"b":1}'))
    kept, saved = fitted.table["a"].to_pylist()[0] if "a" in fitted.table.column_names else None, rescued_text(fitted)
    assert (kept or saved).count("[") == 880


def rescued_text(fitted) -> str | None:
    return fitted.table[names.RESCUED].to_pylist()[0]


def test_required_columns_that_rows_leave_empty_become_optional():
    columns = declared(
        Field(20, "a", "long", required=True),
        Field(21, "b", "long", required=True),
        Field(22, "s", StructType((Field(23, "x", "long", required=True),))),
        Field(24, "l", ListType(25, "long", element_required=True)),
    )
    fitted = fit(group({"a": 1, "b": "t", "s": {}, "l": [None]}, {"a": 2, "b": 3}), columns)
    by_name = {field.name: field for field in own_fields(fitted.columns)}
    assert (by_name["a"].required, by_name["b"].required) == (True, False)
    assert by_name["s"].type == StructType((Field(23, "x", "long"),))
    assert by_name["l"].type == ListType(25, "long")
    assert rescued(fitted.table) == [{"b": "t"}, None]
    assert set(fitted.changes) == {f"{path} required -> optional" for path in ("b", "s.x", "l.element")}


def test_columns_beyond_the_limit_are_rescued(monkeypatch):
    monkeypatch.setattr(names, "FIELDS_MAX", 14)
    fitted = fit(group({f"c{n}": n for n in range(5)}))
    assert list(types(fitted.columns)) == ["c0", "c1", "c2"]
    assert rescued(fitted.table) == [{"c3": 3, "c4": 4}]


def test_one_misfit_among_many_rows_leaves_the_others_as_they_are():
    count = 3 * FIT_CHUNK_ROWS
    rows = [{"id": n} for n in range(count)]
    rows[FIT_CHUNK_ROWS + 7] = {"id": "x", "new": 1.5}
    table = fit(group(*rows), declared(Field(20, "id", "long"))).table
    expected = list(range(count))
    expected[FIT_CHUNK_ROWS + 7] = None
    assert table["id"].to_pylist() == expected
    assert [n for n, text in enumerate(rescued(table)) if text] == [FIT_CHUNK_ROWS + 7]
    assert table["new"].null_count == count - 1


def test_older_tables_conform_by_nulls_and_wider_types():
    old = declared(Field(20, "n", "int"), Field(21, "s", StructType((Field(22, "x", "float"),))))
    table = decode_group(group({"n": 1, "s": {"x": 0.5}}, {"s": None}), old)
    new = fit(group({"n": 2**40, "s": {"x": 0.123456789, "y": [1]}, "z": "t"}), old)
    conformed = conform(table, new.columns)
    assert conformed.schema.equals(new.table.schema, check_metadata=True)
    assert own_rows(conformed) == [{"n": 1, "s": {"x": 0.5, "y": None}}, {}]


def test_a_table_of_the_same_columns_is_itself():
    fitted = fit(group({"a": 1}))
    assert conform(fitted.table, fitted.columns) is fitted.table
