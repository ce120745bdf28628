"""Rows with any drift: nothing is lost, the two paths agree, nothing raises."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lakefeed.iceberg.types import Field, ListType, MapType, StructType
from lakefeed.writer.rows.evolution import initial_columns
from lakefeed.writer.rows.merge import conform
from lakefeed.writer.rows.values import Misfit
from tests.writer.sample_rows import (
    declared,
    decode_group,
    exact,
    fit,
    highest_id,
    is_same,
    own_rows,
    raw_group,
    rebuilt_rows,
)

NAMES = st.sampled_from(["id", "a", "b", "A", "a.b", "c", "", "_cdc_sequence", "_file", "x"])
NUMBERS = st.sampled_from(
    [
        "0",
        "-0",
        "1",
        "-1",
        "1.0",
        "1e3",
        "1E5",
        "1e+2",
        "1.5",
        "0.1",
        "-0.0",
        "12.340",
        "1e400",
        "1e-400",
        "-1e-320",
        "0e-400",
        "1e-39",
        "1e30",
        "200e306",
        "1e-10000000",
        "2147483648",
        "9007199254740993",
        "9223372036854775807",
        "9223372036854775808",
        "-9223372036854775809",
        "0.30000000000000004",
        "0.12345678901234567890",
        "16777217",
        "3.4028236e38",
        "9369714.3",
        "99999999999.99",
        "123456789012345678901234567890",
        "100000000000000000000000",
        "4202027609857111795888160024820663522",
    ]
)
TEXTS = st.one_of(
    st.text(max_size=4),
    st.sampled_from(
        ["__bigint__:12", "__bigint__:99999999999999999999", "__bigint__:x", "1e-39", "2024-01-01T00:00:00Z", "12.34"]
    ),
).map(json.dumps)
SCALARS = st.one_of(NUMBERS, TEXTS, st.sampled_from(["null", "true", "false"]))


def _objects(values):
    return st.dictionaries(NAMES, values, max_size=4).map(
        lambda members: "{" + ",".join(f"{json.dumps(name)}:{value}" for name, value in members.items()) + "}"
    )


def _lists(values):
    return st.lists(values, max_size=3).map(lambda values: "[" + ", ".join(values) + "]")


VALUES = st.recursive(SCALARS, lambda values: st.one_of(_objects(values), _lists(values)), max_leaves=6)
ROWS = st.one_of(_objects(VALUES), _objects(VALUES), _objects(VALUES), VALUES.filter(lambda text: text != "null"))
TABLES = st.lists(st.lists(ROWS, min_size=1, max_size=4), min_size=1, max_size=3)

DECLARED = declared(
    Field(20, "id", "int", required=True),
    Field(21, "a", StructType((Field(22, "b", "float", required=True), Field(23, "x", ListType(24, "double"))))),
    Field(25, "x", MapType(26, "string", 27, "decimal(38, 36)", value_required=True)),
    Field(30, "c", "decimal(6, 2)"),
    Field(28, "b", ListType(29, "int", element_required=True)),
)


def _check_groups(groups: list[list[str]], columns: StructType) -> None:
    for rows in groups:
        images = raw_group(*rows)
        fitted = fit(images, columns)
        assert fitted.table.num_rows == len(rows)
        assert fitted.table["_cdc_sequence"].to_pylist() == list(range(1, len(rows) + 1))
        assert fitted.last_field_id == max(highest_id(fitted.columns), highest_id(columns))
        _check_nothing_lost(rows, rebuilt_rows(fitted.table, fitted.columns))
        fitted.table.validate(full=True)
        columns = fitted.columns


def _check_nothing_lost(rows: list[str], together: list) -> None:
    for text, value in zip(rows, together, strict=True):
        assert is_same(value, exact(text)), text


@given(TABLES)
@settings(max_examples=100, deadline=None)
def test_columns_and_rescued_values_together_are_the_row_that_came(groups):
    _check_groups(groups, initial_columns(keep_before=False))


@given(TABLES)
@settings(max_examples=100, deadline=None)
def test_declared_columns_lose_nothing_either(groups):
    _check_groups(groups, DECLARED)


@given(st.lists(ROWS, min_size=1, max_size=4), st.booleans())
@settings(max_examples=100, deadline=None)
def test_fast_path_and_slow_path_agree_where_the_fast_path_accepts(rows, with_declared):
    columns = DECLARED if with_declared else initial_columns(keep_before=False)
    images = raw_group(*rows)
    evolved = fit(images, columns)
    again = fit(images, evolved.columns)
    assert again.columns == evolved.columns
    assert again.table.equals(evolved.table)
    try:
        fast = decode_group(images, evolved.columns)
    except Misfit:
        return
    assert fast.equals(evolved.table)


@given(TABLES)
@settings(max_examples=60, deadline=None)
def test_tables_of_older_columns_conform_to_the_newest(groups):
    columns, tables = initial_columns(keep_before=False), []
    for rows in groups:
        fitted = fit(raw_group(*rows), columns)
        columns = fitted.columns
        tables.append(fitted.table)
    for rows, table in zip(groups, tables, strict=True):
        conformed = conform(table, columns)
        assert own_rows(conformed) == own_rows(table) or columns != table.schema
        _check_nothing_lost(rows, rebuilt_rows(conformed, columns))


@pytest.mark.parametrize("offset", [1, 2])
def test_slices_conform_too(offset):
    rows = ['{"a":{"x":[{"y":1}]},"l":[1]}', '{"a":null}', '{"a":{"x":[]},"l":[2,3]}']
    old = fit(raw_group(*rows))
    new = fit(raw_group('{"a":{"x":[{"z":"t"}],"w":true}}'), old.columns)
    conformed = conform(old.table.slice(offset), new.columns)
    _check_nothing_lost(rows[offset:], rebuilt_rows(conformed, new.columns))
