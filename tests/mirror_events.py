"""Changes for tests of mirrors: pushed to a service like a source does, batch by batch."""

from __future__ import annotations

import json
from typing import Any, Self

from websockets.sync.client import connect

from tests.service_process import ServiceProcess

# 2026-11-16T00:00:00Z; a change's time rises with its sequence.
START_MS = 1_794_787_200_000


class Pusher:
    """One source of one table. Calls gather changes; `commit` sends them as one batch and has it committed."""

    def __init__(self, service: ServiceProcess, source: str, table: str, *, epoch: int = 0) -> None:
        self._service = service
        self._source = source
        self._table = table
        self._epoch = epoch
        self._waiting: list[dict[str, Any]] = []
        self.sequence = 0

    def change(self, operation: str, row_id: object = "", **fields: Any) -> Self:
        self.sequence += 1
        event = {
            "sequence": self.sequence,
            "table": self._table,
            "operation": operation,
            "rowId": str(row_id),
            "timestamp": START_MS + self.sequence,
        }
        self._waiting.append(event | fields)
        return self

    def insert(self, key: int, **row: Any) -> Self:
        return self.change("INSERT", key, after={"id": key, **row})

    def update(self, key: int, *, unchanged: list[str] | None = None, old_key: int | None = None, **row: Any) -> Self:
        before = {"id": key if old_key is None else old_key}
        extra = {} if unchanged is None else {"unchanged": unchanged}
        return self.change("UPDATE", key, after={"id": key, **row}, before=before, **extra)

    def delete(self, key: int) -> Self:
        return self.change("DELETE", key, before={"id": key})

    def read(self, key: int, **row: Any) -> Self:
        return self.change("READ", key, after={"id": key, **row})

    def truncate(self) -> Self:
        return self.change("TRUNCATE")

    def send(self, events: list[dict[str, Any]]) -> None:
        """Send changes as one batch of a new connection, and wait until it is durable."""
        with connect(self._service.ws_url) as socket:
            socket.send(json.dumps({"type": "connect", "sourceDoId": self._source, "epoch": self._epoch}))
            status = json.loads(socket.recv(timeout=240))
            assert status["type"] == "status", status
            socket.send(json.dumps({"type": "cdc_batch", "sequenceNumber": 0, "events": events}))
            ack = json.loads(socket.recv(timeout=240))
            assert ack["type"] == "ack", ack

    def commit(self) -> None:
        """Send what was gathered, and have it committed."""
        self.send(self._waiting)
        self._waiting = []
        assert self._service.flush()["success"]
