"""Manifests and manifest lists in the store: what a commit reads and writes before it asks the catalog.

Nothing refers to what is written here until a commit does. What fails leaves files that nothing refers to.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace

from writer.commit_plan import AppendPlan, Flush
from writer.errors import StorageError
from writer.iceberg.manifest_merge import OWN_MANIFEST_PREFIX, apply_merge, merge_entries, plan_merge
from writer.iceberg.manifests import (
    ManifestFile,
    ManifestUnreadable,
    TableShape,
    decode_manifest_list,
    describe_manifest,
    encode_manifest,
    encode_manifest_list,
)
from writer.iceberg.table_state import TableState, metadata_location
from writer.parallel import map_parallel, or_raise
from writer.storage import ObjectStore

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
        StorageError, ManifestUnreadable: they cannot be read.
    """
    if state.manifests is not None:
        return state
    assert state.manifest_list is not None
    return replace(state, manifests=decode_manifest_list(await store.read(state.manifest_list)))


async def maybe_merge(store: ObjectStore, state: TableState, *, snapshot_id: int) -> Merged:
    """Merge small manifests if there are many; one that cannot be read now only puts it off."""
    assert state.manifests is not None
    chosen = plan_merge(state.manifests, state.shape, state.properties)
    if not chosen:
        return Merged(state)
    location = metadata_location(state, _new_manifest_name())
    try:
        encoded = await _encode_merged(store, chosen, state.shape)
        await store.write(location, encoded)
    except (StorageError, ManifestUnreadable) as error:
        _log.warning("merge_put_off", extra={"table": str(state.name), "reason": str(error)})
        return Merged(state)
    merged = apply_merge(
        state.manifests,
        chosen,
        shape=state.shape,
        snapshot_id=snapshot_id,
        sequence_number=state.last_sequence_number + 1,
        location=location,
        size_bytes=len(encoded),
    )
    return Merged(replace(state, manifests=merged), replaced=len(chosen))


async def _encode_merged(store: ObjectStore, manifests: Sequence[ManifestFile], shape: TableShape) -> bytes:
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
