import datetime as dt
import json
from decimal import Decimal

import pyarrow as pa
import pytest

from lakefeed.contract import changes as names
from lakefeed.iceberg.arrow import FIELD_ID_KEY, to_arrow_schema
from lakefeed.iceberg.types import Field, ListType, MapType, Schema, StructType
from lakefeed.writer.rows.comments import JSON_DOC
from lakefeed.writer.rows.evolution import initial_columns
from lakefeed.writer.rows.json_strict import SAMPLE_MAX_ROWS
from lakefeed.writer.rows.values import Misfit
from tests.writer.sample_rows import (
    RECEIVED_AT_US,
    declared,
    decode_group,
    event,
    fit,
    frame,
    group,
    json_groups,
    own_rows,
    raw_group,
)

POINT = StructType((Field(31, "x", "long"), Field(32, "y", "double")))


def decode(column_type, *values: str, required: bool = False, doc: str | None = None) -> list:
    columns = declared(Field(20, "c", column_type, required, doc))
    rows = decode_group(raw_group(*(f'{{"c":{value}}}' for value in values)), columns)
    return rows["c"].to_pylist()


def test_changes_become_columns_beside_their_rows_own():
    frames = [
        (
            0,
            frame(
                [event(1, after={"id": 1}, timestamp=1500, rowId="r", unchanged=["photo"], metadata={"lsn": 5})],
                source="a",
            ),
        ),
        (1, frame([event(2, after={"id": 2}, operation="UPDATE", before={"id": 9})], source="b")),
    ]
    columns = StructType((*initial_columns(keep_before=True).fields, Field(20, "id", "long")))
    received = dt.datetime.fromtimestamp(RECEIVED_AT_US / 1e6, dt.UTC)
    first, second = decode_group(json_groups(frames)["users"], columns).to_pylist()
    assert first == {
        names.SEQUENCE: 1,
        names.TIMESTAMP: dt.datetime(1970, 1, 1, 0, 0, 1, 500_000, dt.UTC),
        names.OPERATION: "INSERT",
        names.ROW_ID: "r",
        names.SOURCE: "a",
        names.INGESTED_AT: received,
        names.BEFORE: None,
        names.UNCHANGED: ["photo"],
        names.METADATA: '{"lsn": 5}',
        names.RESCUED: None,
        names.EPOCH: None,
        "id": 1,
    }
    assert (second[names.SOURCE], second[names.TIMESTAMP], second[names.BEFORE]) == ("b", received, '{"id": 9}')
    assert (second[names.OPERATION], second[names.UNCHANGED], second["id"]) == ("UPDATE", None, 2)


def test_each_change_has_its_epoch_and_null_for_the_first_one():
    frames = [(0, frame([event(1), event(2)], source="a")), (1, frame([event(1)], source="b", epoch=2**62))]
    rows = decode_group(json_groups(frames)["users"], initial_columns(keep_before=False))
    assert rows[names.EPOCH].to_pylist() == [None, None, 2**62]


def test_decoded_tables_have_the_schema_of_their_files_with_field_ids():
    columns = declared(Field(20, "p", POINT), Field(40, "l", ListType(41, "date")))
    table = decode_group(group({"p": {"x": 1}, "l": ["2024-01-01"]}), columns)
    assert table.schema.equals(to_arrow_schema(Schema(0, columns)), check_metadata=True)
    assert table.schema.field("p").type.field("y").metadata == {FIELD_ID_KEY: b"32"}


def test_order_is_kept_over_many_blocks():
    rows = group(*({"id": n, "text": "x" * 900} for n in range(2000)))
    columns = declared(Field(20, "id", "long"), Field(21, "text", "string"))
    table = decode_group(rows, columns)
    assert table["id"].num_chunks > 1
    assert table["id"].to_pylist() == list(range(2000))


def test_a_row_larger_than_a_block_is_read():
    assert decode("string", json.dumps("x" * 1_000_000), '"y"') == ["x" * 1_000_000, "y"]


def test_a_group_of_no_rows_is_an_empty_table():
    empty = group({"id": 1}).between(0, 0)
    assert decode_group(empty, declared(Field(20, "id", "long"))).num_rows == 0
    assert fit(empty).table.num_rows == 0


