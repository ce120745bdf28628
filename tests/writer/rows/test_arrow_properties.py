"""Arrow columns of any supported type: nothing is lost, JSON frames of the same rows agree, order is kept."""

from __future__ import annotations

import datetime as dt
import itertools
import json
import random
from decimal import Decimal

import msgspec
import numpy as np
import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from lakefeed.iceberg.arrow import to_arrow_type
from lakefeed.iceberg.types import Field, ListType, MapType, StructType, Type
from lakefeed.writer.rows.comments import JSON_DOC
from lakefeed.writer.rows.evolution import initial_columns, own_fields
from lakefeed.writer.rows.groups import Expected
from lakefeed.writer.rows.merge import conform
from lakefeed.writer.rows.runs import decode_run
from lakefeed.writer.wal.payload import encode_frame
from lakefeed.writer.wal.records import Record
from lakefeed.writer.wire.arrow_types import UUID_VALUES, json_values, plain_rows
from tests.writer.sample_rows import declared, event, fit, frame, highest_id, json_groups
from tests.writer.wire.arrow_batches import arrow_frame, arrow_group, changes, fit_arrow, stream_of

INT64 = st.integers(-(2**63), 2**63 - 1)
SPECIAL_INTS = st.sampled_from([0, 1, -1, 2**31 - 1, 2**31, 2**53 + 1, 2**63 - 1, -(2**63)])
DOUBLES = st.one_of(st.floats(), st.sampled_from([0.1, 1.0, -0.0, 1e300, 2.0**53, float("nan"), float("inf")]))


def _moments(type_: pa.DataType):
    """Any number of units: moments of any year. Python knows few of them, so arrays are made of numbers."""
    return st.one_of(st.integers(-(2**62), 2**62), st.integers(-(10**10), 10**10), st.just(1_500_000)).map(lambda n: n)


def _decimals(precision: int, scale: int):
    return st.integers(-(10**precision) + 1, 10**precision - 1).map(lambda n: Decimal(f"{n}e{-scale}"))


PRIMITIVES = {
    pa.bool_(): st.booleans(),
    pa.int8(): st.integers(-128, 127),
    pa.int32(): st.integers(-(2**31), 2**31 - 1),
    pa.int64(): st.one_of(INT64, SPECIAL_INTS),
    pa.uint16(): st.integers(0, 2**16 - 1),
    pa.uint32(): st.integers(0, 2**32 - 1),
    pa.uint64(): st.one_of(st.integers(0, 2**64 - 1), st.just(5)),
    pa.float16(): st.floats(width=16),
    pa.float32(): st.floats(width=32),
    pa.float64(): DOUBLES,
    pa.decimal128(9, 2): _decimals(9, 2),
    pa.decimal128(38, 10): _decimals(38, 10),
    pa.decimal128(5, -2): _decimals(5, -2),
    pa.decimal64(12, 4): _decimals(12, 4),
    pa.decimal256(30, 5): _decimals(30, 5),
    pa.date32(): st.integers(-(2**31), 2**31 - 1),
    pa.date64(): st.integers(-(10**7), 10**7).map(lambda day: day * 86_400_000),
    pa.time32("s"): st.integers(0, 86_399),
    pa.time32("ms"): st.integers(0, 86_399_999),
    pa.time64("us"): st.integers(0, 86_399_999_999),
    pa.time64("ns"): st.integers(0, 86_399_999_999_999),
    **{pa.timestamp(unit, zone): st.none() for unit in ("s", "ms", "us", "ns") for zone in (None, "UTC", "+02:00")},
    pa.string(): st.text(max_size=5),
    pa.large_string(): st.sampled_from(["2026-11-16", "1.5", "__bigint__:7", "x", ""]),
    pa.string_view(): st.text(max_size=20),
    pa.binary(): st.binary(max_size=5),
    pa.large_binary(): st.binary(max_size=5),
    pa.binary_view(): st.binary(max_size=20),
    pa.binary(3): st.binary(min_size=3, max_size=3),
    pa.uuid(): st.binary(min_size=16, max_size=16),
    pa.null(): st.none(),
    pa.dictionary(pa.int8(), pa.string()): st.sampled_from(["red", "green", "blue"]),
    pa.dictionary(pa.int32(), pa.int64()): SPECIAL_INTS,
}
# Arrays of these are made of the numbers that they are stored as.
STORED = {
    type_: pa.int32() if pa.types.is_date32(type_) or pa.types.is_time32(type_) else pa.int64()
    for type_ in PRIMITIVES
    if pa.types.is_temporal(type_)
}
for _type in PRIMITIVES:
    if pa.types.is_timestamp(_type):
        PRIMITIVES[_type] = _moments(_type)

