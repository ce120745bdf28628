"""Tables that Lakefeed cannot write, as another tool can make them, and what brings them back."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Any

# A type of format 3 that has no place in Arrow yet, so that no row of its table can be decoded.
_STRANGE_COLUMN = {"id": 1, "name": "strange", "required": False, "type": "geometry"}


def create_unwritable(catalog_url: str, table: str) -> None:
    """Create a table in `default` with a column that Lakefeed does not know."""
    _post(f"{catalog_url}/v1/namespaces", {"namespace": ["default"]}, may_exist=True)
    schema = {"type": "struct", "fields": [_STRANGE_COLUMN]}
    document = {"name": table, "schema": schema, "properties": {"format-version": "3"}}
    _post(f"{catalog_url}/v1/namespaces/default/tables", document)


def make_writable(catalog_url: str, table: str) -> None:
    """Replace the column by one that Lakefeed knows: `score`, a double."""
    schema = {"type": "struct", "fields": [{"id": 2, "name": "score", "required": False, "type": "double"}]}
    updates = [
        {"action": "add-schema", "schema": schema},
        {"action": "set-current-schema", "schema-id": -1},
    ]
    _post(f"{catalog_url}/v1/namespaces/default/tables/{table}", {"requirements": [], "updates": updates})


def _post(url: str, document: Any, *, may_exist: bool = False) -> None:
    request = urllib.request.Request(
        url, data=json.dumps(document).encode(), headers={"Content-Type": "application/json"}, method="POST"
    )
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            answer.read()
    except urllib.error.HTTPError as error:
        if not (may_exist and error.code == 409):
            raise AssertionError(error.read().decode()) from error
