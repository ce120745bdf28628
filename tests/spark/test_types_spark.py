"""A row with a value of every type is the same row in Spark, on local files and on S3, and so is one that Spark wrote.

On S3 Spark reads and writes through Iceberg's S3FileIO; all it is given are the keys.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from pyspark.sql import DataFrame, Row, SparkSession

from tests import every_type
from tests.clients import S3Settings, open_duckdb, open_pyiceberg
from tests.integration.pushed_service import pushed_service
from tests.s3_server import S3Server
from tests.spark.conftest import OpenSpark

TABLE = "every_type"
WRITTEN = "written_by_spark"


@dataclass(frozen=True)
class Stored:
    """A service that holds the rows, and how clients reach the store that its files are in."""

    url: str
    s3: S3Settings | None
    prefix: str

    @property
    def properties(self) -> dict[str, str]:
        """What Spark has to be told of the store: the catalog says the rest."""
        if self.s3 is None:
            return {}
        return {"s3.access-key-id": self.s3.access_key_id, "s3.secret-access-key": self.s3.secret_access_key}


@pytest.fixture(scope="module")
def on_local_files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stored]:
    with pushed_service(tmp_path_factory.mktemp("service"), {}, every_type.push_every_type) as service:
        _create_like(service.http_url, None)
        yield Stored(service.http_url, None, "file:/")


@pytest.fixture(scope="module")
def on_s3(tmp_path_factory: pytest.TempPathFactory, s3_server: S3Server) -> Iterator[Stored]:
    directory, warehouse = tmp_path_factory.mktemp("s3-service"), s3_server.new_warehouse()
    with pushed_service(directory, warehouse, every_type.push_every_type) as service:
        _create_like(service.http_url, s3_server.settings)
        yield Stored(service.http_url, s3_server.settings, warehouse["storage.warehouse"])


def _create_like(url: str, s3: S3Settings | None) -> None:
    """Create a table of the same types: Spark's own words have none for a UUID or a fixed length."""
    with contextlib.closing(open_pyiceberg(url, s3=s3)) as catalog:
        catalog.create_table(f"default.{WRITTEN}", catalog.load_table(f"default.{TABLE}").schema())


@pytest.fixture(params=["on_local_files", "on_s3"])
def stored(request: pytest.FixtureRequest) -> Stored:
    return request.getfixturevalue(request.param)


@pytest.fixture
def spark(stored: Stored, open_spark: OpenSpark) -> SparkSession:
    return open_spark(
        uri=stored.url, conf={f"spark.sql.catalog.lake.{key}": value for key, value in stored.properties.items()}
    )


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


def test_spark_shows_every_value(spark: SparkSession) -> None:
    _check(_rows(spark.table(f"default.{TABLE}")))


def test_what_spark_writes_shows_every_value_in_every_engine(stored: Stored, spark: SparkSession) -> None:
    spark.sql(f"INSERT OVERWRITE default.{WRITTEN} SELECT * FROM default.{TABLE}")

    files = spark.sql(f"SELECT file_path FROM default.{WRITTEN}.files").collect()
    assert all(file.file_path.startswith(stored.prefix) for file in files)
    _check(_rows(spark.table(f"default.{WRITTEN}")))
    every_type.check_rows(_rows_in_pyiceberg(stored), TABLE, nulls=every_type.NULLS_IN_PYICEBERG)
    every_type.check_rows(_rows_in_duckdb(stored), TABLE)


def _rows_in_pyiceberg(stored: Stored) -> list[dict[str, Any]]:
    with contextlib.closing(open_pyiceberg(stored.url, s3=stored.s3)) as catalog:
        return catalog.load_table(f"default.{WRITTEN}").scan().to_arrow().sort_by("_cdc_sequence").to_pylist()


def _rows_in_duckdb(stored: Stored) -> list[dict[str, Any]]:
    names = every_type.NAMES[TABLE]
    quoted = ", ".join(f'"{name}"' for name in names)
    with contextlib.closing(open_duckdb(stored.url, s3=stored.s3)) as duckdb:
        rows = duckdb.execute(f"SELECT {quoted} FROM lake.default.{WRITTEN} ORDER BY _cdc_sequence").fetchall()
    return [dict(zip(names, row, strict=True)) for row in rows]
