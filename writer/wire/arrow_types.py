"""Arrow types: which ones a frame may use, the columns that they declare, and the JSON form of their values.

    bool                          boolean        date32, date64              date
    int8, int16, int32            int            time32, time64              time
    int64                         long           timestamp without zone      timestamp    (ns: see below)
    uint8, uint16                 int            timestamp with any zone     timestamptz  (ns: see below)
    uint32                        long           string, large, view         string
    uint64                        decimal(20,0)  binary, large, view         binary
    float16, float32              float          fixed_size_binary(n)        fixed[n]
    float64                       double         arrow.uuid                  uuid
    decimal32 ... decimal256      decimal(p,s)   arrow.json                  string
    list, large, fixed size       list           struct, map                 struct, map
    dictionary of any of these but nested ones   its values' type
    null; list or struct of nothing but null     no column: there is nothing to hold

Nanoseconds become timestamp_ns or timestamptz_ns in tables of format version 3. Other tables have no such type: there a
timestamp is kept if it has whole microseconds. Decimals have at most 38 digits, including those that a negative scale
omits.

Few Arrow functions take dictionaries, views, large and fixed-size lists, and extensions, and casting a nested column
fails on nulls without a type. So `plain_rows` first converts all columns, level by level, to plain types whose values
stand for themselves. The JSON form of plain values is used by `_cdc_rescued` and by columns of JSON text:

    numbers             numbers, with all their digits; NaN, Infinity and -Infinity as text
    dates and times     text: 2026-11-16, 05:28:00.5, 2026-11-16T05:28:00.123456789, with Z if the type has a zone;
                        outside the years 1 to 9999 the number of days or units since 1970
    uuid, bytes         text: 8-4-4-4-12 hexadecimal digits, base64
    structs, lists      objects with all their fields, arrays
    maps                objects if keys are text and unique, else arrays of {"key": ..., "value": ...}

A JSON frame could have brought the same value, and the same columns take it.
"""

from __future__ import annotations

import base64
import math
import uuid
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from lakefeed.contract.changes import TIMESTAMP_MAX_MS, TIMESTAMP_MIN_MS, fold, is_usable
from lakefeed.iceberg.types import DECIMAL_MAX_PRECISION, UNNUMBERED, Field, ListType, MapType, StructType, Type

UUID, JSON = "arrow.uuid", "arrow.json"

# Types whose plain form is cached; one takes some hundred bytes.
TYPES_MAX = 1024

# The plain type of uuids.
UUID_VALUES = pa.large_binary()

_MS_PER_DAY = 86_400_000
_UNITS_PER_S = {"s": 1, "ms": 1_000, "us": 1_000_000, "ns": 1_000_000_000}
_MS_PER_S = 1_000
_SURELY_INT64 = 10**18

# Arrow writes as many digits after the point as the unit has, JSON as many as the value needs.
_ZEROS_AT_END = r"(\.\d*?)0+(Z?)$"
_POINT_AT_END = r"\.(Z?)$"

_PRIMITIVES: dict[pa.DataType, str] = {
    pa.bool_(): "boolean",
    pa.int8(): "int",
    pa.int16(): "int",
    pa.int32(): "int",
    pa.int64(): "long",
    pa.uint8(): "int",
    pa.uint16(): "int",
    pa.uint32(): "long",
    pa.uint64(): "decimal(20, 0)",
    pa.float16(): "float",
    pa.float32(): "float",
    pa.float64(): "double",
    pa.date32(): "date",
    pa.date64(): "date",
    pa.time32("s"): "time",
    pa.time32("ms"): "time",
    pa.time64("us"): "time",
    pa.time64("ns"): "time",
    pa.string(): "string",
    pa.binary(): "binary",
    UUID_VALUES: "uuid",
}


def declared_fields(fields: Iterable[pa.Field], *, nanoseconds: bool) -> tuple[Field, ...]:
    """Return the fields, without ids, that plain Arrow fields declare; those of null types declare nothing."""
    return tuple(
        Field(UNNUMBERED, field.name, type_)
        for field in fields
        if (type_ := declared_type(field.type, nanoseconds=nanoseconds)) is not None
    )


def declared_type(type_: pa.DataType, *, nanoseconds: bool) -> Type | None:
    """Return the type of a new column for a plain Arrow type, None if there is nothing to hold."""
    if pt.is_struct(type_):
        fields = declared_fields(usable_fields(type_), nanoseconds=nanoseconds)
        return StructType(fields) if fields else None
    if is_list(type_):
        element = declared_type(type_.value_type, nanoseconds=nanoseconds)
        return None if element is None else ListType(UNNUMBERED, element)
    if pt.is_map(type_):
        key = declared_type(type_.key_type, nanoseconds=nanoseconds)
        value = declared_type(type_.item_type, nanoseconds=nanoseconds)
        return None if key is None or value is None else MapType(UNNUMBERED, key, UNNUMBERED, value)
    if pt.is_null(type_):
        return None
    if pt.is_timestamp(type_):
        zoned = "timestamp" if type_.tz is None else "timestamptz"
        return f"{zoned}_ns" if nanoseconds and type_.unit == "ns" else zoned
    if pt.is_decimal(type_):
        precision, scale = decimal_shape(type_)
        return f"decimal({precision}, {scale})"
    if pt.is_fixed_size_binary(type_):
        return f"fixed[{type_.byte_width}]"
    return _PRIMITIVES[type_]


