"""Spark prunes by the partitions that were written, under every transform, and reads tables of several specs."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from lakefeed.contract.changes import TableName
from lakefeed.iceberg.types import Field, Schema, StructType
from lakefeed.storage.config import StorageConfig
from tests.spark.conftest import OpenSpark
from tests.writer.commit.test_layouts import commit, rows
from tests.writer.commit.test_partition_types import CASES, VALUES, commit_rows
from tests.writer.committing import open_bench
from tests.writer.conftest import Lake

# Spark has no types for the first two. By identity of a UUID nobody partitions: its summary in the manifest list needs
# bounds, which Iceberg's Java library compares as signed numbers (writer/data_files.py).
CASES_OF_SPARK = [case for case in CASES if case[0] not in ("time", "fixed[3]") and case != ("uuid", "identity")]
LITERALS = {
    "decimal(9,2)": "14.20",
    "decimal(38,10)": "1234567890123456789012345678.0123456789",
    "float": "CAST(2.5 AS FLOAT)",
    "timestamp": "TIMESTAMP_NTZ '2026-11-16 01:00:00'",
    "timestamptz": "TIMESTAMP '2026-11-16 01:00:00Z'",
    "uuid": "'f79c3e09-677c-4bbd-a479-3f349cb785e7'",
    "binary": "X'010203'",
}


@pytest.fixture
def lake(catalog_url: str, tmp_path: Path) -> Lake:
    return Lake(catalog_url, StorageConfig(warehouse=(tmp_path / "warehouse").as_uri()), None)


def test_spark_finds_rows_by_the_value_that_they_are_partitioned_by(lake: Lake, open_spark: OpenSpark) -> None:
    async def write_all() -> None:
        async with open_bench(lake) as bench:
            for number, (type_, transform) in enumerate(CASES_OF_SPARK):
                schema = Schema(0, StructType((Field(1, "_cdc_sequence", "long"), Field(2, "key", type_))))
                low, high, _ = VALUES[type_]
                values = [{"_cdc_sequence": n, "key": key} for n, key in enumerate([low, high, None])]
                name = TableName(("default",), f"t{number}")
                await commit_rows(bench, schema, name=name, partition=f"{transform}(key)", rows=values)

    asyncio.run(write_all())
    spark = open_spark(uri=lake.catalog_url, name="typed")
    found = {}
    for number, (type_, transform) in enumerate(CASES_OF_SPARK):
        literal = LITERALS.get(type_, VALUES[type_][2])
        query = f"SELECT _cdc_sequence FROM typed.default.t{number} WHERE key = {literal}"
        found[type_, transform] = [row[0] for row in spark.sql(query).collect()]
    assert found == {case: [1] for case in CASES_OF_SPARK}


def test_spark_reads_a_table_of_several_specs_and_evolves_it_further(
    lake: Lake, open_spark: OpenSpark, tmp_path: Path
) -> None:
    asyncio.run(commit(tmp_path, lake, {}, 1, *rows({"id": 1})))
    asyncio.run(
        commit(tmp_path, lake, {"partition": "bucket[4](id)", "sort": "id desc"}, 2, *rows({"id": 2}, {"id": 3}))
    )
    spark = open_spark(uri=lake.catalog_url, name="evolved")

    def read(where: str) -> list[int]:
        query = f"SELECT _cdc_sequence FROM evolved.default.orders WHERE {where} ORDER BY 1"
        return [row[0] for row in spark.sql(query).collect()]

    assert (read("true"), read("id = 1"), read("id = 3")) == ([1, 2, 3], [1], [3])
    spark.sql("ALTER TABLE evolved.default.orders ADD PARTITION FIELD truncate(2, _cdc_source)")
    asyncio.run(commit(tmp_path, lake, {"partition": "bucket[4](id)", "sort": "id desc"}, 4, *rows({"id": 4})))
    spark.sql("REFRESH TABLE evolved.default.orders")
    assert (read("true"), read("_cdc_source = 'shop'"), read("id = 4")) == ([1, 2, 3, 4], [1, 2, 3, 4], [4])
    specs = spark.sql("SELECT DISTINCT spec_id FROM evolved.default.orders.files ORDER BY 1").collect()
    assert [row[0] for row in specs] == [0, 1, 2]
