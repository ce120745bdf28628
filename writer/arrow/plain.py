"""Arrow columns whose values stand for themselves, in few types. Owns what is taken apart before anything else.

    dictionaries, views, large and fixed-size lists, extensions --> plain types (arrow_types.plain_type)

Most of Arrow's functions do not take the former, and casting a nested column whole fails on nulls without a type. So
nested columns are taken apart here, level by level. Columns that are plain already stay as they are.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.types as pt

from writer.arrow.types import is_list, plain_type


def plain_rows(rows: pa.Table) -> pa.Table:
    """Make all columns plain. They must not be slices."""
    columns = [_plain_column(column) for column in rows.columns]
    return pa.table(columns, names=rows.column_names)


def _plain_column(column: pa.ChunkedArray) -> pa.ChunkedArray:
    type_ = plain_type(column.type)
    return column if column.type == type_ else pa.chunked_array([_plain(chunk) for chunk in column.chunks], type=type_)


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
        return pa.ListArray.from_arrays(_offsets(values), _plain(values.values), type=type_, mask=_nulls(values))
    return values.cast(type_)


def _offsets(lists: pa.Array) -> pa.Array:
    if pt.is_fixed_size_list(lists.type):
        return pa.array(np.arange(len(lists) + 1) * lists.type.list_size, pa.int32())
    return lists.offsets.cast(pa.int32())


def _nulls(values: pa.Array) -> pa.Array | None:
    return values.is_null() if values.null_count else None
