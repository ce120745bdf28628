"""Single values of every type: binary form, bounds, stored form and JSON form."""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyiceberg.conversions import to_bytes
from pyiceberg.types import BooleanType, DateType, DecimalType, DoubleType, LongType, StringType

from lakefeed.contract.errors import LiteralInvalid
from lakefeed.iceberg.values import (
    BOUND_MAX_UNITS,
    decode_bound,
    decode_stored,
    encode_single_value,
    parse_literal,
    upper_binary_bound,
    upper_text_bound,
    value_to_json,
)

_UUID = "eb26bdb1-a1d8-4aa6-990e-da940875492c"


@pytest.mark.parametrize(
    ("type_", "value", "shown"),
    [
        ("boolean", True, True),
        ("int", 42, 42),
        ("long", 2**63 - 1, 2**63 - 1),
        ("float", 1.0, 1.0),
        ("double", float("nan"), "NaN"),
        ("double", float("-inf"), "-Infinity"),
        ("decimal(9,2)", -12345, "-123.45"),
        ("decimal(38,10)", 5, "0.0000000005"),
        ("decimal(9,0)", 2, "2"),
        ("string", "hello", "hello"),
        ("uuid", UUID(_UUID).bytes, _UUID),
        ("date", 13850, "2007-12-03"),
        ("date", -719529, "-0001-12-31"),
        ("date", 10_000_000, "+29349-01-26"),
        ("time", 81_068_123_456, "22:31:08.123456"),
        ("timestamp", 1_196_676_930_123_456, "2007-12-03T10:15:30.123456"),
        ("timestamptz", 1_196_676_930_123_456, "2007-12-03T10:15:30.123456+00:00"),
        ("timestamp", -1, "1969-12-31T23:59:59.999999"),
        ("timestamp_ns", 1_196_676_930_123_456_789, "2007-12-03T10:15:30.123456789"),
        ("timestamptz_ns", 1_196_676_930_123_456_789, "2007-12-03T10:15:30.123456789+00:00"),
        ("fixed[3]", b"xyz", "78797A"),
        ("binary", b"xyz", "78797A"),
        ("int", None, None),
    ],
)
def test_value_is_written_as_json_by_the_specification_and_read_back(type_: str, value: Any, shown: Any):
    assert value_to_json(type_, value) == shown
    if value is not None and shown not in ("NaN", "-Infinity"):
        assert parse_literal(type_, shown) == value


@pytest.mark.parametrize(
    ("type_", "literal", "value"),
    [
        ("int", 5.0, 5),
        ("int", 5.5, Fraction(11, 2)),
        ("int", 2**40, 2**40),
        ("float", 0.1, 0.10000000149011612),
        ("float", 1e300, float("inf")),
        ("double", 3, 3.0),
        ("decimal(9,2)", 7, 700),
        ("decimal(9,2)", 1.25, 125),
        ("decimal(9,2)", "1.005", Fraction(201, 2)),
        ("date", 13850, 13850),
        ("time", "10:15", 36_900_000_000),
        ("timestamp", 1_196_676_930_123_456, 1_196_676_930_123_456),
        ("timestamp", "2007-12-03T10:15", 1_196_676_900_000_000),
        ("timestamp", "2007-12-03T10:15:30.1234567", Fraction(11_966_769_301_234_567, 10)),
        ("timestamptz", "2007-12-03T10:15:30+01:30", 1_196_671_530_000_000),
        ("timestamptz", "2007-12-03T10:15:30Z", 1_196_676_930_000_000),
        ("timestamptz", "2007-12-03T10:15:30", 1_196_676_930_000_000),
        ("timestamp_ns", 1_196_676_930_123_456, 1_196_676_930_123_456_000),
        ("binary", "78797a", b"xyz"),
    ],
)
def test_literal_is_read_in_every_form_that_clients_send(type_: str, literal: Any, value: Any):
    assert parse_literal(type_, literal) == value


