"""Commits to tables: requirements, updates, and the creation of a table from a request or from updates.

    requirements: each holds for the base, or CommitFailed (409): the client plans again on fresh metadata
    updates:      base -> Draft -> each update in order -> final checks -> new document with its metadata log

The base is never changed. A commit that changes nothing yields None, so that no file is written for it.

A create request becomes the updates that a client would commit, so both ways of creating a table meet here. The
difference: field ids in a request are placeholders and are replaced; a commit has ids that were assigned before.
Messages of requirements are Iceberg's, word for word.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from lakefeed.catalog.errors import BadRequest, CommitFailed, ValidationFailed
from lakefeed.catalog.json_fields import (
    JsonObject,
    maybe_int,
    maybe_object,
    maybe_text,
    maybe_text_map,
    parse_count,
    read_int,
    read_ints,
    read_object,
    read_text,
    read_text_map,
    read_texts,
)
from lakefeed.catalog.metadata import layout, snapshots
from lakefeed.catalog.metadata.document import (
    DEFAULT_FORMAT_VERSION,
    LATEST_FORMAT_VERSION,
    MAIN,
    ROW_LINEAGE_VERSION,
    Draft,
    add_version_fields,
    check_uuid,
    empty_document,
    is_true,
    no_snapshot,
)
from lakefeed.catalog.metadata.partitioning import check_order, check_spec, rewrite_sources
from lakefeed.catalog.metadata.schema import assign_fresh_ids, check_schema
from lakefeed.contract.properties import DELETE_OLD_METADATA, OLD_METADATA_MAX

Update = JsonObject
Requirement = JsonObject

# kind -> (field of the requirement, field of the document, what the message calls it)
_EQUALITIES = {
    "assert-last-assigned-field-id": ("last-assigned-field-id", "last-column-id", "last assigned field id"),
    "assert-current-schema-id": ("current-schema-id", "current-schema-id", "current schema"),
    "assert-last-assigned-partition-id": (
        "last-assigned-partition-id",
        "last-partition-id",
        "last assigned partition id",
    ),
    "assert-default-spec-id": ("default-spec-id", "default-spec-id", "default partition spec"),
    "assert-default-sort-order-id": ("default-sort-order-id", "default-sort-order-id", "default sort order"),
}

_FORMAT_VERSION = "format-version"
# Java clients of other catalogs write zstd by default. Over REST the server must set it, or they fall back to gzip.
_DEFAULT_PROPERTIES = {"write.parquet.compression-codec": "zstd"}
_METADATA_LOG_DEFAULT = 100  # as in Iceberg

_UNPARTITIONED: JsonObject = {"spec-id": 0, "fields": []}
_UNSORTED: JsonObject = {"order-id": 0, "fields": []}


def parse_requirements(requirements: list[JsonObject]) -> list[Requirement]:
    """Check that every requirement is of a known kind and has the fields of its kind.

    Raises: BadRequest.
    """
    for requirement in requirements:
        match read_text(requirement, "type"):
            case "assert-create":
                pass
            case "assert-table-uuid":
                read_text(requirement, "uuid")
            case "assert-ref-snapshot-id":
                read_text(requirement, "ref")
                maybe_int(requirement, "snapshot-id")
            case kind if kind in _EQUALITIES:
                read_int(requirement, _EQUALITIES[kind][0])
            case kind:
                raise BadRequest(f"Cannot parse update requirement, unknown type: {kind}")
    if len(requirements) > 1 and is_create(requirements):
        raise BadRequest("Invalid create requirements: assert-create must stand alone")
    return requirements


def is_create(requirements: list[Requirement]) -> bool:
    """Return whether these are the requirements of a commit that creates its table."""
    return any(requirement["type"] == "assert-create" for requirement in requirements)


def check_requirements(requirements: list[Requirement], base: Mapping[str, Any]) -> None:
    """Check every requirement against the base document.

    Raises: CommitFailed.
    """
    for requirement in requirements:
        match requirement["type"]:
            case "assert-create":
                raise CommitFailed("Requirement failed: table already exists")
            case "assert-table-uuid":
                expected, found = requirement["uuid"], base.get("table-uuid")
                if str(found).lower() != expected.lower():
                    raise CommitFailed(f"Requirement failed: UUID does not match: expected {found} != {expected}")
            case "assert-ref-snapshot-id":
                _check_ref(requirement["ref"], requirement.get("snapshot-id"), base)
            case kind:
                field, base_field, what = _EQUALITIES[kind]
                expected, found = requirement[field], base[base_field]
                if expected != found:
                    raise CommitFailed(f"Requirement failed: {what} changed: expected id {expected} != {found}")


def _check_ref(name: str, expected: int | None, base: Mapping[str, Any]) -> None:
    ref = base["refs"].get(name)
    if ref is None:
        if expected is not None:
            raise CommitFailed(f"Requirement failed: branch or tag {name} is missing, expected {expected}")
        return
    if expected is None:
        raise CommitFailed(f"Requirement failed: {ref['type']} {name} was created concurrently")
    if expected != ref["snapshot-id"]:
        raise CommitFailed(
            f"Requirement failed: {ref['type']} {name} has changed: expected id {expected} != {ref['snapshot-id']}"
        )


@dataclass(frozen=True, slots=True)
class Applied:
    """A new document, and the metadata files to delete because its metadata log no longer names them."""

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
    """Apply updates to an existing table, whose metadata file is at `base_location`; None if they change nothing.

    Raises: BadRequest, ValidationFailed, CommitFailed.
    """
    draft = Draft(base, now_ms=now_ms)
    apply_to_draft(draft, updates)
    if not draft.changed:
        return None
    document = finish(draft)
    log = [*base["metadata-log"], {"metadata-file": base_location, "timestamp-ms": base["last-updated-ms"]}]
    asked = parse_count(document["properties"].get(OLD_METADATA_MAX, ""))
    limit = _METADATA_LOG_DEFAULT if asked is None else max(1, asked)
    document["metadata-log"] = log[-limit:]
    expired = log[:-limit] if is_true(document["properties"], DELETE_OLD_METADATA) else []
    return Applied(document, tuple(entry["metadata-file"] for entry in expired))


def apply_to_draft(draft: Draft, updates: list[Update]) -> None:
    """Apply each update in order."""
    for update in _merge_removals(updates):
        _ACTIONS[update["action"]](draft, update)


def finish(draft: Draft) -> JsonObject:
    """Check the draft as a whole and return its document."""
    snapshots.finish_snapshot_log(draft)
    layout.check_layout(draft)
    snapshots.check_append_only(draft)
    newest = max((snapshot["timestamp-ms"] for snapshot in draft.added_snapshots.values()), default=0)
    # Never backwards: Java rejects metadata that is older than its own log entries.
    draft.put("last-updated-ms", max(draft.base["last-updated-ms"], draft.now_ms, newest))
    return _write_legacy_fields(draft.document)


def _merge_removals(updates: list[Update]) -> Iterator[Update]:
    """Merge adjacent remove-snapshots: Spark sends one per snapshot, and each of them scans all snapshots."""
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
    """Copy the current schema and spec to where readers of v1 expect them; later versions must not have them."""
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
    # The format version has its own update and field; as a property it would contradict them some day.
    updates.pop(_FORMAT_VERSION, None)
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


@dataclass(frozen=True, slots=True)
class CreateRequest:
    """A request to create a table, parsed."""

    schema: JsonObject
    spec: JsonObject
    order: JsonObject
    location: str | None
    properties: dict[str, str]
    format_version: int


def parse_create(document: JsonObject) -> CreateRequest:
    """Read the body of a create request, except its name.

    Raises: BadRequest, ValidationFailed.
    """
    properties = maybe_text_map(document, "properties")
    request = CreateRequest(
        schema=read_object(document, "schema"),
        spec=maybe_object(document, "partition-spec") or _UNPARTITIONED,
        order=maybe_object(document, "write-order") or _UNSORTED,
        location=maybe_text(document, "location"),
        format_version=_format_version(properties.pop(_FORMAT_VERSION, None)),
        properties=properties,
    )
    check_schema(request.schema, request.format_version)
    check_spec(request.spec)
    check_order(request.order)
    return request


def plan_create(request: CreateRequest, *, location: str, table_uuid: str) -> list[Update]:
    """Return the updates that a create request stands for, with fresh field ids."""
    schema, fresh = assign_fresh_ids(request.schema)
    spec, order = rewrite_sources(request.spec, fresh), rewrite_sources(request.order, fresh)
    # Partition field ids of a request are placeholders too.
    spec["fields"] = [{key: value for key, value in field.items() if key != "field-id"} for field in spec["fields"]]
    return [
        {"action": "assign-uuid", "uuid": table_uuid},
        {"action": "upgrade-format-version", "format-version": request.format_version},
        {"action": "add-schema", "schema": schema},
        {"action": "set-current-schema", "schema-id": -1},
        {"action": "add-spec", "spec": spec},
        {"action": "set-default-spec", "spec-id": -1},
        {"action": "add-sort-order", "sort-order": order},
        {"action": "set-default-sort-order", "sort-order-id": -1},
        {"action": "set-location", "location": location},
        {"action": "set-properties", "updates": request.properties},
    ]


def create_document(updates: list[Update], *, default_uuid: str, default_location: str, now_ms: int) -> JsonObject:
    """Apply the updates of a create to an empty document, and add what they leave out.

    Raises: BadRequest, ValidationFailed.
    """
    # The version that the client asks for comes first, so that schemas are checked against it in any order of updates.
    versions = [update.get("format-version") for update in updates if update["action"] == "upgrade-format-version"]
    draft = Draft(empty_document(_format_version(versions[0] if versions else None)), now_ms=now_ms)
    apply_to_draft(draft, updates)
    if draft.document["current-schema-id"] < 0:
        raise ValidationFailed("Cannot create a table without a current schema")
    apply_to_draft(draft, _plan_rest(draft.document, default_uuid, default_location))
    return finish(draft)


def _plan_rest(document: JsonObject, default_uuid: str, default_location: str) -> list[Update]:
    rest: list[Update] = []
    if "table-uuid" not in document:
        rest.append({"action": "assign-uuid", "uuid": default_uuid})
    if "location" not in document:
        rest.append({"action": "set-location", "location": default_location})
    if document["default-spec-id"] < 0:
        rest.append({"action": "add-spec", "spec": _UNPARTITIONED})
        rest.append({"action": "set-default-spec", "spec-id": -1})
    if document["default-sort-order-id"] < 0:
        rest.append({"action": "add-sort-order", "sort-order": _UNSORTED})
        rest.append({"action": "set-default-sort-order", "sort-order-id": -1})
    rest.append({"action": "set-properties", "updates": {**_DEFAULT_PROPERTIES, **document["properties"]}})
    return rest


def _format_version(value: Any) -> int:
    if value is None:
        return DEFAULT_FORMAT_VERSION
    text = str(value)
    version = None if isinstance(value, bool) else parse_count(text)
    if version is None:
        raise BadRequest(f"Invalid format version: {text:.100}")
    if not 1 <= version <= LATEST_FORMAT_VERSION:
        raise ValidationFailed(f"Unsupported format version: v{version}")
    return version
