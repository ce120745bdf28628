"""Request bodies and documents for the catalog's tests."""

from __future__ import annotations

from typing import Any

from lakefeed.catalog.metadata.updates import create_document, parse_create, plan_create

NOW_MS = 1_700_000_000_000
LOCATION = "file:///warehouse/db/t"
UUID = "11111111-2222-3333-4444-555555555555"


def field(field_id: int, name: str, type_: Any = "long", *, required: bool = False, **more: Any) -> dict[str, Any]:
    return {"id": field_id, "name": name, "required": required, "type": type_, **more}


def schema(*fields: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "type": "struct",
        "schema-id": 0,
        "fields": list(fields or (field(1, "id"), field(2, "v", "string"))),
        **more,
    }


def create_body(name: str = "t", **more: Any) -> dict[str, Any]:
    return {"name": name, "schema": schema(), **more}


def new_table(**more: Any) -> dict[str, Any]:
    """Make the document of a new table from a create request."""
    request = parse_create(create_body(**more))
    updates = plan_create(request, location=request.location or LOCATION, table_uuid=UUID)
    return create_document(updates, default_uuid=UUID, default_location=LOCATION, now_ms=NOW_MS)


def snapshot(snapshot_id: int, sequence: int, parent: int | None = None, **more: Any) -> dict[str, Any]:
    document = {
        "snapshot-id": snapshot_id,
        "sequence-number": sequence,
        "timestamp-ms": NOW_MS + sequence,
        "manifest-list": f"{LOCATION}/metadata/snap-{snapshot_id}.avro",
        "summary": {"operation": more.pop("operation", "append")},
        "schema-id": 0,
        **more,
    }
    return document if parent is None else {**document, "parent-snapshot-id": parent}


def add_snapshot(*facts: Any, **more: Any) -> dict[str, Any]:
    return {"action": "add-snapshot", "snapshot": snapshot(*facts, **more)}


def set_main(snapshot_id: int) -> dict[str, Any]:
    return {"action": "set-snapshot-ref", "ref-name": "main", "type": "branch", "snapshot-id": snapshot_id}


def append(snapshot_id: int, sequence: int, parent: int | None = None, **more: Any) -> list[dict[str, Any]]:
    return [add_snapshot(snapshot_id, sequence, parent, **more), set_main(snapshot_id)]


def require_main(snapshot_id: int | None) -> dict[str, Any]:
    return {"type": "assert-ref-snapshot-id", "ref": "main", "snapshot-id": snapshot_id}
