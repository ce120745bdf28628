"""What a verification reads from a table. Owns which version of it shows the rows of which files whole.

Spark reads rows by one schema. A column that was dropped is in the files and in what was recorded of them, but not in
the newest schema: files from before are read as of the last snapshot that still had it.

    version 9, schema 2: id, name           all other files
    version 5, schema 1: id, name, price    files of snapshots 1 to 5
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.table_documents import current_fields, field_ids, fields_of


@dataclass(frozen=True, slots=True)
class Read:
    """One scan: the version, its columns, and of whose files; of no snapshots' in particular, of all that are left."""

    version: int
    fields: Sequence[Mapping[str, Any]]
    snapshot_ids: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Reads:
    """All scans, and whether they show every column of every file."""

    scans: Sequence[Read]
    are_whole: bool


def plan_reads(document: Mapping[str, Any], snapshot_ids: Sequence[int]) -> Reads:
    """Plan the scans of a table as of the last of some snapshots, the oldest first; older ones may be expired."""
    by_id = {snapshot["snapshot-id"]: snapshot for snapshot in document["snapshots"]}
    schema_ids = {each: by_id[each].get("schema-id") for each in snapshot_ids}
    head = snapshot_ids[-1]
    newest = _fields(document, schema_ids[head])
    shown = field_ids(newest)
    groups: dict[int, list[int]] = {}
    for snapshot_id, schema_id in schema_ids.items():
        if not field_ids(_fields(document, schema_id)) <= shown:
            groups.setdefault(schema_id, []).append(snapshot_id)
    older = [Read(ids[-1], _fields(document, schema_id), frozenset(ids)) for schema_id, ids in groups.items()]
    every = {field_id for schema in document["schemas"] for field_id in field_ids(schema["fields"])}
    has_expired = by_id[snapshot_ids[0]].get("parent-snapshot-id") is not None
    return Reads((Read(head, newest), *older), are_whole=every <= shown or not has_expired)


def _fields(document: Mapping[str, Any], schema_id: int | None) -> Sequence[Mapping[str, Any]]:
    return current_fields(document) if schema_id is None else fields_of(document, schema_id)
