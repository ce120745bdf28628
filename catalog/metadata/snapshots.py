"""Updates of snapshots, branches, tags and statistics, and the append-only rule.

The order of checks and their messages follow Iceberg's TableMetadata.Builder.

Append-only tables: a streaming reader follows main from snapshot to snapshot and fails if rows vanish. While the
property `lakefeed.append-only` is true, every snapshot must append or replace, and main only moves to descendants. To
break the rule, a client first sets the property to false, in a commit of its own.
"""

from __future__ import annotations

import operator

from lakefeed.catalog.errors import BadRequest, CommitFailed, ValidationFailed
from lakefeed.catalog.json_fields import (
    JsonObject,
    maybe_id,
    maybe_int,
    read_int,
    read_ints,
    read_object,
    read_objects,
    read_text,
    read_text_map,
)
from lakefeed.catalog.metadata.document import MAIN, ROW_LINEAGE_VERSION, Draft, is_true, no_snapshot

APPEND_ONLY = "lakefeed.append-only"

_OPERATIONS = ("append", "replace", "overwrite", "delete")
_APPEND_ONLY_OPERATIONS = ("append", "replace")
_id_of = operator.itemgetter("snapshot-id")
_REF_AGES = ("max-ref-age-ms", "max-snapshot-age-ms", "min-snapshots-to-keep")


def add_snapshot(draft: Draft, update: JsonObject) -> None:
    """Add a snapshot that no ref points at yet."""
    snapshot = _checked_snapshot(read_object(update, "snapshot"), draft)
    if draft.format_version > 1:
        _advance_sequence_number(draft, snapshot)
    if draft.format_version >= ROW_LINEAGE_VERSION:
        _advance_row_id(draft, snapshot)
    draft.change_list("snapshots").append(snapshot)
    draft.added_snapshots[snapshot["snapshot-id"]] = snapshot


def set_ref(draft: Draft, update: JsonObject) -> None:
    """Point a branch or tag at a snapshot; a move of main is added to the snapshot log."""
    name = read_text(update, "ref-name")
    ref = _checked_ref(name, update)
    snapshot_id = ref["snapshot-id"]
    # From the end: a ref mostly moves to a snapshot that was just added, and there can be thousands.
    if snapshot_id not in map(_id_of, reversed(draft.document["snapshots"])):
        raise ValidationFailed(f"Cannot set {name} to unknown snapshot: {snapshot_id}")
    if draft.document["refs"].get(name) == ref:
        return
    draft.change_map("refs")[name] = ref
    if name == MAIN:
        draft.put("current-snapshot-id", snapshot_id)
        _log_current(draft, snapshot_id)


def remove_ref(draft: Draft, update: JsonObject) -> None:
    """Remove a branch or tag. Without main the table is empty, but its history stays (a replace starts like this)."""
    _remove_ref(draft, read_text(update, "ref-name"))


def remove_snapshots(draft: Draft, update: JsonObject) -> None:
    """Remove snapshots with their statistics and the refs that point at them; unknown ids are ignored."""
    doomed = set(read_ints(update, "snapshot-ids"))
    kept = [snapshot for snapshot in draft.document["snapshots"] if snapshot["snapshot-id"] not in doomed]
    if len(kept) == len(draft.document["snapshots"]):
        return
    draft.put("snapshots", kept)
    draft.removed_snapshots = True
    for key in ("statistics", "partition-statistics"):
        draft.put(key, [entry for entry in draft.document[key] if entry["snapshot-id"] not in doomed])
    dangling = [name for name, ref in draft.document["refs"].items() if ref["snapshot-id"] in doomed]
    for name in dangling:
        _remove_ref(draft, name)


def set_statistics(draft: Draft, update: JsonObject) -> None:
    """Set the statistics file of one snapshot."""
    statistics = read_object(update, "statistics")
    read_int(statistics, "file-footer-size-in-bytes")
    for blob in read_objects(statistics, "blob-metadata"):
        read_text(blob, "type")
        read_int(blob, "snapshot-id")
        read_int(blob, "sequence-number")
        read_ints(blob, "fields")
    _set_statistics(draft, "statistics", update)


def set_partition_statistics(draft: Draft, update: JsonObject) -> None:
    """Set the partition statistics file of one snapshot."""
    _set_statistics(draft, "partition-statistics", update)


def remove_statistics(draft: Draft, update: JsonObject) -> None:
    """Remove the statistics file of one snapshot; an unknown snapshot is no change."""
    _remove_statistics(draft, "statistics", update)


def remove_partition_statistics(draft: Draft, update: JsonObject) -> None:
    """Remove the partition statistics file of one snapshot; an unknown snapshot is no change."""
    _remove_statistics(draft, "partition-statistics", update)


def finish_snapshot_log(draft: Draft) -> None:
    """Remove log entries that were never visible, and all history before a removed snapshot."""
    current = draft.document["current-snapshot-id"]
    intermediate = draft.added_snapshots.keys() - {current}
    if not intermediate and not draft.removed_snapshots:
        return
    known = {snapshot["snapshot-id"] for snapshot in draft.document["snapshots"]}
    log: list[JsonObject] = []
    for entry in draft.document["snapshot-log"]:
        if entry["snapshot-id"] not in known:
            # Time travel across a gap would be wrong, so entries before it are removed.
            log.clear()
        elif entry["snapshot-id"] not in intermediate:
            log.append(entry)
    draft.put("snapshot-log", log)


