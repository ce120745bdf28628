"""Changes that come while a test looks after the table: one client, batch after batch, each acked."""

from __future__ import annotations

import contextlib
import json
import math
import threading
import time
from collections.abc import Callable, Iterator

from websockets.sync.client import connect

from tests.service_process import ServiceProcess

WAIT_S = 600.0
BATCH_ROWS = 20
PACE_S = 0.15

# 2026-11-16 in ms.
_DAY_MS = 1_794_787_200_000


class LiveChanges:
    """Pushes inserts numbered from 1 to `default.users`, some a second, until it is stopped."""

    def __init__(self, service: ServiceProcess) -> None:
        self._service = service
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="live-changes")
        self._limit = math.inf
        self.failure: BaseException | None = None
        self.pushed = 0

    def push_at_most(self, batches: float) -> None:
        """Push so many more. On a slow machine nobody is helped by a table that grows for as long as it takes."""
        self._limit = self.pushed // BATCH_ROWS + batches

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> int:
        """Stop, commit what is durable, and tell how many changes were acked."""
        self._ended.set()
        self._thread.join(WAIT_S)
        if self.failure is not None:
            raise self.failure
        assert self._service.flush()["success"]
        return self.pushed

    def close(self) -> None:
        self._ended.set()
        self._thread.join(WAIT_S)

    def _run(self) -> None:
        try:
            with connect(self._service.ws_url) as socket:
                number = 0
                while not self._ended.wait(PACE_S):
                    if number < self._limit:
                        self._push(socket, number)
                        number += 1
        except BaseException as error:  # noqa: BLE001 - raised where the test waits
            self.failure = error

    def _push(self, socket, number: int) -> None:
        first = self.pushed + 1
        events = [
            {
                "sequence": sequence,
                "operation": "INSERT",
                "table": "users",
                "rowId": str(sequence),
                "timestamp": _DAY_MS + sequence,
                "after": {"id": sequence, "name": f"name {sequence % 97}"},
            }
            for sequence in range(first, first + BATCH_ROWS)
        ]
        message = {"type": "cdc_batch", "sourceDoId": "shop", "sequenceNumber": number, "events": events}
        socket.send(json.dumps(message))
        while True:
            answer = json.loads(socket.recv(timeout=WAIT_S))
            if answer["type"] == "ack" and answer["status"] != "persisted":
                break
            assert answer["type"] == "ack", answer
        self.pushed += BATCH_ROWS


@contextlib.contextmanager
def live_changes(service: ServiceProcess) -> Iterator[LiveChanges]:
    changes = LiveChanges(service)
    changes.start()
    try:
        yield changes
    finally:
        changes.close()


def wait_for(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, f"did not happen in time: {what}"
        time.sleep(0.05)
