"""A small set of changes that every reader must agree on: inserts, updates, deletes, nested values, a new column."""

from __future__ import annotations

import json
from typing import Any

from websockets.sync.client import connect

from tests.service_process import ServiceProcess

SOURCE = "shop"
TABLE = "users"

# 2026-11-15 and 2026-11-16, in ms: two partitions.
_DAY_ONE_MS = 1_794_700_800_000
_DAY_TWO_MS = _DAY_ONE_MS + 86_400_000

_EVENTS: list[dict[str, Any]] = [
    {"operation": "INSERT", "rowId": "1", "after": {"id": 1, "name": "Ada", "score": 0.5, "active": True}},
    {"operation": "INSERT", "rowId": "2", "after": {"id": 2, "name": "Grace", "score": None, "active": False}},
    {"operation": "INSERT", "rowId": "3", "after": {"id": 2**62, "name": "Zoë ☂", "score": -1e300, "active": None}},
    {
        "operation": "UPDATE",
        "rowId": "2",
        "before": {"id": 2, "name": "Grace"},
        "after": {
            "id": 2,
            "name": "Grace Hopper",
            "home": {"city": "Arlington", "zip": 22202},
            "tags": ["navy", "cobol"],
        },
    },
    {"operation": "UPDATE", "rowId": "1", "before": {"id": 1}, "after": {"id": 1, "name": "Ada", "score": "high"}},
    {"operation": "DELETE", "rowId": "1", "before": {"id": 1, "name": "Ada"}},
]

EVENTS = [
    {
        "sequence": number,
        "table": TABLE,
        "timestamp": (_DAY_ONE_MS if number < 4 else _DAY_TWO_MS) + number,
        **event,
    }
    for number, event in enumerate(_EVENTS, start=1)
]

COLUMNS = (
    "_cdc_sequence",
    "_cdc_operation",
    "_cdc_row_id",
    "_cdc_source",
    "id",
    "name",
    "score",
    "active",
    "_cdc_rescued",
)

# What every reader must see, in COLUMNS.
EXPECTED = [
    (1, "INSERT", "1", SOURCE, 1, "Ada", 0.5, True, None),
    (2, "INSERT", "2", SOURCE, 2, "Grace", None, False, None),
    (3, "INSERT", "3", SOURCE, 2**62, "Zoë ☂", -1e300, None, None),
    (4, "UPDATE", "2", SOURCE, 2, "Grace Hopper", None, None, None),
    (5, "UPDATE", "1", SOURCE, 1, "Ada", None, None, '{"score":"high"}'),
    (6, "DELETE", "1", SOURCE, 1, "Ada", None, None, None),
]


def push_changes(service: ServiceProcess, events: list[dict[str, Any]] = EVENTS) -> None:
    """Send the changes in two batches, each acked and committed before the next: the second one finds a table."""
    for number, batch in enumerate((events[:3], events[3:])):
        with connect(service.ws_url) as socket:
            message = {"type": "cdc_batch", "sourceDoId": SOURCE, "sequenceNumber": number, "events": batch}
            socket.send(json.dumps(message))
            ack = json.loads(socket.recv(timeout=240))
        assert (ack["type"], ack["details"]["eventsProcessed"]) == ("ack", len(batch)), ack
        assert service.flush()["success"]
