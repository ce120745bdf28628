"""Snapshot expiry: removes snapshots beyond a table's limits, and the metadata files that only they used.

A snapshot is kept for one of these reasons; all other ancestors of main are removed, the oldest first:

    of main: among the newest `history.expire.min-snapshots-to-keep`
    of main: younger than `history.expire.max-snapshot-age-ms` and among the newest `lakefeed.snapshots-max`,
             fewer where their summaries together are larger than `lakefeed.summaries-max-bytes`
    of main: a consumer has not read it yet (contract/consumers.py), up to `lakefeed.consumer-snapshots-max`
    of another branch: among its newest or young enough, by the branch's own limits where it has some
    referenced by a branch or a tag
    not an append of ours, or the last one before such a snapshot

The last rule keeps data files reachable. An append of ours removes nothing, so its data files are in every later
snapshot. Compaction removes files, and the snapshot before it may be the last one that refers to them: whatever
compacts has to expire that snapshot together with the files (Spark's expire_snapshots).

Metadata files of removed snapshots:

    manifest list   belongs to one snapshot
    manifest        is added by one snapshot, is in all that follow, and is gone after a merge. A merged manifest is
                    therefore unused once the snapshots before the merge are removed, unless a snapshot that is kept
                    for another reason, such as a tag, has it: the lists of these are read before anything is deleted

What a crash after each step leaves:

    1. load the table and plan            nothing. The table is loaded again because a new tag does not move main
    2. read the lists around merges       nothing
    3. commit the removal                 files that nothing refers to, until orphan removal deletes them
    4. delete what nothing refers to      fewer of them

Files are deleted only after the catalog has confirmed step 3. Data files are never deleted here.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from lakefeed.aio import map_parallel
from lakefeed.contract.consumers import Consumer, read_consumers, snapshots_needed
from lakefeed.contract.errors import StorageError, WriterError
from lakefeed.contract.progress import FLUSH_ID_KEY
from lakefeed.contract.properties import (
    CONSUMER_SNAPSHOTS_MAX,
    CONSUMER_SNAPSHOTS_MAX_DEFAULT,
    GC_ENABLED,
    MAIN_BRANCH,
    SNAPSHOT_MAX_AGE_DEFAULT_MS,
    SNAPSHOT_MAX_AGE_MS,
    SNAPSHOTS_MAX,
    SNAPSHOTS_MAX_DEFAULT,
    SNAPSHOTS_MIN,
    SNAPSHOTS_MIN_DEFAULT,
    SUMMARIES_MAX_BYTES,
    SUMMARIES_MAX_BYTES_DEFAULT,
    is_enabled,
    read_number,
)
from lakefeed.iceberg.manifests import manifest_paths
from lakefeed.storage.store import ObjectStore
from lakefeed.writer.commit.manifests import OWN_MANIFEST_PREFIX
from lakefeed.writer.commit.plan import MANIFESTS_REPLACED_KEY, Request
from lakefeed.writer.commit.rest_catalog import CatalogClient
from lakefeed.writer.commit.state import TableState, metadata_location

_log = logging.getLogger(__name__)

# Checking loads the whole history: once in this many commits it adds a few percent to their cost.
LOOK_EVERY_SNAPSHOTS = 50
# Snapshots removed at once: bounds the request and the deletes after it; far above what accumulates between two checks.
REMOVED_MAX = 500
# Lists of kept snapshots that are read before manifests are deleted. With more tags, no manifests are deleted.
KEPT_LISTS_MAX = 32
# Deletes and reads at once: enough to hide the latency of a remote store.
PARALLEL_REQUESTS = 16

_Snapshot: TypeAlias = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ExpiryPlan:
    """Snapshots to remove in one commit. `replaced` has the lists before and after each merge among them.

    A manifest that is in the list before and not in the list after is unused unless one of `kept_lists` has it.
    `unread_by` names the consumers that have not read all of the removed snapshots.
    """

    snapshot_ids: tuple[int, ...]
    request: Request
    lists: tuple[str, ...]
    replaced: tuple[tuple[str, str], ...]
    kept_lists: tuple[str, ...]
    unread_by: tuple[str, ...]


def plan_expiry(document: Mapping[str, Any], *, now_ms: int) -> ExpiryPlan | None:
    """Plan the removal of snapshots beyond the table's limits; return None if there are none."""
    properties = document.get("properties") or {}
    refs = document.get("refs") or {}
    most = read_number(properties, SNAPSHOTS_MAX, SNAPSHOTS_MAX_DEFAULT)
    if MAIN_BRANCH not in refs or most == 0 or not is_enabled(properties, GC_ENABLED):
        return None
    by_id = {snapshot["snapshot-id"]: snapshot for snapshot in document["snapshots"]}
    chain = list(_ancestors(by_id, refs[MAIN_BRANCH]["snapshot-id"]))
    most = min(most, max(_least(refs[MAIN_BRANCH], properties), _count_within_bytes(chain, properties)))
    kept = _kept_by_refs(by_id, refs, properties, now_ms=now_ms)
    kept |= {snapshot["snapshot-id"] for snapshot in _within(chain[:most], refs[MAIN_BRANCH], properties, now_ms)}
    # Snapshots that are not appends of ours, and those right before them.
    others = {
        snapshot["snapshot-id"]
        for snapshot in chain
        if (summary := snapshot.get("summary") or {}).get("operation") != "append" or FLUSH_ID_KEY not in summary
    }
    kept |= others | {
        s["parent-snapshot-id"] for s in chain if s["snapshot-id"] in others and "parent-snapshot-id" in s
    }
    consumers = read_consumers(document)
    followed_max = read_number(properties, CONSUMER_SNAPSHOTS_MAX, CONSUMER_SNAPSHOTS_MAX_DEFAULT)
    followed = snapshots_needed(chain, consumers, now_ms=now_ms, most=followed_max)
    kept |= {snapshot["snapshot-id"] for snapshot in chain[:followed]}
    removed = [snapshot for snapshot in chain if snapshot["snapshot-id"] not in kept][-REMOVED_MAX:]
    return _plan(document, chain, removed, consumers) if removed else None


