"""Metadata documents as a whole: read and checked, drafted while updates are applied, and encoded.

Every other module expects the modern form: `schemas`, `partition-specs`, `sort-orders`, `refs` and the other
collections are present, whatever format version the table has.

Snapshots are nearly all of an old table's document, and a commit adds one to them. They come last in a file, and the
next version copies the bytes of the list that it continues:

    base:  {"format-version":2, ... ,"snapshots":[a,b,c]}
    next:  {"format-version":2, ... ,"snapshots":[a,b,c,d]}      the bytes of a, b and c are the base's
"""

from __future__ import annotations

import operator
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from lakefeed.catalog.errors import BadRequest, ValidationFailed
from lakefeed.catalog.json_fields import (
    JsonObject,
    as_object,
    maybe_int,
    maybe_text,
    maybe_text_map,
    parse_object,
    read_id,
    read_int,
    read_object,
    read_objects,
    read_text,
)
from lakefeed.catalog.metadata.partitioning import (
    FIRST_PARTITION_FIELD_ID,
    check_order,
    check_spec,
    highest_partition_field_id,
    number_spec_fields,
)
from lakefeed.catalog.metadata.schema import check_schema

MAIN = "main"
LATEST_FORMAT_VERSION = 3
DEFAULT_FORMAT_VERSION = 2
ROW_LINEAGE_VERSION = 3

_LISTS = ("snapshots", "statistics", "partition-statistics", "snapshot-log", "metadata-log")
_COUNTERS = ("last-partition-id", "last-sequence-number", "next-row-id")
# Fields for which null means the same as absence.
_OPTIONAL = {"schemas", "partition-specs", "sort-orders", "properties", "refs", *_COUNTERS, *_LISTS}
_SNAPSHOTS_KEY = b',"snapshots":'
_UUID = re.compile(r"[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")


def empty_document(format_version: int) -> JsonObject:
    """Return the document that a create starts from: empty, with all ids before their first."""
    document: JsonObject = {
        "format-version": format_version,
        "last-updated-ms": 0,
        "last-column-id": 0,
        "current-schema-id": -1,
        "schemas": [],
        "default-spec-id": -1,
        "partition-specs": [],
        "last-partition-id": FIRST_PARTITION_FIELD_ID - 1,
        "default-sort-order-id": -1,
        "sort-orders": [],
        "properties": {},
        "current-snapshot-id": no_snapshot(format_version),
        "refs": {},
        **{key: [] for key in _LISTS},
    }
    return add_version_fields(document)


def add_version_fields(document: JsonObject) -> JsonObject:
    """Return the document with the counters that its format version requires."""
    if document["format-version"] > 1:
        document = {"last-sequence-number": 0, **document}
    if document["format-version"] >= ROW_LINEAGE_VERSION:
        document = {"next-row-id": 0, **document}
    return document


def no_snapshot(format_version: int) -> int | None:
    """Return the `current-snapshot-id` of an empty table: older Java readers cannot read null before v3."""
    return None if format_version >= ROW_LINEAGE_VERSION else -1


def parse_document(raw: bytes) -> JsonObject:
    """Read a metadata file into the modern form.

    Raises: BadRequest.
    """
    document = parse_object(raw)
    version = read_int(document, "format-version")
    if not 1 <= version <= LATEST_FORMAT_VERSION:
        raise BadRequest(f"Cannot read unsupported version {version}")
    return _modernise(document)


def only_referenced_snapshots(document: Mapping[str, Any]) -> JsonObject:
    """Return a copy without the snapshots that no branch or tag points at; for responses, never for commits."""
    referenced = {ref["snapshot-id"] for ref in document["refs"].values()}
    shown = dict(document)
    for key in ("snapshots", "statistics", "partition-statistics"):
        shown[key] = [item for item in document[key] if item["snapshot-id"] in referenced]
    return shown


def is_same_table(one: JsonObject, other: JsonObject) -> bool:
    """Return whether two documents are versions of one table, which then has two names for the same files."""
    known = one.get("table-uuid"), other.get("table-uuid")
    return one["location"] == other.get("location") or (known[0] is not None and known[0] == known[1])