NAMES = st.sampled_from(["id", "a", "A", "b", "a.b", "", "_cdc_source", "_file", "x", "y"])


def _nested(types):
    fields = st.dictionaries(st.sampled_from(["a", "b", "B", "", "c"]), types, max_size=3)
    keys = st.sampled_from([pa.string(), pa.int32(), pa.date32()])
    return st.one_of(
        fields.map(lambda members: pa.struct(list(members.items()))),
        types.map(pa.list_),
        types.map(pa.large_list),
        types.map(lambda each: pa.list_(each, 2)),
        st.tuples(keys, types).map(lambda pair: pa.map_(*pair)),
    )


TYPES = st.recursive(st.sampled_from(list(PRIMITIVES)), _nested, max_leaves=4)


@st.composite
def arrays(draw, type_: pa.DataType, length: int, *, nullable: bool = True) -> pa.Array:
    """Draw an array with nulls. Lists are built on their elements, so that elements below nulls are there too."""
    mask = pa.array(draw(st.lists(st.booleans() if nullable else st.just(False), min_size=length, max_size=length)))
    mask = mask.cast(pa.bool_())
    if pa.types.is_null(type_):
        return pa.nulls(length)
    if pa.types.is_struct(type_):
        if not len(type_):
            return pa.array([None if is_null else {} for is_null in mask.to_pylist()], type_)
        children = [draw(arrays(field.type, length)) for field in type_]
        return pa.StructArray.from_arrays(children, fields=list(type_), mask=mask)
    if pa.types.is_fixed_size_list(type_):
        return pa.FixedSizeListArray.from_arrays(draw(arrays(type_.value_type, 2 * length)), 2, mask=mask)
    if pa.types.is_map(type_) or pa.types.is_list(type_) or pa.types.is_large_list(type_):
        lengths = draw(st.lists(st.integers(0, 2), min_size=length, max_size=length))
        offsets = [sum(lengths[:index]) for index in range(length + 1)]
        if pa.types.is_map(type_):
            keys = draw(arrays(type_.key_type, offsets[-1], nullable=False))
            items = draw(arrays(type_.item_type, offsets[-1]))
            return pa.MapArray.from_arrays(pa.array(offsets, pa.int32()), keys, items, type=type_, mask=mask)
        builder, width = (
            (pa.LargeListArray, pa.int64()) if pa.types.is_large_list(type_) else (pa.ListArray, pa.int32())
        )
        return builder.from_arrays(pa.array(offsets, width), draw(arrays(type_.value_type, offsets[-1])), mask=mask)
    values = draw(st.lists(PRIMITIVES[type_], min_size=length, max_size=length))
    values = [None if is_null else value for value, is_null in zip(values, mask.to_pylist(), strict=True)]
    if type_ in STORED:
        return pa.array(values, STORED[type_]).view(type_)
    return pa.array(values, type_)


@st.composite
def tables(draw) -> pa.Table:
    length = draw(st.integers(1, 4))
    columns = draw(st.dictionaries(NAMES, TYPES, min_size=1, max_size=3))
    return changes({name: draw(arrays(type_, length)) for name, type_ in columns.items()}, rows=length)


# -- rows rebuilt from their columns


def _norm(value):
    """Make JSON values comparable: numbers by value, members that are null like those that are missing."""
    if isinstance(value, dict):
        return {name: _norm(member) for name, member in value.items() if member is not None}
    if isinstance(value, list):
        return [_norm(each) for each in value]
    if isinstance(value, msgspec.Raw):
        return Decimal(bytes(value).decode())
    return Decimal(value) if isinstance(value, int | Decimal) and not isinstance(value, bool) else value


def _logical(type_: Type) -> pa.DataType:
    """Give a column's Arrow type with uuids marked as such."""
    match type_:
        case StructType(fields):
            return pa.struct([(field.name, _logical(field.type)) for field in fields])
        case ListType(element=element):
            return pa.list_(_logical(element))
        case MapType(key=key, value=value):
            return pa.map_(_logical(key), _logical(value))
        case "uuid":
            return UUID_VALUES
    return to_arrow_type(type_)


