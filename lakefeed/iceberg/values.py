"""Single values of Iceberg's types: binary form (bounds), stored form (partition tuples), and JSON form (literals).

A value is what compares as its column does:

    boolean bool | int, long int | float, double float | string str | uuid, fixed, binary bytes
    date days, time and timestamp microseconds, timestamp_ns nanoseconds since 1970 | decimal its unscaled integer

A literal between two values of a whole-numbered column (5.5 for an int) stays exact, as a Fraction.

The binary form is the specification's "binary single-value serialization": little-endian numbers, UTF-8 text, decimals
as the shortest big-endian two's complement of their unscaled value.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Callable, Mapping
from decimal import Context, Decimal, InvalidOperation
from fractions import Fraction
from typing import Any
from uuid import UUID

import numpy as np

from lakefeed.contract.errors import LiteralInvalid
from lakefeed.iceberg.types import decimal_parts, fixed_length

# The specification's default for text and binary bounds: long enough to prune by, short enough to keep manifests small.
# A lower bound is cut off there: a prefix never sorts after the whole.
BOUND_MAX_UNITS = 16
# More than any literal of a decimal column has (38 digits), far from what makes the arithmetic slow.
LITERAL_MAX_DIGITS = 400

_MAX_CODE_POINT = 0x10FFFF
_FIRST_SURROGATE = 0xD800
_AFTER_SURROGATES = 0xE000

_NS_PER_SECOND = 1_000_000_000
_NS_PER_US = 1_000
_NS_PER_DAY = 86_400 * _NS_PER_SECOND
_NS_PER_UNIT = {
    "time": _NS_PER_US,
    "timestamp": _NS_PER_US,
    "timestamptz": _NS_PER_US,
    "timestamp_ns": 1,
    "timestamptz_ns": 1,
}
UNITS_PER_DAY = {"date": 1} | {
    type_: _NS_PER_DAY // unit for type_, unit in _NS_PER_UNIT.items() if type_.startswith("timestamp")
}
_WITH_ZONE = ("timestamptz", "timestamptz_ns")

_INT, _LONG, _FLOAT, _DOUBLE = (struct.Struct(form) for form in ("<i", "<q", "<f", "<d"))
_PACKED = {
    "boolean": struct.Struct("<?"),
    "int": _INT,
    "date": _INT,
    "long": _LONG,
    "float": _FLOAT,
    "double": _DOUBLE,
    **dict.fromkeys(_NS_PER_UNIT, _LONG),
}
# Bounds keep the type that the column had when its file was written. Format 3 also widens dates to timestamps.
_BEFORE_WIDENING = {"long": _INT, "double": _FLOAT, **dict.fromkeys(UNITS_PER_DAY, _INT)}

_DATE = re.compile(r"[+-]?\d{4,7}-\d\d-\d\d")
_TIME = re.compile(r"(\d\d):(\d\d)(?::(\d\d)(?:\.(\d{1,9}))?)?")
_ZONE = re.compile(r"Z$|([+-])(\d\d):(\d\d)$")
_EXACT = Context(prec=LITERAL_MAX_DIGITS)  # the usual context rounds to 28 digits


def is_nan(value: Any) -> bool:
    """Return whether a value is a floating-point NaN."""
    return isinstance(value, float) and math.isnan(value)


def is_comparable(type_: str) -> bool:
    """Return whether this version can read values of a type, and so compare them."""
    return type_ in _READERS or decimal_parts(type_) is not None or fixed_length(type_) is not None


def unscaled(type_: str, value: Decimal) -> int:
    """Return the integer that a decimal column stores for `value`."""
    decimal = decimal_parts(type_)
    assert decimal is not None, type_
    return int(value.scaleb(decimal[1], _EXACT))


def shortest_signed(value: int) -> bytes:
    """Encode an integer as the shortest big-endian two's complement."""
    # One bit more than the magnitude, for the sign; -128 needs one byte, 128 needs two.
    bits = (value if value >= 0 else ~value).bit_length() + 1
    return value.to_bytes((bits + 7) // 8, "big", signed=True)


def encode_single_value(type_: str, value: Any) -> bytes:
    """Encode a value in its binary form; a decimal may also be given as Decimal."""
    if packed := _PACKED.get(type_):
        return packed.pack(value)
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, Decimal):
        value = unscaled(type_, value)
    return shortest_signed(value) if isinstance(value, int) else bytes(value)