@pytest.mark.parametrize(
    ("type_", "text", "value"),
    [
        ("long", "9223372036854775807", 2**63 - 1),
        ("long", "-9223372036854775808", -(2**63)),
        ("long", "-0", 0),
        ("long", '"__bigint__:9223372036854775807"', 2**63 - 1),
        ("int", "-2147483648", -(2**31)),
        ("double", "0.30000000000000004", 0.30000000000000004),
        ("double", "0.10000000000000001", 0.1),
        ("double", "9007199254740992", 2.0**53),
        ("double", "1e22", 1e22),
        ("double", "1.5e-300", 1.5e-300),
        ("float", "0.1", pytest.approx(0.1)),
        ("boolean", "true", True),
        ("string", '"a\\u00e9\\ud83d\\ude00\\u0000\\n"', "aé😀\0\n"),
        ("string", '"2024-01-01T00:00:00Z"', "2024-01-01T00:00:00Z"),
        ("string", '"__bigint__:5x"', "__bigint__:5x"),
        ("decimal(10, 2)", '"12.34"', Decimal("12.34")),
        ("decimal(10, 2)", "12.340", Decimal("12.34")),
        ("decimal(38, 0)", "99999999999999999999999999999999999999", Decimal("9" * 38)),
        ("date", '"2024-02-29"', dt.date(2024, 2, 29)),
        ("time", '"05:28:00.123456"', dt.time(5, 28, 0, 123456)),
        ("timestamp", '"2024-01-01 00:00:00.5"', dt.datetime(2024, 1, 1, 0, 0, 0, 500_000)),
        ("timestamptz", '"2024-01-01T02:00:00+02:00"', dt.datetime(2024, 1, 1, tzinfo=dt.UTC)),
        ("uuid", '"00000000-0000-0000-0000-0000000000FF"', bytes(15) + b"\xff"),
        ("binary", '"AQI="', b"\1\2"),
        ("fixed[2]", '"AQI="', b"\1\2"),
        (ListType(21, "long"), "[1,null,2]", [1, None, 2]),
        (POINT, '{"y":1.5}', {"x": None, "y": 1.5}),
        (POINT, "{}", {"x": None, "y": None}),
        (MapType(21, "string", 22, "long"), "null", None),
    ],
)
def test_values_that_fit_are_read_exactly(type_, text, value):
    assert decode(type_, text, "null") == [value, None]


@pytest.mark.parametrize(
    ("type_", "text"),
    [
        ("long", "9223372036854775808"),
        ("long", "1.5"),
        ("long", "1.0"),
        ("long", '"12"'),
        ("long", "true"),
        ("long", '"__bigint__:9223372036854775808"'),
        ("int", "2147483648"),
        ("double", "9007199254740993"),
        ("double", "0.12345678901234567890"),
        ("double", "1e400"),
        ("double", "200e306"),
        (POINT, '{"y":200e306}'),
        (ListType(21, "double"), "[9492309e+302]"),
        ("double", "1e-400"),
        ("double", "4.94e-324"),
        ("double", "-123456789012345678901234567890"),
        ("double", '"1"'),
        ("float", "16777217"),
        ("float", "1e39"),
        ("float", "0.123456789"),
        ("boolean", "1"),
        ("string", "5"),
        ("string", "{}"),
        ("decimal(10, 2)", "12.345"),
        ("decimal(10, 2)", "123456789.12"),
        ("decimal(38, 36)", "9369714.3"),
        ("decimal(38, 0)", "1e-10000000"),
        ("decimal(38, 0)", '"1\\u0065-10000000"'),
        (ListType(21, "decimal(38, 0)"), "[1, 1e-10000000]"),
        ("decimal(10, 2)", "1." + 60 * "0"),
        ("decimal(10, 2)", '"NaN"'),
        ("date", '"2024-02-30"'),
        ("date", '"0000-01-01"'),
        ("date", "19000"),
        ("time", '"24:00:00"'),
        ("timestamp", '"2024-01-01T00:00:00Z"'),
        ("timestamp", '"2024-01-01T00:00:00.1234567"'),
        ("timestamptz", '"2024-01-01T00:00:00"'),
        ("timestamptz", "1700000000000"),
        ("timestamptz", '"0001-01-01T00:00:00+05:00"'),
        ("uuid", '"not-a-uuid"'),
        ("binary", '"AQI"'),
        ("binary", '"AQJ="'),
        ("fixed[2]", '"AQ=="'),
        (ListType(21, "long"), '[1,"2"]'),
        (ListType(21, "long", element_required=True), "[null]"),
        (ListType(21, "double"), "[0.1, 9007199254740993]"),
        (POINT, '{"x":1,"x":1}'),
        (POINT, '{"y":9007199254740993}'),
        (StructType((Field(21, "x", "long", required=True),)), "{}"),
        (MapType(21, "string", 22, "long"), "{}"),
    ],
)
def test_values_that_do_not_fit_are_refused(type_, text):
    with pytest.raises(Misfit):
        decode(type_, "null", text)


@pytest.mark.parametrize(
    "image", [b'{"c":"\xff"}', b'{"c":"\xed\xa0\x80"}', b'{"c":"","c":""}', b"[]", b"5", b'{"\xff":1}']
)
def test_rows_that_are_not_objects_of_the_tables_columns_are_refused(image):
    with pytest.raises(Misfit):
        decode_group(raw_group(b"{}", image), declared(Field(20, "c", "string")))


