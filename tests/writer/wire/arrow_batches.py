"""Arrow frames for tests: streams from plain columns, groups of them, and rows rebuilt from their columns."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping

import pyarrow as pa

from lakefeed.contract.changes import SourceId
from lakefeed.iceberg.types import StructType
from lakefeed.writer.rows.evolution import initial_columns
from lakefeed.writer.rows.groups import ArrowGroup, Expected, Fitted, group_arrow
from lakefeed.writer.wal.payload import Encoding, Frame
from lakefeed.writer.wire.arrow_frame import ArrowBatch, ArrowFrame
from tests.writer.sample_rows import RECEIVED_AT_US, highest_id

MANY_BYTES = 64 * 1024 * 1024


def stream_of(
    rows: pa.Table,
    *,
    table: str | None = "users",
    compression: str | None = None,
    batch_rows: int | None = None,
    **more,
) -> bytes:
    """Write a table as one Arrow stream; `more` are keys of its metadata behind `lakefeed.`."""
    metadata = {f"lakefeed.{key.replace('_', '-')}": str(value) for key, value in more.items()}
    if table is not None:
        metadata["lakefeed.table"] = table
    sink = io.BytesIO()
    options = pa.ipc.IpcWriteOptions(compression=compression)
    with pa.ipc.new_stream(sink, rows.schema.with_metadata(metadata), options=options) as writer:
        writer.write_table(rows.replace_schema_metadata(metadata), max_chunksize=batch_rows)
    return sink.getvalue()


def changes(own: Mapping[str, object] | pa.Table | None = None, *, first: int = 1, rows: int | None = None, **cdc):
    """Make a table of changes numbered from `first` with these own columns and `_cdc_` columns."""
    columns = {} if own is None else dict(zip(own.column_names, own.columns, strict=True)) if _is_table(own) else own
    arrays = {name: values if _is_arrow(values) else pa.array(values) for name, values in columns.items()}
    count = rows if rows is not None else len(next(iter(arrays.values())))
    change = {f"_cdc_{name}": values if _is_arrow(values) else pa.array(values) for name, values in cdc.items()}
    return pa.table({"_cdc_sequence": pa.array(range(first, first + count), pa.int64())} | change | arrays)


def _is_table(value: object) -> bool:
    return isinstance(value, pa.Table)


def _is_arrow(value: object) -> bool:
    return isinstance(value, pa.Array | pa.ChunkedArray)


def admit(stream: bytes, *, expanded_max_bytes: int = MANY_BYTES, row_max_bytes: int = MANY_BYTES) -> ArrowBatch:
    return ArrowFrame.open(stream, expanded_max_bytes=expanded_max_bytes).read(row_max_bytes=row_max_bytes)


def arrow_frame(stream: bytes, *, source: str = "shop-1", epoch: int = 0, after_sequence: int = 0) -> Frame:
    batch = admit(stream)
    last = batch.sequences[-1] if len(batch.sequences) else -1
    return Frame(SourceId(source), epoch, after_sequence, last, RECEIVED_AT_US, Encoding.ARROW_STREAM, stream)


def arrow_group(rows: pa.Table, **options) -> ArrowGroup:
    (group,) = group_arrow([(0, arrow_frame(stream_of(rows, **options)))])
    return group


def fit_arrow(rows: pa.Table | ArrowGroup, columns: StructType | None = None, **options) -> Fitted:
    group = rows if isinstance(rows, ArrowGroup) else arrow_group(rows)
    start = columns or initial_columns(keep_before=False)
    fitted = group.fit(Expected(start, **options), last_field_id=highest_id(start), refused_for=start)
    fitted.table.validate(full=True)
    return fitted


def rescued_texts(table: pa.Table) -> list:
    return [None if text is None else json.loads(text) for text in table["_cdc_rescued"].to_pylist()]
