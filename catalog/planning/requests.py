"""What a client asks to have planned, and the snapshots and columns it means. Core: owns the request's rules.

A scan is of one snapshot (the current one of the main branch, unless named), or of what the appends after one snapshot
and up to another added. `select` changes nothing here: columns are chosen by the reader of the files.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from catalog.errors import BadRequest, Unplannable, ValidationFailed
from catalog.fields import JsonObject, as_text, maybe_bool, maybe_int, maybe_texts, read_bool
from catalog.planning.columns import Column, Columns
from catalog.planning.expressions import ALWAYS_TRUE, Expression, parse_filter
from catalog.planning.partitions import Spec, read_specs

_APPEND = "append"


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """The body of a plan request, parsed. The filter is JSON still, as the schema it is of is the table's to say."""

    snapshot_id: int | None
    start_snapshot_id: int | None
    end_snapshot_id: int | None
    filter_: Any
    case_sensitive: bool
    use_snapshot_schema: bool
    stats_fields: tuple[str, ...]
    min_rows: int | None


@dataclass(frozen=True, slots=True)
class Scan:
    """A request bound to a table's metadata. `added_by` names the snapshots whose additions alone are wanted."""

    manifest_lists: tuple[str, ...]
    added_by: frozenset[int] | None
    filter_: Expression
    specs: Mapping[int, Spec]
    stats_fields: frozenset[int]
    min_rows: int | None


def parse_plan_request(body: JsonObject) -> PlanRequest:
    """Read a plan request.

    Raises: BadRequest.
    """
    snapshot_id, start, end, min_rows = (
        maybe_int(body, key) for key in ("snapshot-id", "start-snapshot-id", "end-snapshot-id", "min-rows-requested")
    )
    if snapshot_id is not None and (start is not None or end is not None):
        raise BadRequest("Invalid scan: snapshot-id cannot be used with start-snapshot-id and end-snapshot-id")
    if (start is None) != (end is None):
        raise BadRequest("Invalid scan: start-snapshot-id and end-snapshot-id must be given together")
    if min_rows is not None and min_rows < 0:
        raise BadRequest("Invalid min-rows-requested: must not be negative")
    maybe_texts(body, "select")
    return PlanRequest(
        snapshot_id=snapshot_id,
        start_snapshot_id=start,
        end_snapshot_id=end,
        filter_=body.get("filter"),
        case_sensitive=body.get("case-sensitive") is None or read_bool(body, "case-sensitive"),
        use_snapshot_schema=maybe_bool(body, "use-snapshot-schema"),
        stats_fields=tuple(maybe_texts(body, "stats-fields")),
        min_rows=min_rows,
    )


def bind_scan(request: PlanRequest, document: JsonObject) -> Scan:
    """Find what a request means for a table.

    Raises: BadRequest, ValidationFailed, Unplannable.
    """
    snapshots = {snapshot["snapshot-id"]: snapshot for snapshot in document["snapshots"]}
    last = _last_snapshot(request, document, snapshots)
    scanned: tuple[JsonObject, ...] = () if last is None else (last,)
    added_by = None
    if request.start_snapshot_id is not None and last is not None:
        scanned = tuple(_appends_between(last, request.start_snapshot_id, snapshots))
        added_by = frozenset(snapshot["snapshot-id"] for snapshot in scanned)
    schema = _schema(request, document, last)
    columns = Columns(schema, case_sensitive=request.case_sensitive)
    return Scan(
        manifest_lists=tuple(map(_manifest_list, scanned)),
        added_by=added_by,
        filter_=ALWAYS_TRUE if request.filter_ is None else parse_filter(request.filter_, columns),
        specs=read_specs(document["partition-specs"], lambda field_id: _find_column(field_id, columns, document)),
        stats_fields=frozenset(columns.named(name).field_id for name in request.stats_fields),
        min_rows=request.min_rows,
    )


def _last_snapshot(
    request: PlanRequest, document: JsonObject, snapshots: Mapping[int, JsonObject]
) -> JsonObject | None:
    named = request.end_snapshot_id if request.snapshot_id is None else request.snapshot_id
    if named is None:
        return snapshots.get(document["current-snapshot-id"])
    if named not in snapshots:
        raise ValidationFailed(f"Cannot find snapshot with ID {named}")
    return snapshots[named]


def _appends_between(last: JsonObject, start_id: int, snapshots: Mapping[int, JsonObject]) -> Iterator[JsonObject]:
    """Walk back from `last` to the snapshot that the scan starts after; it may be expired, but must be an ancestor."""
    snapshot: JsonObject | None = last
    while snapshot is not None:
        if snapshot["snapshot-id"] == start_id:
            return
        if (snapshot.get("summary") or {}).get("operation", _APPEND) == _APPEND:
            yield snapshot
        parent_id = snapshot.get("parent-snapshot-id")
        if parent_id == start_id:
            return
        snapshot = None if parent_id is None else snapshots.get(parent_id)
    raise ValidationFailed(f"Starting snapshot (exclusive) {start_id} is not an ancestor of {last['snapshot-id']}")


def _find_column(field_id: int, columns: Columns, document: JsonObject) -> Column | None:
    """Find a column that may have been dropped since: then in the last schema that has it."""
    found = columns.by_id(field_id)
    schemas = () if found is not None else reversed(document["schemas"])
    older = (Columns(schema, case_sensitive=True).by_id(field_id) for schema in schemas)
    return found or next(filter(None, older), None)


def _manifest_list(snapshot: JsonObject) -> str:
    location = snapshot.get("manifest-list")
    if location is None:  # snapshots of format 1 may list manifests in place, of which nothing tells the spec
        raise Unplannable(f"Cannot plan a scan of snapshot {snapshot['snapshot-id']}: it has no manifest list")
    return as_text(location, "manifest-list")


def _schema(request: PlanRequest, document: JsonObject, last: JsonObject | None) -> JsonObject:
    wanted = document["current-schema-id"]
    if request.use_snapshot_schema and last is not None:
        wanted = last.get("schema-id", wanted)
    by_id: dict[int, JsonObject] = {schema["schema-id"]: schema for schema in document["schemas"]}
    # The schema of an old snapshot may have been removed; the current one has the same ids.
    return by_id.get(wanted, by_id[document["current-schema-id"]])
