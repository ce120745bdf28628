"""JSON values read exactly: numbers, times, dates, UUIDs, bytes and map keys, without changing any of them.

A column takes a value only if the value comes back as it was sent. Everything else is a `Misfit`.

    long, int       integers within bounds; 1.0, 1e3 and "__bigint__:123" are integers too
    double          an integer that equals the double; another number if the double is written that way, in the fewest
                    digits that name it (0.1) or in seventeen (0.10000000000000001)
    decimal(p, s)   a number, or text that writes one, with no more digits than the type has
    date            2026-11-16                       timestamp      2026-11-16T05:28:00[.123456]   without a zone
    time            05:28:00[.123456]                timestamptz    the same with Z, +02:00 or +0200
    uuid            8-4-4-4-12 hexadecimal digits    binary, fixed  base64 with padding

Years are 1 to 9999. Base64 has one spelling: with padding, without white space, unused bits zero. So each text that is
read has one value, and each value one text.

JSON writes map keys as text. Keys of type string, int, long, decimal and of the text types above can be read. A map is
a misfit if one key cannot be read, or if two keys are the same value in two spellings.
"""

from __future__ import annotations

import base64
import binascii
import math
import re
from decimal import Decimal
from typing import Any, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from lakefeed.contract.changes import TIMESTAMP_MAX_MS, TIMESTAMP_MIN_MS
from lakefeed.contract.errors import WriterError
from lakefeed.iceberg.arrow import to_arrow_type
from lakefeed.iceberg.types import decimal_parts

# A row as JSON text: as it was received, or rewritten by json_exact.py.
Image: TypeAlias = msgspec.Raw | bytes

# A row whose bytes are not UTF-8 is kept as {"_cdc_base64": "..."}. The prefix is reserved, so no row looks like it.
BASE64_KEY = "_cdc_base64"

INT32_MIN, INT32_MAX = -(2**31), 2**31 - 1
INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1
UUID_BYTES = 16

_BIGINT_PREFIX = "__bigint__:"
_BIGINT = re.compile(_BIGINT_PREFIX + r"(-?(?:0|[1-9][0-9]*))")
# Exponents of more than nine digits are not numbers here: Decimal would overflow.
_DECIMAL = re.compile(r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]{1,9})?")
_INTEGER = re.compile(r"-?[0-9]+")
_INTEGER_KEY = re.compile(r"0|-?[1-9][0-9]{0,18}")
_INTEGER_BOUNDS = {"int": (INT32_MIN, INT32_MAX), "long": (INT64_MIN, INT64_MAX)}

_DAY = r"\d{4}-\d\d-\d\d"
_TIME = r"\d\d:\d\d:\d\d"
_ZONE = r"(?:Z|[+-]\d\d:?\d\d)"
_PATTERNS = {
    "date": rf"^{_DAY}$",
    "time": rf"^{_TIME}(?:\.\d{{1,6}})?$",
    "timestamp": rf"^{_DAY}[T ]{_TIME}(?:\.\d{{1,6}})?$",
    "timestamptz": rf"^{_DAY}[T ]{_TIME}(?:\.\d{{1,6}})?{_ZONE}$",
    "timestamp_ns": rf"^{_DAY}[T ]{_TIME}(?:\.\d{{1,9}})?$",
    "timestamptz_ns": rf"^{_DAY}[T ]{_TIME}(?:\.\d{{1,9}})?{_ZONE}$",
    "uuid": r"^[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}$",
}
_US_PER_MS = 1000
_MS_PER_DAY = 86_400_000

_Bytes: TypeAlias = npt.NDArray[np.uint8]


class Misfit(WriterError):
    """The strict decoder refuses these rows: take the exact path, which evolves the schema or rescues the value."""


def text_of(image: Image) -> str:
    """Return a row's JSON text, as it was received if it is UTF-8."""
    try:
        return bytes(image).decode()
    except UnicodeDecodeError:
        return msgspec.json.encode({BASE64_KEY: base64.b64encode(bytes(image)).decode()}).decode()


def number_text(value: Any) -> str | None:
    """Return a parsed number as JSON writes it, also one sent as `__bigint__:123`; None for any other value."""
    match value:
        case bool():
            return None
        case int():
            return str(value)
        case msgspec.Raw():
            return bytes(value).decode()
        case str():
            return bigint_of(value)
    return None


def bigint_of(text: str) -> str | None:
    """Return the digits of an integer that a source sent as `__bigint__:123`, None for any other text."""
    if not text.startswith(_BIGINT_PREFIX):
        return None
    match = _BIGINT.fullmatch(text)
    return match[1] if match else None


def is_integer_text(text: str) -> bool:
    """Return whether a JSON number is written without point and exponent."""
    return _INTEGER.fullmatch(text) is not None


