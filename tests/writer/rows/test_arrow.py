"""Arrow columns in their table's: declared types, exact casts, what is rescued, how columns grow, what is dropped."""

from __future__ import annotations

import datetime as dt
import uuid
from dataclasses import replace
from decimal import Decimal

import pyarrow as pa
import pytest

from lakefeed.contract.changes import Position, SourceId, Span
from lakefeed.iceberg.types import Field, ListType, MapType, StructType
from lakefeed.writer.rows.comments import JSON_DOC
from lakefeed.writer.rows.evolution import initial_columns, own_fields
from lakefeed.writer.rows.groups import Expected, JsonGroup, group_arrow
from lakefeed.writer.rows.runs import cut_run, decode_run, fit_or_bisect
from lakefeed.writer.rows.values import Misfit, read_texts
from lakefeed.writer.wal.payload import Frame, decode_frame, encode_frame
from lakefeed.writer.wal.records import Record
from tests.writer.sample_rows import RECEIVED_AT_US, declared, event, fit, frame, highest_id, json_groups, raw_group
from tests.writer.wire.arrow_batches import arrow_frame, arrow_group, changes, fit_arrow, rescued_texts, stream_of

RECEIVED = dt.datetime.fromtimestamp(RECEIVED_AT_US / 1_000_000, dt.UTC)
NOON = dt.datetime(2026, 11, 16, 12, tzinfo=dt.UTC)


def types(columns: StructType) -> dict:
    return {field.name: field.type for field in own_fields(columns)}


def cast(values: pa.Array, type_: str, **field) -> tuple[list, list]:
    """Put values into a column `c`: what is there, and what is rescued of it."""
    fitted = fit_arrow(changes({"c": values}), declared(Field(20, "c", type_, **field)))
    left = [None if each is None else each["c"] for each in rescued_texts(fitted.table)]
    return fitted.table["c"].to_pylist(), left


# -- declared types


@pytest.mark.parametrize(
    ("arrow", "iceberg"),
    [
        (pa.bool_(), "boolean"),
        (pa.int8(), "int"),
        (pa.uint16(), "int"),
        (pa.int32(), "int"),
        (pa.uint32(), "long"),
        (pa.int64(), "long"),
        (pa.uint64(), "decimal(20, 0)"),
        (pa.float16(), "float"),
        (pa.float32(), "float"),
        (pa.float64(), "double"),
        (pa.decimal128(12, 3), "decimal(12, 3)"),
        (pa.decimal32(5, 2), "decimal(5, 2)"),
        (pa.decimal256(38, 2), "decimal(38, 2)"),
        (pa.decimal128(5, -2), "decimal(7, 0)"),
        (pa.decimal128(2, 4), "decimal(4, 4)"),
        (pa.date32(), "date"),
        (pa.date64(), "date"),
        (pa.time32("s"), "time"),
        (pa.time64("ns"), "time"),
        (pa.timestamp("s"), "timestamp"),
        (pa.timestamp("ns"), "timestamp"),
        (pa.timestamp("ms", "Europe/Berlin"), "timestamptz"),
        (pa.large_string(), "string"),
        (pa.string_view(), "string"),
        (pa.large_binary(), "binary"),
        (pa.binary_view(), "binary"),
        (pa.binary(7), "fixed[7]"),
        (pa.uuid(), "uuid"),
        (pa.json_(), "string"),
        (pa.dictionary(pa.int8(), pa.string()), "string"),
        (pa.dictionary(pa.int8(), pa.date32()), "date"),
        (pa.list_(pa.int32()), ListType(21, "int")),
        (pa.large_list(pa.string_view()), ListType(21, "string")),
        (pa.list_(pa.float32(), 3), ListType(21, "float")),
        (pa.struct([("a", pa.int64()), ("n", pa.null())]), StructType((Field(21, "a", "long"),))),
        (pa.map_(pa.string(), pa.int32()), MapType(21, "string", 22, "int")),
    ],
)
def test_new_columns_take_the_declared_type(arrow, iceberg):
    storage = getattr(arrow, "storage_type", arrow)
    values = pa.nulls(2, storage)
    column = pa.ExtensionArray.from_storage(arrow, values) if storage is not arrow else values
    start = declared(Field(19, "old", "int"))
    assert types(fit_arrow(changes({"c": column}), start).columns)["c"] == iceberg


