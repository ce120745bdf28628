"""Scan tasks: from a plan request and a table's metadata to pages of file scan tasks. Decides; reads no files itself.

    request --bind_scan--> Scan --keep_manifests, read_deletes--> PreparedScan --read_page--> TaskPage

Planning has two steps, so that its memory does not grow with the table:

    1. the manifests that may match the filter, and the delete files of the scan    kept as long as the plan
    2. a page: some manifests, or a part of one, read entry by entry into tasks     made when a client asks for it

A scan reads one snapshot (by default the current one of the main branch), or what the appends after one snapshot and
up to another one added. `select` has no effect here, because the reader of the files chooses the columns.

Delete files apply to data files by the specification's rules of scan planning:

    deletion vector     to the one file it names; then no position deletes of other files apply to it
    position deletes    to the file it names, or to all files of its partition, not newer than itself
    equality deletes    to all older files of its partition; with an unpartitioned spec, to all older files
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import islice
from typing import Any, TypeAlias

import orjson

from lakefeed.catalog.errors import BadRequest, Unplannable, ValidationFailed
from lakefeed.catalog.json_fields import JsonObject, as_text, maybe_bool, maybe_int, maybe_texts, read_bool
from lakefeed.catalog.planning.evaluate import (
    ColumnStats,
    ScanSpec,
    StatsOf,
    evaluate,
    metrics_stats,
    partition_stats,
    read_specs,
    summary_stats,
)
from lakefeed.catalog.planning.expressions import (
    ALWAYS_TRUE,
    Column,
    Columns,
    Expression,
    parse_filter,
    referenced_columns,
)
from lakefeed.iceberg.manifests import Content, Entry, Manifest, Status, column_value, read_entries
from lakefeed.iceberg.values import value_to_json

_APPEND = "append"


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """The body of a plan request, parsed. The filter is still JSON, because it depends on the table's schema."""

    snapshot_id: int | None
    start_snapshot_id: int | None
    end_snapshot_id: int | None
    filter_: Any
    case_sensitive: bool
    use_snapshot_schema: bool
    stats_fields: tuple[str, ...]
    min_rows: int | None


@dataclass(frozen=True, slots=True)
class Scan:
    """A request bound to a table's metadata. With `added_by`, only files that these snapshots added are scanned."""

    manifest_lists: tuple[str, ...]
    added_by: frozenset[int] | None
    filter_: Expression
    specs: Mapping[int, ScanSpec]
    stats_fields: frozenset[int]
    min_rows: int | None


def parse_plan_request(body: JsonObject) -> PlanRequest:
    """Parse a plan request.

    Raises: BadRequest.
    """
    snapshot_id, start, end, min_rows = (
        maybe_int(body, key) for key in ("snapshot-id", "start-snapshot-id", "end-snapshot-id", "min-rows-requested")
    )
    if snapshot_id is not None and (start is not None or end is not None):
        raise BadRequest("Invalid scan: snapshot-id cannot be used with start-snapshot-id and end-snapshot-id")
    if (start is None) != (end is None):
        raise BadRequest("Invalid scan: start-snapshot-id and end-snapshot-id must be given together")
    if min_rows is not None and min_rows < 0:
        raise BadRequest("Invalid min-rows-requested: must not be negative")
    maybe_texts(body, "select")
    return PlanRequest(
        snapshot_id=snapshot_id,
        start_snapshot_id=start,
        end_snapshot_id=end,
        filter_=body.get("filter"),
        case_sensitive=body.get("case-sensitive") is None or read_bool(body, "case-sensitive"),
        use_snapshot_schema=maybe_bool(body, "use-snapshot-schema"),
        stats_fields=tuple(maybe_texts(body, "stats-fields")),
        min_rows=min_rows,
    )