def _ancestors(by_id: Mapping[int, _Snapshot], snapshot_id: int | None) -> Iterator[_Snapshot]:
    """Yield a snapshot and its known ancestors, newest first."""
    for _ in by_id:
        snapshot = by_id.get(snapshot_id) if snapshot_id is not None else None
        if snapshot is None:
            return
        yield snapshot
        snapshot_id = snapshot.get("parent-snapshot-id")


def _within(
    chain: list[_Snapshot], ref: Mapping[str, Any], properties: Mapping[str, str], now_ms: int
) -> Iterator[_Snapshot]:
    """Yield the snapshots that a branch keeps by number and by age."""
    least = _least(ref, properties)
    default_age_ms = read_number(properties, SNAPSHOT_MAX_AGE_MS, SNAPSHOT_MAX_AGE_DEFAULT_MS)
    age_ms = ref.get("max-snapshot-age-ms") or default_age_ms
    for position, snapshot in enumerate(chain):
        if position < least or snapshot["timestamp-ms"] >= now_ms - age_ms:
            yield snapshot


def _least(ref: Mapping[str, Any], properties: Mapping[str, str]) -> int:
    """Return how many of its newest snapshots a branch keeps at least."""
    own: int | None = ref.get("min-snapshots-to-keep")
    return max(1, own or read_number(properties, SNAPSHOTS_MIN, SNAPSHOTS_MIN_DEFAULT))


def _count_within_bytes(chain: list[_Snapshot], properties: Mapping[str, str]) -> int:
    """Count the newest snapshots whose summaries together are within the table's limit; 0 means no limit."""
    max_bytes = read_number(properties, SUMMARIES_MAX_BYTES, SUMMARIES_MAX_BYTES_DEFAULT)
    if max_bytes == 0:
        return len(chain)
    summaries = ((snapshot.get("summary") or {}).items() for snapshot in chain)
    sizes = itertools.accumulate(sum(len(key) + len(str(value)) for key, value in items) for items in summaries)
    return sum(1 for _ in itertools.takewhile(lambda size: size <= max_bytes, sizes))


def _kept_by_refs(
    by_id: Mapping[int, _Snapshot], refs: Mapping[str, Mapping[str, Any]], properties: Mapping[str, str], *, now_ms: int
) -> set[int]:
    """Return the snapshots that refs point at, and the ancestors that branches other than main keep."""
    kept = {ref["snapshot-id"] for ref in refs.values()}
    for name, ref in refs.items():
        if name != MAIN_BRANCH and ref["type"] == "branch":
            own = list(_ancestors(by_id, ref["snapshot-id"]))
            kept |= {snapshot["snapshot-id"] for snapshot in _within(own, ref, properties, now_ms)}
    return kept