def test_nanoseconds_have_types_of_their_own_where_the_format_has():
    rows = changes({"t": pa.array([1], pa.timestamp("ns")), "z": pa.array([1], pa.timestamp("ns", "UTC"))})
    fitted = fit_arrow(rows, nanoseconds=True)
    assert types(fitted.columns) == {"t": "timestamp_ns", "z": "timestamptz_ns"}
    assert fitted.table["t"].cast(pa.int64()).to_pylist() == [1]
    assert rescued_texts(fitted.table) == [None]


@pytest.mark.parametrize("column", [pa.nulls(2), pa.array([None, None], pa.list_(pa.null()))])
def test_nulls_without_a_type_make_no_column(column):
    fitted = fit_arrow(changes({"c": column}))
    assert types(fitted.columns) == {}
    assert rescued_texts(fitted.table) == [None, None]


def test_values_without_a_type_are_rescued():
    column = pa.array([{}, None], pa.struct([]))
    assert rescued_texts(fit_arrow(changes({"c": column})).table) == [{"c": {}}, None]


# -- exact casts


@pytest.mark.parametrize(
    ("values", "type_", "kept", "left"),
    [
        (pa.array([1, 2], pa.int32()), "long", [1, 2], [None, None]),
        (pa.array([2**63, 5], pa.uint64()), "long", [None, 5], [2**63, None]),
        (pa.array([1, 2**53 + 1]), "double", [1.0, None], [None, 2**53 + 1]),
        (pa.array([1.0, 1.5, float("nan")]), "long", [1, None, None], [None, 1.5, "NaN"]),
        (pa.array([0.1, 1e300]), "decimal(5, 2)", [Decimal("0.10"), None], [None, 1e300]),
        (pa.array([Decimal("1.10"), Decimal("1.11")]), "decimal(3, 1)", [Decimal("1.1"), None], [None, 1.11]),
        (pa.array([Decimal("0.5"), Decimal("0.1")]), "double", [0.5, 0.1], [None, None]),
        (pa.array([True]), "long", [None], [True]),
        (pa.array([5]), "string", [None], [5]),
        (pa.array([5]), "boolean", [None], [5]),
        (pa.array(["2026-11-16", "soon"]), "date", [dt.date(2026, 11, 16), None], [None, "soon"]),
        (pa.array(["1.5", "x"]), "decimal(4, 2)", [Decimal("1.50"), None], [None, "x"]),
        (pa.array([NOON], pa.timestamp("ns", "Asia/Tokyo")), "timestamptz", [NOON], [None]),
        (pa.array([NOON], pa.timestamp("s", "UTC")), "timestamp", [None], ["2026-11-16T12:00:00Z"]),
        (pa.array([NOON], pa.timestamp("ms", "UTC")), "string", ["2026-11-16T12:00:00Z"], [None]),
        (pa.array([1001]).view(pa.timestamp("ns")), "timestamp", [None], ["1970-01-01T00:00:00.000001001"]),
        (pa.array([2**62]).view(pa.timestamp("s")), "timestamp", [None], [2**62]),
        (pa.array([b"abc", b"ab"]), "fixed[3]", [b"abc", None], [None, "YWI="]),
        (pa.array([b"0" * 16], pa.uuid()), "string", [str(uuid.UUID(bytes=b"0" * 16))], [None]),
        (pa.array([b"0" * 16], pa.binary(16)), "uuid", [b"0" * 16], [None]),
        (pa.array([[1]]), "long", [None], [[1]]),
    ],
)
def test_values_fit_exactly_or_are_rescued(values, type_, kept, left):
    assert cast(values, type_) == (kept, left)


def test_json_columns_take_anything_as_json():
    assert cast(pa.array(["a", None]), "string", doc=JSON_DOC) == (['"a"', None], [None, None])
    values = pa.array([{"a": [1, None], "d": dt.date(2026, 1, 1)}])
    assert cast(values, "string", doc=JSON_DOC) == (['{"a":[1,null],"d":"2026-01-01"}'], [None])


