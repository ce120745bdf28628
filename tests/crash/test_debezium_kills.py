"""Promise 1 for Debezium: whatever is killed, the service or the server that sends to it, each change is there once."""

from __future__ import annotations

import http.client
import json
import os
import random
import time

import pytest

from tests.ingest.debezium.recordings import Request
from tests.integration.debezium_replay import (
    SETTINGS,
    changes_in,
    count_changes,
    table_differences_of,
    with_killed_servers,
)
from tests.service_process import ServiceProcess, service_process

pytestmark = pytest.mark.crash

VARIANT = "v2"
KILLS = 7
# A request takes a few milliseconds: half of the kills fall into one, the others between two.
KILL_WITHIN_S = 0.004
ANSWER_TIMEOUT_S = 240.0

# Small enough that kills meet rotations, trims, flushes and commits.
SMALL = {
    "ingest.frame_max_bytes": "256KiB",
    "ingest.event_max_bytes": "256KiB",
    "log.segment_max_bytes": "1MiB",
    "log.max_bytes": "32MiB",
    "writer.flush_max_changes": 50,
    "writer.flush_max_age_s": 0.2,
    "writer.flush_check_interval_s": 0.05,
}


class Sink:
    """Debezium Server's HTTP sink: one request in flight, and one connection while it lasts."""

    def __init__(self, service: ServiceProcess) -> None:
        self._service = service
        self._connection: http.client.HTTPConnection | None = None

    def deliver(self, request: Request) -> bool:
        """Send a request and hear the answer; tells whether all of it had been taken before."""
        self.send(request)
        assert self._connection is not None
        response = self._connection.getresponse()
        body = response.read()
        assert response.status == 200, body
        return json.loads(body)["isDuplicate"]

    def send(self, request: Request) -> None:
        if self._connection is None:
            self._connection = http.client.HTTPConnection(
                "127.0.0.1", self._service.http_port, timeout=ANSWER_TIMEOUT_S
            )
        self._connection.request("POST", "/cdc/debezium?source=shop", body=request.body, headers=request.headers)

    def hang_up(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._connection = None


def _seed() -> int:
    given = os.environ.get("CRASH_TEST_SEED")
    return int(given) if given else random.SystemRandom().randrange(2**32)


def test_changes_of_debezium_are_in_the_tables_once_after_kills_of_both_sides(tmp_path):
    seed = _seed()
    print(f"seed: CRASH_TEST_SEED={seed}")
    rng = random.Random(seed)
    requests = with_killed_servers(VARIANT, rng, run_max_requests=80)
    kills = set(rng.sample(range(len(requests)), KILLS))
    with service_process(tmp_path, {**SETTINGS, **SMALL}) as service:
        service.start()
        sink = Sink(service)
        durable_unanswered = 0
        for number, request in enumerate(requests):
            if number in kills:
                _kill(service, sink, request, rng)
            durable_unanswered += sink.deliver(request) and number in kills
        print(f"requests={len(requests)} kills={KILLS} durable_unanswered={durable_unanswered}")
        sink.hang_up()
        service.flush()
        assert service.get("/status")["problems"] == []
        assert count_changes(service.http_url) == changes_in(VARIANT)
        assert table_differences_of(service.http_url, VARIANT) == []


def _kill(service: ServiceProcess, sink: Sink, request: Request, rng: random.Random) -> None:
    """Kill the service while it has the request, or has none."""
    if rng.randrange(4):
        sink.send(request)
        time.sleep(rng.uniform(0, KILL_WITHIN_S))  # the moment of the kill
    service.kill()
    sink.hang_up()
    service.start()
