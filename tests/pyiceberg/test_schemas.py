"""Schemas through JSON, against PyIceberg's models."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pyiceberg.schema import Schema

from lakefeed.iceberg.types import schema_from_json, schema_to_json


def field(field_id: int, name: str, type_: Any, **more: Any) -> dict[str, Any]:
    return {"id": field_id, "name": name, "required": False, "type": type_, **more}


def schema(*fields: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "struct", "schema-id": 3, "fields": list(fields), **more}


PRIMITIVES = [
    *("boolean", "int", "long", "float", "double", "date", "time", "timestamp", "timestamptz", "timestamp_ns"),
    *("timestamptz_ns", "string", "uuid", "binary", "fixed[3]", "decimal(10, 2)", "unknown"),
]
LIST = {"type": "list", "element-id": 4, "element": "string", "element-required": True}
MAP = {"type": "map", "key-id": 6, "key": "string", "value-id": 7, "value": "long", "value-required": False}
BOTH_KEEP = {
    "primitives": schema(*(field(i, f"c{i}", type_) for i, type_ in enumerate(PRIMITIVES, 1))),
    "nested": schema(
        field(1, "s", {"type": "struct", "fields": [field(2, "a", "int", doc="x")]}),
        field(3, "l", LIST),
        field(5, "m", MAP),
    ),
    "identifiers": schema({**field(1, "id", "long"), "required": True}, **{"identifier-field-ids": [1]}),
    "defaults": schema(field(1, "a", "int", **{"initial-default": 5, "write-default": 6})),
    "date defaults": schema(field(1, "a", "date", **{"initial-default": "2020-01-01"})),
    "names": schema(field(1, "a.b", "int"), field(2, "é 🐋", "int", doc="")),
}
ONLY_WE_KEEP = {
    "variant (#1551)": schema(field(1, "a", "variant")),
    "geometry without quotes": schema(field(1, "a", "geometry(srid:3857)")),
    "geography": schema(field(1, "a", "geography(OGC:CRS84, karney)")),
    "a later type": schema(field(1, "a", "interval_ym")),
    "default of timestamp_ns": schema(field(1, "a", "timestamp_ns", **{"initial-default": "2020-01-01T00:00:00.1"})),
    "default of a struct": schema(
        field(1, "s", {"type": "struct", "fields": [field(2, "a", "int")]}, **{"initial-default": {}})
    ),
    "unknown key of a field": schema(field(1, "a", "int", mask="secret")),
    "unknown key of a schema": schema(field(1, "a", "int"), owner="me"),
    "unknown key of a list": schema(field(3, "l", {**LIST, "element-doc": "e"})),
}


def through_ours(document: dict[str, Any]) -> Any:
    return schema_to_json(schema_from_json(document))


def through_pyiceberg(document: dict[str, Any]) -> Any:
    return json.loads(Schema.model_validate(document).model_dump_json())


def plain(value: Any) -> Any:
    """Leave out what means nothing: spaces in types, and an empty list of identifiers."""
    if isinstance(value, dict):
        kept = {key: plain(each) for key, each in value.items() if (key, each) != ("identifier-field-ids", [])}
        return kept | ({"type": value["type"].replace(" ", "")} if isinstance(value.get("type"), str) else {})
    return [plain(each) for each in value] if isinstance(value, list) else value


@pytest.mark.parametrize("name", BOTH_KEEP)
def test_schema_survives_both(name):
    document = BOTH_KEEP[name]
    assert plain(through_ours(document)) == plain(document)
    assert plain(through_pyiceberg(document)) == plain(document)
    assert plain(through_ours(through_pyiceberg(document))) == plain(document)


@pytest.mark.parametrize("name", ONLY_WE_KEEP)
def test_schema_that_pyiceberg_cannot_keep_survives_ours(name):
    assert through_ours(ONLY_WE_KEEP[name]) == ONLY_WE_KEEP[name]


@pytest.mark.xfail(strict=True, reason="PyIceberg refuses types and drops keys that it does not know")
@pytest.mark.parametrize("name", ONLY_WE_KEEP)
def test_schema_survives_pyiceberg(name):
    assert plain(through_pyiceberg(ONLY_WE_KEEP[name])) == plain(ONLY_WE_KEEP[name])
