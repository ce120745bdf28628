"""Every type as a partition column, under every transform it takes: committed, and read back by partition."""

from __future__ import annotations

import contextlib
import datetime as dt
import uuid
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from pyiceberg.expressions import EqualTo, IsNull

from lakefeed.contract.changes import Position, SourceId, Span, TableName
from lakefeed.iceberg.arrow import to_arrow_schema
from lakefeed.iceberg.types import Field, Schema, StructType
from lakefeed.writer.commit.plan import Flush
from lakefeed.writer.commit.state import data_location
from lakefeed.writer.config import WriterConfig
from lakefeed.writer.files.parquet import join_rows, lay_out, write_data_file
from lakefeed.writer.rows.table_settings import TableSettings
from tests.writer.committing import USERS, open_bench

# Type: two values in the words of PyArrow, the second one for DuckDB and, where PyIceberg has another word, for it.
VALUES: dict[str, tuple[Any, Any, str]] = {
    "boolean": (False, True, "true"),
    "int": (-7, 12, "12"),
    "long": (-(2**60), 2**60 + 1, str(2**60 + 1)),
    "float": (-1.5, 2.5, "2.5::FLOAT"),
    "double": (-1.5, 2.25, "2.25"),
    "decimal(9,2)": (Decimal("-14.20"), Decimal("14.20"), "14.20::DECIMAL(9,2)"),
    "decimal(38,10)": (
        Decimal("-1234567890123456789012345678.0123456789"),
        Decimal("1234567890123456789012345678.0123456789"),
        "'1234567890123456789012345678.0123456789'::DECIMAL(38,10)",
    ),
    "date": (dt.date(1969, 12, 31), dt.date(2026, 11, 16), "DATE '2026-11-16'"),
    "time": (dt.time(0, 0, 1), dt.time(22, 31, 8, 123), "TIME '22:31:08.000123'"),
    "timestamp": (dt.datetime(1969, 12, 31, 23, 59), dt.datetime(2026, 11, 16, 1), "TIMESTAMP '2026-11-16 01:00:00'"),
    "timestamptz": (
        dt.datetime(1969, 12, 31, 23, 59, tzinfo=dt.UTC),
        dt.datetime(2026, 11, 16, 1, tzinfo=dt.UTC),
        "TIMESTAMPTZ '2026-11-16 01:00:00+00'",
    ),
    "string": ("a/b=c é", "iceberg " * 40, f"'{'iceberg ' * 40}'"),
    "uuid": (
        uuid.UUID(int=5).bytes,
        uuid.UUID("f79c3e09-677c-4bbd-a479-3f349cb785e7").bytes,
        "'f79c3e09-677c-4bbd-a479-3f349cb785e7'::UUID",
    ),
    "binary": (b"\x00\xff", b"\x01\x02\x03", r"'\x01\x02\x03'::BLOB"),
    "fixed[3]": (b"\x00\xff\x00", b"\x01\x02\x03", r"'\x01\x02\x03'::BLOB"),
}

_TIMES = ("year", "month", "day")
TRANSFORMS = {
    "boolean": (),
    "int": ("bucket[5]", "truncate[10]"),
    "long": ("bucket[5]", "truncate[10]"),
    "float": (),
    "double": (),
    "decimal(9,2)": ("bucket[5]", "truncate[10]"),
    "decimal(38,10)": ("bucket[5]", "truncate[10]"),
    "date": ("bucket[5]", *_TIMES),
    "time": ("bucket[5]",),
    "timestamp": ("bucket[5]", *_TIMES, "hour"),
    "timestamptz": ("bucket[5]", *_TIMES, "hour"),
    "string": ("bucket[5]", "truncate[3]"),
    "uuid": ("bucket[5]",),
    "binary": ("bucket[5]", "truncate[2]"),
    "fixed[3]": ("bucket[5]",),
}
# Readers that leave rows out by themselves: PyIceberg 0.12 compares a partition's UUID to the bytes of a literal, and
# DuckDB 1.5 truncates wide decimals otherwise; Spark finds these: tests/spark/test_partitions_spark.py.
MISSED_BY_PYICEBERG = {("uuid", "identity")}
MISSED_BY_DUCKDB = {("decimal(38,10)", "truncate[10]")}
CASES = [(type_, transform) for type_ in VALUES for transform in ("identity", "void", *TRANSFORMS[type_])]


async def commit_rows(
    bench, schema: Schema, *, partition: str, rows: list[dict[str, Any]], name: TableName = USERS
) -> int:
    """Create a table, commit rows to it; how many files there are."""
    settings = TableSettings(config=WriterConfig(partition=partition))
    state = await bench.committer.load_or_create(name, schema, settings)
    table = pa.Table.from_pylist(rows, schema=to_arrow_schema(state.schema))
    files = []
    rows = join_rows([table], state.shape)
    for number, each in enumerate(lay_out(rows, state.shape, order=state.sort_order, files_for=lambda _: 1)):
        location = data_location(state, each.partition, f"{number}.parquet")
        buffer, file = write_data_file(
            each.rows, schema=state.schema, location=location, partition=each.partition, config=WriterConfig()
        )
        await bench.store.write(location, buffer)
        files.append(file)
    spans = {SourceId("shop"): Span(Position(0, 1), Position(0, 3))}
    await bench.committer.commit(state, Flush(id="f", node="n", log_from=0, log_to=1, spans=spans, files=files))
    return len(files)


@pytest.mark.parametrize(("type_", "transform"), CASES)
async def test_rows_are_found_by_the_value_that_they_are_partitioned_by(local_lake, type_, transform):
    schema = Schema(0, StructType((Field(1, "_cdc_sequence", "long"), Field(2, "key", type_))))
    low, high, literal = VALUES[type_]
    rows = [{"_cdc_sequence": n, "key": key} for n, key in enumerate([low, high, None])]
    async with open_bench(local_lake) as bench:
        files = await commit_rows(bench, schema, partition=f"{transform}(key)", rows=rows)
    with contextlib.closing(local_lake.open_pyiceberg()) as catalog:
        table = catalog.load_table("default.users")
        is_null = table.scan(row_filter=IsNull("key"))
        assert is_null.to_arrow()["_cdc_sequence"].to_pylist() == [2]
        if (type_, transform) not in MISSED_BY_PYICEBERG:
            found = table.scan(row_filter=EqualTo("key", _for_pyiceberg(type_, high)))
            assert found.to_arrow()["_cdc_sequence"].to_pylist() == [1]
        if transform != "void":
            assert len(list(is_null.plan_files())) < files
    with local_lake.open_duckdb() as connection:
        if (type_, transform) not in MISSED_BY_DUCKDB:
            query = f"SELECT _cdc_sequence FROM lake.default.users WHERE key = {literal}"
            assert connection.execute(query).fetchall() == [(1,)]
        assert connection.execute("SELECT count(*) FROM lake.default.users").fetchall() == [(3,)]


def _for_pyiceberg(type_: str, value: Any) -> Any:
    if type_ == "uuid":
        return uuid.UUID(bytes=value)
    if isinstance(value, dt.date | dt.time):  # also datetimes
        return value.isoformat()
    return value
