"""The recorded requests, sent as Debezium Server sends them, and the change tables folded to the rows left in them.

A sink has one request in flight, sends what was not answered again byte for byte, and, when it was killed, goes back to
an earlier position under a new run id.
"""

from __future__ import annotations

import contextlib
import json
import random
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import msgspec
from pyiceberg.catalog.rest import RestCatalog
from pyiceberg.table import Table

from lakefeed.ingest.debezium.envelope import read_events
from lakefeed.ingest.debezium.events import Change, Origin, SourceOperation, TransactionMark, TransactionStatus
from lakefeed.writer.rows.comments import JSON_DOC
from tests.clients import open_pyiceberg
from tests.ingest.debezium.envelopes import header, mark
from tests.ingest.debezium.folding import Mirror
from tests.ingest.debezium.recordings import CONFIG, EXPECTED, Request, load, load_events
from tests.ingest.debezium.test_positions import resume_points
from tests.ingest.debezium.test_recordings import changes_of, differences

# The recordings' own configuration, written as settings.
SETTINGS = {
    "debezium.keys": "; ".join(
        f"{name}: {', '.join(keys.columns)}" for name, keys in CONFIG.tables.items() if keys.columns
    ),
    "debezium.replica_identity_full": ", ".join(
        name for name, keys in CONFIG.tables.items() if keys.replica_identity_full
    ),
    # Rows without a key are found again by what they were.
    "writer.keep_before": True,
}

# Maps become structs of all keys that ever came, in which an entry that is null and one that is missing are the same.
_LOST_IN_TABLES = {"v4": frozenset({("public.text_types", "h")})}

# How far back a server that was killed goes, in requests: the recorded one went back by 24.
GO_BACK_MAX = 60

_RUN_ID = "X-DEBEZIUM-__DEBEZIUM.CONTEXT.RUNID"


# -- sending


def changes_in(variant: str) -> int:
    """How many changes a recording holds."""
    return len(changes_of(load_events(variant)))


def of_run(requests: Iterable[Request], run: str) -> list[Request]:
    """Let requests say which run of the server they come from, as the server does on each of them."""
    run_id = header({"schema": {"type": "string", "optional": False}, "payload": run})
    return [replace(request, headers={**request.headers, _RUN_ID: run_id}) for request in requests]


def in_batches(requests: list[Request], size: int) -> list[Request]:
    """Put several events into each request; the headers are those of the first, as the sink does it."""
    return [
        Request(chosen[0].headers, b"[" + b",".join(request.body for request in chosen) + b"]")
        for chosen in (requests[start : start + size] for start in range(0, len(requests), size))
    ]


def restart_points(variant: str) -> list[int]:
    """Where a restarted server can begin, as indexes of requests that hold one event each."""
    return resume_points([event for (event,) in load_events(variant)])


def resent(variant: str, start: int, stop: int) -> list[Request]:
    """What a server that was killed at `stop` sends again from `start`: no reads, and a transaction begins anew."""
    again = [
        Request(request.headers, request.body + b" ")  # the envelope has other times, so the bytes differ
        for request, (event,) in zip(load(variant)[start:stop], load_events(variant)[start:stop], strict=True)
        if getattr(event, "operation", None) is not SourceOperation.READ
    ]
    (first,) = load_events(variant)[start]
    has_marks = any(isinstance(event, TransactionMark) for (event,) in load_events(variant))
    if again and isinstance(first, Change) and first.transaction and has_marks:
        again.insert(0, Request(again[0].headers, json.dumps(mark("BEGIN", f"{first.transaction}:1")).encode()))
    return again


def with_killed_servers(variant: str, rng: random.Random, *, run_max_requests: int) -> list[Request]:
    """All requests of a recording whose server is killed again and again, and goes back by one change at least."""
    requests, points, sent, run, start = load(variant), restart_points(variant), 0, 1, 0
    everything: list[Request] = []
    while sent < len(requests):
        stop = min(sent + rng.randint(1, run_max_requests), len(requests))
        everything += of_run([*resent(variant, start, sent), *requests[sent:stop]], f"run {run}")
        before = [point for point in points if stop - GO_BACK_MAX < point < stop]
        start = rng.choice(before) if before else stop
        sent, run = stop, run + bool(before)
    return _with_true_ends(everything)


