"""A row with a value of every type is the same row in Spark, through the catalog and from files that lie on S3."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, Row

from tests import every_type
from tests.s3_server import S3Server
from tests.service_process import ServiceProcess, service_process
from tests.spark.conftest import OpenSpark

TABLE = "every_type"


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    with service_process(tmp_path_factory.mktemp("service")) as running:
        running.start()
        every_type.push_every_type(running)
        yield running
        assert running.stop() == 0


def _rows(frame: DataFrame) -> list[dict[str, Any]]:
    # A moment without a zone is one; Spark's own class for it would be shown in the zone of this machine.
    shown = frame.withColumn("clock", frame["clock"].cast("string")).withColumn(
        "moment", frame["moment"].cast("string")
    )
    rows = shown.orderBy("_cdc_sequence").select(*every_type.NAMES[TABLE]).collect()
    return [_plain(row) for row in rows]


def _plain(value: Any) -> Any:
    match value:
        case Row():
            return {name: _plain(each) for name, each in value.asDict().items()}
        case dict():
            return {key: _plain(each) for key, each in value.items()}
        case list():
            return [_plain(each) for each in value]
    return value


def _check(rows: list[dict[str, Any]]) -> None:
    for row, wanted in zip(rows, every_type.expected(TABLE), strict=True):
        for name in ("clock", "moment"):
            text = wanted[name] and wanted[name].replace(tzinfo=None).isoformat(sep=" ")
            assert row[name] == text
            row[name] = wanted[name]
    every_type.check_rows(rows, TABLE)


def test_spark_shows_every_value(service: ServiceProcess, open_spark: OpenSpark) -> None:
    spark = open_spark(uri=service.http_url, name="typed")
    _check(_rows(spark.table(f"typed.default.{TABLE}")))


def test_spark_shows_every_value_of_files_that_were_written_to_s3(
    s3_server: S3Server, open_spark: OpenSpark, tmp_path: Path
) -> None:
    """Spark's own way to S3 needs jars that are not here, so the objects are fetched for it, byte by byte."""
    bucket = s3_server.create_bucket()
    settings = {
        "storage.warehouse": f"s3://{bucket}/tables",
        "storage.s3_endpoint": s3_server.endpoint,
        "storage.s3_path_style": "true",
        "storage.s3_access_key_id": s3_server.access_key_id,
        "storage.s3_secret_access_key": s3_server.secret_access_key,
    }
    with service_process(tmp_path, settings) as service:
        service.start()
        every_type.push_every_type(service)
        _fetch_objects(s3_server, bucket, tmp_path / "fetched")
        spark = open_spark(uri=service.http_url, name="fetched")
        files = [str(path) for path in (tmp_path / "fetched").rglob("*.parquet") if f"/{TABLE}" in str(path)]
        # Without the table Spark asks which calendar old dates are in; they are in the one that all others use.
        reader = spark.read.option("datetimeRebaseMode", "CORRECTED")
        _check(_rows(reader.parquet(*files)))
        assert service.stop() == 0


def _fetch_objects(server: S3Server, bucket: str, directory: Path) -> None:
    client = server.client()
    for item in client.list_objects_v2(Bucket=bucket)["Contents"]:
        path = directory / item["Key"]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(client.get_object(Bucket=bucket, Key=item["Key"])["Body"].read())
    client.close()
