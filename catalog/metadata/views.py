"""View metadata: create a document, and apply the requirements and updates of a commit.

A view has a list of versions, one of them current. Each version has a schema and the query in one or more SQL dialects.
A version or schema that equals an existing one reuses its id; otherwise it gets a fresh id, whatever id was sent: two
clients that both send version 2 must not overwrite each other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from lakefeed.catalog.errors import BadRequest, CommitFailed, IllegalArgument, ValidationFailed
from lakefeed.catalog.json_fields import (
    JsonObject,
    maybe_text,
    maybe_text_map,
    parse_count,
    parse_object,
    read_id,
    read_int,
    read_object,
    read_objects,
    read_text,
    read_text_map,
    read_texts,
)
from lakefeed.catalog.metadata.document import LATEST_FORMAT_VERSION, Draft, check_uuid, is_true
from lakefeed.catalog.metadata.schema import check_schema, same_schema

VIEW_FORMAT_VERSION = 1
HISTORY_SIZE = "version.history.num-entries"
DROP_DIALECT_ALLOWED = "replace.drop-dialect.allowed"

# Iceberg's own default.
_HISTORY_SIZE_DEFAULT = 10
_LAST_ADDED = -1
_FIRST_VERSION_ID = 1
_SCHEMAS, _VERSIONS = "schemas", "versions"
# Two versions are the same if these are equal: everything but their ids and times.
_COMPARED = ("schema-id", "summary", "representations", "default-catalog", "default-namespace")


@dataclass(frozen=True, slots=True)
class CreateView:
    """A request to create a view, parsed."""

    schema: JsonObject
    version: JsonObject
    location: str | None
    properties: dict[str, str]


def parse_create_view(body: JsonObject) -> CreateView:
    """Read the body of a create request, except its name.

    Raises: BadRequest, ValidationFailed, IllegalArgument.
    """
    request = CreateView(
        schema=read_object(body, "schema"),
        version=read_object(body, "view-version"),
        location=maybe_text(body, "location"),
        properties=maybe_text_map(body, "properties"),
    )
    check_schema(request.schema, LATEST_FORMAT_VERSION)
    _check_version(request.version)
    return request


def create_view_document(request: CreateView, *, view_uuid: str, location: str, now_ms: int) -> JsonObject:
    """Return the document of a new view: its first schema has id 0 and its first version has id 1.

    Raises: BadRequest, ValidationFailed, IllegalArgument.
    """
    empty: JsonObject = {
        "view-uuid": view_uuid,
        "format-version": VIEW_FORMAT_VERSION,
        "location": location,
        _SCHEMAS: [],
        "current-version-id": _LAST_ADDED,
        _VERSIONS: [],
        "version-log": [],
        "properties": request.properties,
    }
    version = {**request.version, "version-id": _FIRST_VERSION_ID, "timestamp-ms": now_ms, "schema-id": _LAST_ADDED}
    draft = Draft(empty, now_ms=now_ms)
    _add_schema(draft, {"schema": request.schema})
    _add_version(draft, {"view-version": version})
    _set_current_version(draft, {"view-version-id": _LAST_ADDED})
    return _finish(draft)


def parse_view_document(raw: bytes) -> JsonObject:
    """Read a view's metadata file, also of another writer, and check what later commits rely on.

    Raises: BadRequest, ValidationFailed.
    """
    document = parse_object(raw)
    if read_int(document, "format-version") != VIEW_FORMAT_VERSION:
        raise BadRequest(f"Cannot read unsupported version {document['format-version']}")
    read_text(document, "view-uuid")
    read_text(document, "location")
    document = {**document, "properties": maybe_text_map(document, "properties")}
    schema_ids = {read_id(schema, "schema-id") for schema in read_objects(document, _SCHEMAS)}
    for version in read_objects(document, _VERSIONS):
        read_id(version, "version-id")
        if read_id(version, "schema-id") not in schema_ids:
            raise ValidationFailed(f"Cannot find schema {version['schema-id']} of view version {version['version-id']}")
    for entry in read_objects(document, "version-log"):
        read_id(entry, "version-id")
    if _find_version(document, read_id(document, "current-version-id")) is None:
        raise ValidationFailed(f"Cannot find current version {document['current-version-id']} in view versions")
    return document


def parse_view_updates(updates: list[JsonObject]) -> list[JsonObject]:
    """Check that every update is of a kind that views support.

    Raises: BadRequest.
    """
    for update in updates:
        if read_text(update, "action") not in _ACTIONS:
            raise BadRequest(f"Cannot parse view update, unknown action: {update['action']}")
    return updates


def parse_view_requirements(requirements: list[JsonObject]) -> list[JsonObject]:
    """Check that every requirement is of the one kind that views support.

    Raises: BadRequest.
    """
    for requirement in requirements:
        if read_text(requirement, "type") != "assert-view-uuid":
            raise BadRequest(f"Cannot parse update requirement, unknown type: {requirement['type']}")
        read_text(requirement, "uuid")
    return requirements


def check_view_requirements(requirements: list[JsonObject], base: Mapping[str, Any]) -> None:
    """Check every requirement against the base document.

    Raises: CommitFailed.
    """
    for requirement in requirements:
        if requirement["uuid"].lower() != base["view-uuid"].lower():
            raise CommitFailed(
                f"Requirement failed: view UUID does not match: expected {base['view-uuid']} != {requirement['uuid']}"
            )


def apply_view_updates(base: Mapping[str, Any], updates: list[JsonObject], *, now_ms: int) -> JsonObject | None:
    """Apply updates to a view; None if they change nothing. The base is not changed.

    Raises: BadRequest, ValidationFailed, IllegalArgument.
    """
    draft = Draft(base, now_ms=now_ms)
    for update in updates:
        _ACTIONS[update["action"]](draft, update)
    return _finish(draft) if draft.changed else None


def _finish(draft: Draft) -> JsonObject:
    if draft.document["current-version-id"] != draft.base["current-version-id"]:
        _check_dialects_kept(draft)
    _remove_old_versions(draft)
    return draft.document


def _check_dialects_kept(draft: Draft) -> None:
    """Check that a replace does not silently drop the query of another engine."""
    previous = _find_version(draft.base, draft.base["current-version-id"])
    if previous is None or is_true(draft.document["properties"], DROP_DIALECT_ALLOWED):
        return
    current = _find_version(draft.document, draft.document["current-version-id"])
    assert current is not None, "a version exists before it becomes current"
    before, after = _dialects(previous), _dialects(current)
    if not before <= after:
        raise IllegalArgument(
            f"Cannot replace view due to loss of view dialects ({DROP_DIALECT_ALLOWED}=false):\n"
            f"Previous dialects: {sorted(before)}\nNew dialects: {sorted(after)}"
        )


def _remove_old_versions(draft: Draft) -> None:
    """Keep the current version and the newest others; the log is cut after the last entry of a removed one."""
    document = draft.document
    versions = sorted(document[_VERSIONS], key=lambda version: version["version-id"], reverse=True)
    current_id = document["current-version-id"]
    others = [version["version-id"] for version in versions if version["version-id"] != current_id]
    kept_ids = {current_id, *others[: max(_history_size(document), len(draft.added_version_ids)) - 1]}
    if len(kept_ids) == len(versions):
        return
    draft.put(_VERSIONS, [version for version in document[_VERSIONS] if version["version-id"] in kept_ids])
    log: list[JsonObject] = []
    for entry in document["version-log"]:
        log = [*log, entry] if entry["version-id"] in kept_ids else []
    draft.put("version-log", log)


def _history_size(document: Mapping[str, Any]) -> int:
    text = document["properties"].get(HISTORY_SIZE)
    if text is None:
        return _HISTORY_SIZE_DEFAULT
    size = parse_count(text)
    if not size:
        raise IllegalArgument(f"{HISTORY_SIZE} must be positive but was {text:.100}")
    return size


def _check_version(version: JsonObject) -> None:
    """Check a version as it was sent. The caller sets times and ids.

    Raises: BadRequest, IllegalArgument.
    """
    read_text_map(version, "summary")
    read_texts(version, "default-namespace")
    maybe_text(version, "default-catalog")
    seen: set[str] = set()
    for representation in read_objects(version, "representations"):
        if read_text(representation, "type") != "sql":
            continue
        read_text(representation, "sql")
        dialect = read_text(representation, "dialect").lower()
        if dialect in seen:
            raise IllegalArgument(f"Invalid view version: Cannot add multiple queries for dialect {dialect}")
        seen.add(dialect)


def _assign_uuid(draft: Draft, update: JsonObject) -> None:
    sent, known = check_uuid(read_text(update, "uuid")), draft.document["view-uuid"]
    if known.lower() != sent.lower():
        raise IllegalArgument(f"Cannot reassign uuid: {known} to {sent}")


def _upgrade_format_version(draft: Draft, update: JsonObject) -> None:
    version = read_int(update, "format-version")
    if version != VIEW_FORMAT_VERSION:
        raise IllegalArgument(f"Cannot upgrade view to unsupported format version: v{version}")
    del draft  # there is one format version, and every view has it


def _add_schema(draft: Draft, update: JsonObject) -> None:
    schema = read_object(update, "schema")
    check_schema(schema, LATEST_FORMAT_VERSION)
    known = draft.document[_SCHEMAS]
    equal = next((item for item in known if same_schema(item, schema)), None)
    schema_id = equal["schema-id"] if equal else max((item["schema-id"] for item in known), default=-1) + 1
    if equal is None:
        stored = {key: value for key, value in schema.items() if value is not None}
        draft.change_list(_SCHEMAS).append({**stored, "schema-id": schema_id})
    draft.last_added[_SCHEMAS] = schema_id


def _add_version(draft: Draft, update: JsonObject) -> None:
    sent = read_object(update, "view-version")
    _check_version(sent)
    read_int(sent, "timestamp-ms")
    version = {key: value for key, value in sent.items() if value is not None}
    version["schema-id"] = _schema_id(draft, read_id(sent, "schema-id"))
    known = draft.document[_VERSIONS]
    equal = next((item for item in known if all(item.get(key) == version.get(key) for key in _COMPARED)), None)
    if equal is not None:
        version_id = equal["version-id"]
    else:
        version_id = max([read_id(sent, "version-id"), *(item["version-id"] + 1 for item in known)])
        draft.change_list(_VERSIONS).append({**version, "version-id": version_id})
        draft.added_version_ids.add(version_id)
    draft.last_added[_VERSIONS] = version_id


def _schema_id(draft: Draft, sent: int) -> int:
    if sent != _LAST_ADDED:
        if all(schema["schema-id"] != sent for schema in draft.document[_SCHEMAS]):
            raise IllegalArgument(f"Cannot add version with unknown schema: {sent}")
        return sent
    if _SCHEMAS not in draft.last_added:
        raise IllegalArgument("Cannot set last added schema: no schema has been added")
    return draft.last_added[_SCHEMAS]


def _set_current_version(draft: Draft, update: JsonObject) -> None:
    sent = read_id(update, "view-version-id")
    if sent == _LAST_ADDED and _VERSIONS not in draft.last_added:
        raise IllegalArgument("Cannot set last version id: no current version id has been set")
    version_id = draft.last_added[_VERSIONS] if sent == _LAST_ADDED else sent
    version = _find_version(draft.document, version_id)
    if version is None:
        raise IllegalArgument(f"Cannot set current version to unknown version: {version_id}")
    if version_id == draft.document["current-version-id"]:
        return
    draft.put("current-version-id", version_id)
    happened_ms = version["timestamp-ms"] if version_id in draft.added_version_ids else draft.now_ms
    draft.change_list("version-log").append({"timestamp-ms": happened_ms, "version-id": version_id})


def _set_location(draft: Draft, update: JsonObject) -> None:
    draft.put("location", read_text(update, "location"))


def _set_properties(draft: Draft, update: JsonObject) -> None:
    draft.put("properties", {**draft.document["properties"], **read_text_map(update, "updates")})


def _remove_properties(draft: Draft, update: JsonObject) -> None:
    doomed = set(read_texts(update, "removals"))
    kept = {name: value for name, value in draft.document["properties"].items() if name not in doomed}
    draft.put("properties", kept)


def _find_version(document: Mapping[str, Any], version_id: int) -> JsonObject | None:
    return next((version for version in document[_VERSIONS] if version["version-id"] == version_id), None)


def _dialects(version: Mapping[str, Any]) -> set[str]:
    return {item["dialect"].lower() for item in version["representations"] if item.get("type") == "sql"}


_ACTIONS: dict[str, Callable[[Draft, JsonObject], None]] = {
    "assign-uuid": _assign_uuid,
    "upgrade-format-version": _upgrade_format_version,
    "add-schema": _add_schema,
    "add-view-version": _add_version,
    "set-current-view-version": _set_current_version,
    "set-location": _set_location,
    "set-properties": _set_properties,
    "remove-properties": _remove_properties,
}
