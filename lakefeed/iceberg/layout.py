"""Partition specs and sort orders: their JSON, the settings they come from, and partition paths. Pure.

What they do to rows is in arrow.py. A sort order is a promise about the rows inside each data file that names it, so
that engines can skip row groups and pages.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias
from urllib.parse import quote_plus

import numpy as np

from lakefeed.iceberg.terms import (
    PartitionRejected,
    SortRejected,
    Transform,
    parse_partition_terms,
    parse_sort_terms,
    parse_transform,
)
from lakefeed.iceberg.transforms import TIME_UNITS, result_type
from lakefeed.iceberg.types import Field, Schema, StructType, Type, type_name, walk

# One value per field of the spec: dates and times as Iceberg's integers, decimals as Decimal, None for null.
Partition: TypeAlias = tuple[Any, ...]

FIRST_PARTITION_FIELD_ID = 1000  # fixed by the specification for tables of format 2 and above
SEVERAL_SOURCES = -1  # a transform of several columns: format 3 allows them, but none is defined yet

# Of a value in a directory's name, after quoting. File systems end at 255 bytes a name, object stores at 1,024 a path;
# readers take the value from the manifest, so a name that is cut short only looks shorter.
PATH_VALUE_MAX_BYTES = 160
_CUT_CHARACTERS = PATH_VALUE_MAX_BYTES // len("%F0%9F%90%8B")  # the longest that one character becomes

_NAME_SUFFIXES = {"bucket": "bucket_{}", "truncate": "trunc_{}"}
_NUMPY_UNITS = {"date": "D", "timestamp": "us", "timestamptz": "us", "timestamp_ns": "ns", "timestamptz_ns": "ns"}


@dataclass(frozen=True, slots=True)
class PartitionField:
    """One column of a spec: a transform of a table column."""

    source_id: int
    field_id: int
    name: str
    transform: str


@dataclass(frozen=True, slots=True)
class PartitionSpec:
    """How a table's rows are put into partitions."""

    spec_id: int
    fields: tuple[PartitionField, ...]


@dataclass(frozen=True, slots=True)
class SortField:
    """One key of a sort order: a transform of a table column."""

    source_id: int
    transform: str
    is_descending: bool
    nulls_first: bool


@dataclass(frozen=True, slots=True)
class SortOrder:
    """How rows lie in a data file; 0 is the order without keys, by the specification."""

    order_id: int
    fields: tuple[SortField, ...]


UNSORTED = SortOrder(0, ())


def spec_from_json(document: Mapping[str, Any]) -> PartitionSpec:
    """Read a spec from table metadata."""
    fields = (
        PartitionField(f.get("source-id", SEVERAL_SOURCES), f["field-id"], f["name"], f["transform"])
        for f in document["fields"]
    )
    return PartitionSpec(document["spec-id"], tuple(fields))


def fields_to_json(spec: PartitionSpec) -> list[dict[str, Any]]:
    """Render the fields of a spec, as manifests hold them."""
    return [
        {"source-id": f.source_id, "field-id": f.field_id, "name": f.name, "transform": f.transform}
        for f in spec.fields
    ]


def spec_to_json(spec: PartitionSpec) -> dict[str, Any]:
    """Render a spec as the REST catalog takes it."""
    return {"spec-id": spec.spec_id, "fields": fields_to_json(spec)}


def order_from_json(document: Mapping[str, Any]) -> SortOrder:
    """Read a sort order from table metadata."""
    fields = (
        SortField(
            f.get("source-id", SEVERAL_SOURCES),
            f["transform"],
            is_descending=f["direction"] == "desc",
            nulls_first=f["null-order"] == "nulls-first",
        )
        for f in document["fields"]
    )
    return SortOrder(document["order-id"], tuple(fields))


def order_to_json(order: SortOrder) -> dict[str, Any]:
    """Render a sort order as the REST catalog takes it."""
    fields = [
        {
            "source-id": field.source_id,
            "transform": field.transform,
            "direction": "desc" if field.is_descending else "asc",
            "null-order": "nulls-first" if field.nulls_first else "nulls-last",
        }
        for field in order.fields
    ]
    return {"order-id": order.order_id, "fields": fields}


def parse_partition(text: str, schema: Schema) -> PartitionSpec:
    """Read the setting `partition` for a table's columns; terms.py has its grammar.

    Raises: PartitionRejected if a term cannot be parsed, or its column is missing or of a type that it does not take.
    """
    fields = []
    for field_id, term in enumerate(parse_partition_terms(text), FIRST_PARTITION_FIELD_ID):
        source = find_column(term.column, schema)
        if source is None:
            raise PartitionRejected(f"partition names an unknown column: term={term.transform}({term.column})")
        transform = transform_for(term.transform, source.type)
        # Named as other writers do; the width is in the name, so that another width gets another name.
        suffix = _NAME_SUFFIXES.get(transform.kind, transform.kind).format(transform.width)
        name = term.column if transform.is_identity else f"{term.column}_{suffix}"
        fields.append(PartitionField(source.id, field_id, name, term.transform))
    return PartitionSpec(0, tuple(fields))


