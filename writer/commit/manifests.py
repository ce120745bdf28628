"""Manifests of a commit: written before the request to the catalog, and merged so that lists stay short.

Every commit adds one manifest. Manifests are merged in two tiers, each when it has as many as the table's
`commit.manifest.min-count-to-merge`:

    fresh (one flush each)  --100-->  merged  --100-->  merged, until half of `commit.manifest.target-size-bytes`

The next commit replaces them with one manifest that has all their entries. A list therefore has at most about 200
manifests, and one more per several MiB of entries: about 300 after a million commits. Only our own manifests are
merged, recognised by their file name: those of other writers may have fields that we do not know.

Nothing refers to the written files until a commit does, so a failure leaves files for orphan removal.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

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

_log = logging.getLogger(__name__)

OWN_MANIFEST_PREFIX = "lakefeed-"

# Small files, read at most once in a hundred commits. Enough at once to hide the latency of a remote store.
MERGE_PARALLEL_READS = 16
# Iceberg's own defaults.
MIN_COUNT_DEFAULT = 100
TARGET_BYTES_DEFAULT = 8 * 1024 * 1024


def plan_merge(current: ManifestList, shape: TableShape, properties: Mapping[str, str]) -> tuple[ManifestFile, ...]:
    """Return the manifests that the next commit merges; none while they are few."""
    if not is_enabled(properties, MERGE_ENABLED):
        return ()
    wanted = max(2, read_number(properties, MERGE_MIN_COUNT, MIN_COUNT_DEFAULT))
    target_bytes = read_number(properties, MERGE_TARGET_BYTES, TARGET_BYTES_DEFAULT)
    small = [m for m in current.manifests if _is_mergeable(m, shape) and 2 * m["manifest_length"] < target_bytes]
    fresh = [manifest for manifest in small if not manifest["existing_files_count"]]
    merged = [manifest for manifest in small if manifest["existing_files_count"]]
    tier = next((each for each in (fresh, merged) if len(each) >= wanted), [])
    # The oldest that fit into one manifest: they are close in time, and so in their partitions. Each is below half of
    # the target, so there are at least two.
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


def merge_manifests(
    bodies: Sequence[bytes],
    manifests: Sequence[ManifestFile],
    *,
    shape: TableShape,
    snapshot_id: int,
    sequence_number: int,
    location: str,
) -> tuple[bytes, ManifestFile]:
    """Encode one manifest with the entries of several, and describe it for a list.

    Raises: ManifestUnreadable if one of them is damaged.
    """
    types = partition_types(shape.spec, shape.schema)
    entries = [
        entry
        for body, manifest in zip(bodies, manifests, strict=True)
        for entry in read_entries(body, Manifest.of(manifest), types)
        if entry.status is not Status.DELETED
    ]
    encoded = encode_entries((entry.to_existing() for entry in entries), shape)
    described = {
        **describe_manifest([], shape=shape, snapshot_id=snapshot_id, location=location, size_bytes=len(encoded)),
        "sequence_number": sequence_number,
        "min_sequence_number": min(manifest["min_sequence_number"] for manifest in manifests),
        "existing_files_count": sum(m["added_files_count"] + m["existing_files_count"] for m in manifests),
        "existing_rows_count": sum(m["added_rows_count"] + m["existing_rows_count"] for m in manifests),
        "partitions": summarise_partitions([entry.partition for entry in entries], shape),
    }
    return encoded, described


@dataclass(slots=True)
class FreshManifest:
    """A flush's own manifest. All attempts to commit the flush use it, so it is encoded and written once."""

    snapshot_id: int
    described: ManifestFile
    encoded: bytes
    is_durable: bool = False


def prepare_manifest(state: TableState, flush: Flush, *, snapshot_id: int) -> FreshManifest:
    """Encode the manifest of a flush without writing it."""
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
    """Return a new location for a manifest list; the list of an earlier attempt may be in use."""
    return metadata_location(state, f"snap-{snapshot_id}-{uuid.uuid4()}.avro")


async def load_manifests(store: ObjectStore, state: TableState) -> TableState:
    """Return the state with the manifests of its snapshot, read unless they are known.

    Raises: StorageError if the list cannot be read, or is damaged.
    """
    if state.manifests is not None:
        return state
    assert state.manifest_list is not None
    data = await store.read(state.manifest_list)
    return replace(state, manifests=decode_manifest_list(data, state.manifest_list))


async def maybe_merge(store: ObjectStore, state: TableState, *, snapshot_id: int) -> tuple[TableState, int]:
    """Merge small manifests if there are many. Return the state after it, and how many manifests were replaced.

    If a file cannot be read or written, the merge is postponed to the next commit.
    """
    assert state.manifests is not None
    chosen = plan_merge(state.manifests, state.shape, state.properties)
    if not chosen:
        return state, 0
    location = metadata_location(state, _new_manifest_name())
    merge = functools.partial(
        merge_manifests,
        shape=state.shape,
        snapshot_id=snapshot_id,
        sequence_number=state.last_sequence_number + 1,
        location=location,
    )
    try:
        bodies = await map_parallel(
            lambda manifest: store.read(manifest["manifest_path"]), chosen, at_once=MERGE_PARALLEL_READS
        )
        # In a thread: there can be tens of thousands of entries.
        encoded, described = await asyncio.to_thread(merge, bodies, chosen)
        await store.write(location, encoded)
    except StorageError as error:
        _log.warning("manifest_merge_postponed", extra={"table": str(state.name), "reason": str(error)})
        return state, 0
    gone = {manifest["manifest_path"] for manifest in chosen}
    kept = (manifest for manifest in state.manifests.manifests if manifest["manifest_path"] not in gone)
    merged = ManifestList((described, *kept), state.manifests.extra_fields)
    return replace(state, manifests=merged), len(chosen)


async def write_metadata(store: ObjectStore, plan: AppendPlan, manifest: FreshManifest) -> None:
    """Write the manifest list and, unless it is durable, the manifest, in parallel.

    Raises: StorageError if one of them may not have been written.
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
