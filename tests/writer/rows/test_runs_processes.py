"""Chunks of the log are decoded and written as Parquet in another process, from plain bytes and values."""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import pyarrow as pa
import pyarrow.parquet as pq

from lakefeed.iceberg.types import Field, Schema, StructType
from lakefeed.writer.config import WriterConfig
from lakefeed.writer.files.parquet import write_data_file
from lakefeed.writer.rows.groups import Expected
from lakefeed.writer.rows.runs import decode_run
from lakefeed.writer.wal.payload import encode_frame
from lakefeed.writer.wal.records import encode_group, records_in
from tests.writer.sample_rows import declared, event, frame
from tests.writer.wire.arrow_batches import arrow_frame, changes, stream_of

SALT = 0x1122334455667788
COLUMNS = declared(Field(20, "id", "long"), Field(21, "name", "string"))


def decode_chunk(chunk: bytes, offset: int, columns: StructType) -> tuple[list[bytes], bytes]:
    """Decode the records of a chunk; return the rows of each group as an Arrow stream, and all of them as Parquet."""
    records = records_in(memoryview(chunk), offset=offset, synced=offset, salt=SALT, until=2**62).records
    run = decode_run(records, {"users": Expected(columns)})
    tables = [decoded.rows for decoded in run.tables]
    parquet, _ = write_data_file(
        pa.concat_tables(tables), schema=Schema(0, columns), location="s3://t/f", partition=(), config=WriterConfig()
    )
    return [_as_stream(table) for table in tables], parquet.to_pybytes()


def _as_stream(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue().to_pybytes()


def test_a_chunk_of_the_log_is_decoded_by_a_process_that_gets_only_bytes_and_columns():
    frames = [
        frame([event(1, after={"id": 1, "name": "Ada"}), event(2, after={"id": 2, "gone": None})]),
        arrow_frame(stream_of(changes({"id": [3], "name": ["Eve"]}, first=3)), after_sequence=2),
    ]
    payloads = [encode_frame(each) for each in frames]
    chunk = b"".join(encode_group(payloads, first_offset=7, synced=7, salt=SALT))
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn) as pool:
        streams, parquet = pool.submit(decode_chunk, chunk, 7, COLUMNS).result()
    rows = [row for stream in streams for row in pa.ipc.open_stream(stream).read_all().to_pylist()]
    assert [(row["_cdc_sequence"], row["id"], row["name"]) for row in rows] == [
        (1, 1, "Ada"),
        (2, 2, None),
        (3, 3, "Eve"),
    ]
    assert pq.read_table(pa.BufferReader(parquet)).column("id").to_pylist() == [1, 2, 3]
