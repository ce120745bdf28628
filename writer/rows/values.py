"""Which numbers, as JSON writes them, a column can hold without changing them. Owns that question alone.

A double holds an integer if it equals it. It holds any other number if that is how the double would be written: in
the fewest digits that name it (0.1), or in seventeen (0.10000000000000001). Everything else would come back different:
9007199254740993, 0.12345678901234567890, 1e-400.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
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

# --- writer.rows.exact_numbers ----------------------------------------------------------------------------------------


INT32_MIN, INT32_MAX = -(2**31), 2**31 - 1
INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1

BIGINT_PREFIX = "__bigint__:"

_BIGINT = re.compile(BIGINT_PREFIX + r"(-?(?:0|[1-9][0-9]*))")
_DECIMAL = re.compile(r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]{1,9})?")
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


# --- writer.rows.byte_texts -------------------------------------------------------------------------------------------
#
# Bytes that JSON writes as text, read a whole column at a time: base64 and the digits of UUIDs. Owns both readings.
#
# Base64 is taken in the one way that it is written: with padding, no white space, unused bits zero. So every text that
# is read has one value, and every value one text.


UUID_BYTES = 16

_Bytes = npt.NDArray[np.uint8]

_QUAD = 4  # characters of base64, for three bytes
_PAD = 64
_NO_CODE = 255


def _codes(characters: bytes) -> _Bytes:
    codes = np.full(256, _NO_CODE, np.uint8)
    codes[np.frombuffer(characters, np.uint8)] = np.arange(len(characters), dtype=np.uint8)
    return codes


_BASE64 = _codes(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/=")
_HEXADECIMAL = np.minimum(_codes(b"0123456789abcdef"), _codes(b"0123456789ABCDEF"))


def read_uuids(texts: pa.Array) -> pa.Array:
    """Read UUIDs, whose form is checked already, as bytes."""
    digits = _HEXADECIMAL[_characters(pc.replace_substring(texts, "-", "").drop_null())]
    values = (digits[0::2] << 4) | digits[1::2]
    count = len(values) // UUID_BYTES
    uuids = pa.Array.from_buffers(pa.binary(UUID_BYTES), count, [None, pa.py_buffer(values)])
    return _with_nulls_of(texts, uuids)


def read_base64(texts: pa.Array) -> pa.Array:
    """Read base64 as bytes.

    Raises: ValueError if any text is not written so.
    """
    present = texts.drop_null()
    lengths = pc.binary_length(present).to_numpy().astype(np.int64)
    codes = _BASE64[_characters(present)]
    if np.any(lengths % _QUAD) or np.any(codes == _NO_CODE):
        raise ValueError("not base64")
    quads = codes.reshape(-1, _QUAD)
    pads = quads == _PAD
    _check_padding(quads, pads, ends=np.cumsum(lengths // _QUAD) - 1, filled=lengths > 0)
    first, second, third, fourth = np.where(pads, 0, quads).T.astype(np.uint8)
    triples = np.stack([first << 2 | second >> 4, second << 4 | third >> 2, third << 6 | fourth], axis=1)
    values = triples[~np.stack([pads[:, 0], pads[:, 2], pads[:, 3]], axis=1)]
    sizes = lengths // _QUAD * 3 - _pads_of(pads, lengths)
    offsets = np.r_[0, np.cumsum(sizes)].astype(np.int32)
    binaries = pa.Array.from_buffers(pa.binary(), len(present), [None, pa.py_buffer(offsets), pa.py_buffer(values)])
    return _with_nulls_of(texts, binaries)


def _check_padding(
    quads: _Bytes, pads: npt.NDArray[np.bool_], *, ends: npt.NDArray[np.int64], filled: npt.NDArray[np.bool_]
) -> None:
    """Check that padding stands at the ends of texts alone, and that the bits beside it are zero."""
    padded = pads.any(axis=1)
    at_end = np.zeros(len(quads), bool)
    at_end[ends[filled]] = True
    one, two = pads[:, 3] & ~pads[:, 2], pads[:, 2]
    is_wrong = (padded & ~at_end) | pads[:, 0] | pads[:, 1] | (pads[:, 2] & ~pads[:, 3])
    is_wrong |= (one & (quads[:, 2] & 0x03 != 0)) | (two & (quads[:, 1] & 0x0F != 0))
    if is_wrong.any():
        raise ValueError("not the one way to write these bytes")


def _pads_of(pads: npt.NDArray[np.bool_], lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Count the padding of each text."""
    before = np.r_[0, np.cumsum(pads.sum(axis=1))]
    ends = np.cumsum(lengths // _QUAD)
    counts: npt.NDArray[np.int64] = before[ends] - before[ends - lengths // _QUAD]
    return counts


def _characters(texts: pa.Array) -> _Bytes:
    """Give the bytes of texts without nulls, one after the other."""
    _, offsets, data = texts.buffers()
    if not len(texts) or data is None:
        return np.empty(0, np.uint8)
    first, last = np.frombuffer(offsets, np.int32)[[texts.offset, texts.offset + len(texts)]]
    return np.frombuffer(data, np.uint8)[first:last]


def _with_nulls_of(texts: pa.Array, values: pa.Array) -> pa.Array:
    """Put values back where their texts were."""
    if not texts.null_count:
        return values
    present = texts.is_valid().to_numpy(zero_copy_only=False)
    return values.take(pa.array(np.cumsum(present) - 1, mask=~present))


# --- writer.rows.text_values ------------------------------------------------------------------------------------------
#
# Values that JSON can only write as text: times, dates, UUIDs, bytes. Owns how they are written.
#
#     date          2026-11-16                       timestamp    2026-11-16T05:28:00[.123456]   without a zone
#     time          05:28:00[.123456]                timestamptz  the same with Z, +02:00 or +0200
#     uuid          8-4-4-4-12 hexadecimal digits    binary, fixed  base64 with padding
#
# Text that is written otherwise, has more digits than its type holds, lacks a zone or has one too many is a misfit:
# reading it would be guessing. Years are 1 to 9999.


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
_FIXED = re.compile(r"fixed\[(\d+)\]")

_US_PER_MS = 1000
_MS_PER_DAY = 86_400_000


class Misfit(WriterError):
    """The strict decoder refuses these rows: take the exact path, which evolves the schema or rescues the value."""


def is_text_type(type_: str) -> bool:
    """Tell whether JSON writes values of this type as text of their own form."""
    return type_ in _PATTERNS or type_ == "binary" or _FIXED.fullmatch(type_) is not None


def read_texts(texts: pa.Array, type_: str) -> pa.Array:
    """Read texts as values of a type of this module; nulls stay null.

    Raises: Misfit if any text is not exactly such a value.
    """
    if pattern := _PATTERNS.get(type_):
        written_so = pc.match_substring_regex(texts, pattern)
        if not pc.all(written_so, min_count=0).as_py():
            raise Misfit(f"text is not written as its type asks: type={type_}")
    try:
        values = _read(texts, type_)
    except ValueError as error:  # Arrow's own errors are such too
        raise Misfit(f"text has no value of its type: type={type_}") from error
    _check_years(values, type_)
    return values


def fits_text(text: str, type_: str) -> bool:
    """Tell whether a text is exactly a value of its type."""
    try:
        read_texts(pa.array([text], pa.string()), type_)
    except Misfit:
        return False
    return True


def _read(texts: pa.Array, type_: str) -> pa.Array:
    target = to_arrow_type(type_)
    if type_ == "time":
        # Arrow reads no time of day from text, but it reads moments.
        moments = pc.binary_join_element_wise(pa.scalar("1970-01-01T"), texts, "").cast(pa.timestamp("us"))
        return moments.cast(target)
    if type_ == "uuid":
        return read_uuids(texts)
    if type_ in _PATTERNS:
        return texts.cast(target)
    return read_base64(texts).cast(target)


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


# --- writer.rows.map_keys ---------------------------------------------------------------------------------------------
#
# Keys of maps, which JSON can only write as text. Owns how they are read.
#
#     string                    as they are
#     int, long                 digits: "42"
#     decimal(p, s)             a number in digits: "19.90"
#     date, time, uuid ...      as text_values.py reads values of that type
#
# A map whose keys cannot all be read so, or of whose keys two are the same value written in two ways, is a misfit.
# Numbers of floating point, booleans and nested values are no keys here: nobody could look them up by their text.


# From an object's names to keys as the strict decoder takes them, None where they do not all fit.
KeyReader: TypeAlias = Callable[[list[str]], list[Any] | None]

_MAP_KEYS_INTEGER = re.compile(r"0|-?[1-9][0-9]{0,18}")
_BOUNDS = {"int": (INT32_MIN, INT32_MAX), "long": (INT64_MIN, INT64_MAX)}


def can_be_key(type_: str) -> bool:
    """Tell whether a JSON object's names can be read as values of a type."""
    return type_ == "string" or type_ in _BOUNDS or is_text_type(type_) or decimal_parts(type_) is not None


def key_reader(type_: str) -> KeyReader:
    """Give what reads an object's names as keys of a type."""
    if type_ == "string":
        return lambda names: names
    if bounds := _BOUNDS.get(type_):
        return lambda names: _read_integers(names, *bounds)
    if parts := decimal_parts(type_):
        return lambda names: _read_decimals(names, *parts)
    if is_text_type(type_):
        return lambda names: _read_texts(names, type_)
    return lambda names: None if names else []


def _read_integers(names: list[str], lowest: int, highest: int) -> list[int] | None:
    if not all(map(_MAP_KEYS_INTEGER.fullmatch, names)):
        return None
    keys = [int(name) for name in names]
    return keys if all(lowest <= key <= highest for key in keys) else None


def _read_decimals(names: list[str], precision: int, scale: int) -> list[str] | None:
    exact = [decimal_of(name) for name in names]
    keys = []
    for each in exact:
        needed = None if each is None else decimal_precision(each, scale)
        if each is None or needed is None or needed > precision:
            return None
        keys.append(decimal_text(each))
    return keys if len(set(keys)) == len(keys) else None


def _read_texts(names: list[str], type_: str) -> list[str] | None:
    try:
        values = read_texts(pa.array(names, pa.string()), type_)
    except Misfit:
        return None
    return names if len(values.unique()) == len(names) else None


def number_text(value: int | msgspec.Raw) -> str:
    """Give a parsed number as JSON writes it."""
    return str(value) if isinstance(value, int) else bytes(value).decode()


def is_number(value: Any) -> bool:
    """Tell whether a parsed value is a number."""
    return isinstance(value, int | msgspec.Raw) and not isinstance(value, bool)


def plain_number(value: Any) -> str | None:
    """Give a number as JSON writes it, also where it came as `__bigint__:123`; None for anything else."""
    if isinstance(value, str):
        return bigint_of(value)
    return number_text(value) if is_number(value) else None


def as_integer(value: Any, lowest: int, highest: int) -> int | None:
    """Give a parsed value as an integer within bounds, None if it is not one. 1.0 and 1e3 are integers."""
    if type(value) is int:
        return value if lowest <= value <= highest else None
    text = plain_number(value)
    exact = None if text is None else decimal_of(text)
    integer = None if exact is None else integer_of(exact)
    return integer if integer is not None and lowest <= integer <= highest else None


def as_double(value: Any, *, single: bool) -> msgspec.Raw | None:
    """Give a parsed number as it was written if a double (or a float) holds it, else None."""
    text = plain_number(value)
    if text is None or not double_holds(text) or (single and not float_holds(float(text))):
        return None
    return msgspec.Raw(text)


def exact_decimal(value: Any) -> Decimal | None:
    """Give a parsed number, or text that writes one, as a decimal."""
    text = plain_number(value)
    if text is None and isinstance(value, str):
        text = value
    return None if text is None else decimal_of(text)
