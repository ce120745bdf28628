"""Two versions of a table's columns made one: the table's own, and those the writer evolved meanwhile.

The table's version wins wherever both know a column, its field ids always, except that what holds more stays: the
wider of two types, and optional. Rows may be buffered that need it. A column that only one of them has renamed gets
its new name. Columns that only the writer knows are added behind with fresh ids. So a table that the catalog numbered
anew at creation, or that Spark has altered while rows were buffered, goes on with every column of both.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, replace

from writer.rows.column_notes import as_key, former_names, is_key, name_in, with_former_names
from writer.types import Field, ListType, MapType, StructType, Type

_PROMOTIONS = {("int", "long"), ("float", "double")}
_DECIMAL = re.compile(r"decimal\((\d+),\s*(\d+)\)")


@dataclass(frozen=True, slots=True)
class Merged:
    """The columns of both, and the highest field id in use."""

    columns: StructType
    last_field_id: int


def merge_columns(table: StructType, own: StructType, *, last_field_id: int) -> Merged:
    """Add to the table's columns those that only the writer's version has, by name, also by a former one."""
    ids = _Ids(last_field_id)
    columns = _merge_structs(table, own, ids)
    return Merged(columns, ids.last)


class _Ids:
    """Hands out field ids that the table has never used."""

    def __init__(self, last: int) -> None:
        self.last = last

    def next(self) -> int:
        self.last += 1
        return self.last


def _merge_structs(table: StructType, own: StructType, ids: _Ids) -> StructType:
    pairs = _pair_fields(table, own)
    paired = {own_field.name for own_field in pairs.values()}
    kept = tuple(_merge_field(field, pairs.get(field.name), ids) for field in table.fields)
    added = tuple(_renumber_field(field, ids) for field in own.fields if field.name not in paired)
    return StructType(kept + added)


def _pair_fields(table: StructType, own: StructType) -> dict[str, Field]:
    """Find for the table's fields, by name, the writer's that is the same one: of the same name, or renamed by one."""
    pairs = {field.name: same for field in table.fields if (same := own.field(field.name)) is not None}
    left = {field.name: field for field in own.fields if field.name not in pairs}
    for field in table.fields:
        renamed = None if field.name in pairs else _renamed(field, left)
        if renamed is not None:
            pairs[field.name] = left.pop(renamed)
    return pairs


def _renamed(table: Field, own: Mapping[str, Field]) -> str | None:
    """Find the writer's field that the table has renamed, or that has renamed the table's."""
    return name_in(table, own) or next((name for name, each in own.items() if table.name in former_names(each)), None)


def _merge_field(table: Field, own: Field | None, ids: _Ids) -> Field:
    if own is None:
        return table
    merged = replace(table, type=_merge_types(table.type, own.type, ids), required=table.required and own.required)
    if is_key(own) and not is_key(merged):
        merged = as_key(merged)
    if own.name == table.name or own.name in former_names(table):
        return merged
    return with_former_names(replace(merged, name=own.name), (table.name, *former_names(own)))


def _merge_types(table: Type, own: Type, ids: _Ids) -> Type:
    if isinstance(table, StructType) and isinstance(own, StructType):
        return _merge_structs(table, own, ids)
    if isinstance(table, ListType) and isinstance(own, ListType):
        required = table.element_required and own.element_required
        return replace(table, element=_merge_types(table.element, own.element, ids), element_required=required)
    if isinstance(table, MapType) and isinstance(own, MapType):
        required = table.value_required and own.value_required
        return replace(table, value=_merge_types(table.value, own.value, ids), value_required=required)
    if isinstance(table, str) and isinstance(own, str) and _is_promotion(table, own):
        return own
    return table


def _is_promotion(table: str, own: str) -> bool:
    """Tell whether Iceberg lets a column of the table's type become the writer's."""
    if (table, own) in _PROMOTIONS:
        return True
    from_, to = _DECIMAL.fullmatch(table), _DECIMAL.fullmatch(own)
    return from_ is not None and to is not None and int(from_[1]) < int(to[1]) and from_[2] == to[2]


def _renumber_field(field: Field, ids: _Ids) -> Field:
    return replace(field, id=ids.next(), type=_renumber_type(field.type, ids))


def _renumber_type(type_: Type, ids: _Ids) -> Type:
    match type_:
        case StructType(fields):
            return StructType(tuple(_renumber_field(field, ids) for field in fields))
        case ListType(_, element, required):
            return ListType(ids.next(), _renumber_type(element, ids), required)
        case MapType(_, key, _, value, required):
            return MapType(ids.next(), _renumber_type(key, ids), ids.next(), _renumber_type(value, ids), required)
    return type_


def without_fields(columns: StructType, ids: Container[int]) -> StructType:
    """Leave out fields by their ids, at any depth."""
    return StructType(
        tuple(replace(field, type=_without(field.type, ids)) for field in columns.fields if field.id not in ids)
    )


def _without(type_: Type, ids: Container[int]) -> Type:
    match type_:
        case StructType():
            return without_fields(type_, ids)
        case ListType(element=element):
            return replace(type_, element=_without(element, ids))
        case MapType(value=value):
            return replace(type_, value=_without(value, ids))
    return type_


def field_ids(type_: Type) -> Iterator[int]:
    """Walk over all field ids in a type."""
    match type_:
        case StructType(fields):
            for field in fields:
                yield field.id
                yield from field_ids(field.type)
        case ListType(element_id, element, _):
            yield element_id
            yield from field_ids(element)
        case MapType(key_id, key, value_id, value, _):
            yield from (key_id, value_id)
            yield from field_ids(key)
            yield from field_ids(value)