def decode_bound(type_: str, encoded: bytes | None) -> Any:
    """Read a bound, which may be from before its column was widened; None if it is absent or damaged."""
    if encoded is None:
        return None
    if packed := _PACKED.get(type_):
        before = _BEFORE_WIDENING.get(type_)
        if len(encoded) == packed.size:
            value = packed.unpack(encoded)[0]
        elif before is not None and len(encoded) == before.size:
            value = before.unpack(encoded)[0] * UNITS_PER_DAY.get(type_, 1)
        else:
            return None
        return None if is_nan(value) else value
    if type_ == "string":
        try:
            return encoded.decode()
        except UnicodeDecodeError:
            return None
    return decode_stored(type_, encoded)


def decode_stored(type_: str, stored: Any) -> Any:
    """Read a value as partition tuples store it, without Avro's logical types."""
    if isinstance(stored, bytes) and decimal_parts(type_):
        return int.from_bytes(stored, "big", signed=True)
    return stored


def upper_text_bound(text: str) -> str | None:
    """Cut an upper bound and raise its last code point that can rise; None if there is none, so no bound holds."""
    if len(text) <= BOUND_MAX_UNITS:
        return text
    for end in range(BOUND_MAX_UNITS, 0, -1):
        following = ord(text[end - 1]) + 1
        if following == _FIRST_SURROGATE:
            following = _AFTER_SURROGATES
        if following <= _MAX_CODE_POINT:
            return text[: end - 1] + chr(following)
    return None


def upper_binary_bound(data: bytes) -> bytes | None:
    """Cut an upper bound and raise its last byte that can rise; None if there is none, so no bound holds."""
    if len(data) <= BOUND_MAX_UNITS:
        return data
    prefix = data[:BOUND_MAX_UNITS].rstrip(b"\xff")
    return prefix[:-1] + bytes([prefix[-1] + 1]) if prefix else None


def parse_literal(type_: str, value: Any) -> Any:
    """Read a filter's JSON literal as a value of a type. Only floats are rounded, to the column's own width.

    Raises: LiteralInvalid if it is not one of this type.
    """
    try:
        if decimal := decimal_parts(type_):
            return _whole(_exact_number(value) * 10 ** decimal[1])
        if (length := fixed_length(type_)) is not None:
            return _read_hex(value, size=length)
        return _READERS[type_](value)
    except (KeyError, ValueError, TypeError, InvalidOperation) as error:
        raise LiteralInvalid(f"Invalid value for conversion to type {type_}: {value!r:.100}") from error


def _whole(number: Fraction) -> int | Fraction:
    return number.numerator if number.denominator == 1 else number


def _exact_number(value: Any) -> Fraction:
    """Read a number or its text; exponents that would make it huge are refused."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise TypeError("not a number")
    number = Decimal(repr(value) if isinstance(value, float) else value)
    if not number.is_finite() or abs(number.adjusted()) + len(number.as_tuple().digits) > LITERAL_MAX_DIGITS:
        raise ValueError("not a number of this size")
    return Fraction(number)


def _read_integer(value: Any) -> int | Fraction:
    if isinstance(value, str):
        raise TypeError("not a number")
    return _whole(_exact_number(value))


def _read_double(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError("not a number")
    return float(value)


def _read_float(value: Any) -> float:
    number = _read_double(value)
    try:
        rounded: float = _FLOAT.unpack(_FLOAT.pack(number))[0]
    except OverflowError:
        return math.copysign(math.inf, number)
    return rounded


def _read_exactly(kind: type) -> Callable[[Any], Any]:
    def read(value: Any) -> Any:
        if not isinstance(value, kind):
            raise TypeError("wrong kind")
        return value

    return read


def _read_hex(value: Any, *, size: int | None = None) -> bytes:
    data = bytes.fromhex(value)
    if size is not None and len(data) != size:
        raise ValueError("wrong length")
    return data


def _read_date(value: Any) -> int | Fraction:
    """Read an ISO date, or days as older clients send them."""
    return _days(value) if isinstance(value, str) else _read_integer(value)


def _read_time(value: Any) -> int | Fraction:
    return _whole(Fraction(_clock_ns(value), _NS_PER_US)) if isinstance(value, str) else _read_integer(value)


def _timestamp_reader(type_: str) -> Callable[[Any], int | Fraction]:
    unit = _NS_PER_UNIT[type_]

    def read(value: Any) -> int | Fraction:
        """Read ISO text, or microseconds as older clients send them, whatever the column's own unit."""
        if not isinstance(value, str):
            return _whole(_exact_number(value) * Fraction(_NS_PER_US, unit))
        return _whole(Fraction(_moment_ns(value, with_zone=type_ in _WITH_ZONE), unit))

    return read


