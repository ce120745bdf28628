from __future__ import annotations

import pytest

from lakefeed.iceberg.types import Field, MapType
from lakefeed.writer.rows.values import can_be_key, read_keys
from tests.writer.sample_rows import declared, fit, group, own_rows, rescued


@pytest.mark.parametrize(
    ("type_", "names", "keys"),
    [
        ("string", ["", "1", "x"], ["", "1", "x"]),
        ("int", ["0", "-7", "2147483647"], [0, -7, 2147483647]),
        ("int", ["2147483648"], None),
        ("long", ["9223372036854775807"], [9223372036854775807]),
        ("long", ["9223372036854775808"], None),
        *(("long", [text], None) for text in ("01", "-0", "1.0", "1e3", "+1", "", " 1")),
        ("decimal(4, 2)", ["1.5", "-20"], ["1.5", "-20"]),
        ("decimal(4, 2)", ["1.5", "1.50"], None),
        ("decimal(4, 2)", ["1.555"], None),
        ("date", ["2026-11-16", "0001-01-01"], ["2026-11-16", "0001-01-01"]),
        ("date", ["16.11.2026"], None),
        ("timestamptz", ["2026-11-16T02:00:00+02:00", "2026-11-16T00:00:00Z"], None),
        ("uuid", ["F79C3E09-677C-4BBD-A479-3F349CB785E7", "f79c3e09-677c-4bbd-a479-3f349cb785e7"], None),
        ("double", ["1.5"], None),
        ("double", [], []),
    ],
)
def test_names_are_read_as_keys_that_are_each_other_or_not_at_all(type_, names, keys):
    assert read_keys(names, type_) == keys


@pytest.mark.parametrize(
    ("type_", "can"), [("string", True), ("decimal(9, 2)", True), ("time", True), ("float", False)]
)
def test_only_types_that_json_can_write_as_names_are_keys(type_, can):
    assert can_be_key(type_) is can


def test_a_map_with_a_name_that_is_no_key_is_rescued_whole():
    columns = declared(Field(20, "m", MapType(21, "int", 22, "long")))
    table = fit(group({"m": {"1": 2}}, {"m": {"1": 2, "x": 3}}), columns).table
    assert own_rows(table) == [{"m": [(1, 2)]}, {}]
    assert rescued(table) == [None, {"m": {"1": 2, "x": 3}}]
