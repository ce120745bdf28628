"""Which numbers, as JSON writes them, a column can hold without changing them. Owns that question alone.

A double holds an integer if it equals it. It holds any other number if that is how the double would be written: in
the fewest digits that name it (0.1), or in seventeen (0.10000000000000001). Everything else would come back different:
9007199254740993, 0.12345678901234567890, 1e-400.
"""

from __future__ import annotations

import math
import re
from decimal import Decimal

import numpy as np
import pyarrow as pa

INT32_MIN, INT32_MAX = -(2**31), 2**31 - 1
INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1
DECIMAL_MAX_PRECISION = 38

BIGINT_PREFIX = "__bigint__:"

_BIGINT = re.compile(BIGINT_PREFIX + r"(-?(?:0|[1-9][0-9]*))")
_DECIMAL = re.compile(r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]{1,9})?")
_DECIMAL_TYPE = re.compile(r"decimal\((\d+),\s*(\d+)\)")
_INTEGER = re.compile(r"-?[0-9]+")


def bigint_of(text: str) -> str | None:
    """Give the digits of an integer that a source sent as `__bigint__:123`, None for any other text."""
    if not text.startswith(BIGINT_PREFIX):
        return None
    match = _BIGINT.fullmatch(text)
    return match[1] if match else None


def decimal_of(text: str) -> Decimal | None:
    """Read a decimal number from text, None where it is none. Exponents beyond nine digits are none."""
    return Decimal(text) if _DECIMAL.fullmatch(text) else None


def integer_of(number: Decimal) -> int | None:
    """Give a decimal as an integer of 64 bits, None where it is not one."""
    if number.adjusted() > len(str(INT64_MAX)) or number != number.to_integral_value():
        return None
    integer = int(number)
    return integer if INT64_MIN <= integer <= INT64_MAX else None


def is_integer_text(text: str) -> bool:
    """Tell whether a JSON number is written without point and exponent."""
    return _INTEGER.fullmatch(text) is not None


def decimal_parts(type_: str) -> tuple[int, int] | None:
    """Give precision and scale of a decimal type, None for another type."""
    match = _DECIMAL_TYPE.fullmatch(type_)
    return (int(match[1]), int(match[2])) if match else None


def decimal_precision(number: Decimal, scale: int) -> int | None:
    """Give the precision that a decimal column of this scale needs for a number, None where digits would be lost."""
    _, digits, exponent = _significant(number)
    if not digits:
        return max(scale, 1)
    return max(len(digits) + exponent, 0) + scale or 1 if exponent >= -scale else None


def decimal_text(number: Decimal) -> str:
    """Write a decimal without exponent and without zeros at its end, for which its column may have no room."""
    sign, digits, exponent = _significant(number)
    return format(Decimal(f"{sign}{digits}e{exponent}"), "f") if digits else "0"


def _significant(number: Decimal) -> tuple[str, str, int]:
    """Take a decimal apart into sign, digits without zeros at their ends, and exponent."""
    negative, digits, exponent = number.as_tuple()
    assert isinstance(exponent, int)
    written = "".join(map(str, digits)).lstrip("0")
    short = written.rstrip("0")
    return "-" if negative else "", short, exponent + len(written) - len(short)


def double_holds(text: str) -> bool:
    """Tell whether a double holds this JSON number."""
    value = float(text)
    if repr(value) == text:
        return True
    if math.isinf(value):
        return False
    if _INTEGER.fullmatch(text):
        return int(value) == Decimal(text)
    exact = decimal_of(text)
    return exact is not None and exact in (Decimal(repr(value)), Decimal(f"{value:.16e}"))


def float_holds(value: float) -> bool:
    """Tell whether a float of 32 bits holds this double, exactly or in the fewest digits that name it."""
    return bool(floats_hold(pa.array([value], pa.float64())))


def floats_hold(doubles: pa.Array) -> bool:
    """Tell whether floats of 32 bits hold all these doubles."""
    values = doubles.drop_null().to_numpy(zero_copy_only=False)
    with np.errstate(over="ignore"):
        narrow = values.astype(np.float32)
    named = pa.array(narrow).cast(pa.string()).cast(pa.float64()).to_numpy()
    return bool(np.all(np.isfinite(narrow) & ((narrow.astype(np.float64) == values) | (named == values))))