def _column_values(column: pa.ChunkedArray, field: Field) -> list:
    if field.doc == JSON_DOC:
        return [None if text is None else _exact(text) for text in column.to_pylist()]
    logical = _logical(field.type)
    return [_norm(value) for chunk in column.chunks for value in json_values(chunk.cast(logical))]


def _exact(text: str):
    return _norm(json.loads(text, parse_int=Decimal, parse_float=Decimal))


def _merged(kept, left):
    if kept is None:
        return left
    if isinstance(kept, dict) and isinstance(left, dict):
        return {name: _merged(kept.get(name), left.get(name)) for name in kept.keys() | left.keys()}
    assert left is None
    return kept


def _put_together(table: pa.Table, columns: StructType) -> list[dict]:
    kept = {field.name: _column_values(table[field.name], field) for field in own_fields(columns)}
    rows = []
    for index, text in enumerate(table["_cdc_rescued"].to_pylist()):
        left = {} if text is None else _exact(text)
        left |= left.pop("", {})
        rows.append(_norm(_merged({name: values[index] for name, values in kept.items()}, left)))
    return rows


def _is_same(value, original) -> bool:
    """Return whether a rebuilt value is the original. A float holds a number that is its shortest name: 0.1."""
    if isinstance(original, dict):
        return (
            isinstance(value, dict)
            and value.keys() == original.keys()
            and all(_is_same(value[name], member) for name, member in original.items())
        )
    if isinstance(original, list):
        return isinstance(value, list) and len(value) == len(original) and all(map(_is_same, value, original))
    if isinstance(original, Decimal) and isinstance(value, Decimal) and value != original:
        return Decimal(str(np.float32(value))) == original
    return type(value) is type(original) and value == original


def _came_values(values: pa.Array) -> list:
    return json_values(plain_rows(pa.table({"values": values})).column(0).combine_chunks())


def _came(table: pa.Table) -> list[dict]:
    own = table.drop_columns(["_cdc_sequence"])
    columns = [_came_values(own.column(name).combine_chunks()) for name in own.column_names]
    return [_norm(dict(zip(own.column_names, row, strict=True))) for row in zip(*columns, strict=True)]


DECLARED = declared(
    Field(20, "id", "int", required=True),
    Field(21, "a", StructType((Field(22, "b", "float", required=True), Field(23, "c", ListType(24, "double"))))),
    Field(25, "x", "string", doc=JSON_DOC),
    Field(30, "b", "decimal(6, 2)"),
    Field(28, "y", ListType(29, "int", element_required=True)),
)


def _check_groups(groups: list[pa.Table], columns: StructType) -> None:
    fitted_tables = []
    for rows in groups:
        fitted = fit_arrow(rows, columns)
        assert fitted.table["_cdc_sequence"].to_pylist() == rows["_cdc_sequence"].to_pylist()
        assert fitted.last_field_id == max(highest_id(fitted.columns), highest_id(columns))
        assert _is_same(_put_together(fitted.table, fitted.columns), _came(rows))
        again = fit_arrow(rows, fitted.columns)
        assert again.columns == fitted.columns, "columns that have grown for rows hold them"
        assert again.table.equals(fitted.table) or "nan" in str(fitted.table.to_pylist())
        columns = fitted.columns
        fitted_tables.append(fitted.table)
    for table in fitted_tables:
        conform(table, columns).validate(full=True)


@given(st.lists(tables(), min_size=1, max_size=3))
@settings(max_examples=150, deadline=None)
def test_columns_and_rescued_values_together_are_the_rows_that_came(groups):
    _check_groups(groups, initial_columns(keep_before=False))


@given(st.lists(tables(), min_size=1, max_size=2))
@settings(max_examples=150, deadline=None)
def test_declared_columns_lose_nothing_either(groups):
    _check_groups(groups, DECLARED)


@given(tables(), st.sampled_from([None, "lz4", "zstd"]), st.integers(1, 3), st.data())
@settings(max_examples=60, deadline=None)
def test_batches_compression_and_cuts_do_not_matter(rows, compression, batch_rows, data):
    whole = fit_arrow(rows)
    group = arrow_group(rows, compression=compression, batch_rows=batch_rows)
    start = data.draw(st.integers(0, rows.num_rows))
    cut = group.between(start, rows.num_rows)
    assert cut.table == "users"
    assert fit_arrow(group).columns == whole.columns
    parts = fit_arrow(cut, whole.columns).table
    expected = whole.table.slice(start)
    assert [str(row) for row in parts.to_pylist()] == [str(row) for row in expected.to_pylist()]