def as_integer(value: Any, type_: str) -> int | None:
    """Return a parsed value as an integer of a type, None if it is not one. 1.0 and 1e3 are integers."""
    lowest, highest = _INTEGER_BOUNDS[type_]
    if type(value) is int:
        return value if lowest <= value <= highest else None
    text = number_text(value)
    exact = None if text is None else decimal_of(text)
    # Numbers that are far too long are not written out: 1e999999999 would take all memory.
    if exact is None or exact.adjusted() > len(str(INT64_MAX)) or exact != exact.to_integral_value():
        return None
    integer = int(exact)
    return integer if lowest <= integer <= highest else None


def as_double(value: Any, *, single: bool = False) -> msgspec.Raw | None:
    """Return a parsed number as it was written if a double (or a float) holds it, else None."""
    text = number_text(value)
    if text is None or not double_holds(text):
        return None
    is_held = not single or floats_hold(pa.array([float(text)], pa.float64()))
    return msgspec.Raw(text) if is_held else None


def double_holds(text: str) -> bool:
    """Return whether a double holds this JSON number."""
    value = float(text)
    if repr(value) == text:
        return True
    if math.isinf(value):
        return False
    if _INTEGER.fullmatch(text):
        return int(value) == Decimal(text)
    exact = decimal_of(text)
    return exact is not None and exact in (Decimal(repr(value)), Decimal(f"{value:.16e}"))


def floats_hold(doubles: pa.Array) -> bool:
    """Return whether floats of 32 bits hold all these doubles, exactly or in the fewest digits that name them."""
    values = doubles.drop_null().to_numpy(zero_copy_only=False)
    with np.errstate(over="ignore"):
        narrow = values.astype(np.float32)
    named = pa.array(narrow).cast(pa.string()).cast(pa.float64()).to_numpy()
    return bool(np.all(np.isfinite(narrow) & ((narrow.astype(np.float64) == values) | (named == values))))


def exact_decimal(value: Any) -> Decimal | None:
    """Return a parsed number, or text that writes one, as a decimal."""
    text = number_text(value)
    if text is None and isinstance(value, str):
        text = value
    return None if text is None else decimal_of(text)


def decimal_of(text: str) -> Decimal | None:
    """Return the decimal number that a text writes, None if it is not one."""
    return Decimal(text) if _DECIMAL.fullmatch(text) else None


def fit_decimal(number: Decimal | None, precision: int, scale: int) -> str | None:
    """Write a number for a decimal column, None if the column would lose digits of it."""
    needed = None if number is None else decimal_precision(number, scale)
    return None if number is None or needed is None or needed > precision else decimal_text(number)


def decimal_precision(number: Decimal, scale: int) -> int | None:
    """Return the precision that a decimal column of this scale needs for a number, None if digits would be lost."""
    _, digits, exponent = _significant(number)
    if not digits:
        return max(scale, 1)
    return max(len(digits) + exponent, 0) + scale or 1 if exponent >= -scale else None


def decimal_text(number: Decimal) -> str:
    """Write a decimal without exponent and without trailing zeros, for which its column may have no digits."""
    sign, digits, exponent = _significant(number)
    return format(Decimal(f"{sign}{digits}e{exponent}"), "f") if digits else "0"


def _significant(number: Decimal) -> tuple[str, str, int]:
    """Return sign, digits without zeros at either end, and exponent."""
    negative, digits, exponent = number.as_tuple()
    assert isinstance(exponent, int)
    written = "".join(map(str, digits)).lstrip("0")
    short = written.rstrip("0")
    return "-" if negative else "", short, exponent + len(written) - len(short)


def is_text_type(type_: str) -> bool:
    """Return whether JSON writes values of this type as text of a form of their own."""
    return type_ in _PATTERNS or type_ == "binary" or type_.startswith("fixed[")


def read_texts(texts: pa.Array, type_: str) -> pa.Array:
    """Read texts as values of a text type; nulls stay null.

    Raises: Misfit if any text is not exactly such a value.
    """
    pattern, target = _PATTERNS.get(type_), to_arrow_type(type_)
    if pattern and not pc.all(pc.match_substring_regex(texts, pattern), min_count=0).as_py():
        raise Misfit(f"text is not in the form of its type: type={type_}")
    try:
        if type_ == "uuid":
            return read_uuids(texts)
        if pattern is None:
            return read_base64(texts).cast(target)
        if type_ == "time":
            # Arrow does not read a time of day from text, but it reads timestamps.
            moments = pc.binary_join_element_wise(pa.scalar("1970-01-01T"), texts, "")
            return moments.cast(pa.timestamp("us")).cast(target)
        values = texts.cast(target)
    except ValueError as error:  # Arrow's own errors are ValueErrors too
        raise Misfit(f"text is not a value of its type: type={type_}") from error
    _check_years(values, type_)
    return values


