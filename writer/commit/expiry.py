"""Which old snapshots go, and which metadata files go with them. Core: it plans, expiring.py acts.

A snapshot stays if it is one of these; all others that lead to main are removed, the oldest first:

    of main: among the newest `history.expire.min-snapshots-to-keep`
    of main: younger than `history.expire.max-snapshot-age-ms` and among the newest `lakefeed.snapshots-max`,
             fewer where their summaries together are larger than `lakefeed.summaries-max-bytes`
    of main: from the oldest on that a consumer still needs (consumers.py), up to `lakefeed.consumer-snapshots-max`
    of another branch: among its newest or younger, by the branch's own limits where it has some
    pointed at by a branch or a tag
    not an append of ours, or the last one before such a snapshot

The last rule keeps data files reachable. An append of ours takes nothing away, so its data files are in every later
snapshot. Compaction does, and the snapshot before it may be the last to name the files that it replaced: those are
for whoever compacts to remove, with the snapshot (Spark's expire_snapshots).

Metadata files of removed snapshots:

    a snapshot's manifest list belongs to it alone
    a manifest is added in one snapshot, is in every one that follows, and leaves for good where it is merged. So what
    a merge replaced is unused when the snapshots before the merge are gone, unless a snapshot that is kept aside, as
    by a tag, still has it: the lists of these are read before anything is deleted
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
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

# --- writer.iceberg.expiry --------------------------------------------------------------------------------------------


# Snapshots removed at once: bounds the request and the deletes behind it, far above what comes together in between.
REMOVED_MAX = 500

_Snapshot: TypeAlias = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ExpiryPlan:
    """Snapshots to remove in one commit. `replaced` has the lists before and after each merge among them.

    A manifest that is in a list before and not in the one after it is unused unless a list of `kept_lists` has it.
    `passed_over` names the consumers that will miss some of them.
    """

    snapshot_ids: tuple[int, ...]
    request: Request
    lists: tuple[str, ...]
    replaced: tuple[tuple[str, str], ...]
    kept_lists: tuple[str, ...]
    passed_over: tuple[str, ...] = ()


def plan_expiry(document: Mapping[str, Any], *, now_ms: int) -> ExpiryPlan | None:
    """Plan to remove what is beyond the table's limits; None if nothing is."""
    properties = document.get("properties") or {}
    refs = document.get("refs") or {}
    most = read_number(properties, SNAPSHOTS_MAX, SNAPSHOTS_MAX_DEFAULT)
    if MAIN_BRANCH not in refs or most == 0 or not is_enabled(properties, GC_ENABLED):
        return None
    by_id = {snapshot["snapshot-id"]: snapshot for snapshot in document["snapshots"]}
    chain = list(_ancestors(by_id, refs[MAIN_BRANCH]["snapshot-id"]))
    most = min(most, max(_least(refs[MAIN_BRANCH], properties), _count_within_bytes(chain, properties)))
    kept = _held(by_id, refs, properties, now_ms=now_ms)
    kept |= {snapshot["snapshot-id"] for snapshot in _within(chain[:most], refs[MAIN_BRANCH], properties, now_ms)}
    kept |= _around_others(chain)
    consumers = read_consumers(document)
    followed_max = read_number(properties, CONSUMER_SNAPSHOTS_MAX, CONSUMER_SNAPSHOTS_MAX_DEFAULT)
    followed = snapshots_needed(chain, consumers, now_ms=now_ms, most=followed_max)
    kept |= {snapshot["snapshot-id"] for snapshot in chain[:followed]}
    doomed = [snapshot for snapshot in chain if snapshot["snapshot-id"] not in kept][-REMOVED_MAX:]
    if not doomed:
        return None
    return replace(_plan(document, chain, doomed), passed_over=tuple(_passed_over(chain, doomed, consumers)))


def _ancestors(by_id: Mapping[int, _Snapshot], snapshot_id: int | None) -> Iterator[_Snapshot]:
    """Walk from a snapshot to its oldest known ancestor."""
    for _ in by_id:
        snapshot = by_id.get(snapshot_id) if snapshot_id is not None else None
        if snapshot is None:
            return
        yield snapshot
        snapshot_id = snapshot.get("parent-snapshot-id")


def _within(
    chain: list[_Snapshot], ref: Mapping[str, Any], properties: Mapping[str, str], now_ms: int
) -> Iterator[_Snapshot]:
    """Pick what a branch keeps by number and by age."""
    least = _least(ref, properties)
    default_age_ms = read_number(properties, SNAPSHOT_MAX_AGE_MS, SNAPSHOT_MAX_AGE_DEFAULT_MS)
    age_ms = ref.get("max-snapshot-age-ms") or default_age_ms
    for position, snapshot in enumerate(chain):
        if position < least or snapshot["timestamp-ms"] >= now_ms - age_ms:
            yield snapshot


