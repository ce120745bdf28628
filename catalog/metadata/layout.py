"""Updates of schemas, partition specs and sort orders. Ids are assigned and reused as in Iceberg's builder.

An added schema, spec or order that equals an existing one reuses its id; otherwise it gets a fresh id, whatever id was
sent: two clients that both add number 1 must not overwrite each other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from lakefeed.catalog.errors import ValidationFailed
from lakefeed.catalog.json_fields import JsonObject, maybe_id, read_id, read_ints, read_object
from lakefeed.catalog.metadata.document import MAIN, Draft
from lakefeed.catalog.metadata.partitioning import (
    check_order,
    check_order_fits,
    check_sequential_ids,
    check_spec,
    check_spec_fits,
    check_spec_names,
    highest_partition_field_id,
    number_spec_fields,
    same_order,
    same_spec,
)
from lakefeed.catalog.metadata.schema import FieldInfo, check_schema, same_schema

_LAST_ADDED = -1

# The sort order without fields, by the specification.
UNSORTED_ID = 0
_FIRST_SORTED_ID = 1


@dataclass(frozen=True, slots=True)
class _Kind:
    """Where schemas, specs or orders are in a document, which one is in use, and when two of them are the same."""

    key: str
    id_key: str
    default_key: str
    what: str
    same: Callable[[Mapping[str, Any], Mapping[str, Any]], bool]


_SCHEMAS = _Kind("schemas", "schema-id", "current-schema-id", "current schema", same_schema)
_SPECS = _Kind("partition-specs", "spec-id", "default-spec-id", "default partition spec", same_spec)
_ORDERS = _Kind("sort-orders", "order-id", "default-sort-order-id", "default sort order", same_order)


def add_schema(draft: Draft, update: JsonObject) -> None:
    """Add a schema, or find the equal one. The last-column-id is computed; sending it is deprecated."""
    schema = read_object(update, "schema")
    columns = check_schema(schema, draft.format_version)
    _check_initial_defaults(draft, columns)
    maybe_id(update, "last-column-id")
    # Not every reader accepts null for a list.
    stored = {key: value for key, value in schema.items() if value is not None}
    _add(draft, _SCHEMAS, item=stored, first_id=0)
    draft.put("last-column-id", max(draft.document["last-column-id"], *columns, 0))


def set_current_schema(draft: Draft, update: JsonObject) -> None:
    """Make a schema current."""
    _set_default(draft, _SCHEMAS, sent=read_id(update, "schema-id"))


def remove_schemas(draft: Draft, update: JsonObject) -> None:
    """Remove schemas that are not current; unknown ids are ignored."""
    _remove(draft, _SCHEMAS, set(read_ints(update, "schema-ids")))


def add_spec(draft: Draft, update: JsonObject) -> None:
    """Add a partition spec, or find the equal one."""
    spec = read_object(update, "spec")
    check_spec(spec)
    spec = number_spec_fields(spec, draft.document["partition-specs"], draft.document["last-partition-id"])
    if draft.format_version == 1:
        check_sequential_ids(spec)
    spec_id = _add(draft, _SPECS, item=spec, first_id=0)
    draft.added_spec_ids.add(spec_id)
    stored = _by_id(draft.document["partition-specs"], "spec-id", spec_id)
    draft.put("last-partition-id", max(draft.document["last-partition-id"], highest_partition_field_id(stored)))


def set_default_spec(draft: Draft, update: JsonObject) -> None:
    """Make a partition spec the default."""
    _set_default(draft, _SPECS, sent=read_id(update, "spec-id"))


def remove_specs(draft: Draft, update: JsonObject) -> None:
    """Remove partition specs that are not the default; unknown ids are ignored."""
    _remove(draft, _SPECS, set(read_ints(update, "spec-ids")))


def add_order(draft: Draft, update: JsonObject) -> None:
    """Add a sort order, or find the equal one; the order without fields is always number 0."""
    order = read_object(update, "sort-order")
    check_order(order)
    _add(draft, _ORDERS, item=order, first_id=_FIRST_SORTED_ID if order["fields"] else UNSORTED_ID)


def set_default_order(draft: Draft, update: JsonObject) -> None:
    """Make a sort order the default."""
    _set_default(draft, _ORDERS, sent=read_id(update, "sort-order-id"))


def check_layout(draft: Draft) -> None:
    """Check that the default spec and order, and added specs, fit the current schema, and the names of all specs.

    This runs after all updates, because DuckDB adds specs before it makes their schema current.
    """
    document, base = draft.document, draft.base
    watched = ("current-schema-id", "partition-specs", "default-spec-id", "sort-orders", "default-sort-order-id")
    if all(document[key] == base[key] for key in watched):
        return
    schema = _by_id(document["schemas"], "schema-id", document["current-schema-id"])
    columns = check_schema(schema, draft.format_version)
    for spec in document["partition-specs"]:
        if spec["spec-id"] == document["default-spec-id"] or spec["spec-id"] in draft.added_spec_ids:
            check_spec_fits(spec, columns)
        check_spec_names(spec, columns)
    check_order_fits(_by_id(document["sort-orders"], "order-id", document["default-sort-order-id"]), columns)


def _add(draft: Draft, kind: _Kind, *, item: JsonObject, first_id: int) -> int:
    existing = draft.document[kind.key]
    equal = next((known for known in existing if kind.same(known, item)), None)
    if equal is not None:
        item_id: int = equal[kind.id_key]
    else:
        is_unsorted = kind is _ORDERS and first_id == UNSORTED_ID
        item_id = UNSORTED_ID if is_unsorted else max([first_id - 1, *(known[kind.id_key] for known in existing)]) + 1
        draft.change_list(kind.key).append({**item, kind.id_key: item_id})
    draft.last_added[kind.key] = item_id
    return item_id


def _set_default(draft: Draft, kind: _Kind, *, sent: int) -> None:
    if sent == _LAST_ADDED:
        if kind.key not in draft.last_added:
            raise ValidationFailed(f"Cannot set last added {kind.what}: none has been added")
        sent = draft.last_added[kind.key]
    elif all(item[kind.id_key] != sent for item in draft.document[kind.key]):
        raise ValidationFailed(f"Cannot set {kind.what} to unknown id: {sent}")
    draft.put(kind.default_key, sent)


def _remove(draft: Draft, kind: _Kind, doomed: set[int]) -> None:
    if draft.document[kind.default_key] in doomed:
        raise ValidationFailed(f"Cannot remove the {kind.what}")
    draft.put(kind.key, [item for item in draft.document[kind.key] if item[kind.id_key] not in doomed])


def _by_id(items: list[JsonObject], id_key: str, wanted: int) -> JsonObject:
    return next(item for item in items if item[id_key] == wanted)


def _check_initial_defaults(draft: Draft, columns: Mapping[int, FieldInfo]) -> None:
    """Check that no existing column changes its initial default, because older files rely on it.

    A replaced table has no main branch at this point, so its columns may change.
    """
    if MAIN not in draft.document["refs"]:
        return
    current = draft.document["current-schema-id"]
    for schema in (item for item in draft.document["schemas"] if item["schema-id"] == current):
        for field_id, before in check_schema(schema, draft.format_version).items():
            after = columns.get(field_id)
            if after is not None and after.initial_default != before.initial_default:
                raise ValidationFailed(f"Cannot change initial default of column: {before.name}")