def test_text_beyond_ascii_is_no_base64():
    assert cast(pa.array(["\xe9"]), "binary") == ([None], ["\xe9"])
    with pytest.raises(Misfit):
        read_texts(pa.array(["\xe9"]), "binary")


# -- nested columns


def test_a_struct_keeps_the_fields_that_fit():
    columns = declared(Field(20, "s", StructType((Field(21, "a", "int"), Field(22, "b", "boolean")))))
    fitted = fit_arrow(changes({"s": pa.array([{"a": 1, "b": "x", "c": 2.5}, None])}), columns)
    assert fitted.table["s"].to_pylist() == [{"a": 1, "b": None, "c": 2.5}, None]
    assert rescued_texts(fitted.table) == [{"s": {"b": "x"}}, None]
    assert fitted.changes == ("s.a int -> long", "s.c double")


def test_a_list_or_map_with_one_misfit_is_rescued_whole():
    columns = declared(Field(20, "l", ListType(21, "boolean")), Field(22, "m", MapType(23, "string", 24, "boolean")))
    rows = changes(
        {
            "l": pa.array([[True], [False]], pa.list_(pa.bool_())),
            "m": pa.array([[("a", "x"), ("b", None)], []], pa.map_(pa.string(), pa.string())),
        }
    )
    fitted = fit_arrow(rows, columns)
    assert fitted.table["l"].to_pylist() == [[True], [False]]
    assert fitted.table["m"].to_pylist() == [None, []]
    assert rescued_texts(fitted.table) == [{"m": {"a": "x", "b": None}}, None]


def test_values_below_null_structs_are_ignored():
    inner = pa.array([2**40, 1, 2**40])
    structs = pa.StructArray.from_arrays([inner], names=["a"], mask=pa.array([True, False, True]))
    lists = pa.ListArray.from_arrays(pa.array([0, 1, 2, 3], pa.int32()), inner, mask=pa.array([True, False, True]))
    columns = declared(
        Field(20, "s", StructType((Field(21, "a", "decimal(3, 0)", required=True),))),
        Field(22, "l", ListType(23, "decimal(3, 0)", element_required=True)),
    )
    fitted = fit_arrow(changes({"s": structs, "l": lists}), columns)
    assert fitted.columns == columns
    assert rescued_texts(fitted.table) == [None] * 3
    assert fitted.table["s"].to_pylist() == [None, {"a": Decimal(1)}, None]


# -- names


def test_names_that_no_column_can_have_are_rescued():
    rows = changes({"id": [1], "ID": [2], "": [3], "_cdc_source": ["x"], "_file": [4], "_cdc_own": [5]})
    fitted = fit_arrow(rows)
    assert types(fitted.columns) == {"id": "long"}
    expected = {"ID": 2, "": {"": 3}, "_cdc_source": "x", "_file": 4, "_cdc_own": 5}
    assert rescued_texts(fitted.table) == [expected]


def test_nested_names_that_no_field_can_have_are_rescued():
    fitted = fit_arrow(changes({"s": pa.array([{"a": 1, "A": 2, "": 3}])}))
    assert fitted.table["s"].to_pylist() == [{"a": 1}]
    assert rescued_texts(fitted.table) == [{"s": {"A": 2, "": 3}}]


# -- how columns grow


@pytest.mark.parametrize(
    ("old", "values", "new"),
    [
        ("int", pa.array([1]), "long"),
        ("float", pa.array([1.0]), "double"),
        ("decimal(5, 2)", pa.array([Decimal(1)], pa.decimal128(9, 2)), "decimal(9, 2)"),
        ("decimal(5, 2)", pa.array([Decimal(1)], pa.decimal128(9, 4)), "decimal(7, 2)"),
        ("decimal(5, 2)", pa.array([Decimal(1)], pa.decimal128(5, 4)), "decimal(5, 2)"),
        ("long", pa.array([1], pa.int8()), "long"),
        ("double", pa.array([1.0], pa.float32()), "double"),
        ("long", pa.array([1.0]), "long"),
        ("int", pa.array([2.0**40]), "long"),
        ("int", pa.array([Decimal(7)], pa.decimal128(20, 0)), "int"),
        ("decimal(5, 2)", pa.array([123_456]), "decimal(8, 2)"),
    ],
)
def test_columns_widen_as_far_as_iceberg_allows(old, values, new):
    fitted = fit_arrow(changes({"c": values}), declared(Field(20, "c", old)))
    assert types(fitted.columns) == {"c": new}
    assert rescued_texts(fitted.table) == [None]


