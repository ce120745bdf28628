"""What partitions and statistics say of columns, as facts. Core: owns the reading of specs, tuples and metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from catalog.metadata.partitioning import source_ids
from catalog.planning.columns import Column
from catalog.planning.facts import NOTHING_KNOWN, Facts, make_range
from catalog.planning.manifests import column_value
from catalog.planning.transforms import IDENTITY, Transform, parse_transform, result_type
from catalog.planning.values import decode_bound, decode_stored, is_nan

FindColumn: TypeAlias = Callable[[int], Column | None]

_VOID = "void"
# Of the values of a transform that we do not know, whose kind only its inventor knows.
_UNKNOWN_TYPE = "string"
_METRICS = ("value_counts", "null_value_counts", "nan_value_counts", "lower_bounds", "upper_bounds")


@dataclass(frozen=True, slots=True)
class PartitionField:
    """One field of a spec. Without a transform it tells nothing about its source."""

    source_id: int
    source_type: str
    transform: Transform | None
    type_: str
    is_void: bool


@dataclass(frozen=True, slots=True)
class Spec:
    """A partition spec, with the types of its fields."""

    spec_id: int
    fields: tuple[PartitionField, ...]

    @property
    def is_partitioned(self) -> bool:
        """Tell whether files of this spec are apart by anything."""
        return not all(field.is_void for field in self.fields)

    def read_tuple(self, stored: Sequence[Any]) -> tuple[Any, ...]:
        """Read a partition tuple as manifests store it."""
        return tuple(
            None if value is None else decode_stored(field.type_, value)
            for field, value in zip(self.fields, stored, strict=True)
        )


def read_specs(specs: Iterable[Mapping[str, Any]], find_column: FindColumn) -> dict[int, Spec]:
    """Read a table's specs, whose columns are looked up by field id."""
    return {
        spec["spec-id"]: Spec(spec["spec-id"], tuple(_read_field(field, find_column) for field in spec["fields"]))
        for spec in specs
    }


def tuple_facts(spec: Spec, values: Sequence[Any], column: Column) -> Facts:
    """Say what a file's partition tuple tells about a column."""
    facts = NOTHING_KNOWN
    for field, value in zip(spec.fields, values, strict=True):
        if field.source_id == column.field_id and field.transform is not None:
            facts &= _value_facts(field, value)
    return facts


def summary_facts(spec: Spec, summaries: Sequence[Mapping[str, Any]] | None, column: Column) -> Facts:
    """Say what a manifest's summary of its partitions tells about a column."""
    facts = NOTHING_KNOWN
    if summaries is None or len(summaries) != len(spec.fields):
        return facts
    for field, summary in zip(spec.fields, summaries, strict=True):
        if field.source_id == column.field_id and field.transform is not None:
            facts &= _summary_facts(field, summary)
    return facts


def metrics_facts(file: Mapping[str, Any], column: Column) -> Facts:
    """Say what a file's column statistics tell about a column."""
    rows = file["record_count"]
    counted, nulls, nans, lower, upper = (column_value(file, name, column.field_id) for name in _METRICS)
    # Where a struct around the field is null, some writers count nothing: then the field is null more often than told.
    nulls_are_told = not column.nested or counted == rows
    total = counted if counted is not None or column.nested else rows
    return Facts(
        nulls=not (nulls_are_told and nulls == 0),
        nans=nans != 0,
        values=not (total and total == (nulls or 0) + (nans or 0)),
        ranges=make_range(column.type_, IDENTITY, decode_bound(column.type_, lower), decode_bound(column.type_, upper)),
    )


def _read_field(field: Mapping[str, Any], find_column: FindColumn) -> PartitionField:
    name, sources = field["transform"], source_ids(field)
    source = find_column(sources[0])
    source_type = source.type_ if source is not None else _UNKNOWN_TYPE
    transform = parse_transform(name) if len(sources) == 1 else None
    type_ = result_type(transform, source_type) if transform is not None else None
    return PartitionField(
        source_id=sources[0],
        source_type=source_type,
        transform=transform if type_ is not None else None,
        type_=type_ or (source_type if name == _VOID else _UNKNOWN_TYPE),
        is_void=name == _VOID,
    )


def _value_facts(field: PartitionField, value: Any) -> Facts:
    assert field.transform is not None
    if value is None or is_nan(value):
        return Facts(nulls=value is None, nans=value is not None, values=False, ranges=())
    ranges = make_range(field.source_type, field.transform, value, value)
    return Facts(nulls=False, nans=False, values=True, ranges=ranges)


def _summary_facts(field: PartitionField, summary: Mapping[str, Any]) -> Facts:
    """Read a summary. Bounds are left out where no value has any, unless nothing explains their absence."""
    assert field.transform is not None
    lower, upper = (decode_bound(field.type_, summary.get(name)) for name in ("lower_bound", "upper_bound"))
    nulls, nans = summary["contains_null"], summary.get("contains_nan")
    explained = summary.get("lower_bound") is None and (nulls or nans)
    ranges = make_range(field.source_type, field.transform, lower, upper)
    return Facts(nulls=nulls, nans=nans is not False, values=not explained, ranges=ranges)
