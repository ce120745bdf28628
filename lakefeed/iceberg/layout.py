"""Partition specs: their JSON, the setting they come from, the partition of rows, and partition paths. Owns no files.

What a transform does to a column is in transform_arrays.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias
from urllib.parse import quote_plus

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from lakefeed.iceberg.terms import (
    PartitionRejected,
    PartitionTerm,
    SortRejected,
    SortTerm,
    Transform,
    parse_partition_terms,
    parse_sort_terms,
    parse_transform,
)
from lakefeed.iceberg.transform_arrays import NUMPY_UNITS, TIME_UNITS, apply_transform, result_type
from lakefeed.iceberg.types import Field, Schema, StructType, Type

# --- writer.iceberg.partitions ----------------------------------------------------------------------------------------


# One value per field of the spec: dates and times as Iceberg's integers, decimals as Decimal, None for null.
Partition: TypeAlias = tuple[Any, ...]

FIRST_PARTITION_FIELD_ID = 1000  # fixed by the specification for tables of format 2 and above
SEVERAL_SOURCES = -1  # a transform of several columns, which format 3 allows and nobody has defined yet

# Of a value in a directory's name, after quoting. File systems end at 255 bytes a name, object stores at 1,024 a path;
# readers take the value from the manifest, so a name that is cut short only looks shorter.
PATH_VALUE_MAX_BYTES = 160
_CUT_CHARACTERS = PATH_VALUE_MAX_BYTES // len("%F0%9F%90%8B")  # the longest that one character becomes

_NAME_SUFFIXES = {"bucket": "bucket_{}", "truncate": "trunc_{}"}


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


def parse_partition(text: str, schema: Schema) -> PartitionSpec:
    """Read the setting `partition` for a table's columns; terms.py has its grammar.

    Raises:
        PartitionRejected: a term is not understood, or its column is missing or of a type that it does not take.
    """
    fields = (
        _field_of(term, schema, FIRST_PARTITION_FIELD_ID + number)
        for number, term in enumerate(parse_partition_terms(text))
    )
    return PartitionSpec(0, tuple(fields))


def _field_of(term: PartitionTerm, schema: Schema, field_id: int) -> PartitionField:
    source = find_column(term.column, schema)
    if source is None:
        raise PartitionRejected(f"partition names an unknown column: term={term.transform}({term.column})")
    result_type(term.transform, source.type)
    return PartitionField(source.id, field_id, _field_name(term), term.transform)


def find_column(name: str, schema: Schema) -> Field | None:
    """Find a column by its name, or a field inside structs by its path: `address.zip`."""
    field = schema.columns.field(name)
    struct, dot, rest = name.partition(".")
    if field is not None or not dot:
        return field
    outer = schema.columns.field(struct)
    if outer is None or not isinstance(outer.type, StructType):
        return None
    return find_column(rest, Schema(schema.schema_id, outer.type))


def _field_name(term: PartitionTerm) -> str:
    """Name a partition field as other writers do; the width is in it, so that another width is another name."""
    transform = parse_transform(term.transform)
    if transform.kind == "identity":
        return term.column
    return f"{term.column}_{_NAME_SUFFIXES.get(transform.kind, transform.kind).format(transform.width)}"


def same_partitioning(one: PartitionSpec, other: PartitionSpec) -> bool:
    """Tell whether two specs put rows into the same partitions, whatever their fields are called."""
    return _sources_of(one) == _sources_of(other)


def _sources_of(spec: PartitionSpec) -> list[tuple[int, str]]:
    # A void field is what format 1 left of a dropped one: it parts nothing.
    return [(field.source_id, field.transform) for field in spec.fields if field.transform != "void"]


def with_known_ids(spec: PartitionSpec, known: Iterable[PartitionSpec], *, last_field_id: int) -> PartitionSpec:
    """Give each field the id and name of an equal one in the table's specs, or else the next free id.

    The specification asks for it: readers join the partitions of all specs by field id.
    """
    older = {(field.source_id, field.transform): field for each in known for field in each.fields}
    fields = []
    for field in spec.fields:
        found = older.get((field.source_id, field.transform))
        if found is None:
            last_field_id += 1
        fields.append(found or replace(field, field_id=last_field_id))
    return replace(spec, fields=tuple(fields))


def partition_types(spec: PartitionSpec, schema: Schema) -> tuple[str, ...]:
    """Give the types of a spec's partition values.

    Raises:
        PartitionRejected: a transform is not supported.
    """
    return tuple(result_type(f.transform, _find_source(f, schema)[-1].type) for f in spec.fields)


def _find_source(field: PartitionField, schema: Schema) -> tuple[Field, ...]:
    path = find_path(schema.columns, field.source_id)
    if path is None:
        raise PartitionRejected(
            f"partition field has no column in the schema: field={field.name} source_id={field.source_id}"
        )
    return path


def find_path(struct: StructType, field_id: int) -> tuple[Field, ...] | None:
    """Find a field and the structs around it, from the outside in."""
    for field in struct.fields:
        if field.id == field_id:
            return (field,)
        if isinstance(field.type, StructType) and (rest := find_path(field.type, field_id)):
            return (field, *rest)
    return None


def values_at(table: pa.Table, path: tuple[Field, ...]) -> pa.ChunkedArray:
    """Give the values of a column, or of a field inside structs."""
    values = table.column(path[0].name)
    for nested in path[1:]:
        values = pc.struct_field(values, nested.name)
    return values


def split_by_partition(table: pa.Table, spec: PartitionSpec, schema: Schema) -> list[tuple[Partition, pa.Table]]:
    """Split rows by partition, keeping their order within each.

    Raises:
        PartitionRejected: a transform is not supported.
    """
    if table.num_rows == 0:
        return []
    columns = [_Column.of(table, field, schema) for field in spec.fields]
    whole = [column.single_value() for column in columns]
    if all(value is not None for value in whole):
        return [(tuple(value.value for value in whole if value is not None), table)]
    return _split_by_keys(table, [column.keys() for column in columns])


@dataclass(frozen=True, slots=True)
class _Single:
    """A value that all rows share; it wraps the value because the value may be None."""

    value: Any


@dataclass(frozen=True, slots=True)
class _Column:
    """A partition field's column and its transform."""

    transform: Transform
    source_type: str
    values: pa.ChunkedArray

    @classmethod
    def of(cls, table: pa.Table, field: PartitionField, schema: Schema) -> _Column:
        path = _find_source(field, schema)
        source_type = path[-1].type
        result_type(field.transform, source_type)
        assert isinstance(source_type, str)
        return cls(parse_transform(field.transform), source_type, values_at(table, path))

    def single_value(self) -> _Single | None:
        """Find the value that all rows share, from the ends of the column; None if there may be several."""
        if self.transform.kind == "void" or self.values.null_count == len(self.values):
            return _Single(None)
        if self.values.null_count or self.source_type in {"float", "double"}:  # min_max passes over NaN
            return None
        ends = pc.min_max(self.values)
        # All transforms but this one rise with their column, so that what lies between two ends of one value has it.
        if self.transform.kind == "bucket" and ends["min"] != ends["max"]:
            return None
        # Arrow's own scalars: Python has no times in nanoseconds, nor any beyond its years 1 to 9999.
        low, high = self._transform(pa.array([ends["min"], ends["max"]], self.values.type)).to_pylist()
        return _Single(low) if low == high else None

    def keys(self) -> pa.Array:
        """Compute the partition value of each row."""
        return self._transform(self.values.combine_chunks())

    def _transform(self, values: pa.Array) -> pa.Array:
        return apply_transform(self.transform, self.source_type, values)


