"""Merging of small manifests, so that a snapshot's list stays short however often we commit. Owns no files.

Every commit adds one manifest. Manifests are merged in two tiers, each when it has gathered as many as the table's
`commit.manifest.min-count-to-merge`:

    fresh (one flush each)  --100-->  merged  --100-->  merged, until half of `commit.manifest.target-size-bytes`

The next commit puts one manifest that holds all their entries in their place. A list is so at most about 200 entries
long, and one more per several MiB of entries: a million commits make it about 300.

Only manifests of our own are merged, known by their file name: of others we cannot know all fields.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lakefeed.aio import map_parallel, or_raise
from lakefeed.contract.errors import StorageError
from lakefeed.contract.properties import MERGE_ENABLED, MERGE_MIN_COUNT, MERGE_TARGET_BYTES, is_enabled, read_number
from lakefeed.iceberg.layout import partition_types
from lakefeed.iceberg.manifests import (
    Content,
    Manifest,
    ManifestFile,
    ManifestList,
    Status,
    TableShape,
    decode_manifest_list,
    describe_manifest,
    encode_entries,
    encode_manifest,
    encode_manifest_list,
    read_entries,
    summarise_partitions,
)
from lakefeed.storage.store import ObjectStore
from lakefeed.writer.commit.plan import AppendPlan, Flush
from lakefeed.writer.commit.state import TableState, metadata_location

# --- writer.iceberg.manifest_merge ------------------------------------------------------------------------------------


OWN_MANIFEST_PREFIX = "lakefeed-"

# Both are Iceberg's own defaults.
MIN_COUNT_DEFAULT = 100
TARGET_BYTES_DEFAULT = 8 * 1024 * 1024


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
        manifest["content"] == Content.DATA
        and manifest["partition_spec_id"] == shape.spec.spec_id
        and manifest["deleted_files_count"] == 0
        and manifest.get("key_metadata") is None
        and manifest["manifest_path"].rpartition("/")[2].startswith(OWN_MANIFEST_PREFIX)
    )


@dataclass(frozen=True, slots=True)
class MergedManifest:
    """A manifest that holds the entries of several, and the summary of its partitions."""

    encoded: bytes
    partitions: Sequence[Mapping[str, Any]]


def merge_entries(bodies: Sequence[bytes], manifests: Sequence[ManifestFile], shape: TableShape) -> MergedManifest:
    """Encode one manifest that holds the entries of several.

    Raises:
        ManifestUnreadable: one of them is damaged.
    """
    types = partition_types(shape.spec, shape.schema)
    entries = [
        entry
        for body, manifest in zip(bodies, manifests, strict=True)
        for entry in read_entries(body, Manifest.of(manifest), types)
        if entry.status is not Status.DELETED
    ]
    encoded = encode_entries((entry.to_existing() for entry in entries), shape)
    return MergedManifest(encoded, summarise_partitions([entry.partition for entry in entries], shape))


def apply_merge(
    current: ManifestList,
    merged: Sequence[ManifestFile],
    *,
    shape: TableShape,
    snapshot_id: int,
    sequence_number: int,
    location: str,
    new: MergedManifest,
) -> ManifestList:
    """Put one manifest, stored at `location`, in the place of those that it merges."""
    one = {
        "manifest_path": location,
        "manifest_length": len(new.encoded),
        "partition_spec_id": shape.spec.spec_id,
        "content": Content.DATA,
        "sequence_number": sequence_number,
        "min_sequence_number": min(manifest["min_sequence_number"] for manifest in merged),
        "added_snapshot_id": snapshot_id,
        "added_files_count": 0,
        "existing_files_count": sum(m["added_files_count"] + m["existing_files_count"] for m in merged),
        "deleted_files_count": 0,
        "added_rows_count": 0,
        "existing_rows_count": sum(m["added_rows_count"] + m["existing_rows_count"] for m in merged),
        "deleted_rows_count": 0,
        "partitions": new.partitions,
    }
    gone = {manifest["manifest_path"] for manifest in merged}
    kept = (manifest for manifest in current.manifests if manifest["manifest_path"] not in gone)
    return ManifestList((one, *kept), current.extra_fields)


# --- writer.manifest_files --------------------------------------------------------------------------------------------
#
# Manifests and manifest lists in the store: what a commit reads and writes before it asks the catalog.
#
# Nothing refers to what is written here until a commit does. What fails leaves files that nothing refers to.


_log = logging.getLogger(__name__)

# Small files, read once in a hundred commits or less often: enough at once to hide a far store's delay.
MERGE_PARALLEL_READS = 16


@dataclass(slots=True)
class FreshManifest:
    """A flush's own manifest: it fits every attempt to commit the flush, so it is encoded and written once."""

    snapshot_id: int
    described: ManifestFile
    encoded: bytes
    is_durable: bool = False


