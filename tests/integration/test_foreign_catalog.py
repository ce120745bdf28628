"""Services that commit to a catalog elsewhere; a second Lakefeed stands in for it, reached over HTTP as any other."""

from __future__ import annotations

import contextlib
import json
import urllib.error
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from websockets.sync.client import connect

from tests.clients import open_pyiceberg
from tests.pushed_changes import EVENTS, SOURCE, TABLE, push_changes
from tests.service_process import ServiceProcess, service_process

pytestmark = pytest.mark.integration

EXIT_FENCED = 3


@contextlib.contextmanager
def started(directory: Path, **settings: Any) -> Iterator[ServiceProcess]:
    directory.mkdir()
    with service_process(directory, {key.replace("__", "."): value for key, value in settings.items()}) as service:
        service.start()
        yield service


@pytest.fixture
def elsewhere(tmp_path: Path) -> Iterator[ServiceProcess]:
    with started(tmp_path / "elsewhere") as service:
        yield service


def sequences(catalog: ServiceProcess) -> list[int]:
    with contextlib.closing(open_pyiceberg(catalog.http_url)) as client:
        rows = client.load_table(f"default.{TABLE}").scan().to_arrow()
    return sorted(rows["_cdc_sequence"].to_pylist())


def push(service: ServiceProcess, number: int, events: list[dict[str, Any]]) -> None:
    with connect(service.ws_url) as socket:
        batch = {"type": "cdc_batch", "sourceDoId": SOURCE, "sequenceNumber": number, "events": events}
        socket.send(json.dumps(batch))
        assert json.loads(socket.recv(timeout=240))["type"] == "ack"


def more_events(first: int, last: int) -> list[dict[str, Any]]:
    return [{**EVENTS[0], "sequence": sequence, "rowId": str(sequence)} for sequence in range(first, last + 1)]


def test_changes_go_to_the_catalog_elsewhere_and_none_is_served_here(tmp_path: Path, elsewhere: ServiceProcess):
    with started(tmp_path / "here", iceberg__uri=elsewhere.http_url, iceberg__warehouse="lakefeed") as service:
        push_changes(service)
        assert sequences(elsewhere) == [event["sequence"] for event in EVENTS]
        with pytest.raises(urllib.error.HTTPError) as raised:
            service.get("/v1/config")
        raised.value.close()
        assert raised.value.code == 404
        assert service.stop() == 0


def test_of_two_services_with_one_identity_the_earlier_stops_and_the_table_is_right(
    tmp_path: Path, elsewhere: ServiceProcess
):
    same = {"iceberg__uri": elsewhere.http_url, "server__node_id": "node-one"}
    with started(tmp_path / "earlier", **same) as earlier:
        push_changes(earlier)
        with started(tmp_path / "later", **same) as later:
            push(later, 0, [*EVENTS, *more_events(7, 9)])
            assert later.flush()["success"]
            assert earlier.wait_for_exit() == EXIT_FENCED
            words = earlier.log_text()
            push(later, 1, more_events(10, 12))
            assert later.flush()["success"]
            assert later.stop() == 0
    assert "another service has started under our node id" in words
    assert "node=node-one" in words
    assert sequences(elsewhere) == list(range(1, 13))


def test_a_second_service_on_the_same_data_stops_at_once_and_the_first_continues(tmp_path: Path):
    with started(tmp_path / "one") as first, service_process(tmp_path / "one") as second:
        second.spawn()
        assert second.wait_for_exit() != 0
        push_changes(first)
        assert sequences(first) == [event["sequence"] for event in EVENTS]
    assert "log is in use by another process" in second.log_text()
