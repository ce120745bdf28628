"""Table state: a table's metadata between two commits, read from its document; and the locations of new files.

A state is a value. Each commit yields the next state without another request to the catalog. The state keeps the
manifests of its snapshot, so successive commits of one writer read nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lakefeed.contract.changes import TableName
from lakefeed.contract.errors import CatalogError
from lakefeed.contract.ledger import TOTALS_PROPERTY, LedgerUnreadable, totals_from_text
from lakefeed.contract.progress import (
    PROGRESS_PROPERTY,
    Progress,
    ProgressUnreadable,
    progress_from_summaries,
    progress_from_text,
)
from lakefeed.contract.properties import MAIN_BRANCH
from lakefeed.iceberg.avro import FORMAT_WITH_ROW_IDS
from lakefeed.iceberg.layout import (
    UNSORTED,
    Partition,
    PartitionSpec,
    SortOrder,
    order_from_json,
    partition_path,
    spec_from_json,
)
from lakefeed.iceberg.manifests import ManifestList, TableShape
from lakefeed.iceberg.types import Schema, schema_from_json

OLDEST_FORMAT = 2  # format 1 has no sequence numbers; the owner of such a table has to upgrade it


@dataclass(frozen=True, slots=True, kw_only=True)
class TableState:
    """A table as of one version of its metadata. `manifests` is None until the snapshot's list has been read."""

    name: TableName
    uuid: str
    location: str
    format_version: int
    schema: Schema
    spec: PartitionSpec
    last_column_id: int
    last_partition_id: int
    last_sequence_number: int
    last_updated_ms: int
    next_row_id: int
    properties: Mapping[str, str]
    progress: Progress
    snapshot_id: int | None
    manifest_list: str | None
    summary: Mapping[str, str]
    main_ref: Mapping[str, Any]
    snapshot_count: int
    manifests: ManifestList | None
    sort_order: SortOrder = UNSORTED
    specs: tuple[PartitionSpec, ...] = ()

    @property
    def shape(self) -> TableShape:
        """Return what manifests record about the table."""
        return TableShape(self.schema, self.spec, self.format_version)


def table_state_from(name: TableName, document: Mapping[str, Any]) -> TableState:
    """Read a table's metadata document.

    Raises:
        CatalogError: the table has a format version that is not supported.
        ProgressUnreadable: its progress marker is damaged, or lost with the snapshots that could replace it.
    """
    format_version = document["format-version"]
    if not OLDEST_FORMAT <= format_version <= FORMAT_WITH_ROW_IDS:
        raise CatalogError(f"table format is not supported, upgrade the table: table={name} format={format_version}")
    properties = document.get("properties") or {}
    main_ref = (document.get("refs") or {}).get(MAIN_BRANCH) or {"type": "branch"}
    snapshot_id = main_ref.get("snapshot-id")
    snapshot = None if snapshot_id is None else _by_id(document["snapshots"], "snapshot-id", snapshot_id)
    orders = document.get("sort-orders")  # optional: early writers left it out
    order = order_from_json(_by_id(orders, "order-id", document["default-sort-order-id"])) if orders else UNSORTED
    return TableState(
        name=name,
        uuid=document["table-uuid"],
        location=document["location"].rstrip("/"),
        format_version=format_version,
        schema=schema_from_json(_by_id(document["schemas"], "schema-id", document["current-schema-id"])),
        spec=spec_from_json(_by_id(document["partition-specs"], "spec-id", document["default-spec-id"])),
        last_column_id=document["last-column-id"],
        last_partition_id=document["last-partition-id"],
        last_sequence_number=document["last-sequence-number"],
        last_updated_ms=document["last-updated-ms"],
        next_row_id=document.get("next-row-id") or 0,
        properties=properties,
        progress=progress_of(name, document),
        snapshot_id=snapshot_id,
        manifest_list=snapshot["manifest-list"] if snapshot else None,
        summary=snapshot.get("summary", {}) if snapshot else {},
        main_ref=main_ref,
        snapshot_count=len(document.get("snapshots") or ()),
        manifests=None if snapshot else ManifestList(),
        sort_order=order,
        specs=tuple(spec_from_json(each) for each in document["partition-specs"]),
    )


def progress_of(name: TableName, document: Mapping[str, Any]) -> Progress:
    """Read a table's progress marker. If another client has removed it, rebuild it from the snapshots.

    Raises: ProgressUnreadable if it is damaged, or removed and a source's last snapshot has expired.
    """
    properties = document.get("properties") or {}
    text = properties.get(PROGRESS_PROPERTY)
    if text is not None:
        return progress_from_text(text)
    progress = progress_from_summaries(each.get("summary") or {} for each in document.get("snapshots") or ())
    try:
        totals = totals_from_text(properties.get(TOTALS_PROPERTY))
    except LedgerUnreadable:
        totals = None
    committed = {source for source, total in totals.sources.items() if total.epoch is not None} if totals else set()
    if lost := sorted(committed - set(progress.sources)):
        raise ProgressUnreadable(
            f"property {PROGRESS_PROPERTY} is missing, and no snapshot has the last position of {len(lost)} sources: "
            f"set the property to its former value from an earlier metadata file: table={name} source={lost[0]}"
        )
    return progress


def _by_id(documents: list[dict[str, Any]], key: str, wanted: int) -> dict[str, Any]:
    # From the end: the current one was added late.
    return next(document for document in reversed(documents) if document[key] == wanted)


def data_location(state: TableState, partition: Partition, file_name: str) -> str:
    """Return the location of a data file; the table's `write.data.path` has precedence."""
    root = state.properties.get("write.data.path", f"{state.location}/data").rstrip("/")
    path = partition_path(partition, state.spec, state.schema)
    return f"{root}/{path}/{file_name}" if path else f"{root}/{file_name}"


def metadata_location(state: TableState, file_name: str) -> str:
    """Return the location of a manifest or manifest list; the table's `write.metadata.path` has precedence."""
    root = state.properties.get("write.metadata.path", f"{state.location}/metadata").rstrip("/")
    return f"{root}/{file_name}"