def _checked_snapshot(snapshot: JsonObject, draft: Draft) -> JsonObject:
    if not draft.document["schemas"]:
        raise ValidationFailed("Attempting to add a snapshot before a schema is added")
    snapshot_id = read_int(snapshot, "snapshot-id")
    read_int(snapshot, "timestamp-ms")
    maybe_int(snapshot, "parent-snapshot-id")
    maybe_id(snapshot, "schema-id")
    if draft.format_version > 1 or snapshot.get("summary") is not None:
        operation = read_text_map(snapshot, "summary").get("operation")
        if operation not in _OPERATIONS:
            raise ValidationFailed(f"Invalid snapshot operation: {operation}")
    if draft.format_version > 1 or "manifests" not in snapshot:
        read_text(snapshot, "manifest-list")
    if snapshot_id in map(_id_of, draft.document["snapshots"]):
        raise ValidationFailed(f"Snapshot already exists for id: {snapshot_id}")
    return snapshot


def _advance_sequence_number(draft: Draft, snapshot: JsonObject) -> None:
    number, last = read_int(snapshot, "sequence-number"), draft.document["last-sequence-number"]
    if number <= last and snapshot.get("parent-snapshot-id") is not None:
        # A conflict, not a bad request: the client must plan again, and Java writers retry on 409 only.
        raise CommitFailed(f"Cannot add snapshot with sequence number {number} older than last sequence number {last}")
    draft.put("last-sequence-number", max(number, last))


def _advance_row_id(draft: Draft, snapshot: JsonObject) -> None:
    first, added = read_int(snapshot, "first-row-id"), read_int(snapshot, "added-rows")
    next_row_id = draft.document["next-row-id"]
    if added < 0:
        raise ValidationFailed(f"Cannot add a snapshot: added-rows is negative: {added}")
    if first < next_row_id:
        raise CommitFailed(f"Cannot add a snapshot, first-row-id is behind table next-row-id: {first} < {next_row_id}")
    draft.put("next-row-id", first + added)


def _checked_ref(name: str, update: JsonObject) -> JsonObject:
    kind = read_text(update, "type").lower()
    if kind not in ("branch", "tag"):
        raise BadRequest(f"Invalid snapshot ref type: {kind}")
    if name == MAIN and kind != "branch":
        raise ValidationFailed("Invalid ref: main must be a branch")
    ref: JsonObject = {"snapshot-id": read_int(update, "snapshot-id"), "type": kind}
    for key in _REF_AGES:
        value = (maybe_id if key == "min-snapshots-to-keep" else maybe_int)(update, key)
        if value is None:
            continue
        if value <= 0:
            raise ValidationFailed(f"Invalid ref {name}: {key} must be positive")
        if kind == "tag" and key != "max-ref-age-ms":
            raise ValidationFailed(f"Invalid ref {name}: tags do not support setting {key}")
        ref[key] = value
    return ref


def _log_current(draft: Draft, snapshot_id: int) -> None:
    """Add a move of main to the log. Times never decrease: Java rejects a table whose log is out of order."""
    added = draft.added_snapshots.get(snapshot_id)
    moment = draft.now_ms if added is None else added["timestamp-ms"]
    log = draft.change_list("snapshot-log")
    if log:
        moment = max(moment, log[-1]["timestamp-ms"])
    log.append({"timestamp-ms": moment, "snapshot-id": snapshot_id})


def _remove_ref(draft: Draft, name: str) -> None:
    if name not in draft.document["refs"]:
        return
    del draft.change_map("refs")[name]
    if name == MAIN:
        draft.put("current-snapshot-id", no_snapshot(draft.format_version))


def _set_statistics(draft: Draft, key: str, update: JsonObject) -> None:
    statistics = read_object(update, key)
    snapshot_id = read_int(statistics, "snapshot-id")
    read_text(statistics, "statistics-path")
    read_int(statistics, "file-size-in-bytes")
    others = [entry for entry in draft.document[key] if entry["snapshot-id"] != snapshot_id]
    draft.put(key, [*others, statistics])


def _remove_statistics(draft: Draft, key: str, update: JsonObject) -> None:
    snapshot_id = read_int(update, "snapshot-id")
    draft.put(key, [entry for entry in draft.document[key] if entry["snapshot-id"] != snapshot_id])


def check_append_only(draft: Draft) -> None:
    """Check the rule for a table that was, or by this commit becomes, append-only.

    Raises: ValidationFailed.
    """
    before, after = draft.base, draft.document
    if is_true(before["properties"], APPEND_ONLY) or is_true(after["properties"], APPEND_ONLY):
        for snapshot in draft.added_snapshots.values():
            operation = (snapshot.get("summary") or {}).get("operation")
            if operation not in _APPEND_ONLY_OPERATIONS:
                raise ValidationFailed(
                    f"Table is append-only ({APPEND_ONLY}=true):"
                    f" only append and replace snapshots are allowed, not {operation}"
                )
    if is_true(before["properties"], APPEND_ONLY):
        _check_forward(draft)


def _check_forward(draft: Draft) -> None:
    start, end, after = draft.base["refs"].get(MAIN), draft.document["refs"].get(MAIN), draft.document
    if start is None or start == end:
        return
    if end and draft.added_snapshots.get(end["snapshot-id"], {}).get("parent-snapshot-id") == start["snapshot-id"]:
        return  # an append, like nearly all commits: no need to scan thousands of snapshots
    parents = {item["snapshot-id"]: item.get("parent-snapshot-id") for item in after["snapshots"]}
    at = end and end["snapshot-id"]
    for _ in parents:
        if at == start["snapshot-id"]:
            return
        at = parents.get(at)
    raise ValidationFailed(
        f"Table is append-only ({APPEND_ONLY}=true): main can only move to descendants of {start['snapshot-id']}"
    )