def bind_scan(request: PlanRequest, document: JsonObject) -> Scan:
    """Bind a request to a table's metadata.

    Raises: BadRequest, ValidationFailed, Unplannable.
    """
    snapshots = {snapshot["snapshot-id"]: snapshot for snapshot in document["snapshots"]}
    last = _last_snapshot(request, document, snapshots)
    scanned: tuple[JsonObject, ...] = () if last is None else (last,)
    added_by = None
    if request.start_snapshot_id is not None and last is not None:
        scanned = tuple(_appends_between(last, request.start_snapshot_id, snapshots))
        added_by = frozenset(snapshot["snapshot-id"] for snapshot in scanned)
    schema = _schema(request, document, last)
    columns = Columns(schema, case_sensitive=request.case_sensitive)
    return Scan(
        manifest_lists=tuple(map(_manifest_list, scanned)),
        added_by=added_by,
        filter_=ALWAYS_TRUE if request.filter_ is None else parse_filter(request.filter_, columns),
        specs=read_specs(document["partition-specs"], lambda field_id: _find_column(field_id, columns, document)),
        stats_fields=frozenset(columns.named(name).field_id for name in request.stats_fields),
        min_rows=request.min_rows,
    )


def _last_snapshot(
    request: PlanRequest, document: JsonObject, snapshots: Mapping[int, JsonObject]
) -> JsonObject | None:
    named = request.end_snapshot_id if request.snapshot_id is None else request.snapshot_id
    if named is None:
        return snapshots.get(document["current-snapshot-id"])
    if named not in snapshots:
        raise ValidationFailed(f"Cannot find snapshot with ID {named}")
    return snapshots[named]


def _appends_between(last: JsonObject, start_id: int, snapshots: Mapping[int, JsonObject]) -> Iterator[JsonObject]:
    """Yield the appends from `last` back to the start, exclusive. The start may be expired, but must be an ancestor."""
    snapshot: JsonObject | None = last
    while snapshot is not None:
        if snapshot["snapshot-id"] == start_id:
            return
        if (snapshot.get("summary") or {}).get("operation", _APPEND) == _APPEND:
            yield snapshot
        parent_id = snapshot.get("parent-snapshot-id")
        if parent_id == start_id:
            return
        snapshot = None if parent_id is None else snapshots.get(parent_id)
    raise ValidationFailed(f"Starting snapshot (exclusive) {start_id} is not an ancestor of {last['snapshot-id']}")


def _find_column(field_id: int, columns: Columns, document: JsonObject) -> Column | None:
    """Return a column from the schema, or, if it was dropped, from the last schema that has it."""
    found = columns.by_id(field_id)
    schemas = () if found is not None else reversed(document["schemas"])
    older = (Columns(schema, case_sensitive=True).by_id(field_id) for schema in schemas)
    return found or next(filter(None, older), None)


def _manifest_list(snapshot: JsonObject) -> str:
    location = snapshot.get("manifest-list")
    if location is None:  # snapshots of format 1 may list manifests, without their partition specs
        raise Unplannable(f"Cannot plan a scan of snapshot {snapshot['snapshot-id']}: it has no manifest list")
    return as_text(location, "manifest-list")


def _schema(request: PlanRequest, document: JsonObject, last: JsonObject | None) -> JsonObject:
    wanted = document["current-schema-id"]
    if request.use_snapshot_schema and last is not None:
        wanted = last.get("schema-id", wanted)
    by_id: dict[int, JsonObject] = {schema["schema-id"]: schema for schema in document["schemas"]}
    # The schema of an old snapshot may have been removed; the current one has the same ids.
    return by_id.get(wanted, by_id[document["current-schema-id"]])


# Reserved field id of the column of position deletes with the path of the data file.
FILE_PATH_ID = 2147483546

_PartitionKey: TypeAlias = tuple[int, tuple[Any, ...]]


