"""Partition transforms of single values, exact by the specification. Core: owns their results and result types.

    identity            any primitive type
    bucket[N]           (murmur3(value) & 0x7FFFFFFF) % N
    truncate[W]         numbers down to a multiple of W (decimals in their last digit), text and binary to W characters
    year, month, day, hour   whole units since 1970, rounded down before it too

Any other transform, void among them, tells nothing about its column here.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from lakefeed.iceberg.values import UNITS_PER_DAY

TIME_KINDS = ("year", "month", "day", "hour")

_TRANSFORM = re.compile(r"(identity|year|month|day|hour)|(bucket|truncate)\[([0-9]{1,10})\]")
_HASHED_AS_LONG = ("int", "long", "time", *UNITS_PER_DAY)
_HASHED_AS_BYTES = ("string", "uuid", "binary")
_TRUNCATED = ("int", "long", "string", "binary")
_MASK = 0xFFFFFFFF
_WIDTH_MAX = 2**31 - 1  # Java reads it as an int
_NS_PER_US = 1000
_HOURS_PER_DAY = 24
_NUMPY_UNITS = {"year": "Y", "month": "M"}
# Beyond these numpy's calendar overflows; no table has such dates.
_DAYS_MAX = 10**9


@dataclass(frozen=True, slots=True)
class Transform:
    """A transform that is known here. `width` is that of bucket and truncate."""

    kind: str
    width: int = 0

    @property
    def keeps_order(self) -> bool:
        """Tell whether a smaller value never has a greater image."""
        return self.kind != "bucket"

    @property
    def is_identity(self) -> bool:
        """Tell whether every value is its own image."""
        return self.kind == "identity"


IDENTITY = Transform("identity")


def parse_transform(text: str) -> Transform | None:
    """Read a transform as specs and filters spell it; None for one that tells nothing here."""
    match = _TRANSFORM.fullmatch(text)
    if match is None:
        return None
    if match[1] is not None:
        return Transform(match[1])
    width = int(match[3])
    return Transform(match[2], width) if 0 < width <= _WIDTH_MAX else None


def result_type(transform: Transform, source: str) -> str | None:
    """Give the type of a transform's values; None if it does not take this type."""
    is_decimal = source.startswith("decimal")
    match transform.kind:
        case "identity":
            return source
        case "bucket":
            hashed = is_decimal or source.startswith("fixed") or source in _HASHED_AS_LONG + _HASHED_AS_BYTES
            return "int" if hashed else None
        case "truncate":
            return source if is_decimal or source in _TRUNCATED else None
    if source not in UNITS_PER_DAY or (transform.kind == "hour" and source == "date"):
        return None
    return "date" if transform.kind == "day" else "int"


def apply_transform(transform: Transform, source: str, value: Any) -> Any:
    """Give the image of a value that is not null; None where there is none to tell."""
    match transform.kind:
        case "identity":
            return value
        case "bucket":
            return None if isinstance(value, Fraction) else _bucket(transform.width, source, value)
        case "truncate":
            return value[: transform.width] if isinstance(value, str | bytes) else value - value % transform.width
        case "hour":
            return value // (UNITS_PER_DAY[source] // _HOURS_PER_DAY)
    days = value // UNITS_PER_DAY[source]
    if transform.kind == "day":
        return days
    if abs(days) > _DAYS_MAX:
        return None
    return int(np.datetime64(int(days), "D").astype(f"M8[{_NUMPY_UNITS[transform.kind]}]").astype(np.int64))


def _bucket(width: int, source: str, value: Any) -> int | None:
    if source in _HASHED_AS_LONG:
        number = value // _NS_PER_US if source.endswith("_ns") else value
        try:
            data = struct.pack("<q", number)
        except struct.error:
            return None  # beyond what the column can hold
    elif source.startswith("decimal"):
        data = value.to_bytes(((value if value >= 0 else ~value).bit_length() + 8) // 8, "big", signed=True)
    else:
        data = value.encode() if isinstance(value, str) else value
    return (murmur3(data) & 0x7FFFFFFF) % width


def murmur3(data: bytes) -> int:
    """Hash bytes with Murmur3: 32 bits, x86 variant, seed 0."""
    mixed = 0
    whole = len(data) // 4 * 4
    for (block,) in struct.iter_unpack("<I", data[:whole]):
        mixed = ((_rotated(mixed ^ _scrambled(block), 13) * 5) + 0xE6546B64) & _MASK
    mixed ^= _scrambled(int.from_bytes(data[whole:], "little"))
    mixed ^= len(data)
    mixed = ((mixed ^ (mixed >> 16)) * 0x85EBCA6B) & _MASK
    mixed = ((mixed ^ (mixed >> 13)) * 0xC2B2AE35) & _MASK
    return mixed ^ (mixed >> 16)


def _scrambled(word: int) -> int:
    return (_rotated((word * 0xCC9E2D51) & _MASK, 15) * 0x1B873593) & _MASK


def _rotated(word: int, bits: int) -> int:
    return ((word << bits) | (word >> (32 - bits))) & _MASK