@lru_cache(maxsize=TYPES_MAX)
def plain_type(type_: pa.DataType) -> pa.DataType:
    """Return the plain type for a type. UUIDs become UUID_VALUES, which no other type becomes."""
    if pt.is_struct(type_):
        return pa.struct([field.with_type(plain_type(field.type)) for field in type_])
    if pt.is_map(type_):
        return pa.map_(plain_type(type_.key_type), plain_type(type_.item_type))
    if is_list(type_):
        return pa.list_(plain_type(type_.value_type))
    if pt.is_dictionary(type_):
        return plain_type(type_.value_type)
    if isinstance(type_, pa.BaseExtensionType):
        return UUID_VALUES if type_.extension_name == UUID else pa.string()
    if is_text(type_):
        return pa.string()
    return pa.binary() if is_bytes(type_) and not pt.is_fixed_size_binary(type_) else type_


def usable_fields(fields: Iterable[pa.Field]) -> list[pa.Field]:
    """Return the fields of a struct that a table can have; of names that differ by case only, the first."""
    first = {fold(field.name): field for field in reversed(list(fields)) if is_usable(field.name)}
    return list(reversed(first.values()))


def decimal_shape(type_: pa.DataType) -> tuple[int, int]:
    """Return precision and scale as Iceberg counts them: a scale is neither negative nor above the precision."""
    precision, scale = type_.precision, type_.scale
    return max(precision - min(scale, 0), scale), max(scale, 0)


def is_list(type_: pa.DataType) -> bool:
    """Return whether a type is one of the lists that a frame may use."""
    return bool(pt.is_list(type_) or pt.is_large_list(type_) or pt.is_fixed_size_list(type_))


def is_text(type_: pa.DataType) -> bool:
    """Return whether a type is text, in any layout."""
    return bool(pt.is_string(type_) or pt.is_large_string(type_) or pt.is_string_view(type_))


def is_bytes(type_: pa.DataType) -> bool:
    """Return whether a type is bytes, in any layout."""
    return bool(
        pt.is_binary(type_) or pt.is_large_binary(type_) or pt.is_binary_view(type_) or pt.is_fixed_size_binary(type_)
    )


def child_types(type_: pa.DataType) -> list[tuple[str, pa.DataType]]:
    """Return the names and types one level down, with Iceberg's names for elements, keys and values."""
    if pt.is_struct(type_):
        return [(field.name, field.type) for field in type_]
    if is_list(type_):
        return [("element", type_.value_type)]
    return [("key", type_.key_type), ("value", type_.item_type)] if pt.is_map(type_) else []


def find_unsupported(type_: pa.DataType, path: str) -> Iterator[tuple[str, str]]:
    """Yield the path of each type inside this one that a frame may not use, and the rule."""
    # Keys must not be null, and Arrow does not see nulls inside a dictionary's values.
    if pt.is_map(type_) and (pt.is_nested(key := type_.key_type) or pt.is_null(key) or pt.is_dictionary(key)):
        yield f"{path}.key", f"type {key} is not supported as a key"
    if pt.is_struct(type_) or is_list(type_) or pt.is_map(type_):
        for name, child in child_types(type_):
            yield from find_unsupported(child, f"{path}.{name}")
    elif pt.is_decimal(type_):
        if decimal_shape(type_)[0] > DECIMAL_MAX_PRECISION:
            yield path, f"type {type_} is not supported: expected at most {DECIMAL_MAX_PRECISION} digits"
    elif pt.is_dictionary(type_):
        values = type_.value_type
        is_extension = isinstance(values, pa.BaseExtensionType)
        if pt.is_nested(values) or pt.is_dictionary(values) or pt.is_null(values) or is_extension:
            yield path, f"a dictionary of {values} is not supported"
        else:
            yield from find_unsupported(values, path)
    elif not _is_supported(type_):
        yield path, f"type {type_} is not supported"


def _is_supported(type_: pa.DataType) -> bool:
    if isinstance(type_, pa.BaseExtensionType):
        return type_.extension_name == UUID or (type_.extension_name == JSON and is_text(type_.storage_type))
    if pt.is_fixed_size_binary(type_):
        return bool(type_.byte_width > 0)
    is_other = pt.is_null(type_) or pt.is_timestamp(type_) or is_text(type_) or is_bytes(type_)
    return bool(is_other) or type_ in _PRIMITIVES


