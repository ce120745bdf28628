"""Admission of Arrow frames: what is wrong is refused with column and rule, never with a value."""

from __future__ import annotations

import struct

import pyarrow as pa
import pytest

from lakefeed.writer.wire.arrow_frame import ArrowFrame, RowTooLarge, is_arrow_frame
from lakefeed.writer.wire.json_batch import BatchMalformed
from tests.writer.wire.arrow_batches import admit, changes, stream_of

SECRET = "a value that no message may repeat"
US = pa.timestamp("us", "UTC")


def refusal(rows: pa.Table | bytes, **options) -> str:
    limits = {name: options.pop(name) for name in ("expanded_max_bytes", "row_max_bytes") if name in options}
    with pytest.raises(BatchMalformed) as caught:
        admit(rows if isinstance(rows, bytes) else stream_of(rows, **options), **limits)
    assert SECRET not in str(caught.value)
    return str(caught.value)


def test_a_frame_differs_from_json_in_its_first_bytes():
    assert is_arrow_frame(stream_of(changes({"id": [1]})))
    assert not is_arrow_frame(b'{"type":"cdc_batch"}')


def test_the_head_is_what_the_metadata_says():
    stream = stream_of(
        changes({"id": [1, 2]}, first=7),
        table="sales.orders",
        source="shop",
        sequence_number=3,
        first_sequence=7,
        last_sequence=8,
        correlation_id="c-1",
    )
    head = ArrowFrame.open(stream, expanded_max_bytes=10_000).head
    assert (head.table, head.source_do_id, head.sequence_number, head.correlation_id) == (
        "sales.orders",
        "shop",
        3,
        "c-1",
    )
    assert list(admit(stream).sequences) == [7, 8]


@pytest.mark.parametrize("compression", [None, "lz4", "zstd"])
def test_sequences_of_all_batches_are_given_in_order(compression):
    rows = changes({"id": list(range(10))}, first=5)
    assert list(admit(stream_of(rows, compression=compression, batch_rows=3)).sequences) == list(range(5, 15))


def test_sequences_with_holes_are_kept_as_they_are():
    rows = pa.table({"_cdc_sequence": pa.array([1, 2, 9, 2**62], pa.int64())})
    assert list(admit(stream_of(rows)).sequences) == [1, 2, 9, 2**62]
    assert type(admit(stream_of(rows)).sequences[0]) is int


def test_a_frame_without_rows_is_a_frame():
    assert len(admit(stream_of(changes({"id": pa.array([], pa.int64())}))).sequences) == 0


# -- metadata


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"table": None}, "lakefeed.table: expected in the schema's metadata"),
        ({"table": ""}, "lakefeed.table: expected in the schema's metadata"),
        ({"sequence_number": "x"}, "lakefeed.sequence-number: expected a whole number"),
        ({"sequence_number": -1}, "lakefeed.sequence-number: expected a whole number"),
        ({"sequence_number": 2**63}, "lakefeed.sequence-number: expected a whole number"),
        ({"first_sequence": 2}, "lakefeed.first-sequence: expected 1, as in _cdc_sequence"),
        ({"last_sequence": 3}, "lakefeed.last-sequence: expected 2, as in _cdc_sequence"),
    ],
)
def test_wrong_metadata_is_refused(metadata, message):
    assert refusal(changes({"id": [1, 2]}), **metadata).startswith(message)