def test_required_columns_become_optional_where_values_are_missing():
    columns = declared(
        Field(20, "id", "long", required=True),
        Field(21, "gone", "string", required=True),
        Field(22, "s", StructType((Field(23, "a", "long", required=True), Field(24, "b", "long", required=True)))),
    )
    rows = changes(
        {"id": [1, 2], "s": pa.array([{"a": 1, "b": None}, None], pa.struct([("a", pa.int64()), ("b", pa.int64())]))}
    )
    fitted = fit_arrow(rows, columns)
    assert fitted.changes == ("gone required -> optional", "s.b required -> optional")
    assert fitted.table["s"].to_pylist() == [{"a": 1, "b": None}, None]
    assert fitted.columns.field("id").required
    again = fit_arrow(rows, fitted.columns)
    assert (again.changes, again.columns) == ((), fitted.columns)


# -- change columns


def test_change_columns_have_their_defaults():
    row = fit_arrow(changes({"id": [1]}), initial_columns(keep_before=True)).table.to_pylist()[0]
    assert row["_cdc_operation"] == "INSERT"
    assert row["_cdc_timestamp"] == row["_cdc_ingested_at"] == RECEIVED
    assert (row["_cdc_row_id"], row["_cdc_source"]) == ("", "shop-1")
    assert row["_cdc_before"] is row["_cdc_unchanged"] is row["_cdc_metadata"] is row["_cdc_rescued"] is None
    assert row["_cdc_epoch"] is None


@pytest.mark.parametrize("type_", ["timestamptz", "timestamptz_ns"])
def test_moments_stay_the_same_whatever_the_tables_column_counts_in(type_):
    columns = replace_types(initial_columns(keep_before=False), _cdc_timestamp=type_, _cdc_ingested_at=type_)
    in_arrow = fit_arrow(changes({"id": [1]}), columns).table
    in_json = fit(raw_group('{"id":1}'), columns).table
    for table in (in_arrow, in_json):
        for name in ("_cdc_timestamp", "_cdc_ingested_at"):
            assert table[name].cast(pa.timestamp("us", "UTC")).to_pylist() == [RECEIVED]


def replace_types(columns, **types):
    return StructType(tuple(replace(field, type=types.get(field.name, field.type)) for field in columns.fields))


def test_change_has_the_epoch_of_its_connection():
    frames = [
        (0, arrow_frame(stream_of(changes({"id": [1, 2]})), source="a")),
        (1, arrow_frame(stream_of(changes({"id": [3]})), source="b", epoch=3)),
    ]
    (group,) = group_arrow(frames)
    assert fit_arrow(group).table["_cdc_epoch"].to_pylist() == [None, None, 3]


def test_epoch_that_a_row_brings_is_not_taken_for_its_own():
    table = fit_arrow(changes({"id": [1]}, epoch=[7])).table
    assert (table["_cdc_epoch"].to_pylist(), rescued_texts(table)) == ([None], [{"_cdc_epoch": 7}])