def fits_text(text: str, type_: str) -> bool:
    """Return whether a text is exactly a value of its type."""
    try:
        read_texts(pa.array([text], pa.string()), type_)
    except Misfit:
        return False
    return True


def _check_years(values: pa.Array, type_: str) -> None:
    if type_ in ("timestamp", "timestamptz"):
        integers = values.cast(pa.int64())
        first, last = TIMESTAMP_MIN_MS * _US_PER_MS, (TIMESTAMP_MAX_MS + 1) * _US_PER_MS - 1
    elif type_ == "date":
        integers = values.cast(pa.int32())
        first, last = TIMESTAMP_MIN_MS // _MS_PER_DAY, TIMESTAMP_MAX_MS // _MS_PER_DAY
    else:
        return
    ends = pc.min_max(integers)
    if ends["min"].is_valid and not first <= ends["min"].as_py() <= ends["max"].as_py() <= last:
        raise Misfit(f"year is not within 1 to 9999: type={type_}")


def read_uuids(texts: pa.Array) -> pa.Array:
    """Read UUIDs as bytes. The caller has checked their form."""
    present = pc.replace_substring(texts, "-", "").drop_null()
    values = pa.py_buffer(binascii.unhexlify(_characters(present).tobytes()))
    return _with_nulls_of(texts, pa.Array.from_buffers(pa.binary(UUID_BYTES), len(present), [None, values]))


def read_base64(texts: pa.Array) -> pa.Array:
    """Read base64 as bytes, a whole column at a time: four characters are three bytes, less one for each padding.

    Raises: ValueError if any text is not base64 in its one spelling.
    """
    present = texts.drop_null()
    lengths = pc.binary_length(present).to_numpy().astype(np.int64)
    if np.any(lengths % 4):
        raise ValueError("not base64: length")
    characters = _characters(present)
    is_padding = characters == ord("=")
    ends = np.cumsum(lengths)
    last = ends[lengths > 0] - 1
    may_be_padding = np.zeros(len(characters), bool)
    may_be_padding[last] = True
    may_be_padding[last - 1] = is_padding[last]
    if np.any(is_padding & ~may_be_padding):
        raise ValueError("not base64: padding is misplaced")
    # All texts at once, with zero bits in place of the padding. The bytes that come of those must be zero.
    zeroed = np.where(is_padding, np.uint8(ord("A")), characters).tobytes()
    decoded = np.frombuffer(binascii.a2b_base64(zeroed, strict_mode=True), np.uint8)
    is_surplus = is_padding.reshape(-1, 4)[:, 1:].ravel()
    if decoded[is_surplus].any():
        raise ValueError("not base64: unused bits are not zero")
    padding_before = np.r_[0, np.cumsum(is_padding)]
    sizes = lengths // 4 * 3 - (padding_before[ends] - padding_before[ends - lengths])
    offsets = np.r_[0, np.cumsum(sizes)].astype(np.int32)
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(decoded[~is_surplus])]
    return _with_nulls_of(texts, pa.Array.from_buffers(pa.binary(), len(present), buffers))


def _characters(texts: pa.Array) -> _Bytes:
    """Return the bytes of texts without nulls, one after the other."""
    _, offsets, data = texts.buffers()
    if not len(texts) or data is None:
        return np.empty(0, np.uint8)
    first, last = np.frombuffer(offsets, np.int32)[[texts.offset, texts.offset + len(texts)]]
    return np.frombuffer(data, np.uint8)[first:last]


def _with_nulls_of(texts: pa.Array, values: pa.Array) -> pa.Array:
    """Insert nulls among the values where their texts are null."""
    if not texts.null_count:
        return values
    present = texts.is_valid().to_numpy(zero_copy_only=False)
    return values.take(pa.array(np.cumsum(present) - 1, mask=~present))


def can_be_key(type_: str) -> bool:
    """Return whether an object's names can be read as values of a type."""
    return type_ == "string" or type_ in _INTEGER_BOUNDS or is_text_type(type_) or decimal_parts(type_) is not None


def read_keys(names: list[str], type_: str) -> list[Any] | None:
    """Read an object's names as keys of a type, as the strict decoder takes them; None if one does not fit."""
    if bounds := _INTEGER_BOUNDS.get(type_):
        keys: list[Any] = [int(name) for name in names if _INTEGER_KEY.fullmatch(name)]
        return keys if len(keys) == len(names) and all(bounds[0] <= key <= bounds[1] for key in keys) else None
    if parts := decimal_parts(type_):
        keys = [key for name in names if (key := fit_decimal(decimal_of(name), *parts)) is not None]
        return keys if len(set(keys)) == len(names) else None
    if is_text_type(type_):
        try:
            values = read_texts(pa.array(names, pa.string()), type_)
        except Misfit:
            return None
        return names if len(values.unique()) == len(names) else None
    return names if type_ == "string" or not names else None
