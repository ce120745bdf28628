"""Required fields that rows leave out become optional. Owns finding them, in rows as misfits.py keeps them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from writer.rows.evolution import Room
from writer.rows.parse_types import ELEMENT, JSON_DOC, Path
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
    present = [value for value in values if value is not None]
    required = each.required and len(present) == len(values)
    if required != each.required:
        room.note(path, "required -> optional")
    return replace(each, required=required, type=_relax_type(each.type, present, room, path))


def _relax_type(type_: Type, values: list[Any], room: Room, path: Path) -> Type:
    match type_:
        case StructType(fields):
            return StructType(tuple(relax_fields(fields, values, room, path)))
        case ListType(element=element, element_required=required):
            elements = [each for value in values for each in value]
            present = [each for each in elements if each is not None]
            relaxed = _relax_type(element, present, room, (*path, ELEMENT))
            return replace(type_, element=relaxed, element_required=required and len(present) == len(elements))
        case MapType(value=value_type, value_required=required):
            entries = [entry["value"] for value in values for entry in value]
            present = [each for each in entries if each is not None]
            relaxed = _relax_type(value_type, present, room, (*path, "value"))
            return replace(type_, value=relaxed, value_required=required and len(present) == len(entries))
        case str():
            return type_


def _has_required(each: Field) -> bool:
    return each.required or (each.doc != JSON_DOC and type_has_required(each.type))


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
