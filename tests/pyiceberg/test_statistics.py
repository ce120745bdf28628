"""Statistics from Parquet footers, against PyIceberg's."""

from __future__ import annotations

import math
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyiceberg.io.pyarrow import (
    compute_statistics_plan,
    data_file_statistics_from_parquet_metadata,
    parquet_path_to_id_mapping,
)
from pyiceberg.schema import Schema as PeerSchema

from lakefeed.iceberg.arrow import to_arrow_schema
from lakefeed.iceberg.manifests import DataFile
from lakefeed.iceberg.types import Field, ListType, MapType, Schema, StructType, schema_to_json
from lakefeed.writer.files.parquet import describe_file
from tests.pyiceberg.samples import to_arrow_array

Case = tuple[Schema, pa.Table]
LONG_TEXT = "q" * 5000


def one(type_: str, values: list[Any]) -> Case:
    return Schema(0, StructType((Field(1, "c", type_),))), pa.table({"c": to_arrow_array(type_, values)})


def nested() -> Case:
    point = StructType((Field(2, "x", "long"), Field(3, "y", "string")))
    fields = (Field(4, "l", ListType(5, "long")), Field(6, "m", MapType(7, "string", 8, "long")), Field(1, "s", point))
    schema = Schema(0, StructType(fields))
    rows = [
        {"l": [1, 2], "m": [("a", 1)], "s": {"x": 1, "y": "b"}},
        {"l": [], "m": None, "s": None},
        {"l": None, "m": [], "s": {"x": 5, "y": "a"}},
    ]
    return schema, pa.Table.from_pylist(rows, to_arrow_schema(schema))


SAME: dict[str, Case] = {
    "long": one("long", [-(2**63), 2**63 - 1, None]),
    "int": one("int", [3, -1]),
    "boolean": one("boolean", [True, None]),
    "double": one("double", [1.0, 2.0]),
    "NaN": one("double", [1.0, math.nan, 2.0]),
    "only NaN": one("double", [math.nan]),
    "date": one("date", [1, 20_000, None]),
    "time": one("time", [0, 86_399_999_999]),
    "timestamp": one("timestamp", [1, 10**15]),
    "timestamptz": one("timestamptz", [-(10**15), 10**15]),
    "decimal(9,2)": one("decimal(9,2)", [110, -325]),
    "decimal(18,4)": one("decimal(18,4)", [10**18 - 1, -10_000]),
    "decimal(38,10)": one("decimal(38,10)", [10**38 - 1, -1]),
    "fixed": one("fixed[4]", [b"abcd", b"\xff\xff\xff\xff"]),
    "binary": one("binary", [b"a" * 30, b"\xff" * 30]),
    "text": one("string", ["a" * 40, "b" * 40]),
    "only nulls": one("string", [None, None]),
}
# Why PyIceberg's statistics differ. Where its bounds are wrong, readers skip files that hold the rows they look for.
PYICEBERG_FAULTS: dict[str, Case] = {
    "nanoseconds are cut to microseconds": one("timestamp_ns", [1, 1_700_000_000_123_456_789]),
    "a date after year 9999 raises": one("date", [1, 3_700_000]),
    "a date before year 1 raises": one("date", [-800_000, 5]),
    "a timestamp after year 9999 raises": one("timestamptz", [-(2**63) + 1, 2**63 - 1]),
    "text at U+D7FF raises": one("string", ["a", "z" * 15 + "\ud7ff" + "x"]),
    "a row group without bounds is passed over": one("string", ["a", "b", LONG_TEXT, "zz" + LONG_TEXT]),
    "fields of structs have no bounds": nested(),
}
NAMES = ("column_sizes", "value_counts", "null_counts", "lower_bounds", "upper_bounds", "split_offsets")


def footer_of(case: Case) -> pq.FileMetaData:
    schema, table = case
    sink = pa.BufferOutputStream()
    pq.write_table(
        table.cast(to_arrow_schema(schema)), sink, row_group_size=2, store_decimal_as_integer=True, store_schema=False
    )
    return pq.read_metadata(pa.BufferReader(sink.getvalue()))


def ours(case: Case) -> DataFile:
    return describe_file(footer_of(case), schema=case[0], location="x", size_bytes=1, partition=())


def theirs(case: Case) -> dict[str, Any]:
    schema = PeerSchema.model_validate(schema_to_json(case[0]))
    found = data_file_statistics_from_parquet_metadata(
        footer_of(case), compute_statistics_plan(schema, {}), parquet_path_to_id_mapping(schema)
    )
    lower = {key: each.min_as_bytes() for key, each in found.column_aggregates.items()}
    upper = {key: each.max_as_bytes() for key, each in found.column_aggregates.items()}
    return {
        "column_sizes": found.column_sizes,
        "value_counts": found.value_counts,
        "null_counts": found.null_value_counts,
        "lower_bounds": {key: bound for key, bound in lower.items() if bound is not None},
        "upper_bounds": {key: bound for key, bound in upper.items() if bound is not None},
        "split_offsets": tuple(found.split_offsets),
    }


@pytest.mark.parametrize("name", SAME)
def test_statistics_are_pyicebergs(name):
    found = ours(SAME[name])
    assert {each: getattr(found, each) for each in NAMES} == theirs(SAME[name])


@pytest.mark.xfail(
    strict=True, reason="PyIceberg's statistics are wrong, incomplete or raise, as the name of the case says"
)
@pytest.mark.parametrize("name", PYICEBERG_FAULTS)
def test_statistics_of_pyiceberg_are_ours(name):
    found = ours(PYICEBERG_FAULTS[name])
    assert {each: getattr(found, each) for each in NAMES} == theirs(PYICEBERG_FAULTS[name])


def test_our_bounds_hold_where_pyicebergs_do_not():
    nanoseconds = ours(PYICEBERG_FAULTS["nanoseconds are cut to microseconds"])
    assert int.from_bytes(nanoseconds.upper_bounds[1], "little") == 1_700_000_000_123_456_789
    assert ours(PYICEBERG_FAULTS["a row group without bounds is passed over"]).upper_bounds == {}
    assert ours(PYICEBERG_FAULTS["text at U+D7FF raises"]).upper_bounds[1] == ("z" * 15 + "\ue000").encode()
    assert set(ours(PYICEBERG_FAULTS["fields of structs have no bounds"]).lower_bounds) == {2, 3}