@dataclass(frozen=True, slots=True)
class Merged:
    """A state whose manifests may have been merged, and how many of them were."""

    state: TableState
    replaced: int = 0


def prepare_manifest(state: TableState, flush: Flush, *, snapshot_id: int) -> FreshManifest:
    """Encode the manifest of a flush; nothing is written yet."""
    encoded = encode_manifest(flush.files, shape=state.shape, snapshot_id=snapshot_id)
    described = describe_manifest(
        flush.files,
        shape=state.shape,
        snapshot_id=snapshot_id,
        location=metadata_location(state, _new_manifest_name()),
        size_bytes=len(encoded),
    )
    return FreshManifest(snapshot_id, described, encoded)


def new_list_location(state: TableState, snapshot_id: int) -> str:
    """Place a manifest list, anew with each attempt: the list of an earlier one may be in use."""
    return metadata_location(state, f"snap-{snapshot_id}-{uuid.uuid4()}.avro")


async def load_manifests(store: ObjectStore, state: TableState) -> TableState:
    """Read the manifests of the current snapshot, unless they are known.

    Raises:
        StorageError: they cannot be read, or are damaged.
    """
    if state.manifests is not None:
        return state
    assert state.manifest_list is not None
    found = decode_manifest_list(await store.read(state.manifest_list), state.manifest_list)
    return replace(state, manifests=found)


async def maybe_merge(store: ObjectStore, state: TableState, *, snapshot_id: int) -> Merged:
    """Merge small manifests if there are many; one that cannot be read now only puts it off."""
    assert state.manifests is not None
    chosen = plan_merge(state.manifests, state.shape, state.properties)
    if not chosen:
        return Merged(state)
    location = metadata_location(state, _new_manifest_name())
    try:
        new = await _merge_manifests(store, chosen, state.shape)
        await store.write(location, new.encoded)
    except StorageError as error:
        _log.warning("merge_put_off", extra={"table": str(state.name), "reason": str(error)})
        return Merged(state)
    merged = apply_merge(
        state.manifests,
        chosen,
        shape=state.shape,
        snapshot_id=snapshot_id,
        sequence_number=state.last_sequence_number + 1,
        location=location,
        new=new,
    )
    return Merged(replace(state, manifests=merged), replaced=len(chosen))


async def _merge_manifests(store: ObjectStore, manifests: Sequence[ManifestFile], shape: TableShape) -> MergedManifest:
    """Read manifests and encode their entries as one, in a thread: there can be tens of thousands of entries."""
    bodies = await map_parallel(
        lambda manifest: store.read(manifest["manifest_path"]), manifests, at_once=MERGE_PARALLEL_READS
    )
    return await asyncio.to_thread(merge_entries, bodies, manifests, shape)


async def write_metadata(store: ObjectStore, plan: AppendPlan, manifest: FreshManifest) -> None:
    """Write list and manifest side by side.

    Raises:
        StorageError: one of them may not be there.
    """
    location = plan.next_state.manifest_list
    assert location is not None
    writes = [store.write(location, encode_manifest_list(plan.manifests, plan.header))]
    if not manifest.is_durable:
        writes.append(store.write(manifest.described["manifest_path"], manifest.encoded))
    for result in await asyncio.gather(*writes, return_exceptions=True):
        or_raise(result)
    manifest.is_durable = True


def _new_manifest_name() -> str:
    return f"{OWN_MANIFEST_PREFIX}{uuid.uuid4()}.avro"
