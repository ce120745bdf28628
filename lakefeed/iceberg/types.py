"""Iceberg types, fields and schemas as values, and their JSON form in table metadata.

A primitive is its Iceberg name ("long", "decimal(10,2)"); nested types are the classes below. Field ids live in fields,
as in table metadata. Code that traverses nested types uses `children`, `walk` and `map_type`: a list has one child
named "element", a map has the children "key" and "value".

Metadata may hold keys that this version does not know. They are kept as JSON text in `extra` and written back, so that
a schema change does not drop what another writer stored.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from lakefeed.contract.errors import TypeUnknown

# The id of a field that no table has numbered yet.
UNNUMBERED = 0

DECIMAL_MAX_PRECISION = 38

# Primitive types without parameters.
PRIMITIVES = (
    *("boolean", "int", "long", "float", "double", "date", "time"),
    *("timestamp", "timestamptz", "timestamp_ns", "timestamptz_ns", "string", "uuid", "binary"),
)

# Bounded digits: Python refuses to read a number of more than 4,300.
_DECIMAL = re.compile(r"decimal\(\s*([0-9]{1,10})\s*,\s*([0-9]{1,10})\s*\)")
_FIXED = re.compile(r"fixed\[\s*([0-9]{1,10})\s*\]")
_PROMOTIONS = {("int", "long"), ("float", "double")}

_FIELD_KEYS = frozenset({"id", "name", "required", "type", "doc"})
_LIST_KEYS = frozenset({"type", "element-id", "element", "element-required"})
_MAP_KEYS = frozenset({"type", "key-id", "key", "value-id", "value", "value-required"})
_SCHEMA_KEYS = frozenset({"type", "fields", "schema-id", "identifier-field-ids"})


@dataclass(frozen=True, slots=True)
class Field:
    """One named field of a struct. `doc` is its comment."""

    id: int
    name: str
    type: Type
    required: bool = False
    doc: str | None = None
    extra: str | None = None


@dataclass(frozen=True, slots=True)
class StructType:
    """Fields in order."""

    fields: tuple[Field, ...]

    def field(self, name: str) -> Field | None:
        """Find a field by its exact name."""
        return next((field for field in self.fields if field.name == name), None)


@dataclass(frozen=True, slots=True)
class ListType:
    """A list whose element has a field id of its own."""

    element_id: int
    element: Type
    element_required: bool = False
    extra: str | None = None


@dataclass(frozen=True, slots=True)
class MapType:
    """A map whose key and value have field ids of their own."""

    key_id: int
    key: Type
    value_id: int
    value: Type
    value_required: bool = False
    extra: str | None = None


Type: TypeAlias = str | StructType | ListType | MapType


@dataclass(frozen=True, slots=True)
class Schema:
    """One version of a table's columns, with the id that the catalog gave it.

    The identifier fields belong to other writers; Lakefeed only preserves them.
    """

    schema_id: int
    columns: StructType
    identifier_ids: tuple[int, ...] = ()
    extra: str | None = None


def type_name(type_: Type) -> str:
    """Return a primitive's name without spaces, or the word for a nested type: struct, list or map."""
    return type_.replace(" ", "") if isinstance(type_, str) else type(type_).__name__.removesuffix("Type").lower()


def decimal_parts(type_: str) -> tuple[int, int] | None:
    """Return precision and scale of a decimal type, None for another type."""
    match = _DECIMAL.fullmatch(type_)
    return (int(match[1]), int(match[2])) if match else None


def fixed_length(type_: str) -> int | None:
    """Return the length of a fixed type, None for another type."""
    match = _FIXED.fullmatch(type_)
    return int(match[1]) if match else None


def promotes(from_: str, to: str) -> bool:
    """Return whether every format version of Iceberg allows this promotion of a column's type."""
    if (from_, to) in _PROMOTIONS:
        return True
    old, new = decimal_parts(from_), decimal_parts(to)
    return old is not None and new is not None and old[1] == new[1] and old[0] < new[0]


def children(type_: Type) -> tuple[Field, ...]:
    """Return the fields one level down."""
    match type_:
        case StructType(fields):
            return fields
        case ListType(element_id, element, required):
            return (Field(element_id, "element", element, required),)
        case MapType(key_id, key, value_id, value, required):
            return (Field(key_id, "key", key, required=True), Field(value_id, "value", value, required))
        case str():
            return ()


