"""Partition transforms of single values, exact by the specification: result types and results.

    identity, void           any primitive type
    bucket[N]                (murmur3(value) & 0x7FFFFFFF) % N
    truncate[W]              numbers down to a multiple of W (decimals in their last digit), text and binary to W units
    year, month, day, hour   whole units since 1970, rounded down before it too

Values are as in values.py. Results are exact integers of any size, so that a smaller value never has a greater image
(`bucket` aside) and literals beyond the column's type can be compared. The stored form of arrow.py wraps around at the
ends of the type, as Java does: `wraps` says where the two differ.
"""

from __future__ import annotations

import struct
from fractions import Fraction
from typing import Any

import mmh3
import numpy as np

from lakefeed.iceberg.terms import Transform
from lakefeed.iceberg.types import Type, decimal_parts, fixed_length
from lakefeed.iceberg.values import UNITS_PER_DAY, shortest_signed

HASHED_AS_LONG = ("int", "long", "time", *UNITS_PER_DAY)
HASH_MASK = 0x7FFFFFFF
NS_PER_US = 1000
HOURS_PER_DAY = 24
# numpy's codes for the units that times are counted in.
TIME_UNITS = {"year": "Y", "month": "M", "day": "D", "hour": "h"}

_HASHED_AS_BYTES = ("string", "uuid", "binary")
_TRUNCATED = ("int", "long", "string", "binary")
_GREATEST = {"int": 2**31 - 1, "long": 2**63 - 1}
# Hours of the earliest and the latest timestamp do not fit 32 bits. Below this number no stored hour is a wrapped one.
_HOUR_MAX = 2**32 - 2**63 // 3_600_000_000 - 2
# No date is beyond these days, and numpy's calendar is exact up to them.
_DAYS_MAX = 2**31


def result_type(transform: Transform, source: Type) -> str | None:
    """Return the type of a transform's values; None if it does not take this type."""
    if not isinstance(source, str):
        return None
    is_decimal = decimal_parts(source) is not None
    match transform.kind:
        case "identity" | "void":
            return source
        case "bucket":
            is_hashed = is_decimal or source in HASHED_AS_LONG + _HASHED_AS_BYTES or fixed_length(source) is not None
            return "int" if is_hashed else None
        case "truncate":
            return source if is_decimal or source in _TRUNCATED else None
    if source not in UNITS_PER_DAY or (transform.kind == "hour" and source == "date"):
        return None
    return "date" if transform.kind == "day" else "int"


def apply_transform(transform: Transform, source: str, value: Any) -> Any:
    """Return the image of a value that is not null; None where there is none."""
    match transform.kind:
        case "identity":
            return value
        case "void":
            return None
        case "bucket":
            return None if isinstance(value, Fraction) else _bucket(transform.width, source, value)
        case "truncate":
            return value[: transform.width] if isinstance(value, str | bytes) else value - value % transform.width
        case "hour":
            return value // (UNITS_PER_DAY[source] // HOURS_PER_DAY)
    days = value // UNITS_PER_DAY[source]
    if transform.kind == "day":
        return days
    if abs(days) > _DAYS_MAX:
        return None
    return int(np.datetime64(int(days), "D").astype(f"M8[{TIME_UNITS[transform.kind]}]").astype(np.int64))


def wraps(transform: Transform, source: str, lower: Any, upper: Any) -> bool:
    """Return whether a stored image between two bounds, None for no bound, may have wrapped around."""
    if transform.kind == "truncate" and source in _GREATEST:
        # Near the least number of its type, truncation wraps around to the greatest.
        return upper is None or upper > _GREATEST[source] - transform.width
    if transform.kind == "hour" and not source.endswith("_ns"):
        return lower is None or upper is None or lower < -_HOUR_MAX or upper > _HOUR_MAX
    return False


def _bucket(width: int, source: str, value: Any) -> int | None:
    if source in HASHED_AS_LONG:
        number = value // NS_PER_US if source.endswith("_ns") else value
        try:
            data = struct.pack("<q", number)
        except struct.error:
            return None  # beyond what the column can hold
    elif isinstance(value, int):
        data = shortest_signed(value)
    else:
        data = value.encode() if isinstance(value, str) else value
    return int(mmh3.hash(data) & HASH_MASK) % width
