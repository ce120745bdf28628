"""Partition specs: their JSON, the partition of rows, and partition paths. Owns no files.

Supported transforms: identity, year, month, day, hour, void. All of these rise with their column, so that a table
whose smallest and largest value fall into one partition lies in it whole; this is how one partition is told quickly.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias
from urllib.parse import quote_plus

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from writer.errors import WriterError
from writer.types import Field, Schema, StructType, Type

# One value per field of the spec: dates and times as Iceberg's integers, decimals as Decimal, None for null.
Partition: TypeAlias = tuple[Any, ...]

FIRST_PARTITION_FIELD_ID = 1000  # fixed by the specification for tables of format 2 and above

_TIME_UNITS = {"year": "Y", "month": "M", "day": "D", "hour": "h"}
_NUMPY_UNITS = {
    "date": "D",
    "timestamp": "us",
    "timestamptz": "us",
    "timestamp_ns": "ns",
    "timestamptz_ns": "ns",
}
_TERM = re.compile(r"(\w+)\(([^()]+)\)")


class PartitionRejected(WriterError, ValueError):
    """A spec cannot be used here: change the setting, or the table's spec."""


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
    fields = (PartitionField(f["source-id"], f["field-id"], f["name"], f["transform"]) for f in document["fields"])
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
    """Read the setting `partition`: `none`, or terms such as `day(_cdc_timestamp), identity(_cdc_source)`.

    Raises:
        PartitionRejected: a term is not understood or names a column that the table does not have.
    """
    terms = [] if text.strip() == "none" else text.split(",")
    fields = [_parse_term(term.strip(), schema) for term in terms]
    numbered = (
        PartitionField(source.id, FIRST_PARTITION_FIELD_ID + number, _field_name(source, transform), transform)
        for number, (transform, source) in enumerate(fields)
    )
    return PartitionSpec(0, tuple(numbered))


def _parse_term(term: str, schema: Schema) -> tuple[str, Field]:
    match = _TERM.fullmatch(term)
    if match is None:
        raise PartitionRejected(f"partition must be `none` or transform(column): term={term}")
    transform, column = match[1], match[2].strip()
    field = schema.columns.field(column)
    if field is None:
        raise PartitionRejected(f"partition names an unknown column: term={term}")
    result_type(transform, field.type)
    return transform, field


def _field_name(source: Field, transform: str) -> str:
    return source.name if transform == "identity" else f"{source.name}_{transform}"


def result_type(transform: str, source: Type) -> str:
    """Give the type of a partition value.

    Raises:
        PartitionRejected: the transform is not supported, or not on this type.
    """
    if isinstance(source, str):
        if transform in {"identity", "void"}:
            return source
        if transform in _TIME_UNITS and source in _NUMPY_UNITS and (transform, source) != ("hour", "date"):
            return "date" if transform == "day" else "int"
    raise PartitionRejected(f"partition transform is not supported: transform={transform} type={source}")


def partition_types(spec: PartitionSpec, schema: Schema) -> tuple[str, ...]:
    """Give the types of a spec's partition values.

    Raises:
        PartitionRejected: a transform is not supported.
    """
    return tuple(result_type(f.transform, _find_source(f, schema)[-1].type) for f in spec.fields)


def _find_source(field: PartitionField, schema: Schema) -> tuple[Field, ...]:
    path = _find_path(schema.columns, field.source_id)
    if path is None:
        raise PartitionRejected(
            f"partition field has no column in the schema: field={field.name} source_id={field.source_id}"
        )
    return path


def _find_path(struct: StructType, field_id: int) -> tuple[Field, ...] | None:
    for field in struct.fields:
        if field.id == field_id:
            return (field,)
        if isinstance(field.type, StructType) and (rest := _find_path(field.type, field_id)):
            return (field, *rest)
    return None


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

    transform: str
    source_type: str
    values: pa.ChunkedArray

    @classmethod
    def of(cls, table: pa.Table, field: PartitionField, schema: Schema) -> _Column:
        path = _find_source(field, schema)
        values = table.column(path[0].name)
        for nested in path[1:]:
            values = pc.struct_field(values, nested.name)
        source_type = path[-1].type
        result_type(field.transform, source_type)
        assert isinstance(source_type, str)
        return cls(field.transform, source_type, values)

    def single_value(self) -> _Single | None:
        """Find the value that all rows share, from the ends of the column; None if there may be several."""
        if self.transform == "void" or self.values.null_count == len(self.values):
            return _Single(None)
        if self.values.null_count or self.source_type in {"float", "double"}:  # min_max passes over NaN
            return None
        ends = pc.min_max(self.values)
        low, high = self._transform(pa.array([ends["min"].as_py(), ends["max"].as_py()], self.values.type)).to_pylist()
        return _Single(low) if low == high else None

    def keys(self) -> pa.Array:
        """Compute the partition value of each row."""
        if self.transform == "void":
            return pa.nulls(len(self.values))
        return self._transform(self.values.combine_chunks())

    def _transform(self, values: pa.Array) -> pa.Array:
        if self.transform == "identity":
            return _internal(values)
        # Conversions between numpy's time units round down, before 1970 too, as the specification asks.
        source = f"M8[{_NUMPY_UNITS[self.source_type]}]"
        numbers: npt.NDArray[np.int64] = pc.fill_null(_internal(values).cast(pa.int64()), 0).to_numpy(
            zero_copy_only=False
        )
        units = numbers.view(source).astype(f"M8[{_TIME_UNITS[self.transform]}]").astype(np.int64)
        return pa.array(units, mask=values.is_null().to_numpy(zero_copy_only=False) if values.null_count else None)


def _internal(values: pa.Array) -> pa.Array:
    """See dates and times as the integers that they are stored as."""
    if pa.types.is_date32(values.type):
        return values.cast(pa.int32())
    if pa.types.is_timestamp(values.type) or pa.types.is_time64(values.type):
        return values.cast(pa.int64())
    return values


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
        text = "null" if value is None else _value_text(value, field.transform, type_)
        yield f"{quote_plus(field.name)}={quote_plus(text)}"


def _value_text(value: Any, transform: str, type_: str) -> str:
    if transform in _TIME_UNITS:
        return _moment_text(value, _TIME_UNITS[transform]).replace("T", "-")
    if type_ in _NUMPY_UNITS:
        return _moment_text(value, _NUMPY_UNITS[type_])
    if isinstance(value, bool):
        return str(value).lower()
    return value.hex() if isinstance(value, bytes) else str(value)


def _moment_text(value: int, unit: str) -> str:
    return str(np.array(value, dtype=np.int64).view(f"M8[{unit}]"))
