"""The rule of append-only tables: rows are added or rewritten as they are, never changed or taken away.

A streaming reader follows main from snapshot to snapshot and breaks when rows vanish behind it. So while the property
`lakefeed.append-only` is true, every snapshot appends or replaces, and main only moves to descendants of where it
was. Whoever must break the rule first sets the property to false, in a commit of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from catalog.errors import ValidationFailed
from catalog.metadata.documents import MAIN
from catalog.metadata.draft import Draft
from catalog.metadata.properties import APPEND_ONLY, is_true

_ALLOWED_OPERATIONS = ("append", "replace")


def check_append_only(draft: Draft) -> None:
    """Check the rule for a table that was, or by this commit becomes, append-only.

    Raises: ValidationFailed.
    """
    before, after = draft.base, draft.document
    if is_true(before["properties"], APPEND_ONLY) or is_true(after["properties"], APPEND_ONLY):
        for snapshot in draft.added_snapshots.values():
            _check_operation(snapshot)
    if is_true(before["properties"], APPEND_ONLY):
        _check_forward(draft)


def _check_operation(snapshot: Mapping[str, Any]) -> None:
    operation = (snapshot.get("summary") or {}).get("operation")
    if operation not in _ALLOWED_OPERATIONS:
        raise ValidationFailed(
            f"Table is append-only ({APPEND_ONLY}=true): only append and replace snapshots are allowed, not {operation}"
        )


def _check_forward(draft: Draft) -> None:
    start, end, after = draft.base["refs"].get(MAIN), draft.document["refs"].get(MAIN), draft.document
    if start is None or start == end:
        return
    if end and draft.added_snapshots.get(end["snapshot-id"], {}).get("parent-snapshot-id") == start["snapshot-id"]:
        return  # an append, as nearly all are: no need to look at thousands of others
    parents = {item["snapshot-id"]: item.get("parent-snapshot-id") for item in after["snapshots"]}
    at = end and end["snapshot-id"]
    for _ in parents:
        if at == start["snapshot-id"]:
            return
        at = parents.get(at)
    raise ValidationFailed(
        f"Table is append-only ({APPEND_ONLY}=true): main can only move to descendants of {start['snapshot-id']}"
    )
