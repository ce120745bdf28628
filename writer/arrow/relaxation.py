"""Required fields that the columns of a frame leave empty become optional. Owns finding them, at any depth.

The counterpart of rows/relaxation.py for rows that are columns already.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pyarrow as pa

from writer.rows.column_notes import is_json
from writer.rows.evolution import Room
from writer.rows.parse_types import ELEMENT, VALUE, Path
from writer.rows.relaxation import still_required, type_has_required
from writer.types import Field, ListType, MapType, StructType, Type


def relax_columns(fields: Sequence[Field], columns: Sequence[Sequence[pa.Array]], room: Room) -> tuple[Field, ...]:
    """Make those fields optional, at any depth, that have a null in their arrays."""
    return tuple(_relax_field(each, arrays, room, (each.name,)) for each, arrays in zip(fields, columns, strict=True))


def _relax_field(each: Field, arrays: Sequence[pa.Array], room: Room, path: Path) -> Field:
    required = _still_required(arrays, room, path, required=each.required)
    type_ = each.type if is_json(each.doc) else _relax_type(each.type, arrays, room, path)
    return each if (required, type_) == (each.required, each.type) else replace(each, required=required, type=type_)


def _relax_type(type_: Type, arrays: Sequence[pa.Array], room: Room, path: Path) -> Type:
    if not type_has_required(type_):
        return type_
    match type_:
        case StructType(fields):
            # Below a null struct nothing is missing.
            children = [array.filter(array.is_valid()).flatten() for array in arrays]
            columns = [[each[index] for each in children] for index in range(len(fields))]
            relaxed = (
                _relax_field(each, column, room, (*path, each.name))
                for each, column in zip(fields, columns, strict=True)
            )
            return StructType(tuple(relaxed))
        case ListType(element=element, element_required=required):
            below = (*path, ELEMENT)
            elements = [array.flatten() for array in arrays]
            required = _still_required(elements, room, below, required=required)
            return replace(type_, element=_relax_type(element, elements, room, below), element_required=required)
        case MapType(value=value, value_required=required):
            # What is left of a filtered column is no slice, so its items are those of its maps.
            below = (*path, VALUE)
            items = [array.filter(array.is_valid()).items for array in arrays]
            required = _still_required(items, room, below, required=required)
            return replace(type_, value=_relax_type(value, items, room, below), value_required=required)
        case str():
            return type_


def _still_required(arrays: Sequence[pa.Array], room: Room, path: Path, *, required: bool) -> bool:
    has_nulls = any(array.null_count for array in arrays)
    return still_required(room, path, required=required, has_nulls=has_nulls)