def is_true(properties: Mapping[str, str], name: str) -> bool:
    """Return a boolean property as Java reads it: only the word true, in any case, is true."""
    return properties.get(name, "").lower() == "true"


def check_uuid(text: str) -> str:
    """Check the form of a uuid and return it as it was sent.

    Raises: BadRequest.
    """
    if _UUID.fullmatch(text) is None:
        raise BadRequest(f"Invalid uuid: {text}")
    return text


def check_document(document: JsonObject) -> None:
    """Check a document of another writer, so that later commits can rely on its shape.

    Raises: BadRequest, ValidationFailed.
    """
    version = document["format-version"]
    read_int(document, "last-updated-ms")
    for key in ("last-column-id", "last-partition-id"):
        read_id(document, key)
    read_text(document, "location")
    (maybe_text if version == 1 else read_text)(document, "table-uuid")
    maybe_text_map(document, "properties")
    for schema in read_objects(document, "schemas"):
        check_schema(schema, version)
    _last_partition_id(read_objects(document, "partition-specs"))
    for order in read_objects(document, "sort-orders"):
        check_order(order)
    _check_default(document, chosen="current-schema-id", among="schemas", id_key="schema-id")
    _check_default(document, chosen="default-spec-id", among="partition-specs", id_key="spec-id")
    _check_default(document, chosen="default-sort-order-id", among="sort-orders", id_key="order-id")
    _check_history(document)


def _check_default(document: JsonObject, *, chosen: str, among: str, id_key: str) -> None:
    if read_id(document, chosen) not in {read_id(item, id_key) for item in document[among]}:
        raise ValidationFailed(f"Invalid table metadata: {chosen} {document[chosen]} is not in {among}")


def _check_history(document: JsonObject) -> None:
    snapshot_ids = {read_int(snapshot, "snapshot-id") for snapshot in read_objects(document, "snapshots")}
    for snapshot in document["snapshots"]:
        read_int(snapshot, "timestamp-ms")
        maybe_int(snapshot, "parent-snapshot-id")
        maybe_text_map(snapshot, "summary")
    for name, value in read_object(document, "refs").items():
        ref = as_object(value, f"refs.{name}")
        if read_text(ref, "type") not in ("branch", "tag") or read_int(ref, "snapshot-id") not in snapshot_ids:
            raise ValidationFailed(f"Invalid table metadata: ref {name} is neither branch nor tag of a known snapshot")
    for entry in read_objects(document, "snapshot-log"):
        read_int(entry, "snapshot-id")
        read_int(entry, "timestamp-ms")
    for entry in read_objects(document, "metadata-log"):
        read_text(entry, "metadata-file")
        read_int(entry, "timestamp-ms")
    for key in ("statistics", "partition-statistics"):
        for entry in read_objects(document, key):
            read_int(entry, "snapshot-id")
    for key in ("last-sequence-number", "next-row-id"):
        maybe_int(document, key)


def _modernise(document: JsonObject) -> JsonObject:
    """Add what old or terse writers leave out. A document of this catalog stays as it is."""
    nulls = {key for key, value in document.items() if value is None} & _OPTIONAL
    modern = add_version_fields({key: value for key, value in document.items() if key not in nulls})
    if "schemas" not in modern:
        schema = {"schema-id": 0, **read_object(document, "schema")}
        modern |= {"schemas": [schema], "current-schema-id": schema["schema-id"]}
    if "partition-specs" not in modern:
        spec = {"spec-id": 0, "fields": read_objects(document, "partition-spec")}
        check_spec(spec)
        spec = number_spec_fields(spec, (), FIRST_PARTITION_FIELD_ID - 1)
        modern |= {"partition-specs": [spec], "default-spec-id": 0}
    if "last-partition-id" not in modern:
        modern["last-partition-id"] = _last_partition_id(read_objects(modern, "partition-specs"))
    if "sort-orders" not in modern:
        modern |= {"sort-orders": [{"order-id": 0, "fields": []}], "default-sort-order-id": 0}
    modern.setdefault("properties", {})
    for key in _LISTS:
        modern.setdefault(key, [])
    current = modern.setdefault("current-snapshot-id", no_snapshot(modern["format-version"]))
    modern.setdefault("refs", {} if current in (None, -1) else {MAIN: {"snapshot-id": current, "type": "branch"}})
    return modern