def _split_by_keys(table: pa.Table, keys: list[pa.Array]) -> list[tuple[Partition, pa.Table]]:
    codes = np.zeros(table.num_rows, dtype=np.int64)
    for key in keys:
        encoded = pc.dictionary_encode(key, null_encoding="encode")
        codes = codes * len(encoded.dictionary) + encoded.indices.to_numpy(zero_copy_only=False)
        # Renumbered at every step, so that the product stays below rows x distinct values whatever the fields.
        codes = np.unique(codes, return_inverse=True)[1]
    order = np.argsort(codes, kind="stable")
    starts = np.flatnonzero(np.diff(codes[order], prepend=-1))
    ends = np.append(starts[1:], table.num_rows)
    grouped = table.take(pa.array(order))
    return [
        (tuple(key[int(order[start])].as_py() for key in keys), grouped.slice(int(start), int(end - start)))
        for start, end in zip(starts, ends, strict=True)
    ]


def partition_path(partition: Partition, spec: PartitionSpec, schema: Schema) -> str:
    """Name a partition's directory, as `_cdc_timestamp_day=2026-11-16`; empty for a table without partitions."""
    return "/".join(_path_parts(partition, spec, schema))


def _path_parts(partition: Partition, spec: PartitionSpec, schema: Schema) -> Iterator[str]:
    for value, field, type_ in zip(partition, spec.fields, partition_types(spec, schema), strict=True):
        text = "null" if value is None else _value_text(value, parse_transform(field.transform), type_)
        quoted = quote_plus(text)
        shown = quoted if len(quoted) <= PATH_VALUE_MAX_BYTES else quote_plus(text[:_CUT_CHARACTERS])
        yield f"{quote_plus(field.name)}={shown}"