def test_null_rows_never_reach_the_parser_which_would_crash():
    table = decode_group(raw_group("null", "null", '{"c":"x"}'), declared(Field(20, "c", "string")))
    assert table["c"].to_pylist() == [None, None, "x"]


def test_any_value_of_a_json_column_is_refused_because_text_would_be_taken_for_json():
    with pytest.raises(Misfit):
        decode("string", '"5"', doc="json")


def test_nulls_in_required_columns_are_refused():
    assert decode("long", "1", required=True) == [1]
    with pytest.raises(Misfit):
        decode("long", "1", "null", required=True)


def test_null_structs_may_lack_their_required_fields():
    assert decode(StructType((Field(21, "x", "long", required=True),)), "null", '{"x":1}') == [None, {"x": 1}]


def test_unknown_fields_are_accepted_while_they_are_null():
    columns = declared(Field(20, "p", POINT), Field(30, "l", ListType(31, POINT)))
    rows = [{"n": None, "p": {"x": 1, "m": None}, "l": [{"x": 2, "k": None}]}, {"p": None, "l": []}]
    first, second = own_rows(decode_group(group(*rows), columns))
    assert (first["p"]["x"], first["l"][0]["x"], second) == (1, 2, {"l": []})


@pytest.mark.parametrize(
    "row", [{"n": 5}, {"n": []}, {"n": {}}, {"n": {"m": None}}, {"p": {"m": "t"}}, {"l": [{"m": False}]}, {"j": 5}]
)
@pytest.mark.parametrize("before", [0, 1, SAMPLE_MAX_ROWS])
def test_unknown_fields_with_values_are_refused_wherever_they_come(row, before):
    columns = declared(
        Field(20, "p", POINT), Field(30, "l", ListType(31, POINT)), Field(40, "j", "string", doc=JSON_DOC)
    )
    with pytest.raises(Misfit):
        decode_group(group(*[{"n": None}] * before, row), columns)


def test_unknown_fields_in_two_spellings_or_not_in_utf8_are_refused():
    columns = declared(Field(20, "p", POINT))
    for image in (b'{"n":null,"n":null}', b'{"\xff":null}', b'{"p":{"\xff":null}}'):
        with pytest.raises(Misfit):
            decode_group(raw_group(image), columns)


def test_names_that_are_data_are_refused_without_a_column_for_each_of_them():
    # Inferring the fields of all these rows would take time proportional to their number squared.
    rows = raw_group(*(f'{{"k{index}":null}}' for index in range(50_000)))
    with pytest.raises(Misfit):
        decode_group(rows, declared(Field(20, "id", "long")))


@pytest.mark.parametrize(
    "text", ['"x\\"__bigint__:5\\""', '"__bigint__:5"', '"a:\\"__bigint__:5"', '",__bigint__:5"', '"__bigint__:5,"']
)
def test_text_that_only_looks_like_a_big_integer_is_not_changed(text):
    columns = declared(Field(20, "c", "string"))
    assert own_rows(fit(raw_group(f'{{"c":{text}}}'), columns).table) == [{"c": json.loads(text)}]
    try:
        fast = decode("string", text)
    except Misfit:
        return
    assert fast == [json.loads(text)]


def test_numbers_near_the_border_of_scanned_blocks_are_found():
    columns = declared(Field(20, "c", "double"), Field(21, "t", "string"))
    for padding in range(131_000, 131_080):
        with pytest.raises(Misfit):
            decode_group(raw_group(f'{{"t":"{"x" * padding}","c":9007199254740993}}'), columns)


def test_big_integers_and_doubles_in_one_row_do_not_disturb_each_other():
    columns = declared(Field(20, "id", "long"), Field(21, "score", "double"))
    rows = raw_group('{"id":1152921504606846977,"score":0.5}', '{"id":1152921504606846979,"score":0.25}')
    assert decode_group(rows, columns)["id"].to_pylist() == [1152921504606846977, 1152921504606846979]


def test_images_from_before_that_are_not_utf8_are_kept_as_base64():
    body = b'{"events":[{"sequence":1,"operation":"INSERT","table":"users","after":{},"before":{"a":"\xff"}}]}'
    table = decode_group(json_groups([(0, frame(body))])["users"], initial_columns(keep_before=True))
    assert table[names.BEFORE].to_pylist() == ['{"_cdc_base64":"eyJhIjoi/yJ9"}']


def test_columns_of_older_tables_without_a_before_column_are_filled():
    table = decode_group(group({}), initial_columns(keep_before=False))
    assert names.BEFORE not in table.column_names
    assert isinstance(table, pa.Table)
