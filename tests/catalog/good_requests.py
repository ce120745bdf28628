"""A good request of every operation, which the tests of bad ones damage. The table `db.t` and the view `db.v` exist."""

from __future__ import annotations

from typing import Any

from tests.catalog.documents import UUID, create_body, field, schema, set_main, snapshot

NESTED = schema(
    field(1, "id", required=True),
    field(2, "s", {"type": "struct", "fields": [field(3, "x", "decimal(9, 2)")]}),
    field(4, "l", {"type": "list", "element-id": 5, "element": "string", "element-required": False}),
    field(6, "m", {"type": "map", "key-id": 7, "key": "string", "value-id": 8, "value": "int", "value-required": True}),
    **{"identifier-field-ids": [1]},
)
SPEC = {"spec-id": 0, "fields": [{"source-id": 1, "field-id": 1000, "transform": "bucket[4]", "name": "b"}]}
ORDER = {
    "order-id": 1,
    "fields": [{"source-id": 1, "transform": "identity", "direction": "asc", "null-order": "nulls-first"}],
}
STATISTICS = {
    "snapshot-id": 5,
    "statistics-path": "p",
    "file-size-in-bytes": 1,
    "file-footer-size-in-bytes": 1,
    "blob-metadata": [{"type": "b", "snapshot-id": 5, "sequence-number": 1, "fields": [1]}],
}
UPDATES = [
    {"action": "assign-uuid", "uuid": UUID},
    {"action": "upgrade-format-version", "format-version": 2},
    {"action": "add-schema", "schema": NESTED},
    {"action": "set-current-schema", "schema-id": 0},
    {"action": "remove-schemas", "schema-ids": [9]},
    {"action": "add-spec", "spec": SPEC},
    {"action": "set-default-spec", "spec-id": 0},
    {"action": "remove-partition-specs", "spec-ids": [9]},
    {"action": "add-sort-order", "sort-order": ORDER},
    {"action": "set-default-sort-order", "sort-order-id": 0},
    {"action": "add-snapshot", "snapshot": snapshot(1, 1, 5)},
    {**set_main(1), "min-snapshots-to-keep": 1, "max-ref-age-ms": 1},
    {"action": "remove-snapshots", "snapshot-ids": [9]},
    {"action": "remove-snapshot-ref", "ref-name": "none"},
    {"action": "set-statistics", "statistics": STATISTICS},
    {"action": "remove-statistics", "snapshot-id": 9},
    {"action": "set-partition-statistics", "partition-statistics": STATISTICS},
    {"action": "remove-partition-statistics", "snapshot-id": 9},
    {"action": "set-location", "location": "file:///x"},
    {"action": "set-properties", "updates": {"a": "b"}},
    {"action": "remove-properties", "removals": ["none"]},
    {"action": "add-encryption-key", "encryption-key": {"key-id": "k", "encrypted-key-metadata": "AA=="}},
    {"action": "remove-encryption-key", "key-id": "none"},
]
REQUIREMENTS = [
    {"type": "assert-create"},
    {"type": "assert-table-uuid", "uuid": "u"},
    {"type": "assert-ref-snapshot-id", "ref": "main", "snapshot-id": 1},
    {"type": "assert-last-assigned-field-id", "last-assigned-field-id": 1},
    {"type": "assert-current-schema-id", "current-schema-id": 1},
    {"type": "assert-last-assigned-partition-id", "last-assigned-partition-id": 1},
    {"type": "assert-default-spec-id", "default-spec-id": 1},
    {"type": "assert-default-sort-order-id", "default-sort-order-id": 1},
]

