"""Rows decoded under an older version of a schema, brought to a newer one, so that one file can hold both.

A column that the newer version has no more (somebody dropped it) may go if it is empty; values are never left out.
"""

from __future__ import annotations

from collections.abc import Iterable

import pyarrow as pa

from writer.rows.column_notes import name_in
from writer.types import ListType, MapType, Schema, StructType, Type, to_arrow_schema, to_arrow_type


def conform(table: pa.Table, columns: StructType) -> pa.Table:
    """Give the same rows under columns that evolved from the table's: new names, wider types, nulls for new fields.

    Raises:
        pa.ArrowInvalid: the columns have no place for some value.
    """
    schema = to_arrow_schema(Schema(0, columns))
    if table.schema.equals(schema, check_metadata=True):
        return table
    given = set(table.column_names)
    taken = [name_in(field, given) for field in columns.fields]
    _check_empty(table.column(name) for name in given.difference(taken))
    arrays = [
        _conform_column(table.column(name), field.type)
        if name is not None
        else pa.nulls(table.num_rows, to_arrow_type(field.type))
        for field, name in zip(columns.fields, taken, strict=True)
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
    if array.offset:
        # Building on parts of a slice is not possible; joining copies the slice into an array of its own.
        array = pa.concat_arrays([array, array.slice(0, 0)])
    match type_:
        case StructType(fields):
            given = {field.name for field in array.type}
            taken = [name_in(field, given) for field in fields]
            _check_empty(array.field(name) for name in given.difference(taken))
            children = [
                pa.nulls(len(array), to_arrow_type(field.type))
                if name is None
                else _conform(array.field(name), field.type)
                for field, name in zip(fields, taken, strict=True)
            ]
            return pa.StructArray.from_arrays(children, fields=list(target.fields), mask=array.is_null())
        case ListType(element=element):
            values = _conform(array.values, element)
            return pa.ListArray.from_arrays(array.offsets, values, type=target, mask=array.is_null())
        case MapType(value=value):
            items = _conform(array.items, value)
            return pa.MapArray.from_arrays(array.offsets, array.keys, items, type=target, mask=array.is_null())
        case str():
            return array.cast(target)
