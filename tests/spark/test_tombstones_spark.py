"""What mirrors remember of deleted rows: their keys as they change, and for how long."""

from __future__ import annotations

import pytest
from pyspark.sql import SparkSession
from pyspark.sql.types import IntegerType, LongType, StructField, StructType, TimestampType

from lakefeed.pipeline.mirrors.fold import Truncate
from lakefeed.pipeline.mirrors.settings import MirrorSettings, mirror_names
from lakefeed.pipeline.mirrors.table import plan_layout
from lakefeed.pipeline.mirrors.tombstones import Tombstones
from lakefeed.pipeline.spark.tables import TableIdentifier, properties, snapshots
from tests.spark.conftest import OpenSpark

NOW_S = 1_800_000_000.0
HORIZON_S = 86_400.0
DAY_S = 86_400.0


def key_schema(field: StructField) -> StructType:
    return StructType([field]).add("_cdc_sequence", LongType()).add("_cdc_timestamp", TimestampType())


def open_stones(spark: SparkSession, catalog: str, field: StructField) -> Tombstones:
    settings = MirrorSettings(key=(field.name,), tombstone_horizon_s=HORIZON_S, snapshot_age_s=60)
    names = mirror_names(TableIdentifier.parse("users"), settings, catalog)
    stones = Tombstones(names, plan_layout(key_schema(field), settings), settings=settings)
    stones.load(spark)
    return stones


def delete_of(spark: SparkSession, name: str, key: str):
    row = f"{key} {name}, 's' _cdc_source, 0 _cdc_epoch, 5L _cdc_sequence, now() _cdc_timestamp"
    return spark.sql(f"SELECT {row}, 'DELETE' _cdc_operation")


def keys(stones: Tombstones, spark: SparkSession, name: str) -> list[int]:
    found = stones.deletes(spark)
    assert found is not None
    return sorted(row[name] for row in found.collect())


def test_tombstones_follow_a_key_that_is_renamed_and_widened(catalog_url: str, open_spark: OpenSpark) -> None:
    spark = open_spark(uri=catalog_url, name="stones")
    spark.sql("CREATE NAMESPACE stones.default")
    first = open_stones(spark, "stones", StructField("id", IntegerType()))
    first.add(delete_of(spark, "id", "1"), [Truncate("it's", 1, 1)], now=NOW_S)
    renamed = StructField("number", LongType(), True, {"comment": 'formerly ["id"]'})
    second = open_stones(spark, "stones", renamed)
    second.add(delete_of(spark, "number", f"{2**40}L"), [Truncate("it's", 1, 2**40)], now=NOW_S)
    assert keys(second, spark, "number") == [1, 2**40]
    second.load(spark)
    assert second.truncates == (Truncate("it's", 1, 2**40),)


def test_deletes_beyond_the_horizon_are_forgotten_and_truncates_are_not(
    catalog_url: str, open_spark: OpenSpark, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lakefeed.pipeline.mirrors.tombstones._FILES_MAX", 1)
    spark = open_spark(uri=catalog_url, name="horizon")
    spark.sql("CREATE NAMESPACE horizon.default")
    stones = open_stones(spark, "horizon", StructField("id", LongType()))
    truncate = Truncate("s", 0, 3, "2026-11-16 00:00:00")
    stones.add(delete_of(spark, "id", "1L"), [truncate], now=NOW_S - HORIZON_S - 60)
    stones.add(delete_of(spark, "id", "2L"), [], now=NOW_S - HORIZON_S + 60)
    stones.purge(spark, now=NOW_S)
    assert keys(stones, spark, "id") == [1, 2], "few files of a day that is not over are left as they are"
    for key in (3, 4, 5):
        stones.add(delete_of(spark, "id", f"{key}L"), [], now=NOW_S)
    stones.purge(spark, now=NOW_S)
    assert keys(stones, spark, "id") == [2, 3, 4, 5]
    stones.load(spark)
    assert stones.truncates == (truncate,)


def test_days_beyond_the_horizon_are_forgotten_however_few_the_files_are(
    catalog_url: str, open_spark: OpenSpark
) -> None:
    spark = open_spark(uri=catalog_url, name="few")
    spark.sql("CREATE NAMESPACE few.default")
    stones = open_stones(spark, "few", StructField("id", LongType()))
    truncate = Truncate("s", 0, 3, "2026-11-16 00:00:00")
    stones.add(delete_of(spark, "id", "1L"), [truncate], now=NOW_S - HORIZON_S - DAY_S)
    stones.add(delete_of(spark, "id", "2L"), [], now=NOW_S - HORIZON_S + 60)
    stones.purge(spark, now=NOW_S)
    assert keys(stones, spark, "id") == [2]
    table = "few.default.users_current_tombstones"
    count = len(snapshots(spark, table))
    stones.purge(spark, now=NOW_S)
    assert len(snapshots(spark, table)) == count, "the truncate that is left is no reason to look into it each time"
    stones.load(spark)
    assert stones.truncates == (truncate,)
    assert properties(spark, table)["history.expire.max-snapshot-age-ms"] == "60000"
