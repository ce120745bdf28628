"""A real session keeps what the settings promise."""

from __future__ import annotations

import sys

import pandas as pd
import pytest
from pyspark.sql import SparkSession

from lakefeed.pipeline.spark.session import SessionConfig, build_session, s3_conf
from tests.spark.conftest import needs_s3a


@pytest.fixture
def spark(open_spark, catalog_url: str) -> SparkSession:
    return open_spark(uri=catalog_url)


def test_python_functions_run_in_this_interpreter(spark):
    def report(_batches):
        yield pd.DataFrame({"executable": [sys.executable]})

    rows = spark.range(1).mapInPandas(report, "executable string").collect()

    assert {row.executable for row in rows} == {sys.executable}


def test_rows_reach_pandas_through_arrow(spark):
    spark.conf.set("spark.sql.execution.arrow.pyspark.enabled", "true")
    spark.conf.set("spark.sql.execution.arrow.pyspark.fallback.enabled", "false")

    assert spark.range(3).toPandas()["id"].tolist() == [0, 1, 2]


def test_times_without_a_zone_are_utc(spark):
    (row,) = spark.sql("SELECT unix_timestamp(TIMESTAMP '1970-01-01 00:00:01') AS seconds").collect()

    assert row.seconds == 1


def test_time_is_utc_whatever_spark_submit_sets(running_spark, monkeypatch):
    monkeypatch.setenv("PYSPARK_GATEWAY_PORT", "1")  # as spark-submit does
    system, zone = running_spark._jvm.java.lang.System, "spark.sql.session.timeZone"
    system.setProperty(zone, "Asia/Tokyo")  # what spark-submit is told, it tells so
    running_spark.conf.set(zone, "Asia/Tokyo")
    try:
        assert build_session(SessionConfig()).conf.get(zone) == "UTC"
    finally:
        system.clearProperty(zone)
        running_spark.conf.set(zone, "UTC")


def test_second_session_in_the_process_shares_the_first_ones_jvm(running_spark):
    again = build_session(SessionConfig(master="local[2]"))

    assert again.sparkContext is running_spark.sparkContext


def test_sessions_of_one_jvm_know_different_catalogs(open_spark):
    first = open_spark(name="first")
    second = open_spark(name="second")

    assert first.conf.get("spark.sql.catalog.first.uri") == "http://127.0.0.1:8181"
    assert second.conf.get("spark.sql.catalog.first.uri", None) is None


@needs_s3a
def test_checkpoints_of_a_stream_can_lie_on_s3(open_spark, catalog_url, s3_server):
    bucket = s3_server.create_bucket()
    s3 = {
        "s3_endpoint": s3_server.endpoint,
        "s3_region": s3_server.region,
        "s3_path_style": "true",
        "s3_access_key_id": s3_server.access_key_id,
        "s3_secret_access_key": s3_server.secret_access_key,
    }
    spark = open_spark(uri=catalog_url, conf=s3_conf(s3, SessionConfig()))

    spark.sql("CREATE NAMESPACE sales")
    spark.sql("CREATE TABLE sales.orders (id bigint) USING iceberg")
    spark.sql("INSERT INTO sales.orders VALUES (1)")
    stream = spark.readStream.table("sales.orders").writeStream.format("noop").trigger(availableNow=True)
    stream.option("checkpointLocation", f"s3a://{bucket}/checkpoints").start().awaitTermination(60)

    assert "checkpoints/commits/0" in s3_server.keys(bucket)
