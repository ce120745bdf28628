"""Applying a commit's updates to a table document. Owns the table of update kinds and the order of final steps.

    base document -> draft -> each update in turn -> final checks -> new document with its metadata log

The base is never changed. A commit that changes nothing yields None, so that no new file is written for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from catalog.errors import BadRequest, ValidationFailed
from catalog.fields import (
    JsonObject,
    maybe_text,
    read_int,
    read_ints,
    read_object,
    read_text,
    read_text_map,
    read_texts,
)
from catalog.metadata import layout, snapshots
from catalog.metadata.append_only import check_append_only
from catalog.metadata.documents import LATEST_FORMAT_VERSION, MAIN, ROW_LINEAGE_VERSION, add_version_fields, no_snapshot
from catalog.metadata.draft import Draft
from catalog.metadata.properties import DELETE_AFTER_COMMIT, FORMAT_VERSION, is_true, previous_versions_max
from catalog.metadata.uuids import check_uuid

Update = JsonObject


@dataclass(frozen=True, slots=True)
class Applied:
    """A new document, and the metadata files that its log no longer names and that the table wants deleted."""

    document: JsonObject
    expired_files: tuple[str, ...] = ()


def parse_updates(updates: list[JsonObject]) -> list[Update]:
    """Check that every update is of a known kind.

    Raises: BadRequest.
    """
    for update in updates:
        action = read_text(update, "action")
        if action not in _ACTIONS:
            raise BadRequest(f"Cannot parse metadata update, unknown action: {action}")
    return updates


def apply_updates(base: Mapping[str, Any], updates: list[Update], *, base_location: str, now_ms: int) -> Applied | None:
    """Apply updates to a table that exists at `base_location`; None if they change nothing.

    Raises: BadRequest, ValidationFailed, CommitFailed.
    """
    draft = Draft(base, now_ms=now_ms)
    apply_to_draft(draft, updates)
    if not draft.changed:
        return None
    document = finish(draft)
    log = [*base["metadata-log"], {"metadata-file": base_location, "timestamp-ms": base["last-updated-ms"]}]
    limit = previous_versions_max(document["properties"])
    document["metadata-log"] = log[-limit:]
    expired = log[:-limit] if is_true(document["properties"], DELETE_AFTER_COMMIT) else []
    return Applied(document, tuple(entry["metadata-file"] for entry in expired))


def apply_to_draft(draft: Draft, updates: list[Update]) -> None:
    """Apply each update in turn."""
    for update in _merge_removals(updates):
        _ACTIONS[update["action"]](draft, update)


def finish(draft: Draft) -> JsonObject:
    """Check the draft as a whole and return its document."""
    snapshots.finish_snapshot_log(draft)
    layout.check_layout(draft)
    check_append_only(draft)
    newest = max((snapshot["timestamp-ms"] for snapshot in draft.added_snapshots.values()), default=0)
    # Never backwards: Java refuses metadata that is older than its own log entries.
    draft.put("last-updated-ms", max(draft.base["last-updated-ms"], draft.now_ms, newest))
    return _write_legacy_fields(draft.document)


def _merge_removals(updates: list[Update]) -> Iterator[Update]:
    """Merge neighbouring remove-snapshots: Spark sends one per snapshot, and each walks all snapshots."""
    doomed: list[int] = []
    for update in updates:
        if update["action"] == "remove-snapshots":
            doomed += read_ints(update, "snapshot-ids")
            continue
        if doomed:
            yield {"action": "remove-snapshots", "snapshot-ids": doomed}
            doomed = []
        yield update
    if doomed:
        yield {"action": "remove-snapshots", "snapshot-ids": doomed}


def _write_legacy_fields(document: JsonObject) -> JsonObject:
    """Repeat the current schema and spec where readers of v1 look for them; later versions must not have them."""
    if document["format-version"] == 1:
        by_id = {schema["schema-id"]: schema for schema in document["schemas"]}
        specs = {spec["spec-id"]: spec for spec in document["partition-specs"]}
        document["schema"] = by_id[document["current-schema-id"]]
        document["partition-spec"] = specs[document["default-spec-id"]]["fields"]
    else:
        document.pop("schema", None)
        document.pop("partition-spec", None)
    return document


def _assign_uuid(draft: Draft, update: Update) -> None:
    sent, known = check_uuid(read_text(update, "uuid")), draft.document.get("table-uuid")
    if known is not None and known.lower() != sent.lower():
        raise ValidationFailed(f"Cannot reassign uuid: {known} to {sent}")
    if known is None:
        draft.put("table-uuid", sent)


def _upgrade_format_version(draft: Draft, update: Update) -> None:
    version = read_int(update, "format-version")
    if not 1 <= version <= LATEST_FORMAT_VERSION:
        raise ValidationFailed(f"Cannot upgrade table to unsupported format version: v{version}")
    if version < draft.format_version:
        raise ValidationFailed(f"Cannot downgrade v{draft.format_version} table to v{version}")
    if version == draft.format_version:
        return
    draft.put("format-version", version)
    for key, value in add_version_fields(draft.document).items():
        draft.put(key, value)
    if MAIN not in draft.document["refs"]:
        draft.put("current-snapshot-id", no_snapshot(version))


def _set_location(draft: Draft, update: Update) -> None:
    draft.put("location", read_text(update, "location").rstrip("/"))


def _set_properties(draft: Draft, update: Update) -> None:
    updates = read_text_map(update, "updates")
    # The format version has its own update and field; kept as a property it would only come to contradict them.
    updates.pop(FORMAT_VERSION, None)
    known = draft.document["properties"]
    if any(known.get(name) != value for name, value in updates.items()):
        draft.change_map("properties").update(updates)


def _remove_properties(draft: Draft, update: Update) -> None:
    doomed = [name for name in read_texts(update, "removals") if name in draft.document["properties"]]
    for name in doomed:
        draft.change_map("properties").pop(name, None)


def _add_encryption_key(draft: Draft, update: Update) -> None:
    key = read_object(update, "encryption-key")
    key_id = read_text(key, "key-id")
    read_text(key, "encrypted-key-metadata")
    maybe_text(key, "encrypted-by-id")
    if draft.format_version < ROW_LINEAGE_VERSION:
        raise ValidationFailed("Encryption keys are not supported until v3")
    if all(known["key-id"] != key_id for known in draft.document.get("encryption-keys", [])):
        draft.change_list("encryption-keys").append(key)


def _remove_encryption_key(draft: Draft, update: Update) -> None:
    key_id = read_text(update, "key-id")
    known = draft.document.get("encryption-keys", [])
    kept = [key for key in known if key["key-id"] != key_id]
    if len(kept) != len(known):
        draft.put("encryption-keys", kept)


_ACTIONS: dict[str, Callable[[Draft, Update], None]] = {
    "assign-uuid": _assign_uuid,
    "upgrade-format-version": _upgrade_format_version,
    "add-schema": layout.add_schema,
    "set-current-schema": layout.set_current_schema,
    "remove-schemas": layout.remove_schemas,
    "add-spec": layout.add_spec,
    "set-default-spec": layout.set_default_spec,
    "remove-partition-specs": layout.remove_specs,
    "add-sort-order": layout.add_order,
    "set-default-sort-order": layout.set_default_order,
    "add-snapshot": snapshots.add_snapshot,
    "set-snapshot-ref": snapshots.set_ref,
    "remove-snapshots": snapshots.remove_snapshots,
    "remove-snapshot-ref": snapshots.remove_ref,
    "set-statistics": snapshots.set_statistics,
    "remove-statistics": snapshots.remove_statistics,
    "set-partition-statistics": snapshots.set_partition_statistics,
    "remove-partition-statistics": snapshots.remove_partition_statistics,
    "set-location": _set_location,
    "set-properties": _set_properties,
    "remove-properties": _remove_properties,
    "add-encryption-key": _add_encryption_key,
    "remove-encryption-key": _remove_encryption_key,
}
