"""Transforms of single values and of columns: against the specification's own values, PyIceberg's, and each other."""

from __future__ import annotations

import datetime as dt
import uuid
from decimal import Context, Decimal, localcontext
from typing import Any

import mmh3
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyiceberg.transforms import parse_transform as parse_pyiceberg
from pyiceberg.types import (
    BinaryType,
    DateType,
    DecimalType,
    FixedType,
    IntegerType,
    LongType,
    StringType,
    TimestampNanoType,
    TimestampType,
    TimeType,
    UUIDType,
)

from lakefeed.iceberg.arrow import _hash_longs, _hashes, to_arrow_type, transform_column
from lakefeed.iceberg.layout import transform_for
from lakefeed.iceberg.terms import PartitionRejected, Transform, parse_transform
from lakefeed.iceberg.transforms import apply_transform, result_type, wraps
from lakefeed.iceberg.values import unscaled

EXACT = Context(prec=60)  # the usual context rounds to 28 digits
EPOCH = dt.datetime(1970, 1, 1)
INT = st.integers(-(2**31), 2**31 - 1)
LONG = st.integers(-(2**63), 2**63 - 1)
# The days that PyIceberg's own date arithmetic knows.
MICROS = st.integers(-62_135_596_800_000_000, 253_402_300_799_999_999)
NANOS = st.integers(-(2**63) + 1, 2**63 - 1)
TEXT = st.text(max_size=40)
WIDTH = st.integers(1, 2**31 - 1)


def decimals(precision: int, scale: int):
    limit = 10**precision - 1
    return st.integers(-limit, limit).map(lambda number: Decimal(number).scaleb(-scale, EXACT))


# Iceberg's type: the values to try, and the type by PyIceberg.
TYPES = {
    "int": (INT, IntegerType()),
    "long": (LONG, LongType()),
    "decimal(9,2)": (decimals(9, 2), DecimalType(9, 2)),
    "decimal(18,0)": (decimals(18, 0), DecimalType(18, 0)),
    "decimal(38,10)": (decimals(38, 10), DecimalType(38, 10)),
    "date": (st.integers(-719_162, 2_932_896), DateType()),
    "time": (st.integers(0, 86_399_999_999), TimeType()),
    "timestamp": (MICROS, TimestampType()),
    "timestamp_ns": (NANOS, TimestampNanoType()),
    "string": (TEXT, StringType()),
    "binary": (st.binary(max_size=40), BinaryType()),
    "fixed[7]": (st.binary(min_size=7, max_size=7), FixedType(7)),
    "uuid": (st.binary(min_size=16, max_size=16), UUIDType()),
}


def arrow_array(type_: str, values: list[object]) -> pa.Array:
    arrow = to_arrow_type(type_)
    if pa.types.is_timestamp(arrow) or pa.types.is_time64(arrow):
        return pa.array(values, pa.int64()).cast(arrow)
    return pa.array(values, pa.int32()).cast(arrow) if pa.types.is_date32(arrow) else pa.array(values, arrow)


def known(text: str) -> Transform:
    transform = parse_transform(text)
    assert transform is not None
    return transform


def transformed(text: str, type_: str, values: list[Any]) -> list[Any]:
    """Transform a column, and each value by itself; both must agree wherever stored results do not wrap around."""
    column = transform_column(known(text), type_, arrow_array(type_, values)).to_pylist()
    for value, image in zip(values, column, strict=True):
        stored = plain(type_, image)
        if value is not None and not wraps(known(text), type_, stored, stored):
            assert apply_transform(known(text), type_, plain(type_, value)) == stored
    return column


def plain(type_: str, value: Any) -> Any:
    """Return a value as single values are: decimals as their unscaled integer."""
    return unscaled(type_, value) if isinstance(value, Decimal) else value


def hash_of(type_: str, value: object) -> int:
    """Give the hash behind buckets, as a signed number: the specification writes it so."""
    return int(_hashes(type_, arrow_array(type_, [value])).view(np.int32)[0])


def micros(moment: dt.datetime) -> int:
    return (moment - EPOCH) // dt.timedelta(microseconds=1)