def plain_rows(rows: pa.Table) -> pa.Table:
    """Return a table with plain columns. They must not be slices."""
    columns = [pa.chunked_array(map(_plain, column.chunks), plain_type(column.type)) for column in rows.columns]
    return pa.table(columns, names=rows.column_names)


def _plain(values: pa.Array) -> pa.Array:
    source, type_ = values.type, plain_type(values.type)
    if source == type_:
        return values
    if pt.is_struct(source):
        children = [_plain(values.field(index)) for index in range(len(source))]
        return pa.StructArray.from_arrays(children, fields=list(type_), mask=_nulls(values))
    if pt.is_map(source):
        keys, items = _plain(values.keys), _plain(values.items)
        return pa.MapArray.from_arrays(values.offsets, keys, items, type=type_, mask=_nulls(values))
    if is_list(source):
        is_fixed = pt.is_fixed_size_list(source)
        offsets = pa.array(np.arange(len(values) + 1) * source.list_size) if is_fixed else values.offsets
        elements = _plain(values.values)
        return pa.ListArray.from_arrays(offsets.cast(pa.int32()), elements, type=type_, mask=_nulls(values))
    return values.cast(type_)


def _nulls(values: pa.Array) -> pa.Array | None:
    return values.is_null() if values.null_count else None


def json_values(values: pa.Array) -> list[Any]:
    """Return values of a plain type as json_exact.parse_row would parse them from JSON; None for nulls."""
    type_ = values.type
    if type_ == UUID_VALUES:
        return _each(values, lambda value: str(uuid.UUID(bytes=value)))
    if pt.is_uint64(type_) or pt.is_int64(type_):
        return _each(values, lambda value: value if abs(value) < _SURELY_INT64 else msgspec.Raw(str(value)))
    if pt.is_floating(type_):
        return _each(values, _float_value)
    if pt.is_decimal(type_):
        return _each(values, lambda value: msgspec.Raw(format(value, "f")))
    if pt.is_temporal(type_):
        return _moments(values)
    if is_bytes(type_):
        return _each(values, lambda value: base64.b64encode(value).decode())
    if pt.is_struct(type_):
        return _structs(values)
    if pt.is_list(type_):
        return _by_list(values, json_values(values.values))
    if pt.is_map(type_):
        entries = list(zip(json_values(values.keys), json_values(values.items), strict=True))
        by_text = pt.is_string(type_.key_type)
        return [None if own is None else _map_form(own, by_text=by_text) for own in _by_list(values, entries)]
    others: list[Any] = values.to_pylist()
    return others


def _each(values: pa.Array, convert: Callable[[Any], Any]) -> list[Any]:
    return [None if value is None else convert(value) for value in values.to_pylist()]


def _float_value(value: float) -> msgspec.Raw | str:
    if math.isfinite(value):
        return msgspec.Raw(repr(value))
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _structs(values: pa.StructArray) -> list[Any]:
    names = [field.name for field in values.type]
    # Flattened children are null if the struct is.
    columns = [json_values(child) for child in values.flatten()]
    rows = zip(*columns, strict=True) if columns else ((),) * len(values)
    valid = values.is_valid().to_pylist()
    return [dict(zip(names, row, strict=True)) if is_set else None for row, is_set in zip(rows, valid, strict=True)]


def _by_list(lists: pa.Array, elements: list[Any]) -> list[Any]:
    """Return the elements of each list, None for a null list, which may have elements too."""
    offsets, valid = lists.offsets.to_pylist(), lists.is_valid().to_pylist()
    return [elements[offsets[i] : offsets[i + 1]] if valid[i] else None for i in range(len(lists))]


def _map_form(entries: list[tuple[Any, Any]], *, by_text: bool) -> Any:
    if by_text and len(members := dict(entries)) == len(entries):
        return members
    return [{"key": key, "value": value} for key, value in entries]


def _moments(values: pa.Array) -> list[Any]:
    """Return times within the common years as text, and others as the number that Arrow stores."""
    shown = pa.array(in_common_years(values))
    texts: list[Any] = moment_texts(pc.if_else(shown, values, pa.scalar(None, values.type))).to_pylist()
    if all(texts):
        return texts
    numbers = _as_stored(values).to_pylist()
    return [number if text is None else text for text, number in zip(texts, numbers, strict=True)]


def moment_texts(values: pa.Array) -> pa.Array:
    """Return dates and times, all within the common years, as text."""
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
    """Return which dates and timestamps are in the years 1 to 9999; true for nulls and times of day."""
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
    # Nanoseconds in 64 bits end before these years, and the bounds themselves do not fit 64 bits.
    within: npt.NDArray[np.bool_] = (numbers >= max(first, -(2**63))) & (numbers <= min(end - 1, 2**63 - 1))
    return within
