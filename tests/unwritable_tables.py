"""Tables that Lakefeed cannot write, as another tool can make them, and what brings them back."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Any

# A type of format 3 that has no place in Arrow yet. Optional, it could be left null; so no row of its table can be
# decoded.
_STRANGE_COLUMN = {"id": 1, "name": "strange", "required": True, "type": "geometry"}


def create_unwritable(catalog_url: str, table: str) -> None:
    """Create a table in `default` with a column that Lakefeed does not know and cannot leave null."""
    create_with_columns(catalog_url, table, [_STRANGE_COLUMN])


def create_with_columns(catalog_url: str, table: str, fields: list[dict[str, Any]], **more: Any) -> None:
    """Create a table in `default`, of format 3; `more` is what else its schema says."""
    _post(f"{catalog_url}/v1/namespaces", {"namespace": ["default"]}, may_exist=True)
    schema = {"type": "struct", "fields": fields, **more}
    document = {"name": table, "schema": schema, "properties": {"format-version": "3"}}
    _post(f"{catalog_url}/v1/namespaces/default/tables", document)


def make_writable(catalog_url: str, table: str) -> None:
    """Replace the column by one that Lakefeed knows: `score`, a double."""
    set_columns(catalog_url, table, [{"id": 2, "name": "score", "required": False, "type": "double"}])


def set_columns(catalog_url: str, table: str, fields: list[dict[str, Any]]) -> None:
    """Give a table other columns, whatever it had."""
    schema = {"type": "struct", "fields": fields}
    updates = [
        {"action": "add-schema", "schema": schema},
        {"action": "set-current-schema", "schema-id": -1},
    ]
    _post(f"{catalog_url}/v1/namespaces/default/tables/{table}", {"requirements": [], "updates": updates})


def load_columns(catalog_url: str, table: str) -> list[dict[str, Any]]:
    """Load a table's columns as the catalog has them."""
    fields: list[dict[str, Any]] = load_schema(catalog_url, table)["fields"]
    return fields


def load_schema(catalog_url: str, table: str) -> dict[str, Any]:
    """Load a table's schema as the catalog has it."""
    with urllib.request.urlopen(f"{catalog_url}/v1/namespaces/default/tables/{table}", timeout=240) as answer:
        metadata = json.loads(answer.read())["metadata"]
    schemas: dict[int, dict[str, Any]] = {schema["schema-id"]: schema for schema in metadata["schemas"]}
    return schemas[metadata["current-schema-id"]]


def _post(url: str, document: Any, *, may_exist: bool = False) -> None:
    request = urllib.request.Request(
        url, data=json.dumps(document).encode(), headers={"Content-Type": "application/json"}, method="POST"
    )
    try:
        with urllib.request.urlopen(request, timeout=240) as answer:
            answer.read()
    except urllib.error.HTTPError as error:
        if not (may_exist and error.code == 409):
            raise AssertionError(error.read().decode()) from error