def _least(ref: Mapping[str, Any], properties: Mapping[str, str]) -> int:
    """Tell how many of its newest snapshots a branch keeps at least."""
    own: int | None = ref.get("min-snapshots-to-keep")
    return max(1, own or read_number(properties, SNAPSHOTS_MIN, SNAPSHOTS_MIN_DEFAULT))


def _count_within_bytes(chain: list[_Snapshot], properties: Mapping[str, str]) -> int:
    """Count the newest snapshots whose summaries together are within the table's limit; 0 of it is no limit."""
    max_bytes = read_number(properties, SUMMARIES_MAX_BYTES, SUMMARIES_MAX_BYTES_DEFAULT)
    if max_bytes == 0:
        return len(chain)
    sizes = itertools.accumulate(_summary_bytes(snapshot) for snapshot in chain)
    return sum(1 for _ in itertools.takewhile(lambda size: size <= max_bytes, sizes))


def _summary_bytes(snapshot: _Snapshot) -> int:
    return sum(len(key) + len(str(value)) for key, value in (snapshot.get("summary") or {}).items())


def _held(
    by_id: Mapping[int, _Snapshot], refs: Mapping[str, Mapping[str, Any]], properties: Mapping[str, str], *, now_ms: int
) -> set[int]:
    """Find what refs hold: the snapshots they point at, and what other branches keep of their own past."""
    held = {ref["snapshot-id"] for ref in refs.values()}
    for name, ref in refs.items():
        if name != MAIN_BRANCH and ref["type"] == "branch":
            own = list(_ancestors(by_id, ref["snapshot-id"]))
            held |= {snapshot["snapshot-id"] for snapshot in _within(own, ref, properties, now_ms)}
    return held


def _passed_over(chain: list[_Snapshot], doomed: list[_Snapshot], consumers: Sequence[Consumer]) -> Iterator[str]:
    """Name the consumers that have not come as far as the newest snapshot that goes."""
    positions = {snapshot["snapshot-id"]: position for position, snapshot in enumerate(chain)}
    newest = positions[doomed[0]["snapshot-id"]]
    yield from (each.name for each in consumers if positions.get(each.snapshot_id, -1) > newest)


def _around_others(chain: list[_Snapshot]) -> set[int]:
    """Find the snapshots that are not appends of ours, and those right before them."""
    others = {s["snapshot-id"] for s in chain if not _is_own_append(s)}
    return others | {s["parent-snapshot-id"] for s in chain if s["snapshot-id"] in others and "parent-snapshot-id" in s}


def _is_own_append(snapshot: _Snapshot) -> bool:
    summary = snapshot.get("summary") or {}
    return FLUSH_ID_KEY in summary and summary.get("operation") == "append"


def _plan(document: Mapping[str, Any], chain: list[_Snapshot], doomed: list[_Snapshot]) -> ExpiryPlan:
    snapshot_ids = {snapshot["snapshot-id"] for snapshot in doomed}
    # The run of kept ones that ends in main descends from its oldest: what that one has not, none of them has.
    oldest_of_run = next(i for i, s in enumerate(chain) if s["snapshot-id"] in snapshot_ids) - 1
    run = {snapshot["snapshot-id"] for snapshot in chain[:oldest_of_run]}
    kept = [snapshot for snapshot in document["snapshots"] if snapshot["snapshot-id"] not in snapshot_ids]
    used_lists = {snapshot["manifest-list"] for snapshot in kept}
    return ExpiryPlan(
        snapshot_ids=tuple(snapshot["snapshot-id"] for snapshot in doomed),
        request=_request(document, doomed),
        lists=tuple(s["manifest-list"] for s in doomed if s["manifest-list"] not in used_lists),
        replaced=tuple(_replaced(chain, snapshot_ids)),
        kept_lists=tuple(snapshot["manifest-list"] for snapshot in kept if snapshot["snapshot-id"] not in run),
    )


def _replaced(chain: list[_Snapshot], doomed_ids: set[int]) -> Iterator[tuple[str, str]]:
    for after, before in itertools.pairwise(chain):
        if before["snapshot-id"] in doomed_ids and MANIFESTS_REPLACED_KEY in (after.get("summary") or {}):
            yield before["manifest-list"], after["manifest-list"]


def _request(document: Mapping[str, Any], doomed: list[_Snapshot]) -> Request:
    main = document["refs"][MAIN_BRANCH]["snapshot-id"]
    requirements = (
        {"type": "assert-table-uuid", "uuid": document["table-uuid"]},
        {"type": "assert-ref-snapshot-id", "ref": MAIN_BRANCH, "snapshot-id": main},
    )
    removal = {"action": "remove-snapshots", "snapshot-ids": [snapshot["snapshot-id"] for snapshot in doomed]}
    return Request(requirements, (removal,))


