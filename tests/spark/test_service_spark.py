"""What was pushed over the WebSocket is what Spark reads, in batch and as a stream."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import DataFrame

from tests import pushed_changes
from tests.service_process import ServiceProcess, service_process
from tests.spark.conftest import OpenSpark


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    with service_process(tmp_path_factory.mktemp("service")) as running:
        running.start()
        pushed_changes.push_changes(running)
        yield running
        assert running.stop() == 0


def _rows(frame: DataFrame) -> list[tuple[object, ...]]:
    return [tuple(row) for row in frame.select(*pushed_changes.COLUMNS).orderBy("_cdc_sequence").collect()]


def test_spark_reads_what_was_pushed(service: ServiceProcess, open_spark: OpenSpark) -> None:
    spark = open_spark(uri=service.http_url, name="pushed")
    assert _rows(spark.table("pushed.default.users")) == pushed_changes.EXPECTED
    nested = spark.sql("SELECT home.city, tags[0] FROM pushed.default.users WHERE _cdc_sequence = 4").collect()
    assert [tuple(row) for row in nested] == [("Arlington", "navy")]


def test_a_stream_sees_every_change_once_over_two_runs(
    service: ServiceProcess, open_spark: OpenSpark, tmp_path: Path
) -> None:
    spark = open_spark(uri=service.http_url, name="streamed")

    def run_stream() -> None:
        stream = spark.readStream.format("iceberg").load("streamed.default.users")
        query = (
            stream.select(*pushed_changes.COLUMNS)
            .writeStream.format("parquet")
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
            .option("path", str(tmp_path / "seen"))
            .trigger(availableNow=True)
            .start()
        )
        assert query.awaitTermination(120)

    run_stream()
    assert _rows(spark.read.parquet(str(tmp_path / "seen"))) == pushed_changes.EXPECTED
    later = [{**event, "sequence": event["sequence"] + 100} for event in pushed_changes.EVENTS]
    pushed_changes.push_changes(service, later)
    run_stream()
    expected = pushed_changes.EXPECTED + [(row[0] + 100, *row[1:]) for row in pushed_changes.EXPECTED]
    assert _rows(spark.read.parquet(str(tmp_path / "seen"))) == expected
