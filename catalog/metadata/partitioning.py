"""Partition specs and sort orders as JSON: checks, comparison, and ids of partition fields."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from lakefeed.catalog.errors import BadRequest, ValidationFailed
from lakefeed.catalog.json_fields import (
    JsonObject,
    as_id,
    maybe_id,
    read_id,
    read_list,
    read_objects,
    read_text,
)
from lakefeed.catalog.metadata.schema import FieldInfo
from lakefeed.iceberg.terms import WIDE_TRANSFORMS, parse_transform
from lakefeed.iceberg.transforms import result_type

# Partition field ids start here so that they differ from the ids of the manifests' own columns.
FIRST_PARTITION_FIELD_ID = 1000

_DIRECTIONS = ("asc", "desc")
_NULL_ORDERS = ("nulls-first", "nulls-last")


def check_spec(spec: JsonObject) -> None:
    """Check a spec's shape: fields with a source, a transform and names that differ."""
    seen: set[str] = set()
    for field in read_objects(spec, "fields"):
        source_ids(field)
        name = read_text(field, "name")
        read_text(field, "transform")
        maybe_id(field, "field-id")
        if not name:
            raise ValidationFailed("Cannot use empty partition name")
        if name in seen:
            raise ValidationFailed(f"Cannot use partition name more than once: {name}")
        seen.add(name)


def check_order(order: JsonObject) -> None:
    """Check a sort order's shape: fields with a source, a transform, a direction and a null order."""
    for field in read_objects(order, "fields"):
        source_ids(field)
        read_text(field, "transform")
        if read_text(field, "direction") not in _DIRECTIONS:
            raise BadRequest(f"Invalid sort direction: {field['direction']}")
        if read_text(field, "null-order") not in _NULL_ORDERS:
            raise BadRequest(f"Invalid null order: {field['null-order']}")


def check_spec_fits(spec: Mapping[str, Any], columns: Mapping[int, FieldInfo]) -> None:
    """Check that every partition field has a source column of a type that its transform accepts."""
    for field in spec["fields"]:
        # A dropped field of a v1 table is a void transform, whose source column may be gone.
        if field["transform"] != "void":
            _check_source(field, columns, kind="partition")


def check_spec_names(spec: Mapping[str, Any], columns: Mapping[int, FieldInfo]) -> None:
    """Check that no partition field has the name of a column other than its source.

    Java binds all specs to the current schema when it reads a table, and fails if one breaks this rule. A field whose
    source was dropped may have any name.
    """
    ids_by_name = {info.name: field_id for field_id, info in columns.items()}
    for field in spec["fields"]:
        column, sources = ids_by_name.get(field["name"]), source_ids(field)
        if column is not None and sources != [column] and not columns.keys().isdisjoint(sources):
            raise ValidationFailed(
                f"Cannot create identity partition sourced from different field in schema: {field['name']}"
            )


def check_order_fits(order: Mapping[str, Any], columns: Mapping[int, FieldInfo]) -> None:
    """Check that every sort field has a source column of a type that its transform accepts."""
    for field in order["fields"]:
        _check_source(field, columns, kind="sort")


def check_sequential_ids(spec: Mapping[str, Any]) -> None:
    """Check that ids are sequential, as v1 requires, where partition fields are identified by position."""
    ids = [field["field-id"] for field in spec["fields"]]
    if ids != list(range(FIRST_PARTITION_FIELD_ID, FIRST_PARTITION_FIELD_ID + len(ids))):
        raise ValidationFailed(f"Spec does not use sequential IDs that are required in v1: {ids}")


def same_spec(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Return whether two specs have the same fields, apart from field ids."""
    return _comparable(one, ("name", "transform")) == _comparable(other, ("name", "transform"))


def same_order(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Return whether two sort orders have the same fields."""
    keys = ("transform", "direction", "null-order")
    return _comparable(one, keys) == _comparable(other, keys)


def number_spec_fields(spec: JsonObject, specs: Iterable[Mapping[str, Any]], last_partition_id: int) -> JsonObject:
    """Return a spec whose fields all have ids: that of an equal field of an older spec, or else the next one."""
    known = {_field_key(field): field["field-id"] for older in specs for field in older["fields"]}
    taken = {field["field-id"] for field in spec["fields"] if field.get("field-id") is not None}
    highest = max(last_partition_id, *taken, FIRST_PARTITION_FIELD_ID - 1)
    fields = []
    for field in spec["fields"]:
        field_id = field.get("field-id")
        if field_id is None:
            field_id = known.get(_field_key(field))
            if field_id is None or field_id in taken:
                highest += 1
                field_id = highest
            taken.add(field_id)
        fields.append({**field, "field-id": field_id})
    if len(taken) != len(fields):
        raise ValidationFailed("Cannot use partition field id more than once")
    return {**spec, "fields": fields}


def highest_partition_field_id(spec: Mapping[str, Any]) -> int:
    """Return the highest field id of a spec; the id before the first one if it is unpartitioned."""
    return max((field["field-id"] for field in spec["fields"]), default=FIRST_PARTITION_FIELD_ID - 1)


def rewrite_sources(document: JsonObject, fresh: Mapping[int, int]) -> JsonObject:
    """Return a copy of a spec or sort order with new column ids."""
    return {**document, "fields": [_rewrite_source(field, fresh) for field in document["fields"]]}


def source_ids(field: Mapping[str, Any]) -> list[int]:
    """Return the source columns of a field; v3 transforms of several columns list them."""
    if field.get("source-ids") is not None:
        return [as_id(item, "item of source-ids") for item in read_list(field, "source-ids")]
    return [read_id(field, "source-id")]


def _rewrite_source(field: JsonObject, fresh: Mapping[int, int]) -> JsonObject:
    def rewrite(old: int) -> int:
        if old not in fresh:
            raise ValidationFailed(f"Cannot find source column: {old}")
        return fresh[old]

    if field.get("source-ids") is not None:
        return {**field, "source-ids": [rewrite(old) for old in source_ids(field)]}
    return {**field, "source-id": rewrite(read_id(field, "source-id"))}


def _check_source(field: Mapping[str, Any], columns: Mapping[int, FieldInfo], *, kind: str) -> None:
    label = field.get("name") or f"{field['transform']}({source_ids(field)})"
    transform = parse_transform(field["transform"])
    # Other transforms are accepted as they are, because the specification allows writers to define some.
    if transform is None and field["transform"].partition("[")[0] in WIDE_TRANSFORMS:
        raise ValidationFailed(f"Invalid transform, needs a positive width of 32 bits: {field['transform']:.100}")
    for source in source_ids(field):
        info = columns.get(source)
        if info is None:
            raise ValidationFailed(f"Cannot find source column for {kind} field: {label}")
        if not info.is_primitive:
            raise ValidationFailed(f"Cannot {kind} by non-primitive source field: {info.name}")
        if transform is not None and result_type(transform, info.type_) is None:
            raise ValidationFailed(f"Invalid source type {info.type_name} for transform: {field['transform']}")


def _field_key(field: Mapping[str, Any]) -> tuple[tuple[int, ...], str]:
    return tuple(source_ids(field)), field["transform"]


def _comparable(document: Mapping[str, Any], keys: tuple[str, ...]) -> list[Any]:
    return [(source_ids(field), [field.get(key) for key in keys]) for field in document["fields"]]
