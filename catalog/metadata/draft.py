"""Draft: a table or view document while updates are applied to it.

The base document may be cached and shared, so it is never changed. The draft starts as a shallow copy, and each list
or map is copied once, before its first change. A commit on a table of a thousand snapshots copies one list of
references to them, not the snapshots.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lakefeed.catalog.json_fields import JsonObject


class Draft:
    """The document so far, and what later updates and the final checks need to know of earlier updates."""

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
