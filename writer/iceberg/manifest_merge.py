"""Merging of small manifests, so that a snapshot's list stays short however often we commit. Owns no files.

Every commit adds one manifest. Manifests are merged in two tiers, each when it has gathered as many as the table's
`commit.manifest.min-count-to-merge`:

    fresh (one flush each)  --100-->  merged  --100-->  merged, until half of `commit.manifest.target-size-bytes`

The next commit puts one manifest that holds all their entries in their place. A list is so at most about 200 entries
long, and one more per several MiB of entries: a million commits make it about 300.

Only manifests of our own are merged, known by their file name: of others we cannot know all fields.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from writer.iceberg.manifests import ManifestFile, ManifestList, TableShape, decode_avro, encode_entries
from writer.iceberg.partitions import partition_types
from writer.iceberg.properties import MERGE_ENABLED, MERGE_MIN_COUNT, MERGE_TARGET_BYTES, is_enabled, read_number
from writer.iceberg.single_values import comparable_bound

OWN_MANIFEST_PREFIX = "lakefeed-"

# Both are Iceberg's own defaults.
MIN_COUNT_DEFAULT = 100
TARGET_BYTES_DEFAULT = 8 * 1024 * 1024

_DATA = 0
_EXISTING = 0


def plan_merge(current: ManifestList, shape: TableShape, properties: Mapping[str, str]) -> tuple[ManifestFile, ...]:
    """Choose the manifests that the next commit merges; none while they are few."""
    if not is_enabled(properties, MERGE_ENABLED):
        return ()
    wanted = max(2, read_number(properties, MERGE_MIN_COUNT, MIN_COUNT_DEFAULT))
    target_bytes = read_number(properties, MERGE_TARGET_BYTES, TARGET_BYTES_DEFAULT)
    small = [m for m in current.manifests if _is_mergeable(m, shape) and 2 * m["manifest_length"] < target_bytes]
    fresh = [manifest for manifest in small if not manifest["existing_files_count"]]
    merged = [manifest for manifest in small if manifest["existing_files_count"]]
    for tier in (fresh, merged):
        if len(tier) >= wanted:
            return _oldest(tier, target_bytes)
    return ()


def _oldest(tier: Sequence[ManifestFile], target_bytes: int) -> tuple[ManifestFile, ...]:
    """Take the oldest that fit into one manifest: they lie close together in time, and so in their partitions.

    Each is below half of the target, so that there are two at least.
    """
    first, left_bytes = len(tier), target_bytes
    while first and tier[first - 1]["manifest_length"] <= left_bytes:
        first -= 1
        left_bytes -= tier[first]["manifest_length"]
    return tuple(tier[first:])


def _is_mergeable(manifest: ManifestFile, shape: TableShape) -> bool:
    return (
        manifest["content"] == _DATA
        and manifest["partition_spec_id"] == shape.spec.spec_id
        and manifest["deleted_files_count"] == 0
        and manifest.get("key_metadata") is None
        and manifest["manifest_path"].rpartition("/")[2].startswith(OWN_MANIFEST_PREFIX)
    )


def merge_entries(bodies: Sequence[bytes], manifests: Sequence[ManifestFile], shape: TableShape) -> bytes:
    """Encode one manifest that holds the entries of several.

    Raises:
        ManifestUnreadable: one of them is damaged.
    """
    pairs = zip(bodies, manifests, strict=True)
    return encode_entries((entry for body, manifest in pairs for entry in decode_entries(body, manifest)), shape)


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
        "existing_files_count": sum(m["added_files_count"] + m["existing_files_count"] for m in merged),
        "deleted_files_count": 0,
        "added_rows_count": 0,
        "existing_rows_count": sum(m["added_rows_count"] + m["existing_rows_count"] for m in merged),
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
