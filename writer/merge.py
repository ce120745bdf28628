"""Two versions of a table's columns made one: the table's own, and those the writer evolved meanwhile.

The table's version wins wherever both know a column, its field ids always, except that what holds more stays: the
wider of two types, and optional. Rows may be buffered that need it. Columns that only the writer knows are added
behind with fresh ids. So a table that the catalog numbered anew at creation, or that Spark has altered while rows
were buffered, goes on with every column of both.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from writer.types import Field, ListType, MapType, StructType, Type

_PROMOTIONS = {("int", "long"), ("float", "double")}
_DECIMAL = re.compile(r"decimal\((\d+),\s*(\d+)\)")


@dataclass(frozen=True, slots=True)
class Merged:
    """The columns of both, and the highest field id in use."""

    columns: StructType
    last_field_id: int


def merge_columns(table: StructType, own: StructType, *, last_field_id: int) -> Merged:
    """Add to the table's columns those that only the writer's version has, by name."""
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
    kept = tuple(_merge_field(field, own.field(field.name), ids) for field in table.fields)
    added = tuple(_renumber_field(field, ids) for field in own.fields if table.field(field.name) is None)
    return StructType(kept + added)


def _merge_field(table: Field, own: Field | None, ids: _Ids) -> Field:
    if own is None:
        return table
    return replace(table, type=_merge_types(table.type, own.type, ids), required=table.required and own.required)


def _merge_types(table: Type, own: Type, ids: _Ids) -> Type:
    if isinstance(table, StructType) and isinstance(own, StructType):
        return _merge_structs(table, own, ids)
    if isinstance(table, ListType) and isinstance(own, ListType):
        return replace(table, element=_merge_types(table.element, own.element, ids))
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
