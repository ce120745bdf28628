import json
import math
from decimal import Decimal

import msgspec
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lakefeed.writer.rows.json_strict import ParsePlan
from lakefeed.writer.rows.values import as_integer, decimal_precision, decimal_text, double_holds, floats_hold

DIGITS = st.text("0123456789", min_size=1, max_size=22)
NUMBERS = st.builds(
    lambda sign, whole, fraction, exponent: f"{sign}{int(whole)}{fraction}{exponent}",
    st.sampled_from(["", "-"]),
    DIGITS,
    st.one_of(st.just(""), DIGITS.map(".{}".format)),
    st.one_of(st.just(""), st.integers(-420, 420).map("e{}".format), st.integers(-420, 420).map("E{:+}".format)),
)
TYPE = pa.struct([("c", pa.float64()), ("l", pa.list_(pa.struct([("d", pa.float64())]))), ("i", pa.int64())])
CHECK = ParsePlan.of(TYPE)


def all_held(*images: bytes) -> bool:
    lines = b"\n".join(images)
    doubles = [json.loads(image, parse_int=float) for image in images]
    parsed = pa.Table.from_pylist(doubles, pa.schema([("c", pa.float64()), TYPE.field("l")]))
    return CHECK.doubles_are_exact(lines, images, parsed)


@settings(deadline=None, max_examples=300)
@given(NUMBERS)
def test_no_number_that_a_double_changes_is_overlooked(number):
    if not math.isinf(float(number)):
        assert all_held(b"{}", b'{"c":%s}' % number.encode(), b"{}") == double_holds(number)
        assert all_held(b'{"l":[{"d":1},{"d":%s}]}' % number.encode()) == double_holds(number)


@pytest.mark.parametrize(
    "image",
    [
        b'{"i":1234567890123456789,"c":84.74337369372327}',
        b'{"i":-9007199254740993,"c":-9985868320816.52}',
        b'{"c":0.5,"i":9007199254740993, "l":[{"d":2.914129290230828e-05}]}',
    ],
)
def test_long_integers_beside_doubles_and_doubles_in_full_are_held(image):
    assert all_held(b'{"c":1}', image, image)


def test_digits_in_text_are_no_numbers():
    rows = [b'{"s":"192.168.100.200.17 4111111111111111.12345","c":0.25}', b'{"s":": 0.12345678901234567890123"}']
    lines = b"\n".join(rows)
    parsed = pa.table({"c": pa.array([0.25, None], pa.float64())})
    assert CHECK.doubles_are_exact(lines, rows, parsed)


def test_integer_that_a_double_rounds_is_found_in_a_double_column():
    assert not all_held(b'{"i":9007199254740993}', b'{"c":9007199254740993}')


@settings(deadline=None)
@given(st.floats(allow_nan=False, allow_infinity=False))
def test_doubles_as_programs_write_them_are_held(value):
    assert double_holds(json.dumps(value))
    assert double_holds(f"{value:.17g}") or abs(value) >= 2**53


@settings(deadline=None)
@given(st.floats(width=32, allow_nan=False, allow_infinity=False))
def test_floats_are_held_in_their_short_and_their_full_form(value):
    assert floats_hold(pa.array([value], pa.float64()))


@settings(deadline=None)
@given(st.decimals(allow_nan=False, allow_infinity=False), st.integers(0, 38))
def test_decimals_that_fit_survive_their_column(number, scale):
    precision = decimal_precision(number, scale)
    assert Decimal(decimal_text(number)) == number or number == 0
    if precision is not None and precision <= 38:
        assert abs(number.scaleb(scale)) < Decimal(10) ** precision or number == 0


@pytest.mark.parametrize(
    ("text", "integer"),
    [("1.0", 1), ("1e3", 1000), ("1e18", 10**18), ("1e19", None), ("1.5", None), ("1e999999999", None), ("-0", 0)],
)
def test_integers_are_recognised_by_value(text, integer):
    assert as_integer(msgspec.Raw(text), "long") == integer


@pytest.mark.parametrize("image", [b"[]", b"5", b'{"l":5}', b'{"l":[[]]}', b'{"d":1,"d":1e-10000000}'])
def test_rows_of_another_shape_are_not_safe_to_parse_as_decimals(image):
    decimal = pa.decimal256(10, 2)
    check = ParsePlan.of(pa.struct([("d", decimal), ("l", pa.list_(pa.struct([("d", decimal)])))]))
    assert check.decimals_are_safe([b'{"d":"12.50","l":[null,{"d":null},{"d":-1.5}]}', b"{}"])
    assert not check.decimals_are_safe([b"{}", image])
