"""Writes data-directory.tar.gz and expected.json with the revision that is checked out. Never run it again: README.md.

It drives the product from outside: `lakefeed serve` and `lakefeed mirror` as processes, changes over the WebSocket, the
quarantined table through the REST catalog. expected.json is computed from what was sent, not read from the product.

    PYTHONPATH=. .venv/bin/python tests/data/data-directory-1/make.py OUTPUT_DIRECTORY
"""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
from websockets.sync.client import ClientConnection, connect

from tests.earlier_data_directory import ROOT, comparable
from tests.lakefeed_process import LAKEFEED
from tests.service_process import ServiceProcess, service_process
from tests.unwritable_tables import create_unwritable

HERE = Path(__file__).parent

# 2026-11-15T23:00:00Z. With four minutes from each change to the next, the changes lie in two days.
START_MS = 1_794_700_800_000 + 23 * 3_600_000
STEP_MS = 240_000

EPOCHS = {"shop": 0, "crm": 2}
ORDER_TYPES = pa.schema(
    [
        ("id", pa.int64()),
        ("customer", pa.int32()),
        ("region", pa.string()),
        ("total", pa.decimal128(9, 2)),
        ("paid", pa.bool_()),
    ]
)
WIDER_ORDER_TYPES = ORDER_TYPES.set(1, pa.field("customer", pa.int64()))


@dataclass
class Sender:
    """Numbers the changes of all sources and keeps what was sent, in order."""

    service: ServiceProcess
    sequences: dict[str, int] = field(default_factory=lambda: dict.fromkeys(EPOCHS, 0))
    sent: list[dict[str, Any]] = field(default_factory=list)

    def change(
        self,
        source: str,
        table: str,
        operation: str,
        row: dict[str, Any],
        *,
        stored: dict[str, Any] | None = None,
        **more: Any,
    ) -> dict[str, Any]:
        """Number one change; `stored` is what its table holds of it, where that is not the row itself."""
        self.sequences[source] += 1
        sequence = self.sequences[source]
        event = {
            "sequence": sequence,
            "table": table,
            "operation": operation,
            "rowId": f"{source}-{row['id']}",
            "timestamp": START_MS + STEP_MS * sequence,
            "before" if operation == "DELETE" else "after": row,
            **more,
        }
        self.sent.append({"source": source, "epoch": EPOCHS[source], "row": stored or row, **event})
        return event

    def push_json(self, source: str, events: list[dict[str, Any]]) -> None:
        """Send changes as JSON, in batches of a few, and wait until they are durable."""
        with connect(self.service.ws_url) as socket:
            _open_source(socket, source)
            for number, first in enumerate(range(0, len(events), 4)):
                batch = {"type": "cdc_batch", "sequenceNumber": number, "events": events[first : first + 4]}
                socket.send(json.dumps(batch))
                _expect_ack(socket)

    def push_arrow(self, source: str, events: list[dict[str, Any]], types: pa.Schema = ORDER_TYPES) -> None:
        """Send changes of sales.orders as one Arrow frame, and wait until they are durable."""
        rows = [event.get("after") or event["before"] for event in events]
        columns = {
            "_cdc_sequence": pa.array([event["sequence"] for event in events], pa.int64()),
            "_cdc_operation": pa.array([event["operation"] for event in events]),
            "_cdc_row_id": pa.array([event["rowId"] for event in events]),
            "_cdc_timestamp": pa.array([event["timestamp"] for event in events], pa.int64()),
        }
        columns |= {each.name: pa.array([row[each.name] for row in rows], each.type) for each in types}
        table = pa.table(columns).replace_schema_metadata({"lakefeed.table": "sales.orders"})
        sink = io.BytesIO()
        with pa.ipc.new_stream(sink, table.schema) as stream:
            stream.write_table(table)
        with connect(self.service.ws_url) as socket:
            _open_source(socket, source)
            socket.send(sink.getvalue())
            _expect_ack(socket)

    def flush(self) -> None:
        assert self.service.flush()["success"]


def _open_source(socket: ClientConnection, source: str) -> None:
    socket.send(json.dumps({"type": "connect", "sourceDoId": source, "epoch": EPOCHS[source]}))
    status = json.loads(socket.recv(timeout=240))
    assert status["type"] == "status", status


