"""Single values in Iceberg's binary form, as bounds and partition summaries hold them. Owns nothing but the bytes.

The form is the specification's "binary single-value serialization": little-endian numbers, UTF-8 text, decimals as
the shortest big-endian two's complement of their unscaled value.
"""

from __future__ import annotations

import re
import struct
from decimal import Context, Decimal
from typing import Any

# The specification's default for text and binary bounds: long enough to prune by, short enough to keep manifests small.
BOUND_MAX_UNITS = 16

_MAX_CODE_POINT = 0x10FFFF
_FIRST_SURROGATE = 0xD800
_AFTER_SURROGATES = 0xE000

_INT = struct.Struct("<i")
_LONG = struct.Struct("<q")
_PACKED = {
    "boolean": struct.Struct("<?"),
    "int": _INT,
    "date": _INT,
    "long": _LONG,
    "time": _LONG,
    "timestamp": _LONG,
    "timestamptz": _LONG,
    "timestamp_ns": _LONG,
    "timestamptz_ns": _LONG,
    "float": struct.Struct("<f"),
    "double": struct.Struct("<d"),
}
_BEFORE_WIDENING = {"long": _INT, "double": _PACKED["float"]}
_EXACT = Context(prec=38)  # digits of the widest decimal; the usual context rounds to 28
_DECIMAL = re.compile(r"decimal\(\d+,\s*(\d+)\)")


def encode_single_value(type_: str, value: Any) -> bytes:
    """Encode a value: numbers for dates and times, an unscaled integer or Decimal for decimals, bytes as they are."""
    if packed := _PACKED.get(type_):
        return packed.pack(value)
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, Decimal):
        return _shortest_signed(unscaled(type_, value))
    if isinstance(value, int):
        return _shortest_signed(value)
    return bytes(value)


def comparable_bound(type_: str, encoded: bytes) -> Any:
    """Read an encoded value as something that sorts as its column does, even one from before it was widened."""
    if packed := _PACKED.get(type_):
        if len(encoded) < packed.size:
            packed = _BEFORE_WIDENING[type_]
        return packed.unpack(encoded)[0]
    return int.from_bytes(encoded, "big", signed=True) if _DECIMAL.fullmatch(type_) else encoded


def unscaled(type_: str, value: Decimal) -> int:
    """Give the integer that a decimal column stores for `value`."""
    decimal = _DECIMAL.fullmatch(type_)
    assert decimal is not None, type_
    return int(value.scaleb(int(decimal[1]), _EXACT))


def _shortest_signed(value: int) -> bytes:
    # One bit more than the magnitude, for the sign; -128 needs one byte, 128 needs two.
    bits = (value if value >= 0 else ~value).bit_length() + 1
    return value.to_bytes((bits + 7) // 8, "big", signed=True)


def lower_text_bound(text: str) -> str:
    """Cut a lower bound to the stored length; a prefix never sorts after the whole."""
    return text[:BOUND_MAX_UNITS]


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


def lower_binary_bound(data: bytes) -> bytes:
    """Cut a lower bound to the stored length."""
    return data[:BOUND_MAX_UNITS]


def upper_binary_bound(data: bytes) -> bytes | None:
    """Cut an upper bound and raise its last byte that can rise; None if there is none, so no bound holds."""
    if len(data) <= BOUND_MAX_UNITS:
        return data
    prefix = data[:BOUND_MAX_UNITS].rstrip(b"\xff")
    if not prefix:
        return None
    return prefix[:-1] + bytes([prefix[-1] + 1])
