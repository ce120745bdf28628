"""Single values: JSON literals, bounds and partition values of every type."""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction
from typing import Any
from uuid import UUID

import pytest
from pyiceberg.conversions import to_bytes
from pyiceberg.types import DecimalType, LongType

from lakefeed.contract.errors import LiteralInvalid
from lakefeed.iceberg.values import decode_bound, decode_stored, parse_literal, show_value

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
def test_value_is_shown_by_the_specification_and_read_back(type_: str, value: Any, shown: Any):
    assert show_value(type_, value) == shown
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
        ("decimal(9,2)", to_bytes(DecimalType(9, 2), Decimal("-1.50")), -150),
        ("string", "ü".encode(), "ü"),
        ("string", b"\xff", None),
        ("double", b"\x00\x00\x00\x00\x00\x00\xf8\x7f", None),
        ("long", b"\x01", None),
        ("binary", b"\x01", b"\x01"),
        ("int", None, None),
    ],
)
def test_bound_is_read_also_from_before_its_column_was_widened_and_says_nothing_if_unsound(
    type_: str, encoded: Any, value: Any
):
    assert decode_bound(type_, encoded) == value


def test_stored_decimal_is_its_unscaled_number():
    assert decode_stored("decimal(9,2)", b"\xff\x6a") == -150
    assert decode_stored("binary", b"\xff\x6a") == b"\xff\x6a"
