"""What to commit, what it requires, and how to read each outcome. Owns requests as documents; sending is committer's.

    new columns:   add-schema, set-current-schema            if the schema and the last field id are as we know them
    rows:          add-snapshot, set-snapshot-ref main,
                   set-properties lakefeed.progress, .totals if main is still at the snapshot that we build on, and the
                                                             schema is the one that the files are written for

After a conflict, or when the outcome is unknown, the table itself says what happened:

    our flush id is in its snapshots      LANDED      done, whoever answered what
    a source's mark is at our rows        OVERTAKEN   those rows are in the table: the caller drops them
    a column of our files is gone         ColumnsChanged: the rows have to be written again
    none of these                         RETRY       build on the fresh state

A request still under way when we look can land later; it then meets the same requirement as our next attempt, and of
the two only one can win.
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
    Progress,
    spans_to_text,
)
from lakefeed.contract.properties import MAIN_BRANCH
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

# --- writer.commit_plan -----------------------------------------------------------------------------------------------


# Iceberg's own key. Expiry goes by it: only where manifests were replaced can old ones be left over.
MANIFESTS_REPLACED_KEY = "manifests-replaced"

_DELETE_TOTALS = ("total-delete-files", "total-position-deletes", "total-equality-deletes")
_LATEST = -1  # in set-current-schema: the schema that the same request adds


@dataclass(frozen=True, slots=True, kw_only=True)
class Flush:
    """Data files to commit together, with the log range [from, to) and the sources' spans that they cover.

    The files are durable, and were written for the columns and partitions of the state they are committed with.
    `properties` become the table's in the same act. The ledger says what rows are in the files; a flush without one
    leaves the table's totals incomplete. `complete` is up to where sources are in all of their tables with this flush.
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
    """What a freshly loaded table says of a flush; drawn in the module's head."""

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
    """Plan to commit a flush on top of a state whose manifests are loaded, some of them merged into one just now."""
    assert state.manifests is not None, "the committer loads them first"
    sequence_number = state.last_sequence_number + 1
    manifests = apply_manifest(state.manifests, manifest, sequence_number=sequence_number)
    next_row_id = state.next_row_id
    if state.format_version >= FORMAT_WITH_ROW_IDS:
        manifests, next_row_id = apply_row_ids(manifests, state.next_row_id)
    progress = _progress_after(state, flush, generation)
    changed = {**flush.properties, PROGRESS_PROPERTY: progress.to_text(), TOTALS_PROPERTY: _totals_after(state, flush)}
    summary = _summary(state, flush)
    if manifests_replaced:
        summary[MANIFESTS_REPLACED_KEY] = str(manifests_replaced)
    next_state = replace(
        state,
        last_sequence_number=sequence_number,
        # A table's time does not run backwards, even if this machine's clock does.
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


def _progress_after(state: TableState, flush: Flush, generation: int) -> Progress:
    lasts = {source: span.last for source, span in flush.spans.items()}
    return state.progress.advance(
        node=flush.node, log_to=flush.log_to, sources=lasts, generation=generation, complete=flush.complete
    )


def _totals_after(state: TableState, flush: Flush) -> str:
    before = state.properties.get(TOTALS_PROPERTY)
    return next_totals(before, is_new_table=state.snapshot_id is None, ledger=flush.ledger)


def _append_request(state: TableState, after: TableState, changed: Mapping[str, str]) -> Request:
    requirements = (
        {"type": "assert-table-uuid", "uuid": state.uuid},
        {"type": "assert-ref-snapshot-id", "ref": MAIN_BRANCH, "snapshot-id": state.snapshot_id},
        # Whoever drops a column does not move main: its values would go into files under an id that nobody shows.
        {"type": "assert-current-schema-id", "current-schema-id": state.schema.schema_id},
    )
    updates = (
        {"action": "add-snapshot", "snapshot": _snapshot(state, after)},
        # The branch keeps its own retention: what the reference said before is said again.
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
    """Add to a total; a snapshot whose writer left it out leaves it unknown for all after it."""
    before = state.summary.get(name, "0" if state.snapshot_id is None else None)
    return {} if before is None else {name: str(int(before) + added)}


def plan_schema(state: TableState, schema: Schema) -> Request:
    """Plan to make `schema` current; its new fields have ids above the table's last one."""
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
    """Say what became of a flush, from a table loaded after the attempt; its files are written for the base's schema.

    Raises:
        TableReplaced: the name belongs to another table now.
        ColumnsChanged: the table shows the files' values no more.
    """
    if fresh.uuid != base.uuid:
        raise TableReplaced(f"table was replaced: table={base.name} uuid={base.uuid} found={fresh.uuid}")
    if find_flush(document, flush.id) is not None:
        return Outcome.LANDED
    if fresh.progress.is_ahead_of(flush.spans):
        return Outcome.OVERTAKEN
    if not contains_all_written(fresh.schema.columns, StructType(written_fields(base.schema.columns))):
        raise ColumnsChanged(f"columns were changed: table={base.name} flush={flush.id}", table=base.name)
    return Outcome.RETRY


def find_flush(document: Mapping[str, Any], flush_id: str) -> int | None:
    """Find the snapshot that committed a flush."""
    for snapshot in reversed(document.get("snapshots") or []):
        if (snapshot.get("summary") or {}).get(FLUSH_ID_KEY) == flush_id:
            found: int = snapshot["snapshot-id"]
            return found
    return None


# --- writer.layout_plan -----------------------------------------------------------------------------------------------
#
# How a table's partitions, sort order and properties follow its settings. Owns the request; committer sends it.
#
# A table remembers, as properties, the settings that its layout was last made from:
#
#     lakefeed.partition, lakefeed.sort      equal to the setting      nothing to do, whatever others made of it since
#                                            other than the setting    the setting was changed: evolve
#                                            missing                   somebody else's table: left alone, unless a
# section
#                                                                      of the configuration speaks of it
#
# So a layout that an engine has altered on purpose is not altered back at the next start. Evolving writes nothing anew:
# files that are there keep their spec and order, and readers join both.


PARTITION_PROPERTY = "lakefeed.partition"
SORT_PROPERTY = "lakefeed.sort"


@dataclass(frozen=True, slots=True)
class NewLayout:
    """What a table is created with."""

    spec: PartitionSpec
    order: SortOrder
    properties: Mapping[str, str]


@dataclass(slots=True)
class LayoutPlan:
    """What to commit, if anything, and why a setting cannot be followed."""

    requirements: list[Mapping[str, Any]] = field(default_factory=list)
    updates: list[Mapping[str, Any]] = field(default_factory=list)
    properties: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    @property
    def problem(self) -> str | None:
        """Say why settings cannot be followed, or None."""
        return "; ".join(self.problems) or None

    def request_for(self, state: TableState) -> Request | None:
        """Build the request, or None if there is nothing to commit."""
        if not self.updates and not self.properties:
            return None
        requirements = ({"type": "assert-table-uuid", "uuid": state.uuid}, *self.requirements)
        properties = {"action": "set-properties", "updates": self.properties}
        return Request(requirements, (*self.updates, *([properties] if self.properties else [])))


def plan_new_layout(schema: Schema, settings: TableSettings) -> NewLayout:
    """Decide how a new table is laid out. A sort order whose columns have not come yet waits for them.

    Raises:
        PartitionRejected: a partition's column has not come yet, or has another type.
    """
    config = settings.config
    properties = {PARTITION_PROPERTY: config.partition, **settings.properties}
    order = UNSORTED
    try:
        order = parse_sort(config.sort, schema)
        properties[SORT_PROPERTY] = config.sort
    except SortRejected:
        properties[SORT_PROPERTY] = ""  # another than the setting: each flush looks whether it can be followed now
    return NewLayout(parse_partition(config.partition, schema), order, properties)


def plan_layout(state: TableState, settings: TableSettings) -> LayoutPlan:
    """Decide how a table's layout has to change; one that cannot be changed as wished is left as it is."""
    plan = LayoutPlan()
    if _has_changed(state, settings, key="partition", property_name=PARTITION_PROPERTY):
        _plan_partition(plan, state, settings.config.partition)
    if _has_changed(state, settings, key="sort", property_name=SORT_PROPERTY):
        _plan_sort(plan, state, settings.config.sort)
    changed = {name: value for name, value in settings.properties.items() if state.properties.get(name) != value}
    plan.properties.update(changed)
    return plan


def _has_changed(state: TableState, settings: TableSettings, *, key: str, property_name: str) -> bool:
    followed = state.properties.get(property_name)
    if followed is None:
        return key in settings.given
    return bool(followed != getattr(settings.config, key))


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
