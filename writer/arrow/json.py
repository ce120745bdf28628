"""Arrow values in the form that JSON has for them. Owns that form; `_cdc_rescued` and columns of JSON text hold it.

    numbers             numbers, with all their digits; NaN, Infinity and -Infinity as text
    dates and times     text: 2026-11-16, 05:28:00.5, 2026-11-16T05:28:00.123456789, with Z where the type has a zone
                        outside the years 1 to 9999 the number of days or units since 1970, as Arrow holds it
    uuid                text: 8-4-4-4-12 hexadecimal digits
    bytes               text: base64
    structs, lists      objects with all their fields, arrays
    maps                objects where keys are text and differ, else arrays of {"key": ..., "value": ...}

So a JSON frame could have brought the same value, and a column that takes it from there takes it from here.
"""

from __future__ import annotations

import base64
import math
import uuid
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from writer.arrow.types import UUID_VALUES, is_bytes
from writer.envelope import TIMESTAMP_MAX_MS, TIMESTAMP_MIN_MS

_MS_PER_DAY = 86_400_000
_UNITS_PER_S = {"s": 1, "ms": 1_000, "us": 1_000_000, "ns": 1_000_000_000}
_MS_PER_S = 1_000
_SURELY_INT64 = 10**18

# Arrow writes as many digits behind the point as the unit has; JSON as many as the value needs.
_ZEROS_AT_END = r"(\.\d*?)0+(Z?)$"
_POINT_AT_END = r"\.(Z?)$"


def json_values(values: pa.Array) -> list[Any]:
    """Give values of a plain type as misfits.parse_row would from a JSON document; None for nulls."""
    type_ = values.type
    if type_ == UUID_VALUES:
        return _each(values, _uuid_text)
    if pt.is_uint64(type_) or pt.is_int64(type_):
        return _each(values, _integer_value)
    if pt.is_floating(type_):
        return _each(values, _float_value)
    if pt.is_decimal(type_):
        return _each(values, _decimal_value)
    if pt.is_temporal(type_):
        return _moments(values)
    if is_bytes(type_):
        return _each(values, _base64_text)
    if pt.is_struct(type_):
        return _structs(values)
    if pt.is_map(type_):
        return _maps(values)
    if pt.is_list(type_):
        return _lists(values)
    others: list[Any] = values.to_pylist()
    return others


def _each(values: pa.Array, convert: Callable[[Any], Any]) -> list[Any]:
    return [None if value is None else convert(value) for value in values.to_pylist()]


def _integer_value(value: int) -> int | msgspec.Raw:
    return value if abs(value) < _SURELY_INT64 else msgspec.Raw(str(value))


def _float_value(value: float) -> msgspec.Raw | str:
    if math.isfinite(value):
        return msgspec.Raw(repr(value))
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _decimal_value(value: Decimal) -> msgspec.Raw:
    return msgspec.Raw(format(value, "f"))


def _uuid_text(value: bytes) -> str:
    return str(uuid.UUID(bytes=value))


def _base64_text(value: bytes) -> str:
    return base64.b64encode(value).decode()


def _structs(values: pa.StructArray) -> list[Any]:
    names = [field.name for field in values.type]
    # Flattened children are null where the struct is.
    columns = [json_values(child) for child in values.flatten()]
    rows = zip(*columns, strict=True) if columns else ((),) * len(values)
    valid = values.is_valid().to_pylist()
    return [dict(zip(names, row, strict=True)) if is_set else None for row, is_set in zip(rows, valid, strict=True)]


def _lists(values: pa.ListArray) -> list[Any]:
    return _by_list(values, json_values(values.values))


def _maps(values: pa.MapArray) -> list[Any]:
    entries = list(zip(json_values(values.keys), json_values(values.items), strict=True))
    by_text = pt.is_string(values.type.key_type)
    return [None if own is None else _map_form(own, by_text=by_text) for own in _by_list(values, entries)]


def _by_list(lists: pa.Array, elements: list[Any]) -> list[Any]:
    """Hand out elements to their lists, None to lists that are null: those may have elements too."""
    offsets, valid = lists.offsets.to_pylist(), lists.is_valid().to_pylist()
    return [elements[offsets[i] : offsets[i + 1]] if valid[i] else None for i in range(len(lists))]


def _map_form(entries: list[tuple[Any, Any]], *, by_text: bool) -> Any:
    if by_text and len(members := dict(entries)) == len(entries):
        return members
    return [{"key": key, "value": value} for key, value in entries]


def _moments(values: pa.Array) -> list[Any]:
    """Write what has a common form as text, and the rest as the number that it is."""
    shown = pa.array(in_common_years(values))
    texts: list[Any] = moment_texts(pc.if_else(shown, values, pa.scalar(None, values.type))).to_pylist()
    if all(texts):
        return texts
    numbers = _as_stored(values).to_pylist()
    return [number if text is None else text for text, number in zip(texts, numbers, strict=True)]


def moment_texts(values: pa.Array) -> pa.Array:
    """Write dates and times, all within the common years, as text."""
    if pt.is_timestamp(values.type) and values.type.tz is not None:
        values = values.cast(pa.timestamp(values.type.unit, "UTC"))
    texts = values.cast(pa.string())
    if pt.is_timestamp(values.type):
        texts = pc.replace_substring(texts, " ", "T", max_replacements=1)
    if pt.is_date(values.type):
        return texts
    return pc.replace_substring_regex(pc.replace_substring_regex(texts, _ZEROS_AT_END, r"\1\2"), _POINT_AT_END, r"\1")


def _as_stored(moments: pa.Array) -> pa.Array:
    type_ = moments.type
    return moments.view(pa.int32() if pt.is_date32(type_) or pt.is_time32(type_) else pa.int64())


def in_common_years(values: pa.Array) -> npt.NDArray[np.bool_]:
    """Tell of dates and timestamps whether they lie in the years 1 to 9999; true of nulls and times of day."""
    type_ = values.type
    if pt.is_timestamp(type_):
        per_s = _UNITS_PER_S[type_.unit]
        first, end = (ms // _MS_PER_S * per_s for ms in (TIMESTAMP_MIN_MS, TIMESTAMP_MAX_MS + 1))
    elif pt.is_date(type_):
        per_day = 1 if pt.is_date32(type_) else _MS_PER_DAY
        first, end = (ms // _MS_PER_DAY * per_day for ms in (TIMESTAMP_MIN_MS, TIMESTAMP_MAX_MS + 1))
    else:
        return np.ones(len(values), bool)
    numbers = _as_stored(values).fill_null(0).to_numpy()
    # Nanoseconds do not reach so far, and neither do the bounds fit 64 bits.
    within: npt.NDArray[np.bool_] = (numbers >= max(first, -(2**63))) & (numbers <= min(end - 1, 2**63 - 1))
    return within
