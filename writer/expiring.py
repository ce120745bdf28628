"""Removes snapshots beyond a table's limits, and the metadata files that only they used. Which ones is expiry.py's.

Steps, and what a crash after each leaves behind:

    1. load the table and plan            nothing. Loaded anew, because a tag does not move main, and would go unseen
    2. read the lists around merges       nothing
    3. commit the removal                 files that nothing refers to; orphan removal takes them
    4. delete what nothing refers to      fewer of them

Files are deleted only after the catalog has said yes to step 3. Data files are never deleted here.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import replace

from writer.errors import StorageError, WriterError
from writer.iceberg.catalog_client import CatalogClient
from writer.iceberg.expiry import ExpiryPlan, plan_expiry
from writer.iceberg.manifest_merge import OWN_MANIFEST_PREFIX
from writer.iceberg.manifests import decode_manifest_list
from writer.iceberg.table_state import TableState, metadata_location
from writer.parallel import map_parallel
from writer.storage import ObjectStore

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
        found = decode_manifest_list(await store.read(location))
        return {manifest["manifest_path"] for manifest in found.manifests}

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