# -- change columns


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (pa.table({"id": [1]}), "_cdc_sequence: expected as a column of type int64"),
        (pa.table({"_cdc_sequence": pa.array([1], pa.int32())}), "_cdc_sequence: expected int64, got int32"),
        (pa.table({"_cdc_sequence": pa.array([1, None], pa.int64())}), "_cdc_sequence: expected no nulls"),
        (pa.table({"_cdc_sequence": pa.array([-1, 1], pa.int64())}), "_cdc_sequence: expected whole numbers from 0"),
        (pa.table({"_cdc_sequence": pa.array([1, 3, 3], pa.int64())}), "expected more than in the row before: row=2"),
        (changes(rows=2, operation=["INSERT", SECRET]), "_cdc_operation: expected one of INSERT, UPDATE, DELETE"),
        (changes(rows=2, operation=["INSERT", None]), "_cdc_operation: expected one of INSERT, UPDATE, DELETE"),
        (changes(rows=1, operation=[1]), "_cdc_operation: expected text, got int64"),
        (changes(rows=1, operation=pa.array([SECRET]).dictionary_encode()), "_cdc_operation: expected one of"),
        (changes(rows=1, timestamp=["now"]), "_cdc_timestamp: expected a timestamp, or int64, got string"),
        (changes(rows=1, timestamp=[2**60]), "_cdc_timestamp: expected years 1 to 9999"),
        (changes(rows=1, timestamp=pa.array([2**62]).view(US)), "_cdc_timestamp: expected years 1 to 9999"),
        (changes(rows=1, timestamp=pa.array([1001]).view(pa.timestamp("ns"))), "_cdc_timestamp: expected whole micro"),
        (changes(rows=1, row_id=[5]), "_cdc_row_id: expected text, got int64"),
        (changes(rows=1, before=[5]), "_cdc_before: expected text, got int64"),
        (changes(rows=1, unchanged=["x"]), "_cdc_unchanged: expected a list of text, got string"),
    ],
)
def test_wrong_change_columns_are_refused(rows, message):
    assert message in refusal(rows)


def test_sequences_must_rise_from_batch_to_batch_too():
    rows = pa.table({"_cdc_sequence": pa.array([1, 2, 2, 3], pa.int64())})
    assert "row before: row=2" in refusal(rows, batch_rows=2)


def test_dictionaries_that_name_unused_operations_pass():
    given = pa.DictionaryArray.from_arrays(pa.array([0, 0], pa.int8()), pa.array(["UPDATE", "nonsense"]))
    assert len(admit(stream_of(changes(rows=2, operation=given))).sequences) == 2


# -- names and types


@pytest.mark.parametrize(
    ("type_", "message"),
    [
        (pa.duration("s"), "c: type duration[s] is not supported"),
        (pa.month_day_nano_interval(), "c: type month_day_nano_interval is not supported"),
        (pa.list_view(pa.int8()), "c: type list_view<item: int8> is not supported"),
        (pa.decimal256(39, 0), "c: type decimal256(39, 0) is not supported: expected at most 38 digits"),
        (pa.decimal128(38, -1), "c: type decimal128(38, -1) is not supported: expected at most 38 digits"),
        (pa.struct([("d", pa.duration("s"))]), "c.d: type duration[s] is not supported"),
        (pa.list_(pa.list_(pa.duration("s"))), "c.element.element: type duration[s] is not supported"),
        (pa.map_(pa.string(), pa.duration("s")), "c.value: type duration[s] is not supported"),
        (pa.map_(pa.list_(pa.int8()), pa.int8()), "c.key: type list<item: int8> is not supported as a key"),
        (pa.map_(pa.dictionary(pa.int8(), pa.string()), pa.int8()), "c.key: type dictionary<"),
        (pa.run_end_encoded(pa.int32(), pa.int8()), "c: type run_end_encoded<"),
        (pa.bool8(), "c: type extension<arrow.bool8> is not supported"),
    ],
)
def test_unsupported_types_are_refused_by_name(type_, message):
    empty = pa.RunEndEncodedArray.from_arrays(pa.array([], pa.int32()), pa.array([], pa.int8()))
    column = empty if pa.types.is_run_end_encoded(type_) else _nulls(type_)
    assert refusal(changes({"c": column}, rows=len(column))).startswith(message)


def _nulls(type_: pa.DataType) -> pa.Array:
    if isinstance(type_, pa.BaseExtensionType):
        return pa.ExtensionArray.from_storage(type_, pa.nulls(1, type_.storage_type))
    return pa.nulls(1, type_)


