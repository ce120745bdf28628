"""What was pushed over the WebSocket is what PyIceberg and DuckDB read, on local files and on S3."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from tests import pushed_changes
from tests.clients import S3Settings, open_duckdb, open_pyiceberg
from tests.integration.pushed_service import pushed_service
from tests.s3_server import S3Server
from tests.service_process import ServiceProcess

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def on_local_files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ServiceProcess, None]]:
    with pushed_service(tmp_path_factory.mktemp("local"), {}, pushed_changes.push_changes) as service:
        yield service, None


@pytest.fixture(scope="module")
def on_s3(tmp_path_factory: pytest.TempPathFactory, s3_server: S3Server) -> Iterator[tuple[ServiceProcess, S3Settings]]:
    directory, warehouse = tmp_path_factory.mktemp("s3-service"), s3_server.new_warehouse()
    with pushed_service(directory, warehouse, pushed_changes.push_changes) as service:
        yield service, s3_server.settings


@pytest.fixture(params=["on_local_files", "on_s3"])
def stored(request: pytest.FixtureRequest) -> tuple[ServiceProcess, S3Settings | None]:
    return request.getfixturevalue(request.param)


def test_pyiceberg_reads_what_was_pushed(stored: tuple[ServiceProcess, S3Settings | None]) -> None:
    service, s3 = stored
    with contextlib.closing(open_pyiceberg(service.http_url, s3=s3)) as catalog:
        rows = catalog.load_table("default.users").scan().to_arrow().sort_by("_cdc_sequence")
    assert [tuple(row[name] for name in pushed_changes.COLUMNS) for row in rows.to_pylist()] == pushed_changes.EXPECTED
    assert rows["home"].to_pylist()[3] == {"city": "Arlington", "zip": 22202}
    assert rows["tags"].to_pylist()[3] == ["navy", "cobol"]


def test_duckdb_reads_what_was_pushed(stored: tuple[ServiceProcess, S3Settings | None]) -> None:
    service, s3 = stored
    with contextlib.closing(open_duckdb(service.http_url, s3=s3)) as duckdb:
        names = ", ".join(pushed_changes.COLUMNS)
        rows = duckdb.execute(f"SELECT {names} FROM lake.default.users ORDER BY _cdc_sequence").fetchall()
        nested = duckdb.execute("SELECT home.city, tags[1] FROM lake.default.users WHERE _cdc_sequence = 4").fetchall()
    assert rows == pushed_changes.EXPECTED
    assert nested == [("Arlington", "navy")]


def test_rows_lie_in_the_partition_of_their_day(stored: tuple[ServiceProcess, S3Settings | None]) -> None:
    service, s3 = stored
    with contextlib.closing(open_pyiceberg(service.http_url, s3=s3)) as catalog:
        table = catalog.load_table("default.users")
        late = table.scan(row_filter="_cdc_timestamp >= '2026-11-16T00:00:00+00:00'")
        assert len(list(late.plan_files())) == 1, "statistics and partitions leave one file"
        assert sorted(late.to_arrow()["_cdc_sequence"].to_pylist()) == [4, 5, 6]


def test_a_flush_without_new_changes_names_the_snapshot_that_holds_them(
    stored: tuple[ServiceProcess, S3Settings | None],
) -> None:
    service, s3 = stored
    with contextlib.closing(open_pyiceberg(service.http_url, s3=s3)) as catalog:
        snapshot = catalog.load_table("default.users").current_snapshot()
    assert snapshot is not None
    assert service.flush()["tables"]["default.users"] == {"snapshotId": snapshot.snapshot_id, "rows": 0, "files": 0}


def test_the_snapshot_carries_the_progress_marker(stored: tuple[ServiceProcess, S3Settings | None]) -> None:
    service, s3 = stored
    with contextlib.closing(open_pyiceberg(service.http_url, s3=s3)) as catalog:
        table = catalog.load_table("default.users")
    assert '"shop":[0,6]' in table.properties["lakefeed.progress"]
    snapshot = table.current_snapshot()
    assert snapshot is not None
    assert snapshot.summary is not None
    assert snapshot.summary["lakefeed.sources"].endswith(",6]}")