# --- writer.expiring --------------------------------------------------------------------------------------------------
#
# Removes snapshots beyond a table's limits, and the metadata files that only they used. Which ones is expiry.py's.
#
# Steps, and what a crash after each leaves behind:
#
#     1. load the table and plan            nothing. Loaded anew, because a tag does not move main, and would go unseen
#     2. read the lists around merges       nothing
#     3. commit the removal                 files that nothing refers to; orphan removal takes them
#     4. delete what nothing refers to      fewer of them
#
# Files are deleted only after the catalog has said yes to step 3. Data files are never deleted here.


_log = logging.getLogger(__name__)

# Looking costs a load of the whole history: once in so many commits it adds a few percent to them.
LOOK_EVERY_SNAPSHOTS = 50
# Lists of snapshots kept aside that are read before manifests are deleted. With more tags than this, manifests stay.
KEPT_LISTS_MAX = 32
# Deletes and reads at once: enough to hide a far store's delay.
PARALLEL_REQUESTS = 16


def is_due(state: TableState) -> bool:
    """Tell whether it is time to look for old snapshots again."""
    return state.snapshot_count > 0 and state.snapshot_count % LOOK_EVERY_SNAPSHOTS == 0


async def expire_snapshots(catalog: CatalogClient, store: ObjectStore, state: TableState, *, now_ms: int) -> TableState:
    """Remove what is beyond the table's limits; the state after it.

    Cancelling leaves the snapshots removed or not, and files that nothing refers to.

    Raises:
        CatalogError, StorageError: nothing was deleted; the next time will do.
    """
    document = (await catalog.load_table(state.name)).document
    plan = plan_expiry(document, now_ms=now_ms)
    if plan is None or document["table-uuid"] != state.uuid:
        return replace(state, snapshot_count=len(document.get("snapshots") or ()))
    unused = await _unused_manifests(store, state, plan)
    await catalog.commit_table(state.name, plan.request, needs_answer=False)
    await _delete_all(store, [*_own(state, unused), *_own(state, plan.lists)])
    if plan.passed_over:
        _log.warning("consumers_passed_over", extra={"table": str(state.name), "consumers": list(plan.passed_over)})
    left = len(document["snapshots"]) - len(plan.snapshot_ids)
    _log.info(
        "snapshots_expired", extra={"table": str(state.name), "removed": len(plan.snapshot_ids), "snapshots": left}
    )
    return replace(state, snapshot_count=left, last_updated_ms=max(now_ms, state.last_updated_ms))


async def _unused_manifests(store: ObjectStore, state: TableState, plan: ExpiryPlan) -> set[str]:
    """Find the manifests that merges replaced and that no kept snapshot has; none where that cannot be told."""
    if not plan.replaced or len(plan.kept_lists) > KEPT_LISTS_MAX:
        return set()
    locations = {*plan.kept_lists, *(location for pair in plan.replaced for location in pair)}
    try:
        manifests = await _read_lists(store, sorted(locations))
    except WriterError as error:
        _log.warning("manifests_left", extra={"table": str(state.name), "reason": str(error)})
        return set()
    replaced = {path for before, after in plan.replaced for path in manifests[before] - manifests[after]}
    return replaced.difference(*(manifests[location] for location in plan.kept_lists))


async def _read_lists(store: ObjectStore, locations: Sequence[str]) -> dict[str, set[str]]:
    async def read(location: str) -> set[str]:
        return set(manifest_paths(await store.read(location), location))

    return dict(zip(locations, await map_parallel(read, locations, at_once=PARALLEL_REQUESTS), strict=True))


def _own(state: TableState, locations: Iterable[str]) -> list[str]:
    """Pick what lies where we write and is named as we name: a file of anybody else is not ours to delete."""
    root = metadata_location(state, "")
    names = (f"{root}{OWN_MANIFEST_PREFIX}", f"{root}snap-")
    return [location for location in locations if location.startswith(names)]


async def _delete_all(store: ObjectStore, locations: Sequence[str]) -> None:
    """Delete files that nothing refers to; one that stays is only untidy."""

    async def delete(location: str) -> str | None:
        try:
            await store.delete(location)
        except StorageError as error:
            return str(error)
        return None

    problems = await map_parallel(delete, locations, at_once=PARALLEL_REQUESTS)
    failures = [problem for problem in problems if problem is not None]
    if failures:
        _log.warning("metadata_files_left", extra={"files": len(failures), "reason": failures[0]})