def _last_partition_id(specs: list[JsonObject]) -> int:
    """Check stored specs, whose fields all have ids, and return the highest id."""
    for spec in specs:
        check_spec(spec)
        for field in spec["fields"]:
            read_id(field, "field-id")
    return max(map(highest_partition_field_id, specs), default=FIRST_PARTITION_FIELD_ID - 1)


class Draft:
    """A table or view document while updates are applied to it, and what later ones need to know of earlier ones.

    The base document may be cached and shared, so it is never changed. The draft starts as a shallow copy, and each
    list or map is copied once, before its first change. A commit on a table of a thousand snapshots copies one list of
    references to them, not the snapshots.
    """

    def __init__(self, base: Mapping[str, Any], *, now_ms: int) -> None:
        self.base = base
        self.document: JsonObject = dict(base)
        self.now_ms = now_ms
        self.changed = False
        # What the id -1 means in set-current-schema, set-default-spec and similar updates, by the list it refers to.
        self.last_added: dict[str, int] = {}
        self.added_spec_ids: set[int] = set()
        self.added_version_ids: set[int] = set()
        self.added_snapshots: dict[int, JsonObject] = {}
        self.removed_snapshots = False
        self._owned: set[str] = set()

    @property
    def format_version(self) -> int:
        """Return the table's format version as of the updates so far."""
        version: int = self.document["format-version"]
        return version

    def put(self, key: str, value: Any) -> None:
        """Set a top-level field; an equal value is no change."""
        if key not in self.document or self.document[key] != value:
            self.document[key] = value
            self._owned.discard(key)
            self.changed = True

    def change_list(self, key: str) -> list[Any]:
        """Return the list under `key` to be changed, and mark the document as changed."""
        return self._own(key, list, [])  # type: ignore[no-any-return]

    def change_map(self, key: str) -> JsonObject:
        """Return the map under `key` to be changed, and mark the document as changed."""
        return self._own(key, dict, {})  # type: ignore[no-any-return]

    def _own(self, key: str, copy: type, empty: Any) -> Any:
        self.changed = True
        if key not in self._owned:
            self.document[key] = copy(self.document.get(key, empty))
            self._owned.add(key)
        return self.document[key]


@dataclass(frozen=True, slots=True)
class EncodedDocument:
    """A document and its bytes. `snapshots_at` is the position of the list of snapshots, if the bytes end with it."""

    document: JsonObject
    raw: bytes
    snapshots_at: int | None


def encode_document(document: JsonObject, base: EncodedDocument | None = None) -> EncodedDocument:
    """Encode a document. Bytes that it shares with its base are copied."""
    snapshots = document.get("snapshots")
    if not isinstance(snapshots, list) or not snapshots:  # a view may have any field of this name
        return EncodedDocument(document, orjson.dumps(document), None)
    head = orjson.dumps({key: value for key, value in document.items() if key != "snapshots"})
    parts: list[bytes | memoryview] = [memoryview(head)[:-1], _SNAPSHOTS_KEY]
    known = [] if base is None or base.snapshots_at is None else base.document["snapshots"]
    # The same objects, which are never changed.
    if base is not None and known and len(snapshots) >= len(known) and all(map(operator.is_, known, snapshots)):
        parts.append(memoryview(base.raw)[base.snapshots_at : -len(b"]}")])
        added = orjson.dumps(snapshots[len(known) :])
        parts += [b"" if added == b"[]" else b",", memoryview(added)[1:]]
    else:
        parts.append(orjson.dumps(snapshots))
    return EncodedDocument(document, b"".join((*parts, b"}")), len(head) - 1 + len(_SNAPSHOTS_KEY))
