"""Single values: JSON literals, bounds and partition values of every type."""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyiceberg.conversions import to_bytes
from pyiceberg.transforms import parse_transform as pyiceberg_transform
from pyiceberg.types import (
    BinaryType,
    DateType,
    DecimalType,
    FixedType,
    LongType,
    StringType,
    TimestampType,
    UUIDType,
)

from lakefeed.contract.errors import LiteralInvalid
from lakefeed.iceberg.transforms import apply_transform, parse_transform, result_type
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


_SOURCES: dict[str, tuple[Any, Any]] = {
    "long": (LongType(), st.integers(-(2**62), 2**62)),
    "date": (DateType(), st.integers(-700_000, 2_900_000)),
    "timestamp": (TimestampType(), st.integers(-(2**55), 2**55)),
    "string": (StringType(), st.text(max_size=20)),
    "binary": (BinaryType(), st.binary(max_size=20)),
    "fixed[16]": (FixedType(16), st.binary(min_size=16, max_size=16)),
    "uuid": (UUIDType(), st.binary(min_size=16, max_size=16)),
    "decimal(30,4)": (DecimalType(30, 4), st.integers(-(10**29), 10**29)),
}


@given(
    drawn=st.sampled_from(list(_SOURCES)).flatmap(lambda type_: st.tuples(st.just(type_), _SOURCES[type_][1])),
    transform=st.sampled_from(["identity", "bucket[16]", "truncate[7]", "year", "month", "day", "hour"]),
)
def test_transforms_agree_with_pyicebergs(drawn: tuple[str, Any], transform: str):
    type_, value = drawn
    parsed, theirs = parse_transform(transform), pyiceberg_transform(transform)
    source = _SOURCES[type_][0]
    assert parsed is not None
    assert (result_type(parsed, type_) is not None) == theirs.can_transform(source)
    if not theirs.can_transform(source):
        return
    given_to_them = Decimal(value).scaleb(-4) if type_.startswith("decimal") else value
    expected = theirs.transform(source)(UUID(bytes=value) if type_ == "uuid" else given_to_them)
    if isinstance(expected, UUID):
        expected = expected.bytes
    if isinstance(expected, Decimal):
        expected = int(expected.scaleb(4))
    assert apply_transform(parsed, type_, value) == expected


def test_stored_decimal_is_its_unscaled_number():
    assert decode_stored("decimal(9,2)", b"\xff\x6a") == -150
    assert decode_stored("binary", b"\xff\x6a") == b"\xff\x6a"


@pytest.mark.parametrize("unknown", ["void", "bucket[0]", "truncate", "zorder[3]", "bucket[99999999999]"])
def test_other_transforms_tell_nothing(unknown: str):
    assert parse_transform(unknown) is None
