"""Values that came with a schema are exact, and what is no regular value says so."""

from __future__ import annotations

import base64
import json

import pytest

from lakefeed.ingest.debezium.envelope import read_events
from lakefeed.ingest.debezium.events import DebeziumMalformed
from tests.ingest.debezium.envelopes import KEYED, column, envelope, read_change, typed


def two_complement(number: int) -> str:
    return base64.b64encode(number.to_bytes(number.bit_length() // 8 + 1, "big", signed=True)).decode()


def logical(type_: str, name: str) -> dict:
    package = "org.apache.kafka.connect.data" if name == "Decimal" else "io.debezium.time"
    return {"type": type_, "name": f"{package}.{name}"}


@pytest.mark.parametrize(
    ("unscaled", "scale", "text"),
    [
        (0, 0, "0"),
        (0, 2, "0.00"),
        (1, 30, "0.000000000000000000000000000001"),
        (-1, 2, "-0.01"),
        (-100, 2, "-1.00"),
        (127, 0, "127"),
        (128, 0, "128"),
        (-128, 0, "-128"),
        (12345, -2, "1234500"),
        (0, -2, "0"),
        pytest.param(10**5000 - 1, 1, "9" * 4999 + ".9", id="longer than str(int) goes"),
    ],
)
def test_decimals_keep_every_digit(unscaled, scale, text):
    decimal = {"type": "bytes", "name": "org.apache.kafka.connect.data.Decimal", "parameters": {"scale": str(scale)}}
    variable = {"type": "struct", "name": "io.debezium.data.VariableScaleDecimal"}

    assert column(typed(two_complement(unscaled), **decimal)) == text
    assert column(typed({"scale": scale, "value": two_complement(unscaled)}, **variable)) == text


@pytest.mark.parametrize(
    ("name", "number", "text", "regular"),
    [
        ("Date", 0, "1970-01-01", True),
        ("Date", -719162, "0001-01-01", True),
        ("Date", 2932896, "9999-12-31", True),
        ("Date", -719163, "0000-12-31", False),
        ("Date", 2932897, "+10000-01-01", False),
        ("Date", -735160, "-0043-03-15", False),
        ("Date", -2147472692, "infinity", False),
        ("Date", -622191234, "infinity", False),
        ("Date", -2147472691, "-infinity", False),
        ("Date", 622191232, "622191232", False),
        ("Time", 1, "00:00:00.001", True),
        ("Time", 86_400_000, "24:00:00", False),
        ("MicroTime", 86_399_999_999, "23:59:59.999999", True),
        ("MicroTime", -3_600_000_000, "-01:00:00", False),
        ("NanoTime", 1, "00:00:00.000000001", True),
        ("Timestamp", -1, "1969-12-31T23:59:59.999", True),
        ("Timestamp", 9223372036825200, "infinity", False),
        ("MicroTimestamp", -1, "1969-12-31T23:59:59.999999", True),
        ("MicroTimestamp", 1_500_000, "1970-01-01T00:00:01.5", True),
        ("MicroTimestamp", 317336745600000000, "+12026-01-01T00:00:00", False),
        ("MicroTimestamp", 9223372036825200000, "infinity", False),
        ("MicroTimestamp", 9223372036825200001, "9223372036825200001", False),
        ("MicroTimestamp", -9223372036832400000, "-infinity", False),
        ("NanoTimestamp", 1, "1970-01-01T00:00:00.000000001", True),
    ],
)
def test_times_of_every_precision_are_iso_text(name, number, text, regular):
    change = typed(number, **logical("int64", name))

    assert column(change) == text
    assert change.irregular == (() if regular else ("v",))


@pytest.mark.parametrize(
    ("name", "sent", "text", "regular"),
    [
        ("IsoDate", "1970-01-01Z", "1970-01-01", True),
        ("IsoDate", "-5877611-06-21Z", "infinity", False),
        ("IsoDate", "-0043-03-15Z", "-0043-03-15", False),
        ("IsoTime", "12:34:56.7Z", "12:34:56.7", True),
        ("IsoTimestamp", "2024-02-29T12:34:56.123456Z", "2024-02-29T12:34:56.123456", True),
        ("IsoTimestamp", "-290308-12-21T19:59:27.6Z", "-infinity", False),
        ("ZonedTimestamp", "2026-03-29T01:30:00.000000Z", "2026-03-29T01:30:00.000000Z", True),
        ("ZonedTimestamp", "infinity", "infinity", False),
        ("ZonedTimestamp", "+12026-01-01T00:00:00.000000Z", "+12026-01-01T00:00:00.000000Z", False),
        ("ZonedTime", "10:34:56.78Z", "10:34:56.78Z", True),
        ("Interval", "P0Y-1M1DT0H0M0S", "P0Y-1M1DT0H0M0S", True),
    ],
)
def test_times_that_came_as_text_lose_only_a_zone_that_they_never_had(name, sent, text, regular):
    change = typed(sent, **logical("string", name))

    assert column(change) == text
    assert change.irregular == (() if regular else ("v",))


@pytest.mark.parametrize(
    ("sent", "length", "bits"), [("", 3, "000"), ("AQ==", 12, "000000000001"), ("PQc=", 12, "011100111101")]
)
def test_bits_are_padded_to_their_length(sent, length, bits):
    change = typed(sent, type="bytes", name="io.debezium.data.Bits", parameters={"length": str(length)})

    assert column(change) == bits


def test_floats_that_are_no_number_are_irregular():
    assert typed("NaN", type="double").irregular == ("v",)
    assert typed("-Infinity", type="float").irregular == ("v",)
    assert typed(1.5, type="double").irregular == ()


def test_parts_of_lists_maps_and_structs_are_read_by_their_own_types():
    day = logical("int32", "Date")

    assert column(typed([0, None, -1], type="array", items=day)) == ["1970-01-01", None, "1969-12-31"]
    assert column(typed({"a": 0}, type="map", values=day)) == {"a": "1970-01-01"}
    assert column(typed({"d": 0, "n": 1}, type="struct", fields=[{"field": "d", **day}])) == {
        "d": "1970-01-01",
        "n": 1,
    }
    assert typed([0, 2932897], type="array", items=day).irregular == ("v",)


@pytest.mark.parametrize(
    ("sent", "schema"),
    [
        ("not base64!", {"type": "bytes", "name": "org.apache.kafka.connect.data.Decimal"}),
        ("AQ==", {"type": "bytes", "name": "org.apache.kafka.connect.data.Decimal"}),
        ("AQ==", {"type": "bytes", "name": "org.apache.kafka.connect.data.Decimal", "parameters": {"scale": "99999"}}),
        ("/////w==", {"type": "bytes", "name": "io.debezium.data.Bits", "parameters": {"length": "3"}}),
        ({"scale": 1}, {"type": "struct", "name": "io.debezium.data.VariableScaleDecimal"}),
        ("text", logical("int32", "Date")),
        (1.5, logical("int64", "MicroTimestamp")),
        (10**30, logical("int64", "MicroTimestamp")),
        (5, logical("string", "ZonedTimestamp")),
        (5, {"type": "array", "items": logical("int32", "Date")}),
    ],
)
def test_value_that_does_not_fit_its_schema_is_kept_as_it_came(sent, schema):
    change = typed(sent, **schema)

    assert column(change) == sent
    assert change.irregular == ("v",)


@pytest.mark.parametrize(
    "number", ["1.10", "-0.0", "1E+400", "12345678901234567890.12345678901234567890", "9223372036854775808"]
)
def test_numbers_without_a_schema_keep_their_very_digits(number):
    body = json.dumps(envelope("c", after={"id": 1, "v": "HERE"})).replace('"HERE"', number)

    (change,) = read_events(body.encode(), {}, KEYED)

    assert bytes(change.after) == f'{{"id": 1, "v": {number}}}'.encode()


def test_schema_that_is_none_is_refused():
    with pytest.raises(DebeziumMalformed, match=r"^event\.schema: expected a schema"):
        read_change({"schema": {"fields": 5}, "payload": envelope("c", after={"id": 1})})


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        ({"type": "bytes", "name": "io.debezium.data.Bits", "parameters": {"length": "65536"}}, "AQ=="),
        (
            {"type": "bytes", "name": "org.apache.kafka.connect.data.Decimal", "parameters": {"scale": "16383"}},
            two_complement(1),
        ),
        (
            {"type": "bytes", "name": "org.apache.kafka.connect.data.Decimal", "parameters": {"scale": "-16383"}},
            two_complement(1),
        ),
    ],
    ids=["bits", "scale", "negative scale"],
)
def test_value_that_would_grow_out_of_all_proportion_is_kept_as_it_came(schema, value):
    change = typed(value, **schema)

    assert column(change) == value
    assert change.irregular == ("v",)


@pytest.mark.parametrize("shape", ["array", "map"])
def test_many_values_that_together_would_grow_out_of_all_proportion_are_kept_as_they_came(shape):
    bits = {"type": "bytes", "name": "io.debezium.data.Bits", "parameters": {"length": "256"}}
    parts = {"type": "array", "items": bits} if shape == "array" else {"type": "map", "values": bits}
    value = [""] * 1_000 if shape == "array" else {str(number): "" for number in range(1_000)}
    change = typed(value, **parts)

    assert column(change) == value
    assert change.irregular == ("v",)


def test_values_may_grow_by_what_their_encoding_saves():
    bits = {"type": "bytes", "name": "io.debezium.data.Bits", "parameters": {"length": "8000"}}
    whole = base64.b64encode(b"\xff" * 1_000).decode()

    assert column(typed(whole, **bits)) == "1" * 8_000
    assert column(typed("", **bits | {"parameters": {"length": "256"}})) == "0" * 256