def _expect_ack(socket: ClientConnection) -> None:
    while True:
        answer = json.loads(socket.recv(timeout=240))
        assert answer["type"] == "ack", answer
        if answer["status"] != "persisted":
            assert answer["status"] == "ok", answer
            return


def order(number: int, *, paid: bool = False) -> dict[str, Any]:
    regions = ("north", "south")
    return {
        "id": number,
        "customer": number % 5,
        "region": regions[number % 2],
        "total": Decimal(number * 125).scaleb(-2),
        "paid": paid,
    }


def plain(row: dict[str, Any]) -> dict[str, Any]:
    """Return an order as a source of JSON has it: the total is a number."""
    return row | {"total": float(row["total"])}


def push_committed(sender: Sender) -> None:
    """Push everything that is committed in the archive, in several commits."""
    change = sender.change
    users = [change("shop", "users", "INSERT", {"id": n, "name": f"user {n}", "score": n + 0.5}) for n in range(1, 7)]
    sender.push_json("shop", users)
    sender.push_json("crm", [change("crm", "users", "INSERT", {"id": n, "name": f"contact {n}"}) for n in (1, 2)])
    sender.push_arrow("crm", [change("crm", "sales.orders", "INSERT", order(n)) for n in range(1, 9)])
    sender.flush()
    # The schema evolves: a struct, a list.
    home = {"city": "Zürich", "zip": 8001}
    evolved = [
        change("shop", "users", "UPDATE", {"id": 2, "name": "user two", "score": 2.75, "home": home}),
        change("shop", "users", "INSERT", {"id": 7, "name": "user 7", "score": 7, "tags": ["new", "☂"]}),
        change("shop", "users", "DELETE", {"id": 3, "name": "user 3", "score": 3.5}),
        change("shop", "visits", "INSERT", {"id": 1, "page": "/", "ms": 12}),
        change("shop", "visits", "INSERT", {"id": 2, "page": "/cart", "ms": 31}),
    ]
    sender.push_json("shop", evolved)
    sender.push_json("crm", [change("crm", "visits", "INSERT", {"id": 3, "page": "/crm", "ms": 5})])
    sender.flush()
    # Inside the struct too; a column that the change did not send; a value that does not fit and is rescued; a wider
    # type of customer.
    rescued = {"id": 6, "name": "user 6", "_cdc_rescued": '{"score":"high"}'}
    again = [
        change("shop", "users", "UPDATE", {"id": 7, "name": "user 7", "home": home | {"street": "Bahnhofstrasse"}}),
        change("shop", "users", "UPDATE", {"id": 4, "name": "user four"}, unchanged=["score"]),
        change("shop", "users", "UPDATE", {"id": 6, "name": "user 6", "score": "high"}, stored=rescued),
        change("shop", "sales.orders", "INSERT", plain(order(20)), stored=order(20)),
    ]
    sender.push_json("shop", again)
    paid = [change("crm", "sales.orders", "UPDATE", order(n, paid=True)) for n in (2, 3)]
    sender.push_arrow("crm", paid, WIDER_ORDER_TYPES)
    sender.flush()
    # A table that cannot be written: its row is in quarantine.
    create_unwritable(sender.service.http_url, "odd")
    sender.push_json("crm", [change("crm", "odd", "INSERT", {"id": 1, "score": 1.5})])
    sender.flush()


def push_uncommitted(sender: Sender) -> None:
    """Push what only the log has: acked, of all tables, more than one segment of it."""
    change = sender.change
    first = [
        change("shop", "users", "UPDATE", {"id": 1, "name": "user one", "score": 1.25}),
        change("shop", "users", "DELETE", {"id": 5, "name": "user 5", "score": 5.5}),
        change("shop", "users", "INSERT", {"id": 8, "name": "user 8", "email": "8@example.com"}),
    ]
    sender.push_json("shop", first)
    sender.push_arrow("crm", [change("crm", "sales.orders", "INSERT", order(n)) for n in range(30, 35)])
    long = [
        change("shop", "visits", "INSERT", {"id": n, "page": f"/{n}", "ms": n, "note": f"{n} " * 15_000})
        for n in range(10, 40)
    ]
    sender.push_json("shop", long)
    last = [
        change("crm", "users", "UPDATE", {"id": 2, "name": "contact two"}),
        change("crm", "visits", "INSERT", {"id": 50, "page": "/last", "ms": 1}),
    ]
    sender.push_json("crm", last)


