"""Events written by hand, in the shape that Debezium gives them."""

from __future__ import annotations

import base64
import json
from typing import Any

from lakefeed.ingest.debezium.envelope import read_events
from lakefeed.ingest.debezium.events import Change, DebeziumConfig, DebeziumEvent, TableKeys

KEYED = DebeziumConfig(tables={"public.t": TableKeys(columns=("id",))})


def source(**fields: Any) -> dict[str, Any]:
    known = {"connector": "postgresql", "name": "rec", "db": "d", "schema": "public", "table": "t", "snapshot": "false"}
    return known | {"ts_ms": 1794802444929, "lsn": 7, "txId": 5, "sequence": None} | fields


def envelope(op: str = "c", *, before: Any = None, after: Any = None, **fields: Any) -> dict[str, Any]:
    return {"before": before, "after": after, "source": source(**fields), "transaction": None, "op": op}


def streamed(commit: int | None, lsn: int, row: int = 1, **fields: Any) -> dict[str, Any]:
    pair = json.dumps([None if commit is None else str(commit), str(lsn)])
    return envelope("c", after={"id": row}, **{"sequence": pair, "lsn": lsn, **fields})


def mark(status: str, transaction: str, count: int | None = None, **tables: int) -> dict[str, Any]:
    collections = [{"data_collection": f"public.{name}", "event_count": n} for name, n in tables.items()] or None
    return {"status": status, "id": transaction, "event_count": count, "data_collections": collections, "ts_ms": 1}


def read(*documents: Any, config: DebeziumConfig = KEYED, headers: dict[str, str] | None = None) -> list[DebeziumEvent]:
    body = documents[0] if len(documents) == 1 else list(documents)
    return read_events(json.dumps(body).encode(), headers or {}, config)


def read_change(document: Any, config: DebeziumConfig = KEYED, headers: dict[str, str] | None = None) -> Change:
    (change,) = read(document, config=config, headers=headers)
    assert isinstance(change, Change)
    return change


def header(document: Any) -> str:
    return base64.b64encode(json.dumps(document).encode()).decode()


def typed(value: Any, **schema: Any) -> Change:
    """Read a change whose column `v` came with a schema."""
    column = {"field": "v", "optional": True, **schema}
    row = {"type": "struct", "field": "after", "fields": [{"type": "int32", "field": "id"}, column]}
    schema_of_all = {"type": "struct", "fields": [row]}
    return read_change({"schema": schema_of_all, "payload": envelope("c", after={"id": 1, "v": value})})


def column(change: Change, name: str = "v") -> Any:
    return json.loads(bytes(change.after))[name]
