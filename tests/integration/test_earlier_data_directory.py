"""A data directory that an earlier revision wrote and left with kill -9 opens, continues, and loses nothing."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from websockets.sync.client import connect

from tests.clients import open_pyiceberg
from tests.earlier_data_directory import read_rows, resume, sorted_rows, unpack
from tests.lakefeed_process import run_lakefeed
from tests.service_process import ServiceProcess, service_process

pytestmark = pytest.mark.integration

DEADLINE_S = 240.0


@dataclass(frozen=True, slots=True)
class Earlier:
    """The service on the directory, and what the directory has to hold."""

    service: ServiceProcess
    expected: dict[str, Any]

    @property
    def tables(self) -> dict[str, list[Any]]:
        committed, uncommitted = self.expected["committed"], self.expected["uncommitted"]
        return {name: rows + uncommitted.get(name, []) for name, rows in committed.items()}


@pytest.fixture
def earlier(tmp_path: Path) -> Iterator[Earlier]:
    expected = unpack(tmp_path)
    with service_process(tmp_path) as service:
        service.start()
        yield Earlier(service, expected)
        assert service.stop() == 0, service.log_text()


def wait_for_rows(earlier: Earlier) -> None:
    """Wait until every table has as many rows as it must, without asking for a flush."""
    deadline = time.monotonic() + DEADLINE_S
    wanted = {name: len(rows) for name, rows in earlier.tables.items()}
    while (found := {name: count_rows(earlier.service, name) for name in wanted}) != wanted:
        assert time.monotonic() < deadline, f"found={found} wanted={wanted}\n{earlier.service.log_text()}"
        time.sleep(0.2)


def count_rows(service: ServiceProcess, table: str) -> int:
    with closing(open_pyiceberg(service.http_url)) as catalog:
        snapshot = catalog.load_table(table).current_snapshot()
    return int(snapshot.summary["total-records"])


def check_rows(earlier: Earlier, more: dict[str, list[Any]] | None = None) -> None:
    for name, rows in earlier.tables.items():
        assert read_rows(earlier.service, name) == sorted_rows(rows + (more or {}).get(name, [])), name


def verify(service: ServiceProcess, table: str) -> dict[str, Any]:
    done = run_lakefeed("verify", table, "--json", "--url", service.http_url, directory=service.directory)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)


def test_what_the_log_held_is_committed_once_and_sources_go_on(earlier: Earlier) -> None:
    service = earlier.service
    wait_for_rows(earlier)
    assert service.flush()["success"]  # nothing is left to commit; the service has heard of its own commits
    check_rows(earlier)
    more: dict[str, list[Any]] = {name: [] for name in earlier.tables}
    for source, last in earlier.expected["sources"].items():
        events = []
        for sequence, table in enumerate(more, start=last["sequence"]):  # the first is one that was sent before
            row = {"id": sequence, "region": "north", "customer": 1}
            events.append(
                {"sequence": sequence, "table": table, "operation": "INSERT", "rowId": f"new-{sequence}", "after": row}
            )
            if sequence > last["sequence"]:
                more[table].append([source, last["epoch"], sequence, "INSERT", f"new-{sequence}", row])
        with connect(service.ws_url) as socket:
            status = resume(socket, source, epoch=last["epoch"])
            assert (status["epoch"], status["lastDurableSequence"]) == (last["epoch"], last["sequence"])
            assert status["lastCommittedSequence"] == last["sequence"]
            socket.send(json.dumps({"type": "cdc_batch", "sequenceNumber": 0, "events": events}))
            ack = json.loads(socket.recv(timeout=DEADLINE_S))
            assert (ack["type"], ack["details"]["eventsProcessed"], ack["details"]["duplicates"]) == ("ack", 2, 1), ack
    assert service.flush()["success"]
    check_rows(earlier, more)
    for name, rows in earlier.tables.items():
        found = verify(service, name)
        assert (found["isSound"], found["totalsCompared"], found["findings"]) == (True, True, [])
        assert found["rows"] == len(rows) + len(more[name])
        assert {snapshot["state"] for snapshot in found["snapshots"]} == {"verified"}


def test_sources_resume_behind_the_log_before_it_is_committed(tmp_path: Path) -> None:
    expected = unpack(tmp_path)
    with service_process(tmp_path, {"writer.flush_max_age_s": 3600}) as service:
        service.start()
        for source, last in expected["sources"].items():
            with connect(service.ws_url) as socket:
                assert resume(socket, source, epoch=last["epoch"])["lastDurableSequence"] == last["sequence"]
        for name, rows in expected["committed"].items():
            assert read_rows(service, name) == sorted_rows(rows), name
        for name, mirror in expected["mirrors"].items():
            assert read_rows(service, name) == sorted_rows(mirror["merged"])


def test_the_quarantined_row_is_there_once(earlier: Earlier) -> None:
    assert earlier.service.flush()["success"]
    columns = ("table_name", "source", "epoch", "sequence", "operation", "row_id", "kind")
    with closing(open_pyiceberg(earlier.service.http_url)) as catalog:
        quarantine = catalog.load_table("default.lakefeed_quarantine")
        found = quarantine.scan(selected_fields=columns).to_arrow().to_pylist()
    assert [[row[name] for name in columns] for row in found] == [
        [table, *position, "quarantined"]
        for table, rows in earlier.expected["quarantined"].items()
        for *position, _row in rows
    ]
