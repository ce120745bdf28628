"""Commit planning: requests to the catalog, what they require, and the outcome of an attempt. Pure.

    new columns:   add-schema, set-current-schema            requires the schema and last field id of our state
    rows:          add-snapshot, set-snapshot-ref main,      requires main at the snapshot that we build on, and the
                   set-properties lakefeed.progress, .totals schema that the files are written for
    layout:        add-spec, add-sort-order, ...             requires the spec and sort order of our state

After a conflict, or when the outcome is unknown, the table itself shows what happened:

    our flush id is in its snapshots      LANDED           done, whatever the response was
    a source's mark is past our rows      OVERTAKEN        those rows are in the table: the caller drops them
    a column of our files was dropped     ColumnsChanged   the rows have to be written again
    none of these                         RETRY            build on the fresh state

A request that is still running when the table is loaded can land later. It has the same requirement as our next
attempt, so only one of the two can succeed.

Layout follows the settings. A table records, as properties, the settings that its layout was last made from:

    lakefeed.partition,    equal to the setting       no change, even if another engine altered the layout since
    lakefeed.sort          differs from the setting   the setting was changed: evolve
                           missing                    not our table: no change, unless its own section configures it

So a layout that an engine altered on purpose is not reverted at the next start. Evolving rewrites no file: existing
files keep their spec and order, and readers combine both.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from lakefeed.contract.changes import Position, SourceId, Span
from lakefeed.contract.errors import ColumnsChanged, TableReplaced
from lakefeed.contract.ledger import LEDGER_KEY, TOTALS_PROPERTY, Ledger, next_totals
from lakefeed.contract.progress import (
    FLUSH_ID_KEY,
    LOG_FROM_KEY,
    LOG_TO_KEY,
    NODE_KEY,
    PROGRESS_PROPERTY,
    SOURCES_KEY,
    spans_to_text,
)
from lakefeed.contract.properties import MAIN_BRANCH, UPKEEP_PROPERTIES
from lakefeed.iceberg.avro import FORMAT_WITH_ROW_IDS
from lakefeed.iceberg.layout import (
    UNSORTED,
    PartitionSpec,
    SortOrder,
    order_to_json,
    parse_partition,
    parse_sort,
    same_partitioning,
    spec_to_json,
    with_known_ids,
)
from lakefeed.iceberg.manifests import (
    DataFile,
    ListHeader,
    ManifestFile,
    ManifestList,
    apply_manifest,
    apply_row_ids,
)
from lakefeed.iceberg.terms import PartitionRejected, SortRejected
from lakefeed.iceberg.types import Schema, StructType, schema_to_json, written_fields
from lakefeed.writer.commit.state import TableState
from lakefeed.writer.rows.merge import contains_all_written
from lakefeed.writer.rows.table_settings import TableSettings

# Iceberg's own key. Expiry uses it: only where manifests were replaced can unused ones remain.
MANIFESTS_REPLACED_KEY = "manifests-replaced"

_DELETE_TOTALS = ("total-delete-files", "total-position-deletes", "total-equality-deletes")
_LATEST = -1  # the schema, spec or order that the same request adds

_CODEC_NAMES = {"none": "uncompressed"}  # Iceberg's names where they differ from ours

PARTITION_PROPERTY = "lakefeed.partition"
SORT_PROPERTY = "lakefeed.sort"


@dataclass(frozen=True, slots=True, kw_only=True)
class Flush:
    """Data files to commit together, with the log range [from, to) and the sources' spans that they cover.

    The files are durable, and were written for the columns and partitions of the state they are committed with.
    `properties` are set on the table in the same commit. The ledger describes the rows of the files; a flush without
    one leaves the table's totals incomplete. `complete` has the sources' low watermarks over all of their tables,
    this flush included.
    """

    id: str
    node: str
    log_from: int
    log_to: int
    spans: Mapping[SourceId, Span]
    files: Sequence[DataFile]
    properties: Mapping[str, str] = field(default_factory=dict)
    ledger: Ledger | None = None
    complete: Mapping[SourceId, Position] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Request:
    """The body of a commit."""

    requirements: tuple[Mapping[str, Any], ...]
    updates: tuple[Mapping[str, Any], ...]


@dataclass(frozen=True, slots=True)
class AppendPlan:
    """One attempt to commit a flush: the list to write first, the request to send, and the state if it succeeds."""

    manifests: ManifestList
    header: ListHeader
    request: Request
    next_state: TableState


class Outcome(enum.Enum):
    """What a freshly loaded table shows about a flush (see the module's header)."""

    LANDED = "landed"
    OVERTAKEN = "overtaken"
    RETRY = "retry"


def plan_append(
    state: TableState,
    flush: Flush,
    *,
    manifest: ManifestFile,
    snapshot_id: int,
    list_location: str,
    now_ms: int,
    manifests_replaced: int = 0,
    generation: int = 0,
) -> AppendPlan:
    """Plan the commit of a flush on a state whose manifests are loaded; `manifests_replaced` were just merged."""
    assert state.manifests is not None, "the committer loads them first"
    sequence_number = state.last_sequence_number + 1
    manifests = apply_manifest(state.manifests, manifest, sequence_number=sequence_number)
    next_row_id = state.next_row_id
    if state.format_version >= FORMAT_WITH_ROW_IDS:
        manifests, next_row_id = apply_row_ids(manifests, state.next_row_id)
    progress = state.progress.advance(
        node=flush.node,
        log_to=flush.log_to,
        sources={source: span.last for source, span in flush.spans.items()},
        generation=generation,
        complete=flush.complete,
    )
    totals = next_totals(
        state.properties.get(TOTALS_PROPERTY), is_new_table=state.snapshot_id is None, ledger=flush.ledger
    )
    changed = {**flush.properties, PROGRESS_PROPERTY: progress.to_text(), TOTALS_PROPERTY: totals}
    summary = _summary(state, flush)
    if manifests_replaced:
        summary[MANIFESTS_REPLACED_KEY] = str(manifests_replaced)
    next_state = replace(
        state,
        last_sequence_number=sequence_number,
        # A table's timestamps must not decrease, even if this machine's clock does.
        last_updated_ms=max(now_ms, state.last_updated_ms),
        next_row_id=next_row_id,
        properties={**state.properties, **changed},
        progress=progress,
        snapshot_id=snapshot_id,
        manifest_list=list_location,
        summary=summary,
        main_ref={**state.main_ref, "snapshot-id": snapshot_id},
        snapshot_count=state.snapshot_count + 1,
        manifests=manifests,
    )
    header = ListHeader(snapshot_id, state.snapshot_id, sequence_number, state.format_version, state.next_row_id)
    return AppendPlan(manifests, header, _append_request(state, next_state, changed), next_state)


def _append_request(state: TableState, after: TableState, changed: Mapping[str, str]) -> Request:
    requirements = (
        {"type": "assert-table-uuid", "uuid": state.uuid},
        {"type": "assert-ref-snapshot-id", "ref": MAIN_BRANCH, "snapshot-id": state.snapshot_id},
        # Dropping a column does not move main: without this, its values would be written under an unknown field id.
        {"type": "assert-current-schema-id", "current-schema-id": state.schema.schema_id},
    )
    updates = (
        {"action": "add-snapshot", "snapshot": _snapshot(state, after)},
        # Repeats the reference's other fields, so that the branch keeps its own retention.
        {"action": "set-snapshot-ref", "ref-name": MAIN_BRANCH, **after.main_ref},
        {"action": "set-properties", "updates": changed},
    )
    return Request(requirements, updates)


def _snapshot(state: TableState, after: TableState) -> dict[str, Any]:
    snapshot = {
        "snapshot-id": after.snapshot_id,
        "sequence-number": after.last_sequence_number,
        "timestamp-ms": after.last_updated_ms,
        "manifest-list": after.manifest_list,
        "summary": after.summary,
        "schema-id": state.schema.schema_id,
    }
    if state.snapshot_id is not None:
        snapshot["parent-snapshot-id"] = state.snapshot_id
    if state.format_version >= FORMAT_WITH_ROW_IDS:
        snapshot["first-row-id"] = state.next_row_id
        snapshot["added-rows"] = after.next_row_id - state.next_row_id
    return snapshot


def _summary(state: TableState, flush: Flush) -> dict[str, str]:
    files = len(flush.files)
    records = sum(file.record_count for file in flush.files)
    size_bytes = sum(file.size_bytes for file in flush.files)
    return {
        "operation": "append",
        FLUSH_ID_KEY: flush.id,
        NODE_KEY: flush.node,
        LOG_FROM_KEY: str(flush.log_from),
        LOG_TO_KEY: str(flush.log_to),
        SOURCES_KEY: spans_to_text(flush.spans),
        **({LEDGER_KEY: flush.ledger.to_text()} if flush.ledger else {}),
        "added-data-files": str(files),
        "added-records": str(records),
        "added-files-size": str(size_bytes),
        "changed-partition-count": str(len({file.partition for file in flush.files})),
        **_total(state, "total-data-files", files),
        **_total(state, "total-records", records),
        **_total(state, "total-files-size", size_bytes),
        **{key: value for name in _DELETE_TOTALS for key, value in _total(state, name, 0).items()},
    }


def _total(state: TableState, name: str, added: int) -> dict[str, str]:
    """Return a total after this flush, or nothing if the snapshot before does not have it."""
    before = state.summary.get(name, "0" if state.snapshot_id is None else None)
    return {} if before is None else {name: str(int(before) + added)}


def plan_schema(state: TableState, schema: Schema) -> Request:
    """Plan the commit of a new current schema, whose new fields have ids above the table's last one."""
    requirements = (
        {"type": "assert-table-uuid", "uuid": state.uuid},
        {"type": "assert-current-schema-id", "current-schema-id": state.schema.schema_id},
        {"type": "assert-last-assigned-field-id", "last-assigned-field-id": state.last_column_id},
    )
    updates = (
        {"action": "add-schema", "schema": schema_to_json(schema)},
        {"action": "set-current-schema", "schema-id": _LATEST},
    )
    return Request(requirements, updates)


def read_outcome(base: TableState, fresh: TableState, document: Mapping[str, Any], flush: Flush) -> Outcome:
    """Return the outcome of a flush from a table loaded after the attempt; `base` is what its files were written for.

    Raises:
        TableReplaced: another table has this name now.
        ColumnsChanged: a column of the files was dropped.
    """
    if fresh.uuid != base.uuid:
        raise TableReplaced(f"another table has this name now: table={base.name} uuid={base.uuid} found={fresh.uuid}")
    if find_flush(document, flush.id) is not None:
        return Outcome.LANDED
    if fresh.progress.marks_in(flush.spans):
        return Outcome.OVERTAKEN
    if not contains_all_written(fresh.schema.columns, StructType(written_fields(base.schema.columns))):
        raise ColumnsChanged(f"columns of the flush were dropped: table={base.name} flush={flush.id}", table=base.name)
    return Outcome.RETRY


def find_flush(document: Mapping[str, Any], flush_id: str) -> int | None:
    """Return the snapshot that committed a flush, or None."""
    for snapshot in reversed(document.get("snapshots") or []):
        if (snapshot.get("summary") or {}).get(FLUSH_ID_KEY) == flush_id:
            found: int = snapshot["snapshot-id"]
            return found
    return None


# -- layout


@dataclass(slots=True)
class LayoutPlan:
    """The change of a table's layout, if any, and the settings that cannot be applied."""

    requirements: list[Mapping[str, Any]] = field(default_factory=list)
    updates: list[Mapping[str, Any]] = field(default_factory=list)
    properties: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    @property
    def problem(self) -> str | None:
        """Return why settings cannot be applied, or None."""
        return "; ".join(self.problems) or None

    def request_for(self, state: TableState) -> Request | None:
        """Return the request, or None if nothing changes."""
        if not self.updates and not self.properties:
            return None
        requirements = ({"type": "assert-table-uuid", "uuid": state.uuid}, *self.requirements)
        properties = {"action": "set-properties", "updates": self.properties}
        return Request(requirements, (*self.updates, *([properties] if self.properties else [])))


def plan_new_layout(schema: Schema, settings: TableSettings) -> tuple[PartitionSpec, SortOrder, Mapping[str, str]]:
    """Return spec, order and properties of a new table. A sort order is applied later if its columns do not exist yet.

    Raises: PartitionRejected if a partition's column does not exist yet, or has an unsuitable type.
    """
    config = settings.config
    codec = config.parquet_compression
    properties = {
        "format-version": str(config.format_version),
        "lakefeed.append-only": "true",
        "write.parquet.compression-codec": _CODEC_NAMES.get(codec, codec),
        **UPKEEP_PROPERTIES,
        PARTITION_PROPERTY: config.partition,
        **settings.properties,
    }
    order = UNSORTED
    try:
        order = parse_sort(config.sort, schema)
        properties[SORT_PROPERTY] = config.sort
    except SortRejected:
        properties[SORT_PROPERTY] = ""  # differs from the setting, so each flush tries to apply it
    return parse_partition(config.partition, schema), order, properties


def plan_layout(state: TableState, settings: TableSettings) -> LayoutPlan:
    """Plan how a table's layout follows its settings; what cannot be applied stays as it is."""
    plan = LayoutPlan()
    if _has_changed(state, settings, key="partition", property_name=PARTITION_PROPERTY):
        _plan_partition(plan, state, settings.config.partition)
    if _has_changed(state, settings, key="sort", property_name=SORT_PROPERTY):
        _plan_sort(plan, state, settings.config.sort)
    changed = {name: value for name, value in settings.properties.items() if state.properties.get(name) != value}
    plan.properties.update(changed)
    return plan


def _has_changed(state: TableState, settings: TableSettings, *, key: str, property_name: str) -> bool:
    applied = state.properties.get(property_name)
    return key in settings.given if applied is None else bool(applied != getattr(settings.config, key))


def _plan_partition(plan: LayoutPlan, state: TableState, text: str) -> None:
    try:
        spec = parse_partition(text, state.schema)
    except PartitionRejected as error:
        plan.problems.append(str(error))
        return
    plan.properties[PARTITION_PROPERTY] = text
    if same_partitioning(spec, state.spec):
        return
    spec = with_known_ids(spec, state.specs, last_field_id=state.last_partition_id)
    plan.requirements += [
        {"type": "assert-default-spec-id", "default-spec-id": state.spec.spec_id},
        {"type": "assert-last-assigned-partition-id", "last-assigned-partition-id": state.last_partition_id},
    ]
    plan.updates += [
        {"action": "add-spec", "spec": spec_to_json(spec)},
        {"action": "set-default-spec", "spec-id": _LATEST},
    ]


def _plan_sort(plan: LayoutPlan, state: TableState, text: str) -> None:
    try:
        order = parse_sort(text, state.schema)
    except SortRejected as error:
        plan.problems.append(str(error))
        return
    plan.properties[SORT_PROPERTY] = text
    if order.fields == state.sort_order.fields:
        return
    plan.requirements.append(
        {"type": "assert-default-sort-order-id", "default-sort-order-id": state.sort_order.order_id}
    )
    plan.updates += [
        {"action": "add-sort-order", "sort-order": order_to_json(order)},
        {"action": "set-default-sort-order", "sort-order-id": _LATEST},
    ]
