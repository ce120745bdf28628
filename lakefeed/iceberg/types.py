"""Iceberg types, fields and schemas as values. Owns their JSON form and their Arrow form, and nothing of evolution.

A primitive is its Iceberg name ("long", "decimal(10,2)"); nested types are the classes below. Field ids live in
fields, as in the table metadata; Arrow fields carry them as PARQUET:field_id so that files and tables agree.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import pyarrow as pa

from lakefeed.contract.errors import TypeUnknown

# --- writer.types -----------------------------------------------------------------------------------------------------


FIELD_ID_KEY = b"PARQUET:field_id"

# The id of a field that no table has numbered yet.
UNNUMBERED = 0

_DEFAULTS = ("initial-default", "write-default")

_DECIMAL = re.compile(r"decimal\((\d+),\s*(\d+)\)")
_FIXED = re.compile(r"fixed\[(\d+)\]")

# Primitive types that have no parameters, and the Arrow types of their values in files.
PRIMITIVES: Mapping[str, pa.DataType] = {
    "boolean": pa.bool_(),
    "int": pa.int32(),
    "long": pa.int64(),
    "float": pa.float32(),
    "double": pa.float64(),
    "date": pa.date32(),
    "time": pa.time64("us"),
    "timestamp": pa.timestamp("us"),
    "timestamptz": pa.timestamp("us", tz="UTC"),
    "timestamp_ns": pa.timestamp("ns"),
    "timestamptz_ns": pa.timestamp("ns", tz="UTC"),
    "string": pa.string(),
    "uuid": pa.binary(16),
    "binary": pa.binary(),
}


@dataclass(frozen=True, slots=True)
class Field:
    """One named field of a struct. `doc` is its comment, in which rows/column_notes.py remembers things.

    `defaults` are what others have said its values are where files or rows have none: kept as JSON text, for them.
    """

    id: int
    name: str
    type: Type
    required: bool = False
    doc: str | None = None
    defaults: str | None = None


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


@dataclass(frozen=True, slots=True)
class MapType:
    """A map whose key and value have field ids of their own."""

    key_id: int
    key: Type
    value_id: int
    value: Type
    value_required: bool = False


Type: TypeAlias = str | StructType | ListType | MapType


@dataclass(frozen=True, slots=True)
class Schema:
    """A table's columns under the id that the catalog gave this version of them.

    Of the key that others may have declared we only see to it that it stays.
    """

    schema_id: int
    columns: StructType
    identifier_ids: tuple[int, ...] = ()


def type_to_json(type_: Type) -> Any:
    """Render a type as the Iceberg specification writes it."""
    match type_:
        case str():
            return type_
        case StructType(fields):
            return {"type": "struct", "fields": [_field_to_json(field) for field in fields]}
        case ListType(element_id, element, required):
            return {
                "type": "list",
                "element-id": element_id,
                "element": type_to_json(element),
                "element-required": required,
            }
        case MapType(key_id, key, value_id, value, required):
            return {
                "type": "map",
                "key-id": key_id,
                "key": type_to_json(key),
                "value-id": value_id,
                "value": type_to_json(value),
                "value-required": required,
            }


def _field_to_json(field: Field) -> dict[str, Any]:
    document = {"id": field.id, "name": field.name, "required": field.required, "type": type_to_json(field.type)}
    if field.doc is not None:
        document["doc"] = field.doc
    return document if field.defaults is None else document | json.loads(field.defaults)


def type_from_json(document: Any) -> Type:
    """Read a type from table metadata."""
    if isinstance(document, str):
        return document
    match document["type"]:
        case "struct":
            return StructType(tuple(_field_from_json(field) for field in document["fields"]))
        case "list":
            element = type_from_json(document["element"])
            return ListType(document["element-id"], element, document["element-required"])
        case "map":
            return MapType(
                document["key-id"],
                type_from_json(document["key"]),
                document["value-id"],
                type_from_json(document["value"]),
                document["value-required"],
            )
    raise TypeUnknown(f"type in table metadata is not known here: type={document['type']}")


def _field_from_json(document: Mapping[str, Any]) -> Field:
    defaults = {key: document[key] for key in _DEFAULTS if key in document}
    return Field(
        document["id"],
        document["name"],
        type_from_json(document["type"]),
        document["required"],
        document.get("doc"),
        json.dumps(defaults) if defaults else None,
    )


def schema_to_json(schema: Schema) -> dict[str, Any]:
    """Render a schema as the REST catalog takes it."""
    document = {**type_to_json(schema.columns), "schema-id": schema.schema_id}
    return document | {"identifier-field-ids": list(schema.identifier_ids)} if schema.identifier_ids else document


def schema_from_json(document: Mapping[str, Any]) -> Schema:
    """Read a schema from table metadata."""
    columns = type_from_json({"type": "struct", "fields": document["fields"]})
    assert isinstance(columns, StructType)
    return Schema(document["schema-id"], columns, tuple(document.get("identifier-field-ids") or ()))


def written_fields(columns: StructType) -> tuple[Field, ...]:
    """Give the columns that files of a table have.

    An optional one of a type that is not known here, at any depth, is left out: readers then show null.
    """
    return tuple(field for field in columns.fields if field.required or _is_known(field.type))


def _is_known(type_: Type) -> bool:
    match type_:
        case StructType(fields):
            return all(_is_known(field.type) for field in fields)
        case ListType(_, element, _):
            return _is_known(element)
        case MapType(_, key, _, value, _):
            return _is_known(key) and _is_known(value)
        case str():
            return any((type_ in PRIMITIVES, _DECIMAL.fullmatch(type_), _FIXED.fullmatch(type_)))


def to_arrow_schema(schema: Schema) -> pa.Schema:
    """Build the Arrow schema of a table's files, field ids included."""
    return pa.schema([to_arrow_field(field) for field in written_fields(schema.columns)])


