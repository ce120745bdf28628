"""`lakefeed verify` beside a running service: right on what was pushed, and it finds what somebody did to the files."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from tests import every_type, pushed_changes
from tests.lakefeed_process import run_lakefeed
from tests.service_process import ServiceProcess, free_ports, service_process

pytestmark = pytest.mark.integration


@pytest.fixture
def service(tmp_path: Path) -> Iterator[ServiceProcess]:
    with service_process(tmp_path) as service:
        service.start()
        pushed_changes.push_changes(service)
        yield service


def verify(service: ServiceProcess, table: str, *options: str, url: str = "") -> subprocess.CompletedProcess[str]:
    return run_lakefeed("verify", table, *options, "--url", url or service.http_url, directory=service.directory)


def report(service: ServiceProcess, table: str = "users", *, exit_code: int) -> dict[str, Any]:
    done = verify(service, table, "--json")
    assert done.returncode == exit_code, done.stdout + done.stderr
    return json.loads(done.stdout)


def data_file(service: ServiceProcess) -> Path:
    """Find the largest data file of the table."""
    return max(service.data_dir.rglob("*.parquet"), key=lambda path: pq.read_metadata(path).num_rows)


def spoil(service: ServiceProcess, change: Callable[[pa.Table], pa.Table]) -> None:
    path = data_file(service)
    with pq.ParquetFile(path) as file:
        rows = file.read()
    pq.write_table(change(rows), path, store_schema=False)


def flip(rows: pa.Table) -> pa.Table:
    index = rows.schema.get_field_index("name")
    return rows.set_column(index, rows.schema.field(index), pc.utf8_upper(rows.column("name")))


def test_what_was_pushed_is_as_recorded_also_after_a_kill(service: ServiceProcess) -> None:
    done = verify(service, "users")
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "everything is as it was recorded")
    assert "read 6 rows" in done.stdout
    assert "snapshots: 2 verified" in done.stdout
    service.kill()
    service.start()
    service.flush()
    found = report(service, exit_code=0)
    assert (found["isSound"], found["totalsCompared"], found["findings"]) == (True, True, [])
    assert found["sources"]["shop"]["operations"] == {"DELETE": 1, "INSERT": 3, "UPDATE": 2}


def test_rows_of_every_type_are_as_recorded(service: ServiceProcess) -> None:
    every_type.push_every_type(service)
    for table in every_type.TABLES:
        found = report(service, table, exit_code=0)
        assert (found["rows"], found["totalsCompared"]) == (3, True)
        assert {snapshot["state"] for snapshot in found["snapshots"]} == {"verified"}


@pytest.mark.parametrize(
    ("change", "kinds"),
    [
        (lambda rows: rows.slice(1), {"loss"}),
        (lambda rows: pa.concat_tables([rows, rows.slice(0, 1)]), {"duplicate", "surplus"}),
        (flip, {"difference"}),
    ],
    ids=["loss", "duplicate", "flipped value"],
)
def test_a_changed_data_file_is_found(
    service: ServiceProcess, change: Callable[[pa.Table], pa.Table], kinds: set[str]
) -> None:
    spoil(service, change)
    found = report(service, exit_code=1)
    assert {finding["kind"] for finding in found["findings"]} == kinds
    assert "findings: " in verify(service, "users").stdout


def test_a_lost_file_is_found(service: ServiceProcess) -> None:
    data_file(service).unlink()
    assert {finding["kind"] for finding in report(service, exit_code=1)["findings"]} == {"unreadable", "loss"}


def test_what_cannot_be_looked_at_is_exit_code_2(service: ServiceProcess) -> None:
    (port,) = free_ports(1)
    for done in (
        verify(service, "nothing"),
        verify(service, "users", "--to", "17"),
        verify(service, "users", url=f"http://127.0.0.1:{port}"),
        verify(service, "users", "--no-such-option"),
    ):
        assert done.returncode == 2
        assert "Error: " in done.stderr
        assert "Traceback" not in done.stderr
