from __future__ import annotations

from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyiceberg.conversions import to_bytes
from pyiceberg.types import BooleanType, DateType, DecimalType, DoubleType, LongType, StringType

from lakefeed.iceberg.values import (
    BOUND_MAX_UNITS,
    comparable_bound,
    encode_single_value,
    lower_binary_bound,
    lower_text_bound,
    upper_binary_bound,
    upper_text_bound,
)


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
def test_text_bounds_hold_for_the_text_and_are_short(text):
    upper = upper_text_bound(text)
    assert lower_text_bound(text).encode() <= text.encode()
    assert len(lower_text_bound(text)) <= BOUND_MAX_UNITS
    if upper is not None:
        assert upper.encode() >= text.encode()
        assert len(upper) <= BOUND_MAX_UNITS


@given(st.binary(max_size=40))
def test_binary_bounds_hold_for_the_bytes_and_are_short(data):
    upper = upper_binary_bound(data)
    assert lower_binary_bound(data) <= data
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


def test_bounds_from_before_a_column_was_widened_compare_with_those_after_it():
    bounds = [encode_single_value("int", -5), encode_single_value("long", -(2**40)), encode_single_value("long", 3)]
    assert [comparable_bound("long", each) for each in bounds] == [-5, -(2**40), 3]
    assert comparable_bound("double", encode_single_value("float", 1.5)) == 1.5


def test_decimals_of_all_digits_are_encoded_exactly():
    value = Decimal(12345678901234567890123456789012345678)
    assert int.from_bytes(encode_single_value("decimal(38,0)", value), "big") == int(value)