class DeleteIndex:
    """Delete files by what they apply to."""

    def __init__(self, entries: Iterable[Entry], specs: Mapping[int, ScanSpec]) -> None:
        self._vectors: dict[str, Entry] = {}
        self._by_path: dict[str, list[Entry]] = {}
        self._by_partition: dict[_PartitionKey, list[Entry]] = {}
        self._equality: dict[_PartitionKey | None, list[Entry]] = {}
        for entry in entries:
            self._add(entry, specs[entry.spec_id])

    def find(self, entry: Entry) -> list[Entry]:
        """Return the delete files that apply to a data file."""
        sequence, path, partition = entry.sequence_number, entry.file["file_path"], _partition_key(entry)
        found = [
            delete
            for key in (None, partition)
            for delete in self._equality.get(key, ())
            if delete.sequence_number > sequence
        ]
        vector = self._vectors.get(path)
        if vector is not None:
            return [*found, vector]
        positions = (*self._by_partition.get(partition, ()), *self._by_path.get(path, ()))
        return found + [delete for delete in positions if delete.sequence_number >= sequence]

    def _add(self, entry: Entry, spec: ScanSpec) -> None:
        if entry.content is Content.EQUALITY_DELETES:
            self._equality.setdefault(_partition_key(entry) if spec.is_partitioned else None, []).append(entry)
            return
        path = entry.file.get("referenced_data_file")
        if path is not None and entry.file.get("content_offset") is not None:
            self._vectors[path] = entry
            return
        path = path or _path_by_bounds(entry.file)
        if path is None:
            self._by_partition.setdefault(_partition_key(entry), []).append(entry)
        else:
            self._by_path.setdefault(path, []).append(entry)


def _partition_key(entry: Entry) -> _PartitionKey:
    return entry.spec_id, tuple("nan" if value != value else value for value in entry.partition)  # noqa: PLR0124


def _path_by_bounds(file: Mapping[str, Any]) -> str | None:
    """Return the one data file that position deletes refer to, if their bounds show that it is one."""
    lower, upper = (column_value(file, name, FILE_PATH_ID) for name in ("lower_bounds", "upper_bounds"))
    return lower.decode() if lower is not None and lower == upper else None


_CONTENTS = {
    Content.DATA: "data",
    Content.POSITION_DELETES: "position-deletes",
    Content.EQUALITY_DELETES: "equality-deletes",
}
STATISTICS = (
    "column_sizes",
    "value_counts",
    "null_value_counts",
    "nan_value_counts",
    "lower_bounds",
    "upper_bounds",
)
_ALWAYS_SHOWN = ("split_offsets", "sort_order_id")
_SHOWN_OF_DELETES = ("equality_ids", "referenced_data_file", "content_offset", "content_size_in_bytes")


def data_file_json(entry: Entry, spec: ScanSpec, stats_fields: Collection[int]) -> JsonObject:
    """Return a data file as JSON, with the statistics of the columns asked for."""
    document = _file_json(entry, spec)
    if entry.first_row_id is not None:
        document["first-row-id"] = entry.first_row_id
    if stats_fields:
        document |= _statistics_json(entry.file, stats_fields)
    return document


def delete_file_json(entry: Entry, spec: ScanSpec) -> JsonObject:
    """Return a delete file as JSON."""
    return _file_json(entry, spec) | _present_fields(entry.file, _SHOWN_OF_DELETES)


def _file_json(entry: Entry, spec: ScanSpec) -> JsonObject:
    file = entry.file
    document = {
        "content": _CONTENTS[entry.content],
        "file-path": file["file_path"],
        "file-format": file["file_format"].lower(),
        "spec-id": entry.spec_id,
        "partition": [
            value_to_json(field.type_, value) for field, value in zip(spec.fields, entry.partition, strict=True)
        ],
        "file-size-in-bytes": file["file_size_in_bytes"],
        "record-count": file["record_count"],
        **_present_fields(file, _ALWAYS_SHOWN),
    }
    if file.get("key_metadata") is not None:
        document["key-metadata"] = file["key_metadata"].hex().upper()
    return document


def _present_fields(file: Mapping[str, Any], names: Collection[str]) -> JsonObject:
    return {name.replace("_", "-"): file[name] for name in names if file.get(name) is not None}