def test_names_must_differ_and_be_short_at_any_depth():
    twice = pa.StructArray.from_arrays([pa.array([1]), pa.array([2])], names=["a", "a"])
    assert refusal(changes({"s": twice})) == "s.a: expected each name once"
    table = pa.Table.from_arrays([pa.array([1], pa.int64()), pa.array([1]), pa.array([2])], ["_cdc_sequence", "b", "b"])
    assert refusal(table) == "b: expected each name once"
    assert "expected names of at most 255 characters" in refusal(changes({"x" * 256: [1]}))


def test_deep_nesting_and_very_many_columns_are_refused():
    deep = pa.int8()
    for _ in range(13):
        deep = pa.list_(deep)
    assert "nested at most 12 deep" in refusal(changes({"c": pa.nulls(1, deep)}))
    assert "at most 2000 fields" in refusal(changes({f"c{n}": [1] for n in range(2001)}))


# -- values that only look like their type


def _with_bytes(stream: bytes, old: bytes, new: bytes) -> bytes:
    assert stream.count(old) == 1
    return stream.replace(old, new)


def test_text_that_is_not_utf8_is_refused():
    stream = _with_bytes(stream_of(changes({"name": ["abcdefgh"]})), b"abcdefgh", b"abcd\xff\xfegh")
    assert refusal(stream) == "name: values are not valid string"


def test_dictionary_indices_outside_of_their_dictionary_are_refused():
    values = pa.DictionaryArray.from_arrays(pa.array([7, 7, 7, 7], pa.int8()), pa.array(["a"]), safe=False)
    assert refusal(changes({"d": values})).startswith("d: values are not valid dictionary")


def test_maps_with_null_keys_are_refused():
    maps = pa.array([[(f"key {n}", n) for n in range(77)]], pa.map_(pa.string(), pa.int64()))
    stream = stream_of(changes({"m": maps}))
    node, node_with_null = struct.pack("<qq", 77, 0), struct.pack("<qq", 77, 1)
    entries, keys, values = [index for index in range(len(stream)) if stream[index : index + 16] == node]
    assert entries < keys < values
    assert refusal(stream[:keys] + node_with_null + stream[keys + 16 :]).startswith("not a valid Arrow stream")


# -- sizes


def test_rows_beyond_the_limit_are_refused_by_number():
    rows = changes({"t": ["x", "y" * 5_000]})
    with pytest.raises(RowTooLarge, match="row 1 of a batch: expected at most 4096 bytes, got 50"):
        admit(stream_of(rows), row_max_bytes=4096)
    assert len(admit(stream_of(rows), row_max_bytes=5_100).sequences) == 2


@pytest.mark.parametrize(
    "column",
    [
        pa.DictionaryArray.from_arrays(pa.array([0] * 1000, pa.int16()), pa.array(["x" * 10_000])),
        pa.array(["x" * 10_000] * 1000).dictionary_encode(),
        pa.ListArray.from_arrays(
            pa.array(range(1001), pa.int32()),
            pa.DictionaryArray.from_arrays(pa.array([0] * 1000, pa.int8()), pa.array(["x" * 10_000])),
        ),
    ],
)
def test_values_that_are_referenced_many_times_count_each_time(column):
    stream = stream_of(changes({"d": column}))
    assert len(stream) < 40_000
    assert "expected at most 1000000 bytes once expanded" in refusal(stream, expanded_max_bytes=1_000_000)


def test_views_count_as_what_they_show():
    _, view, text = pa.array(["x" * 10_000], pa.string_view()).buffers()
    views = pa.py_buffer(view.to_pybytes()[:16] * 200)
    stream = stream_of(changes({"v": pa.Array.from_buffers(pa.string_view(), 200, [None, views, text])}))
    assert len(stream) < 40_000
    assert "once expanded" in refusal(stream, expanded_max_bytes=1_000_000)


def test_narrow_columns_count_with_their_names():
    stream = stream_of(changes({"x" * 200: pa.array([True] * 10_000)}), compression="zstd")
    assert len(stream) < 100_000
    assert "once expanded" in refusal(stream, expanded_max_bytes=2_000_000)
    assert admit(stream, expanded_max_bytes=3_000_000).expanded_bytes > 2_000_000
