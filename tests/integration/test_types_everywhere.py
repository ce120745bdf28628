"""A row with a value of every type is the same row in DuckDB and PyIceberg, on local files and on S3.

Spark reads the same rows in tests/spark/test_types_spark.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pyarrow.parquet as pq
import pytest

from tests import every_type
from tests.clients import S3Settings, open_duckdb, open_pyiceberg
from tests.integration.pushed_service import pushed_service
from tests.s3_server import S3Server
from tests.service_process import ServiceProcess

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def on_local_files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ServiceProcess, None]]:
    with pushed_service(tmp_path_factory.mktemp("local"), {}, every_type.push_every_type) as service:
        yield service, None


@pytest.fixture(scope="module")
def on_s3(tmp_path_factory: pytest.TempPathFactory, s3_server: S3Server) -> Iterator[tuple[ServiceProcess, S3Settings]]:
    directory, warehouse = tmp_path_factory.mktemp("s3-service"), s3_server.new_warehouse()
    with pushed_service(directory, warehouse, every_type.push_every_type) as service:
        yield service, s3_server.settings


@pytest.fixture(params=["on_local_files", "on_s3"])
def stored(request: pytest.FixtureRequest) -> tuple[ServiceProcess, S3Settings | None]:
    return request.getfixturevalue(request.param)


@pytest.mark.parametrize("table", every_type.TABLES)
def test_pyiceberg_shows_every_value(stored: tuple[ServiceProcess, S3Settings | None], table: str) -> None:
    service, s3 = stored
    with contextlib.closing(open_pyiceberg(service.http_url, s3=s3)) as catalog:
        rows = catalog.load_table(f"default.{table}").scan().to_arrow().sort_by("_cdc_sequence")
    every_type.check_rows(rows.to_pylist(), table, nulls=every_type.NULLS_IN_PYICEBERG)
    assert rows["_cdc_rescued"].to_pylist() == [None, None, None]


@pytest.mark.parametrize("table", every_type.TABLES)
def test_duckdb_shows_every_value(stored: tuple[ServiceProcess, S3Settings | None], table: str) -> None:
    service, s3 = stored
    names = every_type.NAMES[table]
    with contextlib.closing(open_duckdb(service.http_url, s3=s3)) as duckdb:
        quoted = ", ".join(f'"{name}"' for name in names)
        rows = duckdb.execute(f"SELECT {quoted} FROM lake.default.{table} ORDER BY _cdc_sequence").fetchall()
    every_type.check_rows([dict(zip(names, row, strict=True)) for row in rows], table)


@pytest.mark.parametrize("table", every_type.TABLES)
def test_the_files_alone_show_every_value(on_local_files: tuple[ServiceProcess, None], table: str) -> None:
    service, _ = on_local_files
    files = [path for path in (service.data_dir / "warehouse").rglob("*.parquet") if f"/{table}" in str(path)]
    rows = [row for file in files for row in pq.ParquetFile(file).read().to_pylist()]
    every_type.check_rows(sorted(rows, key=lambda row: row["_cdc_sequence"]), table)