@pytest.mark.parametrize(
    "moments",
    [
        pa.array([1_500, 0, None]),
        pa.array([1_500_000_000, 0, None]).view(pa.timestamp("ns")),
        pa.array([1_500, 0, None]).view(pa.timestamp("ms", "+05:00")),
    ],
)
def test_change_columns_are_taken_as_they_come_and_0_is_a_time(moments):
    rows = changes(
        {"id": [1, 2, 3]},
        timestamp=moments,
        operation=pa.array(["UPDATE", "DELETE", "INSERT"]).dictionary_encode(),
        row_id=pa.array(["a", None, "c"], pa.string_view()),
        before=pa.array(['{"id":0}', None, None], pa.large_string()),
        unchanged=pa.array([["photo"], None, []], pa.large_list(pa.large_string())),
        metadata=["{}", None, None],
    )
    table = fit_arrow(rows, initial_columns(keep_before=True)).table
    second = dt.datetime(1970, 1, 1, 0, 0, 1, 500_000, dt.UTC)
    assert table["_cdc_timestamp"].to_pylist() == [second, dt.datetime(1970, 1, 1, tzinfo=dt.UTC), RECEIVED]
    assert table["_cdc_operation"].to_pylist() == ["UPDATE", "DELETE", "INSERT"]
    assert table["_cdc_row_id"].to_pylist() == ["a", "", "c"]
    assert table["_cdc_before"].to_pylist() == ['{"id":0}', None, None]
    assert table["_cdc_unchanged"].to_pylist() == [["photo"], None, []]
    assert table["_cdc_metadata"].to_pylist() == ["{}", None, None]


def test_rows_without_columns_of_their_own_are_rows():
    table = fit_arrow(changes(rows=3)).table
    assert table["_cdc_sequence"].to_pylist() == [1, 2, 3]


# -- groups


def frames_of(*tables: pa.Table, **options) -> list[tuple[int, Frame]]:
    return [(offset, arrow_frame(stream_of(rows), **options)) for offset, rows in enumerate(tables)]


def test_frames_of_one_table_and_schema_are_one_group():
    frames = frames_of(changes({"id": [1, 2]}), changes({"id": [3]}, first=3))
    (group,) = group_arrow(frames)
    assert group.sequences.tolist() == [1, 2, 3]
    assert [(run.start, run.stop, run.offset) for run in group.runs] == [(0, 2, 0), (2, 3, 1)]
    assert fit_arrow(group).table["id"].to_pylist() == [1, 2, 3]


def test_another_schema_begins_another_group_in_the_order_of_the_log():
    frames = frames_of(changes({"a": [1]}), changes({"b": [1]}, first=2), changes({"a": [1]}, first=3))
    assert [group.sequences.tolist() for group in group_arrow(frames)] == [[1], [2], [3]]


def test_changes_that_admission_had_taken_before_are_dropped():
    rows = changes({"id": list(range(1, 7))})
    (group,) = group_arrow([(0, arrow_frame(stream_of(rows, batch_rows=2), after_sequence=3))])
    assert group.sequences.tolist() == [4, 5, 6]
    assert fit_arrow(group).table["id"].to_pylist() == [4, 5, 6]
    assert group_arrow([(0, arrow_frame(stream_of(rows), after_sequence=6))]) == []


def test_changes_at_or_below_their_sources_mark_are_dropped():
    frames = [
        (0, arrow_frame(stream_of(changes({"id": [1, 2, 3]})), source="a")),
        (1, arrow_frame(stream_of(changes({"id": [7, 8]}, first=7)), source="b", epoch=2)),
        (2, arrow_frame(stream_of(changes({"id": [4]}, first=4)), source="a")),
    ]
    (group,) = group_arrow(frames)
    assert group.after({}) is group
    left = group.after({SourceId("a"): Position(0, 2), SourceId("b"): Position(3, 0)})
    assert left.sequences.tolist() == [3, 4]
    assert [(run.source, run.start, run.stop, run.offset) for run in left.runs] == [("a", 0, 1, 0), ("a", 1, 2, 2)]
    assert fit_arrow(left).table["id"].to_pylist() == [3, 4]
    assert left.spans() == {"a": Span(Position(0, 3), Position(0, 4))}
    assert all(type(each.sequence) is int for span in left.spans().values() for each in (span.first, span.last))


def test_few_rows_of_a_large_frame_do_not_hold_it():
    rows = changes({"id": list(range(1000)), "text": ["x" * 1000] * 1000})
    group = arrow_group(rows).between(0, 2)
    before = pa.total_allocated_bytes()
    table = fit_arrow(group).table
    assert table.num_rows == 2
    assert pa.total_allocated_bytes() - before > 2_000, "the rows were copied out of their frame"


