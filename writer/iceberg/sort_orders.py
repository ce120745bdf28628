"""Sort orders: their JSON, the setting they come from, and rows put in order. Owns no files.

A table's sort order is a promise about the rows inside each data file that names it, so that engines can skip row
groups and pages. Not a number counts as larger than all numbers, as the specification says.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from writer.iceberg.partitions import SEVERAL_SOURCES, find_column, find_path, values_at
from writer.iceberg.terms import PartitionRejected, SortRejected, SortTerm, parse_sort_terms, parse_transform
from writer.iceberg.transforms import apply_transform, result_type
from writer.types import Field, Schema, Type


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
    fields = tuple(_field_of(term, schema) for term in parse_sort_terms(text))
    return SortOrder(1, fields) if fields else UNSORTED


def _field_of(term: SortTerm, schema: Schema) -> SortField:
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