IDENTIFIER = {"namespace": ["db"], "name": "t"}
VERSION = {
    "version-id": 1,
    "timestamp-ms": 1,
    "schema-id": -1,
    "summary": {"engine-name": "spark"},
    "representations": [{"type": "sql", "sql": "SELECT 1", "dialect": "spark"}],
    "default-catalog": None,
    "default-namespace": ["db"],
}
VIEW_UPDATES = [
    {"action": "assign-uuid", "uuid": UUID},
    {"action": "upgrade-format-version", "format-version": 1},
    {"action": "add-schema", "schema": NESTED},
    {"action": "add-view-version", "view-version": VERSION},
    {"action": "set-current-view-version", "view-version-id": -1},
    {"action": "set-location", "location": "file:///x"},
    {"action": "set-properties", "updates": {"a": "b"}},
    {"action": "remove-properties", "removals": ["none"]},
]
FILTER = {"type": "and", "left": {"type": "eq", "term": "id", "value": 1}, "right": {"type": "is-null", "term": "id"}}
# A good body of every operation that takes one, by its endpoint.
BODIES: dict[str, Any] = {
    "namespaces": {"namespace": ["a"], "properties": {"a": "b"}},
    "namespaces/{namespace}/properties": {"removals": ["a"], "updates": {"b": "c"}},
    "namespaces/{namespace}/tables": create_body("x"),
    "namespaces/{namespace}/tables/{table}": {"identifier": IDENTIFIER, "requirements": [], "updates": []},
    "namespaces/{namespace}/tables/{table}/unregister": {},
    "namespaces/{namespace}/tables/{table}/metrics": {"report-type": "scan-report", "table-name": "t"},
    "namespaces/{namespace}/tables/{table}/plan": {
        "snapshot-id": 5,
        "select": ["id"],
        "filter": FILTER,
        "case-sensitive": True,
        "use-snapshot-schema": False,
        "start-snapshot-id": 1,
        "end-snapshot-id": 5,
        "stats-fields": ["id"],
        "min-rows-requested": 1,
    },
    "namespaces/{namespace}/tables/{table}/tasks": {"plan-task": "task"},
    "namespaces/{namespace}/register": {"name": "t", "metadata-location": "file:///x", "overwrite": True},
    "tables/rename": {"source": IDENTIFIER, "destination": {**IDENTIFIER, "name": "u"}},
    "transactions/commit": {
        "table-changes": [{"identifier": IDENTIFIER, "requirements": REQUIREMENTS[:2], "updates": UPDATES[:2]}]
    },
    "namespaces/{namespace}/views": {"name": "x", "schema": NESTED, "view-version": VERSION, "properties": {}},
    "namespaces/{namespace}/views/{view}": {
        "identifier": {**IDENTIFIER, "name": "v"},
        "requirements": [{"type": "assert-view-uuid", "uuid": UUID}],
        "updates": VIEW_UPDATES[:1],
    },
    "namespaces/{namespace}/register-view": {"name": "x", "metadata-location": "file:///x"},
    "views/rename": {
        "source": {**IDENTIFIER, "name": "v"},
        "destination": {**IDENTIFIER, "name": "w"},
    },
}

# Query parameters by operation, with what a client sends.
_PAGE = {"pageToken": "", "pageSize": "2"}
QUERIES: dict[str, dict[str, str]] = {
    "GET config": {"warehouse": "lakefeed"},
    "GET namespaces": {"parent": "db", **_PAGE},
    "GET namespaces/{namespace}/tables": _PAGE,
    "GET namespaces/{namespace}/views": _PAGE,
    "GET namespaces/{namespace}/functions": _PAGE,
    "GET namespaces/{namespace}/tables/{table}": {"snapshots": "refs"},
    "DELETE namespaces/{namespace}/tables/{table}": {"purgeRequested": "true"},
}
HEADERS = {
    "If-None-Match": '"etag"',
    "Prefer": "return=minimal",
    "Idempotency-Key": UUID,
    "X-Iceberg-Access-Delegation": "vended-credentials",
    "Content-Encoding": "identity",
    "Accept-Encoding": "gzip",
    "Content-Type": "application/json",
    "Accept": "application/json",
}
# Operations without a body; with BODIES these are all that there are.
BODILESS = (
    "GET config",
    "GET namespaces",
    "GET namespaces/{namespace}",
    "HEAD namespaces/{namespace}",
    "DELETE namespaces/{namespace}",
    "GET namespaces/{namespace}/tables",
    "GET namespaces/{namespace}/tables/{table}",
    "HEAD namespaces/{namespace}/tables/{table}",
    "DELETE namespaces/{namespace}/tables/{table}",
    "GET namespaces/{namespace}/tables/{table}/plan/{plan-id}",
    "DELETE namespaces/{namespace}/tables/{table}/plan/{plan-id}",
    "GET namespaces/{namespace}/views",
    "GET namespaces/{namespace}/views/{view}",
    "HEAD namespaces/{namespace}/views/{view}",
    "DELETE namespaces/{namespace}/views/{view}",
    "GET namespaces/{namespace}/functions",
    "GET namespaces/{namespace}/functions/{function}",
)
OPERATIONS = (*BODILESS, *(f"POST {endpoint}" for endpoint in BODIES))
