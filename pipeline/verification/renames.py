"""Columns of a change table by the names that its mirror has for them. Core: owns finding these, by field ids.

A mirror is compared as of the snapshot that it has merged, with the columns of then. It follows renames before the
first batch behind them, so that for a while it has names that the snapshot has not, or that the table has no longer: it
has those of one of the table's schemas, as a whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pyspark.sql.types import ArrayType, DataType, MapType, StructType

from pipeline.table_documents import current_fields, fields_of
from writer.columns import RESERVED_PREFIX

Fields = Sequence[Mapping[str, Any]]


def fields_as_of(document: Mapping[str, Any], snapshot_id: int) -> Fields:
    """Give the columns that a table had at one of its snapshots."""
    found: Mapping[str, Any] = next((each for each in document["snapshots"] if each["snapshot-id"] == snapshot_id), {})
    schema_id = found.get("schema-id")
    return current_fields(document) if schema_id is None else fields_of(document, schema_id)


def fields_in(mirror: StructType, document: Mapping[str, Any], snapshot_id: int) -> Fields:
    """Give the columns of then under the names that a mirror has for them; as they were if it has none of them all."""
    then = fields_as_of(document, snapshot_id)
    for schema in _newest_first(document):
        renamed = _renamed(then, dict(_names(schema["fields"])))
        if len({field["name"] for field in renamed}) == len(renamed) and _has_all(mirror, renamed):
            return renamed
    return then


def _newest_first(document: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    current = document["current-schema-id"]
    return sorted(document["schemas"], key=lambda each: (each["schema-id"] == current, each["schema-id"]), reverse=True)


def _inner(type_: Any) -> Iterator[tuple[str, Any]]:
    """Give the types inside of one, by where they stand."""
    match type_:
        case {"type": "list", "element": element}:
            yield "element", element
        case {"type": "map", "key": key, "value": value}:
            yield "key", key
            yield "value", value


def _names(fields: Fields) -> Iterator[tuple[int, str]]:
    for field in fields:
        yield field["id"], field["name"]
        yield from _names_inside(field["type"])


def _names_inside(type_: Any) -> Iterator[tuple[int, str]]:
    if isinstance(type_, Mapping) and type_["type"] == "struct":
        yield from _names(type_["fields"])
    for _, each in _inner(type_):
        yield from _names_inside(each)


def _renamed(fields: Fields, names: Mapping[int, str]) -> Fields:
    return [
        {**field, "name": names.get(field["id"], field["name"]), "type": _type_renamed(field["type"], names)}
        for field in fields
    ]


def _type_renamed(type_: Any, names: Mapping[int, str]) -> Any:
    if not isinstance(type_, Mapping):
        return type_
    if type_["type"] == "struct":
        return {**type_, "fields": _renamed(type_["fields"], names)}
    return {**type_, **{place: _type_renamed(each, names) for place, each in _inner(type_)}}


def _has_all(schema: StructType, fields: Fields) -> bool:
    present = set(schema.names)
    return all(
        field["name"] in present and _has_inside(schema[field["name"]].dataType, field["type"])
        for field in fields
        if not field["name"].startswith(RESERVED_PREFIX)  # a mirror has but some of our own, and they keep their names
    )


def _has_inside(kind: DataType, type_: Any) -> bool:
    if isinstance(kind, StructType) and isinstance(type_, Mapping) and type_["type"] == "struct":
        return _has_all(kind, type_["fields"])
    inside = dict(_inner(type_))
    if isinstance(kind, ArrayType) and "element" in inside:
        return _has_inside(kind.elementType, inside["element"])
    if isinstance(kind, MapType) and "value" in inside:
        return _has_inside(kind.keyType, inside["key"]) and _has_inside(kind.valueType, inside["value"])
    return True