def to_arrow_field(field: Field) -> pa.Field:
    """Build an Arrow field that carries its Iceberg field id."""
    return _arrow_field(field.name, field.id, to_arrow_type(field.type), required=field.required)


def to_arrow_type(type_: Type) -> pa.DataType:
    """Map an Iceberg type to the Arrow type that Parquet files of the table use."""
    match type_:
        case StructType(fields):
            return pa.struct([to_arrow_field(field) for field in fields])
        case ListType(element_id, element, required):
            return pa.list_(_arrow_field("element", element_id, to_arrow_type(element), required=required))
        case MapType(key_id, key, value_id, value, required):
            return pa.map_(
                _arrow_field("key", key_id, to_arrow_type(key), required=True),
                _arrow_field("value", value_id, to_arrow_type(value), required=required),
            )
        case str():
            return _primitive_to_arrow(type_)


def _primitive_to_arrow(name: str) -> pa.DataType:
    if name in PRIMITIVES:
        return PRIMITIVES[name]
    if decimal := _DECIMAL.fullmatch(name):
        return pa.decimal128(int(decimal[1]), int(decimal[2]))
    if fixed := _FIXED.fullmatch(name):
        return pa.binary(int(fixed[1]))
    raise TypeUnknown(f"type is not known here: type={name}")


def _arrow_field(name: str, field_id: int, type_: pa.DataType, *, required: bool) -> pa.Field:
    return pa.field(name, type_, nullable=not required, metadata={FIELD_ID_KEY: str(field_id).encode()})


DECIMAL_MAX_PRECISION = 38
_DECIMAL_TYPE = re.compile(r"decimal\((\d+),\s*(\d+)\)")


def decimal_parts(type_: str) -> tuple[int, int] | None:
    """Give precision and scale of a decimal type, None for another type."""
    match = _DECIMAL_TYPE.fullmatch(type_)
    return (int(match[1]), int(match[2])) if match else None
