"""Arrow types and the columns that they declare. Owns which types a frame may use and what they become.

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

Nanoseconds become timestamp_ns or timestamptz_ns in tables of format version 3. Others have no such type: there a
moment is kept where it has whole microseconds. Decimals have at most 38 digits; those that a scale below 0 leaves
unwritten count.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache

import pyarrow as pa
import pyarrow.types as pt

from writer.rows.exact_numbers import DECIMAL_MAX_PRECISION
from writer.rows.field_names import fold, is_usable
from writer.types import UNNUMBERED, Field, ListType, MapType, StructType, Type

UUID, JSON = "arrow.uuid", "arrow.json"

# Types whose plain form is remembered; one takes some hundred bytes.
TYPES_MAX = 1024

# The plain type of uuids.
UUID_VALUES = pa.large_binary()

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
    """Give the fields, not numbered yet, that plain ones of Arrow declare; without those that hold nothing."""
    return tuple(
        Field(UNNUMBERED, field.name, type_)
        for field in fields
        if (type_ := declared_type(field.type, nanoseconds=nanoseconds)) is not None
    )


def declared_type(type_: pa.DataType, *, nanoseconds: bool) -> Type | None:
    """Give the type of a new column for a plain one of Arrow's, None where there is nothing to hold."""
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
    return None if pt.is_null(type_) else _declared_primitive(type_, nanoseconds=nanoseconds)


def _declared_primitive(type_: pa.DataType, *, nanoseconds: bool) -> str:
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
    """Give the type whose values stand for themselves, without what few of Arrow's functions take.

    That is dictionaries, views and extensions. UUID_VALUES, which nothing else becomes, tells uuids from other bytes.
    """
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
    """Pick the fields of a struct that can have a place in a table; of names that differ by case only, the first."""
    first = {fold(field.name): field for field in reversed(list(fields)) if is_usable(field.name)}
    return list(reversed(first.values()))


def decimal_shape(type_: pa.DataType) -> tuple[int, int]:
    """Give precision and scale as Iceberg counts them: a scale is neither negative nor above the precision."""
    precision, scale = type_.precision, type_.scale
    return max(precision - min(scale, 0), scale), max(scale, 0)


def is_list(type_: pa.DataType) -> bool:
    """Tell whether a type is one of the lists that a frame may use."""
    return bool(pt.is_list(type_) or pt.is_large_list(type_) or pt.is_fixed_size_list(type_))


def is_text(type_: pa.DataType) -> bool:
    """Tell whether a type is text, however it is laid out."""
    return bool(pt.is_string(type_) or pt.is_large_string(type_) or pt.is_string_view(type_))


def is_bytes(type_: pa.DataType) -> bool:
    """Tell whether a type is bytes, however they are laid out."""
    return bool(
        pt.is_binary(type_) or pt.is_large_binary(type_) or pt.is_binary_view(type_) or pt.is_fixed_size_binary(type_)
    )


def find_unsupported(fields: Iterable[pa.Field], parent: str = "") -> Iterator[tuple[str, str]]:
    """Find fields whose type a frame may not use; gives each one's path and the rule."""
    for field in fields:
        yield from _find_unsupported(field.type, parent + field.name)


def _find_unsupported(type_: pa.DataType, path: str) -> Iterator[tuple[str, str]]:
    if pt.is_struct(type_):
        yield from find_unsupported(type_, f"{path}.")
    elif is_list(type_):
        yield from _find_unsupported(type_.value_type, f"{path}.element")
    elif pt.is_map(type_):
        # Keys may not be null, and those of a dictionary can be in a way that Arrow does not see.
        if pt.is_nested(type_.key_type) or pt.is_null(type_.key_type) or pt.is_dictionary(type_.key_type):
            yield f"{path}.key", f"type {type_.key_type} is not supported as a key"
        yield from _find_unsupported(type_.key_type, f"{path}.key")
        yield from _find_unsupported(type_.item_type, f"{path}.value")
    elif pt.is_decimal(type_):
        if decimal_shape(type_)[0] > DECIMAL_MAX_PRECISION:
            yield path, f"type {type_} is not supported: expected at most {DECIMAL_MAX_PRECISION} digits"
    elif pt.is_dictionary(type_):
        yield from _find_unsupported_values(type_.value_type, path)
    elif not _is_supported(type_):
        yield path, f"type {type_} is not supported"


def _find_unsupported_values(type_: pa.DataType, path: str) -> Iterator[tuple[str, str]]:
    if pt.is_nested(type_) or pt.is_dictionary(type_) or pt.is_null(type_) or isinstance(type_, pa.BaseExtensionType):
        yield path, f"a dictionary of {type_} is not supported"
    else:
        yield from _find_unsupported(type_, path)


def _is_supported(type_: pa.DataType) -> bool:
    if isinstance(type_, pa.BaseExtensionType):
        return type_.extension_name == UUID or (type_.extension_name == JSON and is_text(type_.storage_type))
    if pt.is_fixed_size_binary(type_):
        return bool(type_.byte_width > 0)
    is_other = pt.is_null(type_) or pt.is_timestamp(type_) or is_text(type_) or is_bytes(type_)
    return bool(is_other) or type_ in _PRIMITIVES