# -- runs of the log


def record(offset: int, each: Frame) -> Record:
    return Record(offset, b"".join(encode_frame(each)))


def test_tables_of_either_encoding_are_gathered_apart():
    orders = [arrow_frame(stream_of(changes({"id": [n]}, first=n), table="orders")) for n in (1, 2)]
    users = [frame([event(n, after={"id": n})]) for n in (3, 4)]
    records = [record(n, each) for n, each in enumerate([orders[0], users[0], orders[1], users[1]])]
    run = decode_run(records, {})
    assert {each.group.table: len(each.group) for each in run.tables} == {"orders": 2, "users": 2}


def test_a_table_of_both_encodings_keeps_the_order_of_the_log():
    frames = [
        frame([event(1, after={"id": 1}), event(2, after={"id": 2}, table="orders")]),
        arrow_frame(stream_of(changes({"id": [3]}, first=3))),
        frame([event(4, after={"id": 4})]),
    ]
    run = decode_run([record(n, each) for n, each in enumerate(frames)], {})
    users = [each.group for each in run.tables if each.group.table == "users"]
    assert [group.sequence_at(0) for group in users] == [1, 3, 4]
    assert [isinstance(group, JsonGroup) for group in users] == [True, False, True]


def test_rows_with_misfits_are_decoded_at_once_while_columns_stay():
    columns = declared(Field(20, "id", "long"))
    known = {"users": Expected(columns)}
    run = decode_run([record(0, arrow_frame(stream_of(changes({"id": ["x"]}))))], known)
    assert rescued_texts(run.tables[0].rows) == [{"id": "x"}]
    run = decode_run([record(0, arrow_frame(stream_of(changes({"new": ["x"]}))))], known)
    assert run.tables[0].rows is None


def test_json_goes_on_with_columns_that_arrow_declared():
    rows = changes({"day": pa.array([dt.date(2026, 1, 1)]), "price": pa.array([Decimal("1.50")])})
    fitted = fit_arrow(rows)
    group = json_groups([(0, frame([event(2, after={"day": "2026-01-02", "price": 2.5})]))])["users"]
    table = fit(group, fitted.columns).table
    assert table["day"].to_pylist() == [dt.date(2026, 1, 2)]
    assert table["price"].to_pylist() == [Decimal("2.50")]


def test_runs_are_cut_by_what_they_become():
    def sized(offset: int, expanded_bytes: int) -> Record:
        plain = arrow_frame(stream_of(changes({"id": [1]})))
        each = Frame(plain.source, 0, -1, 1, 0, plain.encoding, plain.body, expanded_bytes=expanded_bytes)
        assert decode_frame(b"".join(encode_frame(each))) == each
        return record(offset, each)

    records = [sized(5, 600_000), sized(6, 300_000), sized(8, 300_000), sized(9, 2_000_000), sized(10, 1)]
    parts = list(cut_run(records, max_bytes=1_000_000, next_offset=12))
    assert [([each.offset for each in part], offset) for part, offset in parts] == [
        ([5, 6], 8),
        ([8], 9),
        ([9], 10),
        ([10], 12),
    ]
    assert list(cut_run([], max_bytes=1, next_offset=3)) == [([], 3)]


def test_ids_of_new_columns_follow_those_in_use():
    fitted = fit_arrow(changes({"a": [1], "s": pa.array([{"x": 1}])}))
    start = highest_id(initial_columns(keep_before=False))
    assert [field.id for field in own_fields(fitted.columns)] == [start + 1, start + 2]
    assert fitted.last_field_id == start + 3


def test_rows_with_a_new_column_fit_a_table_that_they_were_not_decoded_for_yet():
    group = arrow_group(changes({"id": [1, 2], "name": ["a", "b"]}))
    known = Expected(declared(Field(20, "id", "long")))
    fitted = fit_or_bisect(group, known, last_field_id=20)
    assert (fitted.refused, fitted.changes) == ([], ["name string"])
    [(_, table)] = fitted.kept
    assert table.select(["id", "name"]).to_pylist() == [{"id": 1, "name": "a"}, {"id": 2, "name": "b"}]