def _statistics_json(file: Mapping[str, Any], stats_fields: Collection[int]) -> JsonObject:
    statistics = {}
    for name in STATISTICS:
        known = [(pair["key"], pair["value"]) for pair in file.get(name) or () if pair["key"] in stats_fields]
        if known:
            values = [value.hex().upper() if isinstance(value, bytes) else value for _, value in known]
            statistics[name.replace("_", "-")] = {"keys": [key for key, _ in known], "values": values}
    return statistics


# Roughly the largest response in bytes. The filter is repeated in each of its tasks.
_PAGE_MAX_BYTES = 64 * 1024 * 1024
_TASK_BYTES = 1024
# Each part is a file to read, and a client waits for the whole page.
_PAGE_MAX_PARTS = 64


@dataclass(frozen=True, slots=True)
class ManifestPart:
    """Live entries of one manifest, from `first` to `end`; without an end, all of them."""

    manifest: Manifest
    first: int
    end: int | None


@dataclass(frozen=True, slots=True)
class PreparedScan:
    """A scan with its manifests, in pages, and its delete files."""

    scan: Scan
    pages: tuple[tuple[ManifestPart, ...], ...]
    deletes: DeleteIndex
    filter_json: orjson.Fragment
    held_files: int


@dataclass(frozen=True, slots=True)
class TaskPage:
    """The tasks of a page with the delete files they refer to; `is_enough` if the client needs no further page."""

    tasks: list[JsonObject]
    deletes: list[JsonObject]
    is_enough: bool


def keep_manifests(scan: Scan, manifests: Iterable[Manifest]) -> list[Manifest]:
    """Return the manifests that, by their partition summaries, may have a file with a matching row.

    Raises: Unplannable if the table does not have the spec of a manifest.
    """
    columns = referenced_columns(scan.filter_)
    return [manifest for manifest in manifests if _manifest_may_match(scan, manifest, columns)]


def read_deletes(scan: Scan, data: bytes, manifest: Manifest) -> list[Entry]:
    """Read the delete files of a manifest.

    Raises: Unplannable.
    """
    spec = scan.specs[manifest.spec_id]
    return [_slim(entry) for entry in _live_entries(data, manifest, spec)]