def parse_sort(text: str, schema: Schema) -> SortOrder:
    """Read the setting `sort` for a table's columns; terms.py has its grammar.

    Raises: SortRejected if a key cannot be parsed, or its column is missing or cannot be sorted by.
    """
    fields = []
    for term in parse_sort_terms(text):
        source = find_column(term.column, schema)
        if source is None:
            raise SortRejected(f"sort names an unknown column: column={term.column}")
        _check_sort_transform(term.transform, source.type)
        fields.append(SortField(source.id, term.transform, term.is_descending, term.nulls_first))
    return SortOrder(1, tuple(fields)) if fields else UNSORTED


def _check_sort_transform(transform: str, source: Type) -> None:
    try:
        transform_for(transform, source)
    except PartitionRejected as error:
        raise SortRejected(f"sort key is not for this type: transform={transform}") from error


def find_column(name: str, schema: Schema) -> Field | None:
    """Find a column by its name, or a field inside structs by its path: `address.zip`."""
    nested = (path[-1] for path in _paths(schema) if ".".join(field.name for field in path) == name)
    return schema.columns.field(name) or next(nested, None)


def _find_source(source_id: int, schema: Schema) -> tuple[Field, ...] | None:
    """Find a field by its id, with the structs around it from the outside in."""
    return next((path for path in _paths(schema) if path[-1].id == source_id), None)


def _paths(schema: Schema) -> Iterator[tuple[Field, ...]]:
    """Yield the fields that rows have one value of: columns, and fields inside structs."""
    return (path for path in walk(schema.columns) if all(isinstance(outer.type, StructType) for outer in path[:-1]))


def transform_for(text: str, source: Type) -> Transform:
    """Read a transform for a column of a type.

    Raises: PartitionRejected if the transform is not known, or does not take this type.
    """
    transform = parse_transform(text)
    if transform is None:
        raise PartitionRejected(f"partition transform is not known: transform={text}")
    if result_type(transform, source) is None:
        raise PartitionRejected(
            f"partition transform does not take this type: transform={text} type={type_name(source)}"
        )
    return transform


def same_partitioning(one: PartitionSpec, other: PartitionSpec) -> bool:
    """Return whether two specs put rows into the same partitions, whatever their fields are called."""
    # A void field is what format 1 left of a dropped one: it separates no rows.
    first, second = (
        [(field.source_id, field.transform) for field in spec.fields if field.transform != "void"]
        for spec in (one, other)
    )
    return first == second


def with_known_ids(spec: PartitionSpec, known: Iterable[PartitionSpec], *, last_field_id: int) -> PartitionSpec:
    """Return the spec with the ids and names of equal fields in the table's specs, and the next free ids otherwise.

    The specification requires it: readers join the partitions of all specs by field id.
    """
    older = {(field.source_id, field.transform): field for each in known for field in each.fields}
    fields = []
    for field in spec.fields:
        found = older.get((field.source_id, field.transform))
        if found is None:
            last_field_id += 1
        fields.append(found or replace(field, field_id=last_field_id))
    return replace(spec, fields=tuple(fields))


def partition_source(field: PartitionField, schema: Schema) -> tuple[Field, ...]:
    """Return the path of a partition field's column. Raise PartitionRejected if the schema has no such column."""
    path = _find_source(field.source_id, schema)
    if path is None:
        raise PartitionRejected(
            f"partition field has no column in the schema: field={field.name} source_id={field.source_id}"
        )
    return path


def partition_types(spec: PartitionSpec, schema: Schema) -> tuple[str, ...]:
    """Return the types of a spec's partition values. Raise PartitionRejected if a transform is not supported."""
    types = []
    for field in spec.fields:
        source = partition_source(field, schema)[-1].type
        type_ = result_type(transform_for(field.transform, source), source)
        assert type_ is not None, "transform_for has checked it"
        types.append(type_)
    return tuple(types)


def sort_source(field: SortField, schema: Schema) -> tuple[Field, ...]:
    """Return the path of a sort key's column.

    Raises: SortRejected if the schema has no such column, or the transform does not take its type.
    """
    path = _find_source(field.source_id, schema)
    if path is None:
        raise SortRejected(f"sort field has no column in the schema: source_id={field.source_id}")
    _check_sort_transform(field.transform, path[-1].type)
    return path


def partition_path(partition: Partition, spec: PartitionSpec, schema: Schema) -> str:
    """Name a partition's directory, as `_cdc_timestamp_day=2026-11-16`; empty for a table without partitions."""
    parts = []
    for value, field, type_ in zip(partition, spec.fields, partition_types(spec, schema), strict=True):
        text = "null" if value is None else _value_text(value, field.transform, type_)
        quoted = quote_plus(text)
        shown = quoted if len(quoted) <= PATH_VALUE_MAX_BYTES else quote_plus(text[:_CUT_CHARACTERS])
        parts.append(f"{quote_plus(field.name)}={shown}")
    return "/".join(parts)


def _value_text(value: Any, transform: str, type_: str) -> str:
    if transform in TIME_UNITS:
        return _moment_text(value, TIME_UNITS[transform]).replace("T", "-")
    if type_ in _NUMPY_UNITS:
        return _moment_text(value, _NUMPY_UNITS[type_])
    if isinstance(value, bool):
        return str(value).lower()
    return value.hex() if isinstance(value, bytes) else str(value)


def _moment_text(value: int, unit: str) -> str:
    return str(np.array(value, dtype=np.int64).view(f"M8[{unit}]"))
