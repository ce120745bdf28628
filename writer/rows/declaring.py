"""How a table's columns grow for what somebody declares: an Arrow frame, a source, the configuration. Owns the rules.

    a field that the table lacks      is added with the declared type, if evolution.py has room for it
    a field under a former name       is renamed; its id, and so its values in every file, stay
    a wider type                      int -> long, float -> double, decimal with more digits before the point
    part of the row's key             is noted in the column's comment

No other type changes: Iceberg allows no more. A declaration that asks for it is refused in that point: the column stays
as it is, and values that do not fit it are rescued, one by one. A declaration never takes anything away.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from writer.rows.column_notes import as_key, former_names, is_json, is_key, name_in, with_former_names
from writer.rows.evolution import Room, describe, full_names
from writer.rows.exact_numbers import DECIMAL_MAX_PRECISION, decimal_parts
from writer.rows.field_names import fold
from writer.rows.parse_types import ELEMENT, VALUE, Path
from writer.types import UNNUMBERED, Field, ListType, MapType, StructType, Type

_WIDENINGS = {("int", "long"), ("float", "double")}


def declare_fields(
    fields: Sequence[Field], declared: Iterable[Field], room: Room, path: Path = ()
) -> tuple[Field, ...]:
    """Give fields with what is declared beyond them."""
    wanted = {each.name: each for each in declared}
    kept = []
    for each in fields:
        name = name_in(each, wanted)
        kept.append(each if name is None else _declare_field(each, wanted.pop(name), room, (*path, each.name)))
    return (*kept, *(new for each in wanted.values() if (new := _add(each, room, path)) is not None))


def _add(declared: Field, room: Room, path: Path) -> Field | None:
    added = room.add((*path, declared.name), declared)
    if added is None:
        room.refuse((*path, declared.name), "is not added: its name is another column's, or there are too many columns")
    return added


def _declare_field(each: Field, declared: Field, room: Room, path: Path) -> Field:
    if is_json(each.doc) or is_json(declared.doc):
        type_ = each.type
        if is_json(each.doc) != is_json(declared.doc):
            _refuse_type(describe(each), describe(declared), room, path)
    else:
        type_ = _declare_type(each.type, declared.type, room, path)
    if type_ != each.type:
        each = replace(each, type=type_)
    if is_key(declared) and not is_key(each):
        room.note(path, "key")
        each = as_key(each)
    return each


def _declare_type(type_: Type, declared: Type, room: Room, path: Path) -> Type:
    match type_, declared:
        case StructType(fields), StructType(members):
            return StructType(declare_fields(fields, members, room, path))
        case ListType(element=element), ListType(element=new):
            return replace(type_, element=_declare_type(element, new, room, (*path, ELEMENT)))
        case MapType(value=value), MapType(value=new):
            return replace(type_, value=_declare_type(value, new, room, (*path, VALUE)))
        case str(), str():
            return _widen(type_, declared, room, path)
    _refuse_type(_kind_of(type_), _kind_of(declared), room, path)
    return type_


def _kind_of(type_: Type) -> str:
    return describe(Field(UNNUMBERED, "", type_))


def _widen(type_: str, declared: str, room: Room, path: Path) -> str:
    wider = declared if (type_, declared) in _WIDENINGS else _wider_decimal(type_, declared)
    if wider is not None:
        room.note(path, f"{type_} -> {wider}")
    if not _holds(wider or type_, declared):
        _refuse_type(type_, declared, room, path)
    return wider or type_


def _wider_decimal(type_: str, declared: str) -> str | None:
    mine, other = decimal_parts(type_), decimal_parts(declared)
    if mine is None or other is None:
        return None
    (precision, scale), (other_precision, other_scale) = mine, other
    needed = min(other_precision - other_scale + scale, DECIMAL_MAX_PRECISION)
    return f"decimal({needed}, {scale})" if needed > precision else None


def _holds(type_: str, declared: str) -> bool:
    """Tell whether a column holds every value of a declared type."""
    mine, other = decimal_parts(type_), decimal_parts(declared)
    if mine is not None and other is not None:
        return mine[1] >= other[1] and mine[0] - mine[1] >= other[0] - other[1]
    return type_ == declared or (declared, type_) in _WIDENINGS


def _refuse_type(type_: str, declared: str, room: Room, path: Path) -> None:
    room.refuse(path, f"stays {type_}: declared as {declared}")


# -- renames


def rename_fields(fields: Sequence[Field], declared: Iterable[Field], room: Room) -> tuple[Field, ...]:
    """Rename the fields, at any depth, of which a declaration knows the former name."""
    renamed = _rename_fields(fields, declared, room, ())
    names = list(full_names(renamed))
    if len(set(names)) == len(names):
        return renamed
    room.refuse((), "renames are not followed: a name would be another column's path")
    return tuple(fields)


def _rename_fields(fields: Sequence[Field], declared: Iterable[Field], room: Room, path: Path) -> tuple[Field, ...]:
    by_name = {each.name: each for each in declared}
    present = {each.name for each in fields}
    new_names = {
        former: each.name for each in by_name.values() if each.name not in present for former in former_names(each)
    }
    renamed = []
    for each in fields:
        if each.name in new_names:
            each = _rename_field(each, new_names[each.name], present, room, path)  # noqa: PLW2901 - the same field
        if (wanted := by_name.get(each.name)) is not None:
            each = _remember_names(each, wanted, present)  # noqa: PLW2901
            each = replace(each, type=_rename_below(each.type, wanted.type, room, (*path, each.name)))  # noqa: PLW2901
        renamed.append(each)
    return tuple(renamed)


def _rename_field(each: Field, name: str, present: set[str], room: Room, path: Path) -> Field:
    others = {fold(other) for other in present - {each.name}}
    if fold(name) in others:
        room.refuse((*path, each.name), f"is not renamed: another column is called {name}")
        return each
    room.note((*path, name), f"renamed from {each.name}")
    return with_former_names(replace(each, name=name), (each.name,))


def _remember_names(each: Field, declared: Field, present: set[str]) -> Field:
    """Remember a former name under which there is no column, so that rows that still use it are understood."""
    names = tuple(name for name in former_names(declared) if name not in present and name not in former_names(each))
    return with_former_names(each, names) if names else each


def _rename_below(type_: Type, declared: Type, room: Room, path: Path) -> Type:
    match type_, declared:
        case StructType(fields), StructType(members):
            return StructType(_rename_fields(fields, members, room, path))
        case ListType(element=element), ListType(element=new):
            return replace(type_, element=_rename_below(element, new, room, (*path, ELEMENT)))
        case MapType(value=value), MapType(value=new):
            return replace(type_, value=_rename_below(value, new, room, (*path, VALUE)))
    return type_
