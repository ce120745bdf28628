"""A table that cannot be written: its rows are kept whole, seen by every reader, and replayed when it is well again."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from websockets.sync.client import connect

from lakefeed.writer.quarantine.store import Quarantine
from tests import pushed_changes
from tests.clients import open_duckdb, open_pyiceberg
from tests.lakefeed_process import Main, run_lakefeed, run_main
from tests.service_process import ServiceProcess, service_process
from tests.unwritable_tables import create_unwritable, make_writable

pytestmark = pytest.mark.integration


def crash_before_resolving(arguments: list[str]) -> None:
    """Run the command line, and kill the process when a replay has committed the rows and not yet resolved them."""

    async def kill(*_: Any, **__: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    Quarantine.resolve = kill
    run_main(arguments)


@pytest.fixture
def service(tmp_path: Path) -> Iterator[ServiceProcess]:
    with service_process(tmp_path) as service:
        service.start()
        create_unwritable(service.http_url, "users")
        pushed_changes.push_changes(service)
        yield service


def quarantine(service: ServiceProcess, *arguments: str) -> Any:
    """Run a command of `lakefeed quarantine`, and return what it printed, from JSON."""
    done = run_quarantine(service, *arguments, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def run_quarantine(service: ServiceProcess, *arguments: str, main: Main = run_main) -> subprocess.CompletedProcess[str]:
    return run_lakefeed("quarantine", *arguments, "--url", service.http_url, directory=service.directory, main=main)


def read_with_pyiceberg(service: ServiceProcess, table: str, *columns: str) -> list[tuple[Any, ...]]:
    with contextlib.closing(open_pyiceberg(service.http_url)) as catalog:
        rows = catalog.load_table(f"default.{table}").scan(selected_fields=columns).to_arrow()
    return sorted((tuple(row[name] for name in columns) for row in rows.to_pylist()), key=lambda row: row[0])


def read_with_duckdb(service: ServiceProcess, table: str, *columns: str) -> list[tuple[Any, ...]]:
    with contextlib.closing(open_duckdb(service.http_url)) as duckdb:
        return duckdb.execute(f"SELECT {', '.join(columns)} FROM lake.default.{table} ORDER BY {columns[0]}").fetchall()


def test_rows_are_kept_whole_and_seen_by_operators_and_readers(service: ServiceProcess) -> None:
    columns = ("sequence", "source", "operation", "row_id", "kind", "table_name", "reason", "row_image")
    images = [json.dumps(event.get("after") or event["before"]) for event in pushed_changes.EVENTS]
    expected = [
        (n, "shop", event["operation"], event["rowId"], "quarantined", "default.users", "undecodable", image)
        for n, (event, image) in enumerate(zip(pushed_changes.EVENTS, images, strict=True), start=1)
    ]
    assert read_with_pyiceberg(service, "lakefeed_quarantine", *columns) == expected
    assert read_with_duckdb(service, "lakefeed_quarantine", *columns) == expected
    (status,) = (each for each in service.get("/status")["tables"] if each["table"] == "default.users")
    assert (status["quarantinedRows"], status["committedRows"]) == (6, 0)
    assert 'lakefeed_writer_quarantined_changes_total{table="default.users"} 6.0' in service.get_text("/metrics")
    (listed,) = quarantine(service, "list")
    assert (listed["table"], listed["reason"], listed["changes"], listed["sources"]) == (
        "default.users",
        "undecodable",
        6,
        1,
    )


def test_a_killed_service_that_reads_its_log_again_keeps_each_row_once(service: ServiceProcess) -> None:
    for _ in range(2):
        service.kill()
        service.start()
        service.flush()
    assert [n for (n,) in read_with_pyiceberg(service, "lakefeed_quarantine", "sequence")] == [1, 2, 3, 4, 5, 6]


def test_replayed_rows_are_what_was_pushed_beside_a_running_service_and_after_its_restart(
    service: ServiceProcess,
) -> None:
    make_writable(service.http_url, "users")
    assert quarantine(service, "replay", "users")["replayed"] == 6
    assert read_with_pyiceberg(service, "users", *pushed_changes.COLUMNS) == pushed_changes.EXPECTED
    assert read_with_duckdb(service, "users", *pushed_changes.COLUMNS) == pushed_changes.EXPECTED
    assert quarantine(service, "list") == []
    service.kill()
    service.start()
    service.flush()
    assert read_with_pyiceberg(service, "users", *pushed_changes.COLUMNS) == pushed_changes.EXPECTED


def test_a_replay_killed_between_its_two_commits_and_run_again_appends_nothing_twice(service: ServiceProcess) -> None:
    make_writable(service.http_url, "users")
    done = run_quarantine(service, "replay", "users", main=crash_before_resolving)
    assert done.returncode == -signal.SIGKILL
    assert len(read_with_pyiceberg(service, "users", "_cdc_sequence")) == 6, "the rows are committed"
    assert quarantine(service, "list")[0]["changes"] == 6, "and the quarantine does not know"
    assert quarantine(service, "replay", "users")["found"] == 6
    assert read_with_pyiceberg(service, "users", *pushed_changes.COLUMNS) == pushed_changes.EXPECTED
    assert quarantine(service, "list") == []


def test_a_replay_before_the_cause_is_fixed_reports_it_and_changes_nothing(service: ServiceProcess) -> None:
    done = run_quarantine(service, "replay", "users")
    assert done.returncode == 3
    assert "6 are still refused" in done.stdout
    assert quarantine(service, "list")[0]["changes"] == 6


def test_a_push_whose_rows_all_go_there_does_not_call_them_committed(service: ServiceProcess) -> None:
    done = run_lakefeed("push", "-", "--table", "users", "--url", service.ws_url, stdin='{"id": 1}\n')
    assert done.returncode == 0, done.stderr
    assert "default.users: all rows were refused, see `lakefeed quarantine list`" in done.stdout
    assert "committed default.users" not in done.stdout


def test_a_table_that_a_client_names_like_the_quarantine_is_refused(service: ServiceProcess) -> None:
    events = [{**pushed_changes.EVENTS[0], "table": "lakefeed_quarantine"}]
    with connect(service.ws_url) as socket:
        socket.send(json.dumps({"type": "cdc_batch", "sourceDoId": "another", "sequenceNumber": 0, "events": events}))
        answer = json.loads(socket.recv(timeout=240))
    assert answer["type"] == "nack"
    assert "the last one not lakefeed_quarantine" in json.dumps(answer)