def _with_true_ends(requests: list[Request]) -> list[Request]:
    """Let every END count what was sent since its BEGIN, as that of a restarted server does."""
    counts: Counter[str] = Counter()
    told = []
    for request in requests:
        (event,) = read_events(request.body, request.headers, CONFIG)
        body = request.body
        match event:
            case Change() if event.transaction:
                counts[event.origin.collection] += 1
            case TransactionMark(TransactionStatus.BEGIN):
                counts.clear()
            case TransactionMark(TransactionStatus.END, transaction):
                collections = [{"data_collection": name, "event_count": count} for name, count in counts.items()]
                end = mark("END", f"{transaction}:1", counts.total()) | {"data_collections": collections}
                body = json.dumps(end).encode()
        told.append(Request(request.headers, body))
    return told


# -- reading back


def table_differences_of(catalog_url: str, variant: str) -> list[str]:
    """Fold all change tables, as PyIceberg reads them, and compare the rows with what PostgreSQL printed."""
    mirror = Mirror()
    for changes in read_changes(catalog_url).values():
        mirror.apply(changes)
    return differences(mirror, variant, besides=_LOST_IN_TABLES.get(variant, frozenset()))


def read_changes(catalog_url: str) -> dict[str, list[Change]]:
    """Read the changes of all tables that the recording expects, each in `_cdc_sequence` order."""
    with contextlib.closing(open_pyiceberg(catalog_url)) as catalog:
        return {name: list(_changes_of(name, table)) for name, table in _tables(catalog) if name in EXPECTED["tables"]}


def count_changes(catalog_url: str) -> int:
    """Count the rows of all change tables: a change that was taken twice has two numbers, and folds to the same row."""
    with contextlib.closing(open_pyiceberg(catalog_url)) as catalog:
        return sum(table.scan().count() for _, table in _tables(catalog))


def _tables(catalog: RestCatalog) -> Iterator[tuple[str, Table]]:
    for namespace in catalog.list_namespaces():
        for identifier in catalog.list_tables(namespace):
            yield ".".join(identifier), catalog.load_table(identifier)


def _changes_of(name: str, table: Table) -> Iterator[Change]:
    own = [field for field in table.schema().fields if not field.name.startswith("_cdc_")]
    last = -1
    for row in table.scan().to_arrow().sort_by("_cdc_sequence").to_pylist():
        assert row["_cdc_sequence"] > last, f"there twice: table={name} row={row}"
        last = row["_cdc_sequence"]
        yield _change_of(name, row, own)


def _change_of(name: str, row: dict[str, Any], own: list[Any]) -> Change:
    rescued = json.loads(row["_cdc_rescued"] or "{}")
    values = {field.name: _value(row[field.name], field.doc, rescued.get(field.name)) for field in own}
    before = json.loads(row["_cdc_before"] or "{}")
    known = json.dumps({column: before.get(column) for column in values}) if before else ""
    is_delete = row["_cdc_operation"] == "DELETE"
    return Change(
        operation=SourceOperation(row["_cdc_operation"]),
        table=name,
        row_id=row["_cdc_row_id"],
        timestamp_ms=0,
        before=msgspec.Raw(known.encode()),
        after=msgspec.Raw(b"" if is_delete else json.dumps(values).encode()),
        unchanged=tuple(row["_cdc_unchanged"] or ()),
        irregular=(),
        metadata=msgspec.Raw(row["_cdc_metadata"].encode()),
        origin=Origin(),
        transaction="",
        moved_from=json.loads(row["_cdc_metadata"]).get("movedFrom", ""),
    )


def _value(value: Any, doc: str | None, rescued: Any) -> Any:
    """Put a column's value together with what of it did not fit."""
    if value is None:
        return rescued
    if doc == JSON_DOC:
        return json.loads(value)
    if isinstance(value, dict) and isinstance(rescued, dict):
        return {name: _value(member, None, rescued.get(name)) for name, member in value.items()}
    return value
