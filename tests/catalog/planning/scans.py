"""A table with a column of each kind, rows for it, and files of those rows as manifests describe them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any

from pyiceberg.conversions import to_bytes
from pyiceberg.transforms import parse_transform
from pyiceberg.types import (
    BinaryType,
    BooleanType,
    DateType,
    DecimalType,
    DoubleType,
    LongType,
    PrimitiveType,
    StringType,
    TimestampType,
)

from lakefeed.catalog.planning.evaluate import ScanSpec, read_specs
from lakefeed.catalog.planning.expressions import Columns

TYPES: dict[str, PrimitiveType] = {
    "number": LongType(),
    "ratio": DoubleType(),
    "text": StringType(),
    "moment": TimestampType(),
    "date": DateType(),
    "price": DecimalType(9, 2),
    "data": BinaryType(),
    "flag": BooleanType(),
    "point.x": LongType(),
}
FIELD_IDS = {name: field_id for field_id, name in enumerate(TYPES, start=1)}
_POINT_ID = len(FIELD_IDS) + 1

SCHEMA = {
    "type": "struct",
    "schema-id": 0,
    "fields": [
        *(
            {"id": FIELD_IDS[name], "name": name, "type": str(type_).replace(" ", ""), "required": False}
            for name, type_ in TYPES.items()
            if "." not in name
        ),
        {
            "id": _POINT_ID,
            "name": "point",
            "required": False,
            "type": {
                "type": "struct",
                "fields": [{"id": FIELD_IDS["point.x"], "name": "x", "type": "long", "required": True}],
            },
        },
    ],
}
COLUMNS = Columns(SCHEMA, case_sensitive=True)


def internal(value: Any) -> Any:
    """Give a value as planning handles it."""
    return int(value.scaleb(2)) if isinstance(value, Decimal) else value


def literal_json(name: str, value: Any) -> Any:
    """Write a value as clients do."""
    if isinstance(value, Decimal):
        return str(value)
    return value.hex() if isinstance(value, bytes) else value


def image(transform: str, name: str, value: Any) -> Any:
    """Apply a transform with PyIceberg."""
    return value if value is None else parse_transform(transform).transform(TYPES[name])(value)


def make_spec(fields: Sequence[tuple[str, str]]) -> ScanSpec:
    document = {
        "spec-id": 0,
        "fields": [
            {"source-id": FIELD_IDS[name], "field-id": 1000 + index, "transform": transform, "name": f"p{index}"}
            for index, (name, transform) in enumerate(fields)
        ],
    }
    return read_specs([document], COLUMNS.by_id)[0]


def partition_of(row: Mapping[str, Any], fields: Sequence[tuple[str, str]]) -> tuple[Any, ...]:
    return tuple(internal(image(transform, name, row[name])) for name, transform in fields)


def is_nan(value: Any) -> bool:
    return isinstance(value, float) and math.isnan(value)


def describe_file(rows: Sequence[Mapping[str, Any]], *, left_out: frozenset[tuple[str, str]]) -> dict[str, Any]:
    """Describe a file of some rows, with statistics but for those (kind, column) that are left out."""
    file: dict[str, Any] = {"record_count": len(rows), "file_path": "f.parquet"}
    for kind in ("value_counts", "null_value_counts", "nan_value_counts", "lower_bounds", "upper_bounds"):
        known = {name: _statistic(kind, name, rows) for name in TYPES if (kind, name) not in left_out}
        file[kind] = [{"key": FIELD_IDS[name], "value": value} for name, value in known.items() if value is not None]
    return file


def _statistic(kind: str, name: str, rows: Sequence[Mapping[str, Any]]) -> Any:
    # Like writers of ORC: a field inside a null struct is not counted.
    values = [row[name] for row in rows if "." not in name or row[name] is not None]
    ordinary = [value for value in values if value is not None and not is_nan(value)]
    if kind == "value_counts":
        return len(values)
    if kind == "null_value_counts":
        return sum(value is None for value in values)
    if kind == "nan_value_counts":
        return sum(map(is_nan, values)) if isinstance(TYPES[name], DoubleType) else None
    if not ordinary:
        return None
    return to_bytes(TYPES[name], min(ordinary) if kind == "lower_bounds" else max(ordinary))


def summarise(
    spec: ScanSpec, types: Sequence[PrimitiveType], tuples: Sequence[tuple[Any, ...]]
) -> list[dict[str, Any]]:
    """Summarise the partitions of a manifest."""
    summaries = []
    for index, type_ in enumerate(types):
        values = [values[index] for values in tuples]
        ordinary = [value for value in values if value is not None and not is_nan(value)]
        summaries.append(
            {
                "contains_null": None in values,
                "contains_nan": any(map(is_nan, values)),
                "lower_bound": _bound(type_, min(ordinary)) if ordinary else None,
                "upper_bound": _bound(type_, max(ordinary)) if ordinary else None,
            }
        )
    return summaries


def _bound(type_: PrimitiveType, value: Any) -> bytes:
    return to_bytes(type_, Decimal(value).scaleb(-2) if isinstance(type_, DecimalType) else value)