def _value_text(value: Any, transform: Transform, type_: str) -> str:
    if transform.kind in TIME_UNITS:
        return _moment_text(value, TIME_UNITS[transform.kind]).replace("T", "-")
    if type_ in NUMPY_UNITS:
        return _moment_text(value, NUMPY_UNITS[type_])
    if isinstance(value, bool):
        return str(value).lower()
    return value.hex() if isinstance(value, bytes) else str(value)


def _moment_text(value: int, unit: str) -> str:
    return str(np.array(value, dtype=np.int64).view(f"M8[{unit}]"))


# --- writer.iceberg.sort_orders ---------------------------------------------------------------------------------------
#
# Sort orders: their JSON, the setting they come from, and rows put in order. Owns no files.
#
# A table's sort order is a promise about the rows inside each data file that names it, so that engines can skip row
# groups and pages. Not a number counts as larger than all numbers, as the specification says.


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


def parse_sort(text: str, schema: Schema) -> SortOrder:
    """Read the setting `sort` for a table's columns; terms.py has its grammar.

    Raises:
        SortRejected: a key is not understood, or its column is missing or cannot be sorted by.
    """
    fields = tuple(_sort_orders_field_of(term, schema) for term in parse_sort_terms(text))
    return SortOrder(1, fields) if fields else UNSORTED


def _sort_orders_field_of(term: SortTerm, schema: Schema) -> SortField:
    source = find_column(term.column, schema)
    if source is None:
        raise SortRejected(f"sort names an unknown column: column={term.column}")
    _check_transform(term.transform, source.type)
    return SortField(source.id, term.transform, term.is_descending, term.nulls_first)


def _check_transform(transform: str, source: Type) -> None:
    try:
        result_type(transform, source)
    except PartitionRejected as error:
        raise SortRejected(f"sort key is not for this type: transform={transform}") from error


def check_order(order: SortOrder, schema: Schema) -> None:
    """Raise SortRejected unless every column and transform of the order is known here."""
    for field in order.fields:
        _source_of(field, schema)


def _source_of(field: SortField, schema: Schema) -> tuple[Field, ...]:
    path = find_path(schema.columns, field.source_id)
    if path is None:
        raise SortRejected(f"sort field has no column in the schema: source_id={field.source_id}")
    _check_transform(field.transform, path[-1].type)
    return path


def apply_order(table: pa.Table, order: SortOrder, schema: Schema) -> pa.Table:
    """Sort rows; rows that are equal by the order keep theirs. The table itself if it lies in order already.

    Raises:
        SortRejected: a column or transform of the order is not known here.
    """
    if not order.fields or table.num_rows <= 1:
        return table
    columns, keys = _sort_keys(table, order, schema)
    indices = pc.sort_indices(pa.table(columns), sort_keys=keys).to_numpy()
    if np.array_equal(indices, np.arange(len(indices))):
        return table
    return table.take(pa.array(indices))


def _sort_keys(
    table: pa.Table, order: SortOrder, schema: Schema
) -> tuple[dict[str, pa.Array], list[tuple[str, str, str]]]:
    columns: dict[str, pa.Array] = {}
    keys = []
    for number, field in enumerate(order.fields):
        path = _source_of(field, schema)
        source = path[-1].type
        assert isinstance(source, str)
        stored = values_at(table, path).combine_chunks()
        values = apply_transform(parse_transform(field.transform), source, stored)
        direction = "descending" if field.is_descending else "ascending"
        placement = "at_start" if field.nulls_first else "at_end"
        if pa.types.is_floating(values.type):
            # Arrow keeps NaN beside the nulls; a key of its own puts it above all numbers.
            columns[f"{number}-nan"] = pc.is_nan(values)
            keys.append((f"{number}-nan", direction, placement))
        columns[str(number)] = values
        keys.append((str(number), direction, placement))
    return columns, keys