def _moment_ns(text: str, *, with_zone: bool) -> int:
    date, _, rest = text.partition("T")
    zone = _ZONE.search(rest)
    if zone is not None and not with_zone:
        raise ValueError("a zone where the column has none")
    shift_ns = 0  # PyIceberg leaves out the zone, meaning UTC
    if zone is not None and zone[1] is not None:
        minutes = int(zone[2]) * 60 + int(zone[3])
        shift_ns = minutes * 60 * _NS_PER_SECOND * (-1 if zone[1] == "-" else 1)
    return _days(date) * _NS_PER_DAY + _clock_ns(rest[: zone.start()] if zone else rest) - shift_ns


def _clock_ns(text: str) -> int:
    match = _TIME.fullmatch(text)
    if match is None:
        raise ValueError("not a time")
    hours, minutes, seconds = (int(part or 0) for part in match.groups()[:3])
    return ((hours * 60 + minutes) * 60 + seconds) * _NS_PER_SECOND + int((match[4] or "").ljust(9, "0"))


def _days(text: str) -> int:
    if _DATE.fullmatch(text) is None:
        raise ValueError("not a date")
    return int(np.datetime64(text, "D").astype(np.int64))


_READERS: Mapping[str, Callable[[Any], Any]] = {
    "boolean": _read_exactly(bool),
    "int": _read_integer,
    "long": _read_integer,
    "float": _read_float,
    "double": _read_double,
    "date": _read_date,
    "time": _read_time,
    **{type_: _timestamp_reader(type_) for type_ in _NS_PER_UNIT if type_.startswith("timestamp")},
    "string": _read_exactly(str),
    "uuid": lambda value: UUID(str(value)).bytes,
    "binary": _read_hex,
}


def value_to_json(type_: str, value: Any) -> Any:
    """Write a value as JSON: Iceberg's JSON single-value serialization."""
    if value is None or type_ in ("boolean", "int", "long", "string"):
        return value
    if type_ in ("float", "double"):
        if math.isfinite(value):
            return value
        # JSON has no number for these: they are written by name, as Iceberg's Java writer does.
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if decimal := decimal_parts(type_):
        return f"{Decimal(value).scaleb(-decimal[1], _EXACT):f}"
    if isinstance(value, bytes):
        return str(UUID(bytes=value)) if type_ == "uuid" else value.hex().upper()
    if type_ == "date":
        return _date_text(value)
    if type_ == "time":
        return _clock_text(value, _NS_PER_SECOND // _NS_PER_US)
    days, within = divmod(value, UNITS_PER_DAY[type_])
    clock = _clock_text(within, _NS_PER_SECOND // _NS_PER_UNIT[type_])
    return f"{_date_text(days)}T{clock}{'+00:00' if type_ in _WITH_ZONE else ''}"


def _date_text(days: int) -> str:
    """Spell a date by ISO 8601, whose years have four digits, or more behind a sign."""
    year, month, day = str(np.datetime64(days, "D")).rsplit("-", 2)
    sign = "-" if year.startswith("-") else "+" if len(year) > len("9999") else ""
    return f"{sign}{year.lstrip('-').rjust(4, '0')}-{month}-{day}"


def _clock_text(units: int, per_second: int) -> str:
    seconds, fraction = divmod(units, per_second)
    digits = len(str(per_second)) - 1
    return f"{seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}.{fraction:0{digits}}"