# -- JSON and Arrow agree

JSON_TYPES = {
    "long": (pa.int64(), INT64),
    "double": (pa.float64(), st.floats(allow_nan=False, allow_infinity=False)),
    "string": (pa.string(), st.text(max_size=5).filter(lambda text: not text.startswith("__bigint__"))),
    "boolean": (pa.bool_(), st.booleans()),
    "list": (pa.list_(pa.int64()), st.lists(INT64, min_size=1, max_size=3)),
    "struct": (
        pa.struct([("n", pa.int64()), ("s", pa.string())]),
        st.builds(lambda n, s: {"n": n, "s": s}, INT64, st.text(max_size=3)),
    ),
}


@st.composite
def json_rows(draw) -> tuple[dict[str, pa.DataType], list[dict]]:
    """Draw rows as both encodings have them; the first is whole, because JSON learns its types from values."""
    kinds = draw(st.dictionaries(st.sampled_from(["p", "q", "r"]), st.sampled_from(list(JSON_TYPES)), min_size=1))
    whole = st.fixed_dictionaries({name: JSON_TYPES[kind][1] for name, kind in kinds.items()})
    some = st.fixed_dictionaries({name: st.none() | JSON_TYPES[kind][1] for name, kind in kinds.items()})
    rows = [draw(whole), *draw(st.lists(some, max_size=5))]
    return {name: JSON_TYPES[kinds[name]][0] for name in rows[0]}, rows


def _json_frame(rows: list[dict], first: int):
    return frame([event(first + index, after=row) for index, row in enumerate(rows)])


def _arrow_frame(types: dict[str, pa.DataType], rows: list[dict], first: int):
    own = {name: pa.array([row[name] for row in rows], type_) for name, type_ in types.items()}
    return arrow_frame(stream_of(changes(own, first=first)))


@given(json_rows())
@settings(max_examples=100, deadline=None)
def test_json_and_arrow_frames_of_the_same_rows_give_equal_tables(drawn):
    types, rows = drawn
    from_json = fit(json_groups([(0, _json_frame(rows, 1))])["users"])
    from_arrow = fit_arrow(changes({name: pa.array([row[name] for row in rows], t) for name, t in types.items()}))
    assert from_arrow.columns == from_json.columns
    assert from_arrow.table.equals(from_json.table)


@given(json_rows(), st.randoms(use_true_random=False))
@settings(max_examples=60, deadline=None)
def test_a_run_of_mixed_frames_keeps_the_order_of_the_log(drawn, rng: random.Random):
    types, rows = drawn
    expected = fit(json_groups([(0, _json_frame(rows, 1))])["users"]).table
    starts = [0, *(index for index in range(1, len(rows)) if rng.random() < 0.6), len(rows)]
    frames = [
        _json_frame(rows[start:stop], start + 1)
        if rng.random() < 0.5
        else _arrow_frame(types, rows[start:stop], start + 1)
        for start, stop in itertools.pairwise(starts)
    ]
    records = [Record(offset, b"".join(encode_frame(each))) for offset, each in enumerate(frames)]
    run = decode_run(records, {})
    known = Expected(initial_columns(keep_before=False))
    last_field_id, parts = highest_id(known.columns), []
    for decoded in run.tables:
        fitted = decoded.group.fit(known, last_field_id=last_field_id)
        known, last_field_id = Expected(fitted.columns), fitted.last_field_id
        parts.append(fitted.table)
    together = pa.concat_tables([conform(part, known.columns) for part in parts])
    assert together["_cdc_sequence"].to_pylist() == expected["_cdc_sequence"].to_pylist()
    names = sorted(expected.column_names)
    assert together.select(names).to_pylist() == expected.select(names).to_pylist()
    again = decode_run(records, {"users": known})
    assert all(decoded.rows is not None for decoded in again.tables), "the next run is decoded at once"


def test_the_year_one_and_the_year_9999_are_kept():
    ends = [dt.datetime(1, 1, 1), dt.datetime(9999, 12, 31, 23, 59, 59)]
    assert fit_arrow(changes({"t": pa.array(ends, pa.timestamp("us"))})).table["t"].to_pylist() == ends
