"""New tables: from a create request, or from the updates of a commit that creates its table, to a document.

A create request becomes the same updates that a client would commit, so both ways meet in one place. The difference:
a request carries placeholder field ids, which are replaced here; a commit carries ids that were assigned before.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from catalog.errors import BadRequest, ValidationFailed
from catalog.fields import JsonObject, maybe_object, maybe_text, maybe_text_map, parse_count, read_object
from catalog.metadata.documents import DEFAULT_FORMAT_VERSION, LATEST_FORMAT_VERSION, empty_document
from catalog.metadata.draft import Draft
from catalog.metadata.partitioning import check_order, check_spec, rewrite_sources
from catalog.metadata.properties import DEFAULT_PROPERTIES, FORMAT_VERSION
from catalog.metadata.schemas import assign_fresh_ids, check_schema
from catalog.metadata.updates import Update, apply_to_draft, finish

_UNPARTITIONED: JsonObject = {"spec-id": 0, "fields": []}
_UNSORTED: JsonObject = {"order-id": 0, "fields": []}


@dataclass(frozen=True, slots=True)
class CreateRequest:
    """A new table as its client describes it."""

    schema: JsonObject
    spec: JsonObject
    order: JsonObject
    location: str | None
    properties: dict[str, str]
    format_version: int


def parse_create(document: JsonObject) -> CreateRequest:
    """Read the body of a create, beside its name.

    Raises: BadRequest, ValidationFailed.
    """
    properties = maybe_text_map(document, "properties")
    request = CreateRequest(
        schema=read_object(document, "schema"),
        spec=maybe_object(document, "partition-spec") or _UNPARTITIONED,
        order=maybe_object(document, "write-order") or _UNSORTED,
        location=maybe_text(document, "location"),
        format_version=_format_version(properties.pop(FORMAT_VERSION, None)),
        properties=properties,
    )
    check_schema(request.schema, request.format_version)
    check_spec(request.spec)
    check_order(request.order)
    return request


def plan_create(request: CreateRequest, *, location: str, table_uuid: str) -> list[Update]:
    """Turn a create request into updates, with fresh field ids everywhere."""
    schema, fresh = assign_fresh_ids(request.schema)
    spec, order = rewrite_sources(request.spec, fresh), rewrite_sources(request.order, fresh)
    # A new table's partition fields are numbered here too, whatever placeholders were sent.
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
    """Apply the updates of a create to nothing, and fill in what they leave open.

    Raises: BadRequest, ValidationFailed.
    """
    draft = Draft(empty_document(_first_format_version(updates)), now_ms=now_ms)
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
    rest.append({"action": "set-properties", "updates": {**DEFAULT_PROPERTIES, **document["properties"]}})
    return rest


def _first_format_version(updates: list[Update]) -> int:
    """Start at the version the client asks for, so that schemas are checked against it wherever it stands."""
    asked = [update.get("format-version") for update in updates if update["action"] == "upgrade-format-version"]
    return _format_version(asked[0]) if asked else DEFAULT_FORMAT_VERSION


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
