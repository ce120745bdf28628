"""The benchmark's rows as Arrow frames: those of the JSON frames, with the types that a database would declare."""

from __future__ import annotations

import datetime as dt
import io
from decimal import Decimal

import orjson
import pyarrow as pa

_SCHEMA = pa.schema(
    {
        "_cdc_sequence": pa.int64(),
        "_cdc_timestamp": pa.int64(),
        "_cdc_operation": pa.dictionary(pa.int8(), pa.string()),
        "_cdc_row_id": pa.string(),
        "id": pa.int64(),
        "first_name": pa.string(),
        "last_name": pa.string(),
        "address": pa.string(),
        "score": pa.float64(),
        "active": pa.bool_(),
        "updated_at": pa.timestamp("us", "UTC"),
        "balance": pa.decimal128(12, 2),
        "profile": pa.struct([("tier", pa.string()), ("visits", pa.int64())]),
        "referrer": pa.int64(),
    }
)


def to_arrow(json_frame: bytes, *, compression: str | None) -> bytes:
    """Write a JSON frame's changes as an Arrow frame; the rows before updates have no place there."""
    batch = orjson.loads(json_frame)
    events = batch["events"]
    metadata = {
        "lakefeed.source": batch["sourceDoId"],
        "lakefeed.table": events[0]["table"],
        "lakefeed.sequence-number": str(batch["sequenceNumber"]),
    }
    rows = pa.Table.from_pylist([_row(event) for event in events], schema=_SCHEMA.with_metadata(metadata))
    sink = io.BytesIO()
    options = pa.ipc.IpcWriteOptions(compression=compression)
    with pa.ipc.new_stream(sink, rows.schema, options=options) as writer:
        writer.write_table(rows)
    return sink.getvalue()


def _row(event: dict) -> dict:
    row = event.get("after") or event["before"]
    return {
        "_cdc_sequence": event["sequence"],
        "_cdc_timestamp": event["timestamp"],
        "_cdc_operation": event["operation"],
        "_cdc_row_id": event["rowId"],
        **row,
        "updated_at": dt.datetime.fromisoformat(row["updated_at"]),
        "balance": Decimal(row["balance"]),
    }
