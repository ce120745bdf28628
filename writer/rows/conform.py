"""Rows decoded under an older version of a schema, brought to a newer one, so that one file can hold both.

Owns which differences are bridged without looking at what was sent: new names, new fields, and Iceberg's promotions.

    int -> long, float -> double, decimal(p, s) -> decimal(p', s)      each value stays what it is
    any other type                                                     only where there are no values

Of any other type the rows have to be decoded again: a number of milliseconds is no timestamp to Arrow's casts, nor is
base64 bytes to them. The same goes for a column that the newer version has no more (somebody dropped it).
"""

from __future__ import annotations

from collections.abc import Iterable

import pyarrow as pa
import pyarrow.types as pt

from writer.rows.column_notes import name_in
from writer.types import (
    ListType,
    MapType,
    Schema,
    StructType,
    Type,
    to_arrow_schema,
    to_arrow_type,
    written_fields,
)

_PROMOTIONS = {(pa.int32(), pa.int64()), (pa.float32(), pa.float64())}


def conform(table: pa.Table, columns: StructType) -> pa.Table:
    """Give the same rows under columns that evolved from the table's: new names, wider types, nulls for new fields.

    Raises:
        pa.ArrowInvalid: the columns have no place for some value, as far as can be told here.
    """
    schema = to_arrow_schema(Schema(0, columns))
    if table.schema.equals(schema, check_metadata=True):
        return table
    given, fields = set(table.column_names), written_fields(columns)
    taken = [name_in(field, given) for field in fields]
    _check_empty(table.column(name) for name in given.difference(taken))
    arrays = [
        _conform_column(table.column(name), field.type)
        if name is not None
        else pa.nulls(table.num_rows, to_arrow_type(field.type))
        for field, name in zip(fields, taken, strict=True)
    ]
    return pa.table(arrays, schema=schema)


def _check_empty(left_out: Iterable[pa.Array | pa.ChunkedArray]) -> None:
    if any(values.null_count < len(values) for values in left_out):
        raise pa.ArrowInvalid("values have no column any more")


def _conform_column(column: pa.ChunkedArray, type_: Type) -> pa.ChunkedArray:
    target = to_arrow_type(type_)
    if column.type == target:
        return column
    return pa.chunked_array([_conform(chunk, type_) for chunk in column.chunks], type=target)


def _conform(array: pa.Array, type_: Type) -> pa.Array:
    target = to_arrow_type(type_)
    if array.type == target:
        return array
    if array.null_count == len(array):
        return pa.nulls(len(array), target)
    if array.offset:
        # Building on parts of a slice is not possible; joining copies the slice into an array of its own.
        array = pa.concat_arrays([array, array.slice(0, 0)])
    match type_:
        case StructType() if pt.is_struct(array.type):
            return _conform_struct(array, type_)
        case ListType(element=element) if pt.is_list(array.type):
            values = _conform(array.values, element)
            return pa.ListArray.from_arrays(array.offsets, values, type=target, mask=array.is_null())
        case MapType(key=key, value=value) if pt.is_map(array.type):
            keys, items = _conform(array.keys, key), _conform(array.items, value)
            return pa.MapArray.from_arrays(array.offsets, keys, items, type=target, mask=array.is_null())
        case str() if _is_promotion(array.type, target):
            return array.cast(target)
    raise pa.ArrowInvalid("values have a column of another type now")


def _conform_struct(array: pa.StructArray, type_: StructType) -> pa.StructArray:
    given = {field.name for field in array.type}
    taken = [name_in(field, given) for field in type_.fields]
    _check_empty(array.field(name) for name in given.difference(taken))
    children = [
        pa.nulls(len(array), to_arrow_type(field.type)) if name is None else _conform(array.field(name), field.type)
        for field, name in zip(type_.fields, taken, strict=True)
    ]
    fields = list(to_arrow_type(type_).fields)
    return pa.StructArray.from_arrays(children, fields=fields, mask=array.is_null())


def _is_promotion(given: pa.DataType, target: pa.DataType) -> bool:
    """Tell whether Iceberg lets a column of the one type become the other."""
    if pt.is_decimal(given) and pt.is_decimal(target):
        return bool(given.scale == target.scale and given.precision <= target.precision)
    return (given, target) in _PROMOTIONS
