"""Schemas as JSON: checks, comparison, field ids, and which format version each type needs.

A schema is an object `{"type": "struct", "fields": [...], "schema-id": n, "identifier-field-ids": [...]}` whose fields
nest structs, lists and maps. Keys that this module does not know are kept.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from lakefeed.catalog.errors import BadRequest, ValidationFailed
from lakefeed.catalog.json_fields import (
    JsonObject,
    maybe_text,
    read_bool,
    read_id,
    read_objects,
    read_text,
)
from lakefeed.iceberg.types import DECIMAL_MAX_PRECISION, PRIMITIVES, decimal_parts, fixed_length

# Deeper than any real schema, shallower than Python's recursion limit.
SCHEMA_MAX_DEPTH = 100

_NESTED = ("struct", "list", "map")
_PARTS = {"list": ("element",), "map": ("key", "value")}
_SINCE_V3 = {"timestamp_ns", "timestamptz_ns", "unknown", "variant", "geometry", "geography"}
_GEOSPATIAL = re.compile(r"(geometry|geography)(\(.*\))?")
_FIXED_MAX_BYTES = 2**31 - 1  # Java reads the length as 32 bits
_DEFAULTS = ("initial-default", "write-default")


@dataclass(frozen=True, slots=True)
class FieldInfo:
    """One field of a schema, at any depth, with what other checks need to know of it."""

    name: str
    type_: Any
    type_name: str
    required: bool
    initial_default: Any
    in_collection: bool

    @property
    def is_primitive(self) -> bool:
        """Return whether the field holds a single value."""
        return self.type_name not in (*_NESTED, "variant")


def check_schema(schema: JsonObject, format_version: int) -> dict[int, FieldInfo]:
    """Check a schema for a format version and return its fields by id.

    Raises: BadRequest, ValidationFailed.
    """
    if schema.get("type") != "struct":
        raise BadRequest("Cannot parse schema: type must be struct")
    fields: dict[int, FieldInfo] = {}
    for field_id, info in _walk_struct(schema, prefix="", depth=0, in_collection=False):
        if field_id in fields:
            raise ValidationFailed(f"Multiple entries with same field id: {field_id}")
        _check_version(info, format_version)
        fields[field_id] = info
    _check_identifiers(schema, fields)
    return fields


def same_schema(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Return whether two schemas differ in their id only."""
    return _comparable_struct(one) == _comparable_struct(other) and _identifiers(one) == _identifiers(other)


def assign_fresh_ids(schema: JsonObject) -> tuple[JsonObject, dict[int, int]]:
    """Assign field ids from 1, level by level as Iceberg does; return the new schema, and old id -> new id."""
    fresh: dict[int, int] = {}

    def take(old: int) -> int:
        fresh[old] = len(fresh) + 1
        return fresh[old]

    renumbered = _renumber_type(schema, take)
    if "identifier-field-ids" in schema:
        renumbered["identifier-field-ids"] = [fresh[old] for old in schema["identifier-field-ids"] or []]
    return renumbered, fresh


def _walk_struct(
    struct: JsonObject, *, prefix: str, depth: int, in_collection: bool
) -> Iterator[tuple[int, FieldInfo]]:
    seen: set[str] = set()
    for field in read_objects(struct, "fields"):
        name = read_text(field, "name")
        if name in seen:
            raise ValidationFailed(f"Invalid schema: multiple fields for name {prefix}{name}")
        seen.add(name)
        info = FieldInfo(
            name=prefix + name,
            type_=field.get("type"),
            type_name=_type_name(field.get("type")),
            required=read_bool(field, "required"),
            initial_default=field.get("initial-default"),
            in_collection=in_collection,
        )
        maybe_text(field, "doc")
        if info.type_name == "unknown" and (info.required or any(field.get(key) is not None for key in _DEFAULTS)):
            raise ValidationFailed(f"Invalid field {info.name}: unknown must be optional with null defaults")
        yield read_id(field, "id"), info
        yield from _walk_type(field["type"], prefix=f"{info.name}.", depth=depth + 1, in_collection=in_collection)