@pytest.mark.parametrize(
    ("type_", "value", "expected"),
    [
        ("int", 34, 2017239379),
        ("long", 34, 2017239379),
        ("decimal(9,2)", Decimal("14.20"), -500754589),
        ("decimal(38,2)", Decimal("14.20"), -500754589),
        ("date", 17_486, -653330422),
        ("time", 81_068_000_000, -662762989),
        ("timestamp", micros(dt.datetime(2017, 11, 16, 22, 31, 8)), -2047944441),
        ("timestamptz", micros(dt.datetime(2017, 11, 16, 22, 31, 8)), -2047944441),
        ("timestamp", micros(dt.datetime(2017, 11, 16, 22, 31, 8, 1)), -1207196810),
        ("timestamp_ns", micros(dt.datetime(2017, 11, 16, 22, 31, 8, 1)) * 1000 + 1, -1207196810),
        ("string", "iceberg", 1210000089),
        ("uuid", uuid.UUID("f79c3e09-677c-4bbd-a479-3f349cb785e7").bytes, 1488055340),
        ("fixed[4]", b"\x00\x01\x02\x03", -188683207),
        ("binary", b"\x00\x01\x02\x03", -188683207),
    ],
)
def test_hashes_are_those_of_the_specification(type_, value, expected):
    assert hash_of(type_, value) == expected


@pytest.mark.parametrize(
    ("text", "type_", "value", "expected"),
    [
        ("truncate[10]", "int", 1, 0),
        ("truncate[10]", "int", -1, -10),
        ("truncate[10]", "long", -1, -10),
        ("truncate[50]", "decimal(9,2)", Decimal("10.65"), Decimal("10.50")),
        ("truncate[10]", "decimal(9,2)", Decimal("-0.05"), Decimal("-0.10")),
        ("truncate[3]", "string", "iceberg", "ice"),
        ("truncate[3]", "string", "\U0001f40b日本語", "\U0001f40b日本"),
        ("truncate[3]", "binary", b"\x01\x02\x03\x04\x05", b"\x01\x02\x03"),
        ("year", "timestamp", -1, -1),
        ("month", "timestamp", -1, -1),
        ("day", "timestamp", -1, -1),
        ("hour", "timestamp", -1, -1),
        ("day", "timestamp_ns", -1, -1),
        ("year", "date", 17_486, 47),
        ("month", "date", 17_486, 574),
        ("void", "long", 34, None),
    ],
)
def test_values_are_those_of_the_specification(text, type_, value, expected):
    assert transformed(text, type_, [value]) == [expected]


@pytest.mark.parametrize("type_", TYPES)
@given(data=st.data(), width=WIDTH)
@settings(deadline=None)
def test_buckets_are_those_of_pyiceberg(type_, data, width):
    strategy, peer_type = TYPES[type_]
    values = data.draw(st.lists(st.none() | strategy, max_size=12))
    peer = parse_pyiceberg(f"bucket[{width}]").transform(peer_type)
    with localcontext(EXACT):
        expected = [peer(_for_pyiceberg(type_, value)) for value in values]
    assert transformed(f"bucket[{width}]", type_, values) == expected


def _for_pyiceberg(type_: str, value):
    return uuid.UUID(bytes=value) if type_ == "uuid" and value is not None else value


@pytest.mark.parametrize("type_", ["int", "long", "decimal(9,2)", "decimal(38,10)", "string", "binary"])
@given(data=st.data(), width=WIDTH)
@settings(deadline=None)
def test_truncations_are_those_of_pyiceberg(type_, data, width):
    strategy, peer_type = TYPES[type_]
    if type_ in ("int", "long"):  # PyIceberg does not wrap around at the ends of the type
        bits = 31 if type_ == "int" else 63
        strategy = strategy.filter(lambda value: value - value % width >= -(2**bits))
    if type_ == "decimal(38,10)":  # beyond 38 digits there is no such decimal
        strategy = strategy.filter(lambda value: int(value.scaleb(10, EXACT)) - width > -(10**38))
    values = data.draw(st.lists(st.none() | strategy, max_size=12))
    peer = parse_pyiceberg(f"truncate[{width}]").transform(peer_type)
    with localcontext(EXACT):
        assert transformed(f"truncate[{width}]", type_, values) == [peer(value) for value in values]


