"""A table that cannot be written: its rows are kept whole, seen by every reader, and replayed when it is well again."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from websockets.sync.client import connect

from tests import pushed_changes
from tests.clients import open_duckdb, open_pyiceberg
from tests.service_process import LAKEFEED, ServiceProcess, service_process
from tests.unwritable_tables import create_unwritable, make_writable

pytestmark = pytest.mark.integration

COMMAND_TIMEOUT_S = 120

# The command line, but killed where a replay has committed the rows and not yet said so in the quarantine.
DYING_LAKEFEED = """
import os, signal
from lakefeed.ingest.cli.main import main
from lakefeed.writer.quarantine.store import Quarantine

async def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)

Quarantine.resolve = die
main()
"""


@pytest.fixture
def service(tmp_path: Path) -> Iterator[ServiceProcess]:
    with service_process(tmp_path) as service:
        service.start()
        create_unwritable(service.http_url, "users")
        pushed_changes.push_changes(service)
        yield service


def lakefeed(service: ServiceProcess, *arguments: str, program: tuple[str, ...] = (LAKEFEED,)) -> Any:
    """Run a command of `lakefeed quarantine` as an operator would; what it printed, from JSON."""
    done = run(service, *arguments, "--json", program=program)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def run(
    service: ServiceProcess, *arguments: str, program: tuple[str, ...] = (LAKEFEED,)
) -> subprocess.CompletedProcess[str]:
    command = [*program, "quarantine", *arguments, "--url", service.http_url]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=False, cwd=service.directory
    )


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
    (listed,) = lakefeed(service, "list")
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
    assert lakefeed(service, "replay", "users")["replayed"] == 6
    assert read_with_pyiceberg(service, "users", *pushed_changes.COLUMNS) == pushed_changes.EXPECTED
    assert read_with_duckdb(service, "users", *pushed_changes.COLUMNS) == pushed_changes.EXPECTED
    assert lakefeed(service, "list") == []
    service.kill()
    service.start()
    service.flush()
    assert read_with_pyiceberg(service, "users", *pushed_changes.COLUMNS) == pushed_changes.EXPECTED


def test_a_replay_killed_between_its_two_commits_and_run_again_appends_nothing_twice(service: ServiceProcess) -> None:
    make_writable(service.http_url, "users")
    done = run(service, "replay", "users", program=(sys.executable, "-c", DYING_LAKEFEED))
    assert done.returncode == -signal.SIGKILL
    assert len(read_with_pyiceberg(service, "users", "_cdc_sequence")) == 6, "the rows are committed"
    assert lakefeed(service, "list")[0]["changes"] == 6, "and the quarantine does not know"
    assert lakefeed(service, "replay", "users")["found"] == 6
    assert read_with_pyiceberg(service, "users", *pushed_changes.COLUMNS) == pushed_changes.EXPECTED
    assert lakefeed(service, "list") == []


def test_a_replay_before_the_cause_is_gone_tells_so_and_changes_nothing(service: ServiceProcess) -> None:
    done = run(service, "replay", "users")
    assert done.returncode == 3
    assert "6 are still refused" in done.stdout
    assert lakefeed(service, "list")[0]["changes"] == 6


def test_a_push_whose_rows_all_go_there_does_not_call_them_committed(service: ServiceProcess) -> None:
    push = [LAKEFEED, "push", "-", "--table", "users", "--url", service.ws_url]
    done = subprocess.run(
        push, input='{"id": 1}\n', capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=True
    )
    assert "default.users: all rows were refused, see `lakefeed quarantine list`" in done.stdout
    assert "committed default.users" not in done.stdout


def test_a_table_that_a_client_names_like_the_quarantine_is_refused(service: ServiceProcess) -> None:
    events = [{**pushed_changes.EVENTS[0], "table": "lakefeed_quarantine"}]
    with connect(service.ws_url) as socket:
        socket.send(json.dumps({"type": "cdc_batch", "sourceDoId": "another", "sequenceNumber": 0, "events": events}))
        answer = json.loads(socket.recv(timeout=60))
    assert answer["type"] == "nack"
    assert "the last one not lakefeed_quarantine" in json.dumps(answer)