def _walk_type(type_: Any, *, prefix: str, depth: int, in_collection: bool) -> Iterator[tuple[int, FieldInfo]]:
    if isinstance(type_, str):
        return
    if depth > SCHEMA_MAX_DEPTH:
        raise BadRequest(f"Invalid schema: nested deeper than {SCHEMA_MAX_DEPTH} levels")
    if type_["type"] == "struct":
        yield from _walk_struct(type_, prefix=prefix, depth=depth, in_collection=in_collection)
        return
    for part in _PARTS[type_["type"]]:
        required = part == "key" or read_bool(type_, f"{part}-required")
        info = FieldInfo(
            f"{prefix}{part}", type_.get(part), _type_name(type_.get(part)), required, None, in_collection=True
        )
        yield read_id(type_, f"{part}-id"), info
        yield from _walk_type(type_[part], prefix=f"{info.name}.", depth=depth + 1, in_collection=True)


def _type_name(type_: Any) -> str:
    """Return the name of a type without its parameters; check that Iceberg has the type."""
    if isinstance(type_, dict) and type_.get("type") in _NESTED:
        return str(type_["type"])
    if not isinstance(type_, str):
        raise BadRequest(f"Cannot parse type from json: {type_!r}")
    if type_ in PRIMITIVES or type_ in _SINCE_V3:
        return type_
    if (digits := decimal_parts(type_)) is not None and digits[0] > 0 and max(digits) <= DECIMAL_MAX_PRECISION:
        return "decimal"
    if (length := fixed_length(type_)) is not None and length <= _FIXED_MAX_BYTES:
        return "fixed"
    if (match := _GEOSPATIAL.fullmatch(type_)) is not None:
        return str(match[1])
    raise BadRequest(f"Cannot parse type string to primitive: {type_}")


def _check_version(info: FieldInfo, format_version: int) -> None:
    if format_version >= 3:  # noqa: PLR2004 - the format version that brought these
        return
    if info.type_name in _SINCE_V3:
        raise ValidationFailed(
            f"Invalid schema for v{format_version}: Invalid type for {info.name}: "
            f"{info.type_name} is not supported until v3"
        )
    if info.initial_default is not None:
        raise ValidationFailed(
            f"Invalid schema for v{format_version}: Invalid initial default for {info.name}: "
            f"non-null default ({info.initial_default}) is not supported until v3"
        )


def _check_identifiers(schema: JsonObject, fields: Mapping[int, FieldInfo]) -> None:
    listed = schema.get("identifier-field-ids")
    if listed is not None and not isinstance(listed, list):
        raise BadRequest("Cannot parse identifier-field-ids: expected a list")
    for field_id in listed or []:
        info = fields.get(field_id) if isinstance(field_id, int) else None
        if info is None:
            reason = "field does not exist"
        elif not info.is_primitive:
            reason = "not a primitive type field"
        elif not info.required:
            reason = "not a required field"
        elif info.type_name in ("float", "double"):
            reason = "must not be float or double field"
        elif info.in_collection:
            reason = "must not be nested in a list or map"
        else:
            continue
        raise ValidationFailed(f"Cannot add fieldId {field_id} as an identifier field: {reason}")


def _identifiers(schema: Mapping[str, Any]) -> set[int]:
    return set(schema.get("identifier-field-ids") or [])


def _comparable_struct(struct: Mapping[str, Any]) -> list[Any]:
    return [_comparable_field(field) for field in struct["fields"]]


def _comparable_field(field: Mapping[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in field.items() if value is not None}
    kept["required"] = bool(field.get("required"))
    kept["type"] = _comparable_type(field["type"])
    return kept


def _comparable_type(type_: Any) -> Any:
    if isinstance(type_, str):
        return type_.replace(" ", "")
    if type_["type"] == "struct":
        return _comparable_struct(type_)
    parts = _PARTS[type_["type"]]
    return {**type_, **{part: _comparable_type(type_[part]) for part in parts}}


def _renumber_type(type_: Any, take: Callable[[int], int]) -> Any:
    """Return a copy of a type with new ids. All ids of one level are taken before those of nested levels."""
    if isinstance(type_, str):
        return type_
    if type_["type"] == "struct":
        ids = [take(field["id"]) for field in type_["fields"]]
        numbered = zip(ids, type_["fields"], strict=True)
        fields = [{**field, "id": new, "type": _renumber_type(field["type"], take)} for new, field in numbered]
        return {**type_, "fields": fields}
    parts = _PARTS[type_["type"]]
    ids_by_part = {f"{part}-id": take(type_[f"{part}-id"]) for part in parts}
    return {**type_, **ids_by_part, **{part: _renumber_type(type_[part], take) for part in parts}}
