"""Merging of small manifests, so that a snapshot's list stays short however often we commit. Owns no files.

Every commit adds one manifest. When as many as the table's `commit.manifest.min-count-to-merge` have gathered, the
next commit replaces them by one that holds all their entries; that one is left alone by us from then on. A list is so
about commits/100 + 100 entries long; the pipeline's manifest rewrite takes it from there.

Only manifests of our own are merged, known by their file name: of others we cannot know all fields.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from writer.iceberg.manifests import ManifestFile, ManifestList, TableShape, decode_avro
from writer.iceberg.partitions import partition_types
from writer.iceberg.single_values import comparable_bound

OWN_MANIFEST_PREFIX = "lakefeed-"

MERGE_ENABLED_PROPERTY = "commit.manifest-merge.enabled"
MIN_COUNT_PROPERTY = "commit.manifest.min-count-to-merge"
MIN_COUNT_DEFAULT = 100

_DATA = 0
_EXISTING = 0


def plan_merge(current: ManifestList, shape: TableShape, properties: Mapping[str, str]) -> tuple[ManifestFile, ...]:
    """Choose the manifests that the next commit merges; none while they are few."""
    if properties.get(MERGE_ENABLED_PROPERTY, "true") != "true":
        return ()
    chosen = tuple(manifest for manifest in current.manifests if _is_mergeable(manifest, shape))
    wanted = max(2, int(properties.get(MIN_COUNT_PROPERTY, MIN_COUNT_DEFAULT)))
    return chosen if len(chosen) >= wanted else ()


def _is_mergeable(manifest: ManifestFile, shape: TableShape) -> bool:
    return (
        manifest["content"] == _DATA
        and manifest["partition_spec_id"] == shape.spec.spec_id
        and manifest["existing_files_count"] == 0  # not merged before
        and manifest["deleted_files_count"] == 0
        and manifest.get("key_metadata") is None
        and manifest["manifest_path"].rpartition("/")[2].startswith(OWN_MANIFEST_PREFIX)
    )


def decode_entries(data: bytes, manifest: ManifestFile) -> list[dict[str, Any]]:
    """Read a manifest's entries as they go into another one: existing, with all that they inherited written out.

    Raises:
        ManifestUnreadable: it is damaged.
    """
    return list(_existing_entries(decode_avro(data)[1], manifest))


def _existing_entries(entries: list[dict[str, Any]], manifest: ManifestFile) -> Iterator[dict[str, Any]]:
    sequence_number = manifest["sequence_number"]
    next_row_id = manifest.get("first_row_id")
    for entry in entries:
        entry["status"] = _EXISTING
        _inherit(entry, "snapshot_id", manifest["added_snapshot_id"])
        _inherit(entry, "sequence_number", sequence_number)
        _inherit(entry, "file_sequence_number", sequence_number)
        data_file = entry["data_file"]
        if next_row_id is not None and data_file.get("first_row_id") is None:
            data_file["first_row_id"] = next_row_id
            next_row_id += data_file["record_count"]
        yield entry


def _inherit(entry: dict[str, Any], name: str, value: int) -> None:
    if entry[name] is None:
        entry[name] = value


def apply_merge(
    current: ManifestList,
    merged: Sequence[ManifestFile],
    *,
    shape: TableShape,
    snapshot_id: int,
    sequence_number: int,
    location: str,
    size_bytes: int,
) -> ManifestList:
    """Put one manifest, stored at `location`, in the place of those that it merges."""
    one = {
        "manifest_path": location,
        "manifest_length": size_bytes,
        "partition_spec_id": shape.spec.spec_id,
        "content": _DATA,
        "sequence_number": sequence_number,
        "min_sequence_number": min(manifest["min_sequence_number"] for manifest in merged),
        "added_snapshot_id": snapshot_id,
        "added_files_count": 0,
        "existing_files_count": sum(manifest["added_files_count"] for manifest in merged),
        "deleted_files_count": 0,
        "added_rows_count": 0,
        "existing_rows_count": sum(manifest["added_rows_count"] for manifest in merged),
        "deleted_rows_count": 0,
        "partitions": _merge_summaries([manifest["partitions"] for manifest in merged], shape),
    }
    gone = {manifest["manifest_path"] for manifest in merged}
    kept = (manifest for manifest in current.manifests if manifest["manifest_path"] not in gone)
    return ManifestList((one, *kept), current.extra_fields)


def _merge_summaries(summaries: Sequence[Sequence[Mapping[str, Any]]], shape: TableShape) -> list[dict[str, Any]]:
    types = partition_types(shape.spec, shape.schema)
    return [_merge_summary(type_, [summary[i] for summary in summaries]) for i, type_ in enumerate(types)]


def _merge_summary(type_: str, summaries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    lowers = [summary["lower_bound"] for summary in summaries if summary["lower_bound"] is not None]
    uppers = [summary["upper_bound"] for summary in summaries if summary["upper_bound"] is not None]
    return {
        "contains_null": any(summary["contains_null"] for summary in summaries),
        "contains_nan": any(summary["contains_nan"] for summary in summaries),
        "lower_bound": min(lowers, key=lambda bound: comparable_bound(type_, bound), default=None),
        "upper_bound": max(uppers, key=lambda bound: comparable_bound(type_, bound), default=None),
    }