def walk(type_: Type) -> Iterator[tuple[Field, ...]]:
    """Yield every field at any depth as its path: the fields around it, outermost first, then the field."""
    for field in children(type_):
        yield (field,)
        for path in walk(field.type):
            yield (field, *path)


def map_type(type_: Type, change: Callable[[Field], Field]) -> Type:
    """Rebuild a type with `change` applied to each field one level down."""
    match type_:
        case StructType(fields):
            return StructType(tuple(change(field) for field in fields))
        case ListType():
            (element,) = map(change, children(type_))
            return ListType(element.id, element.type, element.required, type_.extra)
        case MapType():
            key, value = map(change, children(type_))
            return MapType(key.id, key.type, value.id, value.type, value.required, type_.extra)
        case str():
            return type_


def written_fields(columns: StructType) -> tuple[Field, ...]:
    """Return the columns that data files of a table have.

    Optional columns with an unknown type at any depth are left out: readers return null for them.
    """
    return tuple(field for field in columns.fields if field.required or _is_known(field.type))


def _is_known(type_: Type) -> bool:
    if isinstance(type_, str):
        return type_ in PRIMITIVES or decimal_parts(type_) is not None or fixed_length(type_) is not None
    return all(_is_known(field.type) for field in children(type_))


def type_to_json(type_: Type) -> Any:
    """Render a type as the Iceberg specification writes it."""
    match type_:
        case str():
            return type_
        case StructType(fields):
            return {"type": "struct", "fields": [_field_to_json(field) for field in fields]}
        case ListType(element_id, element, required, extra):
            document: dict[str, Any] = {
                "type": "list",
                "element-id": element_id,
                "element": type_to_json(element),
                "element-required": required,
            }
        case MapType(key_id, key, value_id, value, required, extra):
            document = {
                "type": "map",
                "key-id": key_id,
                "key": type_to_json(key),
                "value-id": value_id,
                "value": type_to_json(value),
                "value-required": required,
            }
    return _with_extra(document, extra)


def _field_to_json(field: Field) -> dict[str, Any]:
    document = {"id": field.id, "name": field.name, "required": field.required, "type": type_to_json(field.type)}
    if field.doc is not None:
        document["doc"] = field.doc
    return _with_extra(document, field.extra)


def type_from_json(document: Any) -> Type:
    """Read a type from table metadata. Raise TypeUnknown if a nested type is of a later format."""
    if isinstance(document, str):
        return document
    match document["type"]:
        case "struct":
            return StructType(tuple(_field_from_json(field) for field in document["fields"]))
        case "list":
            element = type_from_json(document["element"])
            extra = _extra_of(document, _LIST_KEYS)
            return ListType(document["element-id"], element, document["element-required"], extra)
        case "map":
            return MapType(
                document["key-id"],
                type_from_json(document["key"]),
                document["value-id"],
                type_from_json(document["value"]),
                document["value-required"],
                _extra_of(document, _MAP_KEYS),
            )
    raise TypeUnknown(f"type in table metadata is not known to this version: type={document['type']}")


def _field_from_json(document: Mapping[str, Any]) -> Field:
    return Field(
        document["id"],
        document["name"],
        type_from_json(document["type"]),
        document["required"],
        document.get("doc"),
        _extra_of(document, _FIELD_KEYS),
    )


def schema_to_json(schema: Schema) -> dict[str, Any]:
    """Render a schema as the REST catalog expects it."""
    document = {**type_to_json(schema.columns), "schema-id": schema.schema_id}
    if schema.identifier_ids:
        document["identifier-field-ids"] = list(schema.identifier_ids)
    return _with_extra(document, schema.extra)


def schema_from_json(document: Mapping[str, Any]) -> Schema:
    """Read a schema from table metadata."""
    columns = StructType(tuple(_field_from_json(field) for field in document["fields"]))
    identifier_ids = tuple(document.get("identifier-field-ids") or ())
    return Schema(document["schema-id"], columns, identifier_ids, _extra_of(document, _SCHEMA_KEYS))


def _extra_of(document: Mapping[str, Any], known: frozenset[str]) -> str | None:
    if known.issuperset(document):
        return None
    return json.dumps({key: value for key, value in document.items() if key not in known})


def _with_extra(document: dict[str, Any], extra: str | None) -> dict[str, Any]:
    return document if extra is None else document | json.loads(extra)
