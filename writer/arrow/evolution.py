"""How a table's columns grow for a frame that declares its own. Owns which declarations are followed.

    a column that the table lacks     is added with the declared type (arrow_types.py), if evolution.py has room for it
    a field that a struct lacks       likewise
    a wider type                      int -> long, float -> double, decimal with more digits before the point
    null where a value is required    required -> optional

No other type changes: Iceberg allows no more. What then does not fit is left over, value by value (arrow_split.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import pyarrow as pa

from writer.arrow.types import declared_type
from writer.rows.evolution import Room
from writer.rows.exact_numbers import DECIMAL_MAX_PRECISION, decimal_parts
from writer.rows.inference import NewList, NewMap, NewStruct, Settled
from writer.rows.parse_types import ELEMENT, JSON_DOC, Path
from writer.rows.relaxation import type_has_required
from writer.types import Field, ListType, MapType, StructType, Type

_WIDENINGS = {("int", "long"), ("float", "double")}


def declare_columns(
    own: Sequence[Field], schema: Iterable[pa.Field], room: Room, *, nanoseconds: bool
) -> tuple[Field, ...]:
    """Give a table's own columns with what a frame's schema declares beyond them."""
    declared = {
        field.name: settled
        for field in schema
        if (settled := declared_type(field.type, nanoseconds=nanoseconds)) is not None
    }
    return _declare_fields(own, declared, room, ())


def _declare_fields(fields: Sequence[Field], declared: dict[str, Settled], room: Room, path: Path) -> tuple[Field, ...]:
    kept = [
        _declare_field(each, declared[each.name], room, (*path, each.name)) if each.name in declared else each
        for each in fields
    ]
    known = {each.name for each in fields}
    new = [room.add((*path, name), settled) for name, settled in declared.items() if name not in known]
    return (*kept, *(each for each in new if each is not None))


def _declare_field(each: Field, declared: Settled, room: Room, path: Path) -> Field:
    type_ = each.type if each.doc == JSON_DOC else _declare_type(each.type, declared, room, path)
    return each if type_ == each.type else replace(each, type=type_)


def _declare_type(type_: Type, declared: Settled, room: Room, path: Path) -> Type:
    match type_, declared:
        case StructType(fields), NewStruct(members):
            return StructType(_declare_fields(fields, members, room, path))
        case ListType(element=element), NewList(new):
            return replace(type_, element=_declare_type(element, new, room, (*path, ELEMENT)))
        case MapType(value=value), NewMap(_, new):
            return replace(type_, value=_declare_type(value, new, room, (*path, "value")))
        case str(), str():
            return _widen(type_, declared, room, path)
    return type_


def _widen(type_: str, declared: str, room: Room, path: Path) -> str:
    wider = declared if (type_, declared) in _WIDENINGS else _wider_decimal(type_, declared)
    if wider is None:
        return type_
    room.note(path, f"{type_} -> {wider}")
    return wider


def _wider_decimal(type_: str, declared: str) -> str | None:
    mine, other = decimal_parts(type_), decimal_parts(declared)
    if mine is None or other is None:
        return None
    (precision, scale), (other_precision, other_scale) = mine, other
    needed = min(other_precision - other_scale + scale, DECIMAL_MAX_PRECISION)
    return f"decimal({needed}, {scale})" if needed > precision else None


# -- required fields


def relax_columns(fields: Sequence[Field], columns: Sequence[Sequence[pa.Array]], room: Room) -> tuple[Field, ...]:
    """Make those fields optional, at any depth, that have a null in their arrays."""
    return tuple(_relax_field(each, arrays, room, (each.name,)) for each, arrays in zip(fields, columns, strict=True))


def _relax_field(each: Field, arrays: Sequence[pa.Array], room: Room, path: Path) -> Field:
    required = each.required and not any(array.null_count for array in arrays)
    if required != each.required:
        room.note(path, "required -> optional")
    type_ = each.type if each.doc == JSON_DOC else _relax_type(each.type, arrays, room, path)
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
            elements = [array.flatten() for array in arrays]
            required = required and not any(each.null_count for each in elements)
            return replace(
                type_, element=_relax_type(element, elements, room, (*path, ELEMENT)), element_required=required
            )
        case MapType(value=value, value_required=required):
            # What is left of a filtered column is no slice, so its items are those of its maps.
            items = [array.filter(array.is_valid()).items for array in arrays]
            required = required and not any(each.null_count for each in items)
            return replace(type_, value=_relax_type(value, items, room, (*path, "value")), value_required=required)
        case str():
            return type_