def _plan(
    document: Mapping[str, Any], chain: list[_Snapshot], removed: list[_Snapshot], consumers: Sequence[Consumer]
) -> ExpiryPlan:
    ids = [snapshot["snapshot-id"] for snapshot in removed]
    positions = {snapshot["snapshot-id"]: position for position, snapshot in enumerate(chain)}
    newest_removed = positions[ids[0]]
    # The kept snapshots from main down to the newest removed one descend from the oldest of them: a manifest that this
    # one does not have is in none of them.
    run = {snapshot["snapshot-id"] for snapshot in chain[: newest_removed - 1]}
    removed_ids = set(ids)
    kept = [snapshot for snapshot in document["snapshots"] if snapshot["snapshot-id"] not in removed_ids]
    used_lists = {snapshot["manifest-list"] for snapshot in kept}
    main = document["refs"][MAIN_BRANCH]["snapshot-id"]
    requirements = (
        {"type": "assert-table-uuid", "uuid": document["table-uuid"]},
        {"type": "assert-ref-snapshot-id", "ref": MAIN_BRANCH, "snapshot-id": main},
    )
    return ExpiryPlan(
        snapshot_ids=tuple(ids),
        request=Request(requirements, ({"action": "remove-snapshots", "snapshot-ids": ids},)),
        lists=tuple(s["manifest-list"] for s in removed if s["manifest-list"] not in used_lists),
        replaced=tuple(
            (before["manifest-list"], after["manifest-list"])
            for after, before in itertools.pairwise(chain)
            if before["snapshot-id"] in removed_ids and MANIFESTS_REPLACED_KEY in (after.get("summary") or {})
        ),
        kept_lists=tuple(snapshot["manifest-list"] for snapshot in kept if snapshot["snapshot-id"] not in run),
        unread_by=tuple(each.name for each in consumers if positions.get(each.snapshot_id, -1) > newest_removed),
    )


def is_due(state: TableState) -> bool:
    """Return whether it is time to check for old snapshots."""
    return state.snapshot_count > 0 and state.snapshot_count % LOOK_EVERY_SNAPSHOTS == 0


async def expire_snapshots(catalog: CatalogClient, store: ObjectStore, state: TableState, *, now_ms: int) -> TableState:
    """Remove snapshots beyond the table's limits, and return the state after it.

    Cancelling leaves the snapshots removed or not, and files that nothing refers to.

    Raises: CatalogError, StorageError; nothing was deleted then, and the next call tries again.
    """
    document = await catalog.load_table(state.name)
    plan = plan_expiry(document, now_ms=now_ms)
    if plan is None or document["table-uuid"] != state.uuid:
        return replace(state, snapshot_count=len(document.get("snapshots") or ()))
    unused = await _unused_manifests(store, state, plan)
    await catalog.commit_table(state.name, plan.request, needs_response=False)
    # Only files with our names in our directory are deleted, never those of other writers.
    root = metadata_location(state, "")
    own = (f"{root}{OWN_MANIFEST_PREFIX}", f"{root}snap-")
    await _delete_all(store, [location for location in (*unused, *plan.lists) if location.startswith(own)])
    if plan.unread_by:
        _log.warning("unread_snapshots_removed", extra={"table": str(state.name), "consumers": list(plan.unread_by)})
    left = len(document["snapshots"]) - len(plan.snapshot_ids)
    _log.info(
        "snapshots_expired", extra={"table": str(state.name), "removed": len(plan.snapshot_ids), "snapshots": left}
    )
    return replace(state, snapshot_count=left, last_updated_ms=max(now_ms, state.last_updated_ms))


async def _unused_manifests(store: ObjectStore, state: TableState, plan: ExpiryPlan) -> set[str]:
    """Return the manifests that merges replaced and no kept snapshot has; none if that cannot be determined."""
    if not plan.replaced or len(plan.kept_lists) > KEPT_LISTS_MAX:
        return set()
    locations = sorted({*plan.kept_lists, *(location for pair in plan.replaced for location in pair)})

    async def read(location: str) -> set[str]:
        return set(manifest_paths(await store.read(location), location))

    try:
        lists = await map_parallel(read, locations, at_once=PARALLEL_REQUESTS)
    except WriterError as error:
        _log.warning("manifests_not_deleted", extra={"table": str(state.name), "reason": str(error)})
        return set()
    manifests = dict(zip(locations, lists, strict=True))
    replaced = {path for before, after in plan.replaced for path in manifests[before] - manifests[after]}
    return replaced.difference(*(manifests[location] for location in plan.kept_lists))


async def _delete_all(store: ObjectStore, locations: Sequence[str]) -> None:
    """Delete files that nothing refers to. A failure is logged: orphan removal deletes the file later."""

    async def delete(location: str) -> str | None:
        try:
            await store.delete(location)
        except StorageError as error:
            return str(error)
        return None

    reasons = await map_parallel(delete, locations, at_once=PARALLEL_REQUESTS)
    failures = [reason for reason in reasons if reason is not None]
    if failures:
        _log.warning("metadata_files_not_deleted", extra={"files": len(failures), "reason": failures[0]})
