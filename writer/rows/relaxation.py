"""Required fields that rows leave out become optional. Owns finding them, in rows as misfits.py keeps them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from writer.rows.column_notes import is_json
from writer.rows.evolution import Room
from writer.rows.parse_types import ELEMENT, VALUE, Path
from writer.types import Field, ListType, MapType, StructType, Type


def relax_fields(fields: Sequence[Field], rows: Sequence[dict[str, Any]], room: Room, path: Path = ()) -> list[Field]:
    """Make those fields optional, at any depth, that some row has no value for."""
    return [
        _relax_field(each, [row.get(each.name) for row in rows], room, (*path, each.name))
        if _has_required(each)
        else each
        for each in fields
    ]


def _relax_field(each: Field, values: list[Any], room: Room, path: Path) -> Field:
    present, required = _present(values, room, path, required=each.required)
    return replace(each, required=required, type=_relax_type(each.type, present, room, path))


def _present(values: list[Any], room: Room, path: Path, *, required: bool) -> tuple[list[Any], bool]:
    """Leave out nulls, and tell whether the values can still be required."""
    present = [value for value in values if value is not None]
    return present, still_required(room, path, required=required, has_nulls=len(present) < len(values))


def still_required(room: Room, path: Path, *, required: bool, has_nulls: bool) -> bool:
    """Tell whether what is required can stay so; notes it where it cannot."""
    if required and has_nulls:
        room.note(path, "required -> optional")
    return required and not has_nulls


def _relax_type(type_: Type, values: list[Any], room: Room, path: Path) -> Type:
    match type_:
        case StructType(fields):
            return StructType(tuple(relax_fields(fields, values, room, path)))
        case ListType(element=element, element_required=required):
            below = (*path, ELEMENT)
            present, required = _present([each for value in values for each in value], room, below, required=required)
            return replace(type_, element=_relax_type(element, present, room, below), element_required=required)
        case MapType(value=value_type, value_required=required):
            below = (*path, VALUE)
            entries = [entry[VALUE] for value in values for entry in value]
            present, required = _present(entries, room, below, required=required)
            return replace(type_, value=_relax_type(value_type, present, room, below), value_required=required)
        case str():
            return type_


def _has_required(each: Field) -> bool:
    return each.required or (not is_json(each.doc) and type_has_required(each.type))


def type_has_required(type_: Type) -> bool:
    """Tell whether anything below a type is required."""
    match type_:
        case StructType(fields):
            return any(map(_has_required, fields))
        case ListType(element=element, element_required=required):
            return required or type_has_required(element)
        case MapType(value=value, value_required=required):
            return required or type_has_required(value)
        case str():
            return False
