"""One table that cannot be written, as its operator sees it: a view has its name, until somebody drops the view."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from websockets.sync.client import connect

from tests.clients import open_pyiceberg
from tests.service_process import ServiceProcess, service_process

pytestmark = pytest.mark.integration

# A shutdown that waited for the bad table would wait this long.
SETTINGS = {"writer.flush_max_age_s": 0.2, "server.shutdown_deadline_s": 600}

SCHEMA = {"type": "struct", "schema-id": 0, "fields": [{"id": 1, "name": "id", "type": "long", "required": False}]}
VIEW = {
    "name": "bad",
    "schema": SCHEMA,
    "properties": {},
    "view-version": {
        "version-id": 1,
        "timestamp-ms": 1_794_700_800_000,
        "schema-id": 0,
        "summary": {},
        "default-namespace": ["default"],
        "representations": [{"type": "sql", "sql": "SELECT 1 AS id", "dialect": "spark"}],
    },
}


def request(service: ServiceProcess, method: str, path: str, body: Any = None) -> tuple[int, Any]:
    data = None if body is None else json.dumps(body).encode()
    wanted = urllib.request.Request(
        f"{service.http_url}{path}", method=method, data=data, headers={"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(wanted, timeout=60) as answer:
            text = answer.read()
            return answer.status, json.loads(text) if text else None
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def push(service: ServiceProcess, table: str, sequence: int) -> None:
    event = {"sequence": sequence, "operation": "INSERT", "table": table, "after": {"id": sequence}}
    with connect(service.ws_url) as socket:
        socket.send(json.dumps({"type": "cdc_batch", "sourceDoId": "shop", "events": [event]}))
        while json.loads(socket.recv(timeout=240)).get("type") != "ack":
            pass


def table_status(service: ServiceProcess, table: str) -> dict[str, Any]:
    return next(each for each in service.get("/status")["tables"] if each["table"] == table)


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def wait_until_paused(service: ServiceProcess) -> dict[str, Any]:
    wait_for(lambda: table_status(service, "default.bad")["state"] == "paused")
    return table_status(service, "default.bad")


def rows_of(service: ServiceProcess, table: str) -> list[int]:
    catalog = open_pyiceberg(service.http_url)
    try:
        return sorted(catalog.load_table(table).scan().to_arrow()["id"].to_pylist())
    finally:
        catalog.close()


def test_a_paused_table_is_reported_everywhere_delays_no_other_table_and_recovers(tmp_path: Path) -> None:
    with service_process(tmp_path, SETTINGS) as service:
        service.start()
        request(service, "POST", "/v1/namespaces", {"namespace": ["default"]})
        assert request(service, "POST", "/v1/namespaces/default/views", VIEW)[0] == 200
        push(service, "bad", 1)
        push(service, "good", 2)

        status = wait_until_paused(service)
        assert status["problem"]
        assert status["failedAttempts"] >= 3
        wait_for(lambda: request(service, "GET", "/health")[1]["status"] == "degraded")
        code, health = request(service, "GET", "/health")
        assert code == 200, "others commit: the service stays in its load balancer"
        assert any("table=default.bad" in problem for problem in health["problems"])
        wait_for(lambda: 'lakefeed_writer_table_paused{table="default.bad"} 1.0' in service.get_text("/metrics"))

        code, flushed = request(service, "POST", "/flush")
        assert (code, flushed["success"]) == (503, False)
        assert flushed["tables"]["default.bad"]["error"] in flushed["error"]
        assert rows_of(service, "default.good") == [2]
        assert request(service, "POST", "/flush?table=good")[0] == 200

        assert service.stop() == 0
        service.spawn()
        wait_for_the_table(service)
        wait_until_paused(service)
        assert request(service, "DELETE", "/v1/namespaces/default/views/bad")[0] == 204
        code, flushed = request(service, "POST", "/flush?table=bad")
        assert (code, flushed["tables"]["default.bad"]["rows"]) == (200, 1)
        assert rows_of(service, "default.bad") == [1]
        service.wait_until_ready()


def wait_for_the_table(service: ServiceProcess) -> None:
    """Wait for the table alone: while nothing but it is to be committed, the service does not call itself ready."""

    def has_read_the_log() -> bool:
        try:
            return any(each["table"] == "default.bad" for each in service.get("/status")["tables"])
        except OSError:
            return False

    wait_for(has_read_the_log)
