"""Values that JSON can only write as text: times, dates, UUIDs, bytes. Owns how they are written.

    date          2026-11-16                       timestamp    2026-11-16T05:28:00[.123456]   without a zone
    time          05:28:00[.123456]                timestamptz  the same with Z, +02:00 or +0200
    uuid          8-4-4-4-12 hexadecimal digits    binary, fixed  base64 with padding

Text that is written otherwise, has more digits than its type holds, lacks a zone or has one too many is a misfit:
reading it would be guessing. Years are 1 to 9999.
"""

from __future__ import annotations

import re

import pyarrow as pa
import pyarrow.compute as pc

from writer.envelope import TIMESTAMP_MAX_MS, TIMESTAMP_MIN_MS
from writer.errors import WriterError
from writer.rows.byte_texts import read_base64, read_uuids
from writer.types import to_arrow_type

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