@pytest.mark.parametrize(
    ("type_", "literal"),
    [
        ("int", "5"),
        ("int", True),
        ("boolean", 1),
        ("string", 5),
        ("double", "1.0"),
        ("decimal(9,2)", "1E+1000000000"),
        ("decimal(9,2)", "NaN"),
        ("date", "2007-13-45"),
        ("date", "yesterday"),
        ("time", "25"),
        ("timestamp", "2007-12-03"),
        ("timestamp", "2007-12-03T10:15:30+00:00"),
        ("uuid", "xyz"),
        ("uuid", 5),
        ("fixed[3]", "7879"),
        ("binary", "x"),
        ("variant", 1),
    ],
)
def test_literal_that_does_not_fit_is_refused(type_: str, literal: Any):
    with pytest.raises(LiteralInvalid, match="Invalid value for conversion"):
        parse_literal(type_, literal)


@pytest.mark.parametrize(
    ("type_", "encoded", "value"),
    [
        ("long", to_bytes(LongType(), -5), -5),
        ("long", b"\x05\x00\x00\x00", 5),
        ("double", b"\x00\x00\x80\x3f", 1.0),
        ("timestamp", b"\x01\x00\x00\x00", 86_400_000_000),
        ("timestamptz_ns", b"\xff\xff\xff\xff", -86_400_000_000_000),
        ("decimal(9,2)", to_bytes(DecimalType(9, 2), Decimal("-1.50")), -150),
        ("string", "ü".encode(), "ü"),
        ("string", b"\xff", None),
        ("double", b"\x00\x00\x00\x00\x00\x00\xf8\x7f", None),
        ("long", b"\x01", None),
        ("binary", b"\x01", b"\x01"),
        ("int", None, None),
    ],
)
def test_bound_from_before_its_column_was_widened_is_read_and_a_damaged_one_is_no_bound(
    type_: str, encoded: Any, value: Any
):
    assert decode_bound(type_, encoded) == value


def test_stored_decimal_is_its_unscaled_number():
    assert decode_stored("decimal(9,2)", b"\xff\x6a") == -150
    assert decode_stored("binary", b"\xff\x6a") == b"\xff\x6a"


@pytest.mark.parametrize(
    ("type_", "value", "peer"),
    [
        ("boolean", True, BooleanType()),
        ("date", 20_000, DateType()),
        ("long", -(2**63), LongType()),
        ("double", 1.5, DoubleType()),
        ("string", "é", StringType()),
        ("decimal(9,2)", Decimal("-1.28"), DecimalType(9, 2)),
        ("decimal(9,2)", Decimal("1.28"), DecimalType(9, 2)),
        ("decimal(38,0)", Decimal(10**37), DecimalType(38, 0)),
        ("decimal(9,2)", Decimal("0.00"), DecimalType(9, 2)),
    ],
)
def test_values_are_encoded_as_pyiceberg_encodes_them(type_, value, peer):
    assert encode_single_value(type_, value) == to_bytes(peer, value)


def test_an_unscaled_integer_is_encoded_as_its_decimal():
    assert encode_single_value("decimal(9,2)", -128) == encode_single_value("decimal(9,2)", Decimal("-1.28"))


@given(st.text(max_size=40))
def test_upper_text_bound_holds_for_the_text_and_is_short(text):
    upper = upper_text_bound(text)
    if upper is not None:
        assert upper.encode() >= text.encode()
        assert len(upper) <= BOUND_MAX_UNITS


@given(st.binary(max_size=40))
def test_upper_binary_bound_holds_for_the_bytes_and_is_short(data):
    upper = upper_binary_bound(data)
    if upper is not None:
        assert upper >= data
        assert len(upper) <= BOUND_MAX_UNITS


def test_an_upper_text_bound_steps_over_surrogates():
    assert upper_text_bound("a" * 15 + "\ud7ff" + "b") == "a" * 15 + "\ue000"


def test_text_of_only_largest_code_points_has_no_upper_bound():
    assert upper_text_bound("\U0010ffff" * 17) is None
    assert upper_text_bound("a" + "\U0010ffff" * 17) == "b"


def test_binary_of_only_largest_bytes_has_no_upper_bound():
    assert upper_binary_bound(b"\xff" * 17) is None
    assert upper_binary_bound(b"\x01" + b"\xff" * 17) == b"\x02"


def test_decimals_of_all_digits_are_encoded_exactly():
    value = Decimal(12345678901234567890123456789012345678)
    assert int.from_bytes(encode_single_value("decimal(38,0)", value), "big") == int(value)