def prepare_scan(scan: Scan, manifests: Sequence[Manifest], deletes: Sequence[Entry], page_files: int) -> PreparedScan:
    """Divide a scan into pages of at most `page_files` entries, and of fewer if the filter is long."""
    filter_json = orjson.dumps(scan.filter_.json)
    entries = max(1, min(page_files, _PAGE_MAX_BYTES // (_TASK_BYTES + len(filter_json))))
    return PreparedScan(
        scan=scan,
        pages=tuple(_cut_pages(manifests, entries)),
        deletes=DeleteIndex(deletes, scan.specs),
        filter_json=orjson.Fragment(filter_json),
        held_files=1 + len(manifests) + len(deletes),
    )


def read_page(prepared: PreparedScan, page: Sequence[ManifestPart], bodies: Iterable[bytes]) -> TaskPage:
    """Return the tasks of a page, given the manifests of its parts.

    Raises: Unplannable.
    """
    tasks: list[JsonObject] = []
    deletes: dict[str, tuple[int, Entry]] = {}
    scan, settled_rows = prepared.scan, 0
    for entry, residual in _matching_entries(scan, page, bodies):
        applying = [] if scan.added_by is not None else prepared.deletes.find(entry)
        task = {
            "data-file": data_file_json(entry, scan.specs[entry.spec_id], scan.stats_fields),
            "residual-filter": prepared.filter_json if residual is scan.filter_.json else residual,
        }
        if applying:
            task["delete-file-references"] = [_reference(delete, deletes) for delete in applying]
        tasks.append(task)
        settled_rows += entry.file["record_count"] if residual is True and not applying else 0
        if scan.min_rows is not None and settled_rows >= scan.min_rows:
            break
    delete_files = [delete_file_json(delete, scan.specs[delete.spec_id]) for _, delete in deletes.values()]
    return TaskPage(tasks, delete_files, is_enough=scan.min_rows is not None and settled_rows >= scan.min_rows)


def _manifest_may_match(scan: Scan, manifest: Manifest, columns: Mapping[int, Column]) -> bool:
    spec = scan.specs.get(manifest.spec_id)
    if spec is None:
        raise Unplannable(f"Cannot find partition spec {manifest.spec_id} of manifest: {manifest.location}")
    if scan.added_by is not None and manifest.snapshot_id not in (None, *scan.added_by):
        return False
    if manifest.files_count == 0:
        return False
    return evaluate(scan.filter_, lambda field_id: summary_stats(spec, manifest.summaries, columns[field_id])).may_match


def _live_entries(data: bytes, manifest: Manifest, spec: ScanSpec) -> Iterator[Entry]:
    return (entry for entry in read_entries(data, manifest, spec.types) if entry.status is not Status.DELETED)


def _matching_entries(scan: Scan, page: Sequence[ManifestPart], bodies: Iterable[bytes]) -> Iterator[tuple[Entry, Any]]:
    """Yield the files with a row that may match, each with its residual filter."""
    columns = referenced_columns(scan.filter_)
    for part, body in zip(page, bodies, strict=True):
        spec = scan.specs[part.manifest.spec_id]
        for entry in islice(_live_entries(body, part.manifest, spec), part.first, part.end):
            is_older = entry.status is not Status.ADDED
            if scan.added_by is not None and (is_older or entry.snapshot_id not in scan.added_by):
                continue
            evaluation = evaluate(scan.filter_, _file_stats(entry, spec, columns))
            if evaluation.may_match:
                yield entry, evaluation.residual


def _file_stats(entry: Entry, spec: ScanSpec, columns: Mapping[int, Column]) -> StatsOf:
    """Return a lookup of statistics that computes each column once: filters often name a column repeatedly."""

    @cache
    def stats_of(field_id: int) -> ColumnStats:
        column = columns[field_id]
        return partition_stats(spec, entry.partition, column) & metrics_stats(entry.file, column)

    return stats_of


def _cut_pages(manifests: Sequence[Manifest], page_files: int) -> Iterator[tuple[ManifestPart, ...]]:
    page: list[ManifestPart] = []
    room = page_files
    for manifest in manifests:
        for part in _cut_manifest(manifest, page_files):
            # An old manifest list has no counts: such a manifest is a page of its own.
            size = page_files if part.end is None else part.end - part.first
            if page and (size > room or len(page) == _PAGE_MAX_PARTS):
                yield tuple(page)
                page, room = [], page_files
            page.append(part)
            room -= size
    if page:
        yield tuple(page)


def _cut_manifest(manifest: Manifest, page_files: int) -> Iterator[ManifestPart]:
    if manifest.files_count is None:
        yield ManifestPart(manifest, 0, None)
        return
    for first in range(0, manifest.files_count, page_files):
        yield ManifestPart(manifest, first, min(first + page_files, manifest.files_count))


def _reference(delete: Entry, deletes: dict[str, tuple[int, Entry]]) -> int:
    """Return the index of a delete file in this page. One Puffin file holds several deletion vectors."""
    key = f"{delete.file.get('content_offset')} {delete.file['file_path']}"
    return deletes.setdefault(key, (len(deletes), delete))[0]


def _slim(entry: Entry) -> Entry:
    """Return a delete file without its statistics, because it is kept in memory, except the bounds of its path."""
    kept = {name: value for name, value in entry.file.items() if name not in STATISTICS}
    for name in ("lower_bounds", "upper_bounds"):
        kept[name] = [pair for pair in entry.file.get(name) or () if pair["key"] == FILE_PATH_ID]
    return replace(entry, file=kept)