def run_mirror(service: ServiceProcess) -> None:
    command = [LAKEFEED, "mirror", "run", "users", "--once", "--url", service.http_url, "--master", "local[2]"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("LAKEFEED_")}
    subprocess.run(
        [*command, "--checkpoints", str(service.data_dir / "checkpoints")],
        cwd=service.directory,
        env=environment,
        timeout=600,
        check=True,
    )


def rows_by_table(changes: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """Return what each table holds: source, epoch, sequence, operation, row id, and the columns that were sent."""
    tables: dict[str, list[Any]] = {}
    for each in changes:
        name = each["table"] if "." in each["table"] else f"default.{each['table']}"
        position = [each["source"], each["epoch"], each["sequence"], each["operation"], each["rowId"]]
        tables.setdefault(name, []).append([*position, comparable(each["row"])])
    return tables


def current_users(changes: list[dict[str, Any]]) -> list[Any]:
    """Return what the mirror of users holds: the last change of each row that is not deleted, in the same form."""
    rows: dict[str, list[Any]] = {}
    for each in changes:
        if each["table"] != "users":
            continue
        before = rows.pop(each["rowId"], None)
        if each["operation"] == "DELETE":
            continue
        carried = {name: before[-1][name] for name in each.get("unchanged", ()) if before is not None}
        position = [each["source"], each["epoch"], each["sequence"], each["operation"], each["rowId"]]
        rows[each["rowId"]] = [*position, carried | comparable(each["row"])]
    return list(rows.values())


def main(output: Path) -> None:
    ROOT.mkdir()  # fails if something is there
    shutil.copy(HERE / "lakefeed.toml", ROOT)
    with service_process(ROOT, {"writer.flush_max_age_s": 3600}) as service:
        service.start()
        sender = Sender(service)
        push_committed(sender)
        run_mirror(service)
        # One more commit, so that the mirror is behind its table.
        sender.push_json("shop", [sender.change("shop", "users", "INSERT", {"id": 9, "name": "user 9", "score": 9})])
        mirrored = sender.sent[:-1]
        sender.flush()
        committed = list(sender.sent)
        push_uncommitted(sender)
        service.kill()
    tables = rows_by_table(committed)
    quarantined = tables.pop("default.odd")
    expected = {
        "revision": subprocess.check_output(["git", "rev-parse", "HEAD"], text=True, cwd=HERE).strip(),
        "sources": {name: {"epoch": EPOCHS[name], "sequence": n} for name, n in sender.sequences.items()},
        "committed": tables,
        "uncommitted": rows_by_table(sender.sent[len(committed) :]),
        "quarantined": {"default.odd": quarantined},
        "mirrors": {
            "default.users_current": {"merged": current_users(mirrored), "continued": current_users(sender.sent)}
        },
    }
    (output / "expected.json").write_text(dump(expected), encoding="utf-8")
    with tarfile.open(output / "data-directory.tar.gz", "w:gz", compresslevel=9) as archive:
        archive.add(ROOT / "data", "data")
    shutil.rmtree(ROOT)


def dump(document: Any, depth: int = 0) -> str:
    """Write JSON with one row on a line."""
    if not isinstance(document, dict | list) or (isinstance(document, list) and not isinstance(document[0], list)):
        return json.dumps(document, ensure_ascii=False)
    pad = "  " * (depth + 1)
    end = "\n" if depth == 0 else ""
    if isinstance(document, list):
        return "[\n" + ",\n".join(pad + dump(each, depth + 1) for each in document) + f"\n{pad[2:]}]"
    fields = (f"{pad}{json.dumps(name)}: {dump(value, depth + 1)}" for name, value in document.items())
    return "{\n" + ",\n".join(fields) + f"\n{pad[2:]}}}{end}"


if __name__ == "__main__":
    main(Path(sys.argv[1]))
