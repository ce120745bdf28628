"""Rows, schemas and states that several tests of the writer start from."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal

import pyarrow as pa

from lakefeed.iceberg.arrow import to_arrow_schema
from lakefeed.iceberg.types import Field, ListType, MapType, Schema, StructType

NESTED = Schema(
    0,
    StructType(
        (
            Field(1, "_cdc_sequence", "long", required=True),
            Field(2, "_cdc_timestamp", "timestamptz"),
            Field(3, "_cdc_operation", "string"),
            Field(4, "name", "string"),
            Field(5, "price", "decimal(9,2)"),
            Field(6, "total", "decimal(30,4)"),
            Field(7, "weight", "double"),
            Field(8, "active", "boolean"),
            Field(9, "born", "date"),
            Field(10, "blob", "binary"),
            Field(11, "address", StructType((Field(12, "city", "string"), Field(13, "zip", "int")))),
            Field(14, "tags", ListType(15, "string")),
            Field(16, "scores", MapType(17, "string", 18, "long")),
        )
    ),
)

MIDNIGHT = dt.datetime(2026, 11, 16, tzinfo=dt.UTC)


def nested_rows(count: int, *, first_sequence: int = 1, start: dt.datetime = MIDNIGHT) -> pa.Table:
    """Make rows of NESTED, one a second from `start`; every third name is null."""
    sequences = range(first_sequence, first_sequence + count)
    rows = [_nested_row(sequence, start + dt.timedelta(seconds=sequence - first_sequence)) for sequence in sequences]
    return pa.Table.from_pylist(rows, schema=to_arrow_schema(NESTED))


def _nested_row(sequence: int, timestamp: dt.datetime) -> dict[str, object]:
    return {
        "_cdc_sequence": sequence,
        "_cdc_timestamp": timestamp,
        "_cdc_operation": "INSERT",
        "name": None if sequence % 3 == 0 else f"name of the customer {sequence:06d}",
        "price": Decimal(sequence) / 100,
        "total": Decimal(-sequence) / 10_000,
        "weight": sequence * 0.5,
        "active": sequence % 2 == 0,
        "born": dt.date(2000, 1, 1) + dt.timedelta(days=sequence),
        "blob": b"\xff" * 20 if sequence % 2 else bytes([sequence % 250]) * 20,
        "address": {"city": f"city {sequence % 5}", "zip": sequence},
        "tags": [f"tag {sequence}", None],
        "scores": [("a", sequence)],
    }