@pytest.mark.parametrize("text", ["year", "month", "day", "hour"])
@pytest.mark.parametrize("type_", ["date", "timestamp", "timestamp_ns"])
@given(data=st.data())
@settings(deadline=None)
def test_times_are_those_of_pyiceberg(text, type_, data):
    if (text, type_) == ("hour", "date"):
        return
    strategy, peer_type = TYPES[type_]
    values = data.draw(st.lists(st.none() | strategy, max_size=12))
    peer = parse_pyiceberg(text).transform(peer_type)
    assert transformed(text, type_, values) == [peer(value) for value in values]


@given(values=st.lists(st.none() | st.binary(max_size=300), max_size=60), start=st.integers(0, 5))
@settings(deadline=None)
def test_slice_of_a_binary_column_hashes_as_its_values(values, start):
    array = pa.array([b"before"] * start + values, pa.binary()).slice(start)
    assert _hashes("binary", array).view(np.int32).tolist() == [mmh3.hash(value or b"") for value in values]


@given(st.lists(LONG))
@settings(deadline=None)
def test_longs_hash_as_their_eight_bytes(values):
    hashes = _hash_longs(np.array(values, np.int64)).view(np.int32)
    assert hashes.tolist() == [mmh3.hash(value.to_bytes(8, "little", signed=True)) for value in values]


@pytest.mark.parametrize(("text", "type_"), [("bucket[7]", "string"), ("truncate[4]", "decimal(30,2)")])
def test_slice_of_a_column_gives_the_values_of_its_rows(text, type_):
    values = ["a", None, "bcdefg", "h"] if type_ == "string" else [Decimal("1.11"), None, Decimal("-9.99"), Decimal(0)]
    whole = transformed(text, type_, values)
    part = transform_column(known(text), type_, arrow_array(type_, values).slice(1, 3))
    assert part.to_pylist() == whole[1:]


@pytest.mark.parametrize(
    ("text", "type_"),
    [
        ("bucket[4]", "double"),
        ("bucket[4]", "boolean"),
        ("truncate[4]", "uuid"),
        ("truncate[4]", "fixed[4]"),
        ("truncate[4]", "date"),
        ("hour", "date"),
        ("year", "string"),
        ("day", "time"),
        ("bucket", "int"),
        ("bucket[0]", "int"),
        ("truncate[2147483648]", "int"),
        ("day[2]", "date"),
        ("zorder", "int"),
    ],
)
def test_transform_that_the_specification_does_not_have_is_refused(text, type_):
    with pytest.raises(PartitionRejected, match="transform="):
        transform_for(text, type_)
    transform = parse_transform(text)
    assert transform is None or result_type(transform, type_) is None


@pytest.mark.parametrize("text", [f"bucket[{'9' * 5000}]", "bucket[٣]", "truncate[-1]", "", "bucket[]"])
def test_text_that_is_no_transform_is_not_parsed(text):
    assert parse_transform(text) is None


@pytest.mark.parametrize("text", ["year", "month", "day", "hour"])
@pytest.mark.parametrize(
    ("type_", "ends"),
    [
        ("date", (-(2**31), 2**31 - 1)),
        ("timestamp", (-(2**63), 2**63 - 1)),
        ("timestamp_ns", (-(2**63), 2**63 - 1)),
    ],
)
def test_times_at_the_ends_of_a_type_fit_32_bits_as_in_java(text, type_, ends):
    if (text, type_) == ("hour", "date"):
        return
    for value, image in zip(ends, transformed(text, type_, list(ends)), strict=True):
        exact = apply_transform(known(text), type_, value)
        assert image == (exact + 2**31) % 2**32 - 2**31
        assert (image == exact) or wraps(known(text), type_, image, image)


def test_hours_wrap_around_only_where_a_timestamp_is_beyond_32_bits_of_them():
    hour_us, hour = 3_600_000_000, known("hour")
    first_wrapped = 2**31
    assert transformed("hour", "timestamp", [(first_wrapped - 1) * hour_us]) == [2**31 - 1]
    assert transformed("hour", "timestamp", [first_wrapped * hour_us]) == [-(2**31)]
    # Images of the earliest and the latest timestamp bound those that may be wrapped ones.
    latest, earliest = (transformed("hour", "timestamp", [value])[0] for value in (2**63 - 1, -(2**63)))
    assert wraps(hour, "timestamp", latest, latest)
    assert wraps(hour, "timestamp", earliest, earliest)
    assert not wraps(hour, "timestamp", latest + 2, earliest - 1)
    assert not wraps(hour, "timestamp_ns", None, None)
