"""Committer: commits flushes to tables through the REST catalog, each exactly once, with retries.

What a crash after each step of a commit leaves:

    1. manifest and manifest list are written     files that nothing refers to, until orphan removal deletes them
    2. the catalog accepts the request            the rows and the progress marker, committed atomically
    3. the response arrives                       nothing more to do

The committer deletes no file of an attempt: if the outcome of the request is unknown, a snapshot may refer to it. Old
snapshots and the files that only they use are deleted between flushes (expiry.py).
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from lakefeed.aio import or_raise
from lakefeed.backoff import Backoff
from lakefeed.contract.changes import TableName
from lakefeed.contract.errors import (
    CatalogError,
    CatalogUnavailable,
    ColumnsChanged,
    CommitConflict,
    CommitRefused,
    CommitUnknown,
    RowsAlreadyCommitted,
    TableMissing,
    WriterError,
)
from lakefeed.iceberg.types import Schema
from lakefeed.storage.store import ObjectStore
from lakefeed.writer.commit.expiry import expire_snapshots, is_due
from lakefeed.writer.commit.fencing import Fence, check_fence
from lakefeed.writer.commit.manifests import (
    FreshManifest,
    load_manifests,
    maybe_merge,
    new_list_location,
    prepare_manifest,
    write_metadata,
)
from lakefeed.writer.commit.plan import (
    AppendPlan,
    Flush,
    Outcome,
    Request,
    find_flush,
    plan_append,
    plan_new_layout,
    plan_schema,
    read_outcome,
)
from lakefeed.writer.commit.rest_catalog import CatalogClient, parse_table
from lakefeed.writer.commit.state import TableState, table_state_from
from lakefeed.writer.rows.table_settings import TableSettings

_log = logging.getLogger(__name__)

# Attempts of one commit: about half a minute with the pauses. After that the table's own retry state decides.
ATTEMPTS_MAX = 10
BACKOFF = Backoff(first_s=0.1, max_s=5.0)

# Flushes wait while snapshots expire. What is not done by then is done next time, or left to orphan removal.
EXPIRY_MAX_S = 30.0

_SNAPSHOT_ID_BITS = 63  # a positive long, as in other Iceberg writers


@dataclass(frozen=True, slots=True)
class CommitResult:
    """A committed flush: its snapshot, and the table as it is now."""

    snapshot_id: int
    state: TableState


@dataclass(slots=True)
class _Pending:
    """A flush that is being committed. Its files were written for `base`; `state` is the table as last loaded."""

    base: TableState
    state: TableState
    flush: Flush
    manifest: FreshManifest
    result: CommitResult | None = None


class Committer:
    """Commits to the tables of one catalog. It has no state of its own: any number of tables may use it at once."""

    def __init__(
        self,
        catalog: CatalogClient,
        store: ObjectStore,
        *,
        fence: Fence | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._catalog = catalog
        self._store = store
        self._fence = fence
        self._clock = clock

    async def load(self, name: TableName) -> TableState:
        """Load a table. Raise TableMissing if no table has this name."""
        return table_state_from(name, await self._catalog.load_table(name))

    async def load_or_create(self, name: TableName, schema: Schema, settings: TableSettings) -> TableState:
        """Load a table, or create it with these columns. The returned state has the field ids of the catalog.

        Raises: PartitionRejected if the columns known so far do not fit the configured partitioning.
        """
        try:
            return await self.load(name)
        except TableMissing:
            await self._catalog.ensure_namespace(name.namespace)
        spec, order, properties = plan_new_layout(schema, settings)
        try:
            created = await self._catalog.create_table(
                name, schema=schema, spec=spec, order=order, properties=properties
            )
        except (CommitConflict, CommitUnknown):  # another writer created it, or the response to us was lost
            return await self.load(name)
        return table_state_from(name, created)

    async def commit_layout(self, state: TableState, request: Request) -> TableState:
        """Change a table's layout as planned. Raise CommitConflict if it has changed: load it and plan again."""
        return table_state_from(state.name, parse_table(await self._catalog.commit_table(state.name, request)))

    async def commit_schema(self, state: TableState, schema: Schema) -> TableState:
        """Commit `schema` as the table's current schema.

        Raises: CommitConflict if the columns have changed; load the table and evolve its columns again.
        """
        try:
            response = await self._catalog.commit_table(state.name, plan_schema(state, schema))
        except CommitUnknown:
            fresh = await self.load(state.name)
            if fresh.uuid == state.uuid and fresh.schema.columns == schema.columns:
                return fresh
            raise
        return table_state_from(state.name, parse_table(response))

    async def commit(
        self, state: TableState, flush: Flush, *, on_retry: Callable[[str], object] = lambda _: None
    ) -> CommitResult:
        """Commit a flush exactly once. After any error it may be committed: call again with the same flush.

        Cancelling leaves it committed or not; the next commit of the same flush finds out. `on_retry` is called with
        the reason before each further attempt.

        Raises:
            Fenced: a later service commits under our node id.
            RowsAlreadyCommitted: some of its rows are in the table; the error has the marks.
            TableMissing, TableReplaced: the table is gone.
            ColumnsChanged: columns of its files were dropped; write the rows again for the current columns.
            CommitConflict, CommitUnknown, CatalogUnavailable: all attempts failed; try again later.
            CatalogError: the catalog refuses the request although the table has not changed.
            StorageError: manifests could not be written; try again later.
        """
        [result] = await self.commit_all([(state, flush)], on_retry=on_retry)
        return result

    @property
    def has_transactions(self) -> bool:
        """Return whether the catalog can commit to several tables atomically."""
        return self._catalog.has_transactions

    async def commit_all(
        self,
        flushes: Sequence[tuple[TableState, Flush]],
        *,
        on_retry: Callable[[str], object] = lambda _: None,
        attempts_max: int | None = None,
    ) -> list[CommitResult]:
        """Commit flushes of different tables exactly once and atomically: readers see all of them or none.

        Errors are those of `commit`, of any of the tables. More than one table needs a catalog with transactions.
        """
        pendings = [self._prepare(state, flush) for state, flush in flushes]
        # Marks past our rows are ours, if an earlier call has committed, or another node's.
        must_check = any(state.progress.marks_in(flush.spans) for state, flush in flushes)
        failure: CatalogError | None = None
        for number in range(attempts_max or ATTEMPTS_MAX):
            if number:
                await asyncio.sleep(BACKOFF.jittered_s(number))
            try:
                if must_check:
                    await self._check_all(pendings)
                    must_check = False
                await self._try_commit([pending for pending in pendings if pending.result is None])
                return [pending.result for pending in pendings if pending.result is not None]
            except CatalogUnavailable as error:
                failure = failure or error  # an unknown outcome remains unknown
            except ColumnsChanged:
                raise
            except CommitRefused as error:
                if not await self._check_all(pendings):  # nothing has changed: it would be refused again
                    raise
                failure = error
            except (CommitConflict, CommitUnknown) as error:
                failure, must_check = error, True
            facts = {
                "table": ",".join(str(pending.state.name) for pending in pendings),
                "flush": ",".join(pending.flush.id for pending in pendings),
            }
            _log.warning("commit_retried", extra={"reason": str(failure), **facts})
            on_retry(str(failure))
        assert failure is not None
        raise failure

    def _prepare(self, state: TableState, flush: Flush) -> _Pending:
        assert flush.files, "a flush without rows is not committed"
        check_fence(state.progress, node=flush.node, generation=self._generation)
        snapshot_id = random.SystemRandom().getrandbits(_SNAPSHOT_ID_BITS)
        return _Pending(state, state, flush, prepare_manifest(state, flush, snapshot_id=snapshot_id))

    async def maybe_expire(self, state: TableState) -> TableState:
        """Expire old snapshots if they are due, and return the state after it. Failures are logged, not raised.

        Called between flushes; the next flush waits for at most EXPIRY_MAX_S.
        """
        if not is_due(state):
            return state
        try:
            async with asyncio.timeout(EXPIRY_MAX_S):
                return await expire_snapshots(self._catalog, self._store, state, now_ms=self._now_ms())
        except (WriterError, TimeoutError) as error:
            _log.warning("expiry_postponed", extra={"table": str(state.name), "reason": str(error) or "timed out"})
            return state

    @property
    def _generation(self) -> int:
        return self._fence.generation if self._fence else 0

    def _now_ms(self) -> int:
        return int(self._clock() * 1000)

    async def _try_commit(self, pendings: Sequence[_Pending]) -> None:
        if not pendings:  # all of them are committed
            return
        plans = [await self._plan(pending) for pending in pendings]
        writes = [write_metadata(self._store, plan, p.manifest) for plan, p in zip(plans, pendings, strict=True)]
        for written in await asyncio.gather(*writes, return_exceptions=True):
            or_raise(written)
        if len(plans) == 1:
            [plan] = plans
            await self._catalog.commit_table(plan.next_state.name, plan.request, needs_response=False)
        else:
            await self._catalog.commit_transaction({plan.next_state.name: plan.request for plan in plans})
        for pending, plan in zip(pendings, plans, strict=True):
            pending.result = CommitResult(pending.manifest.snapshot_id, plan.next_state)

    async def _plan(self, pending: _Pending) -> AppendPlan:
        snapshot_id = pending.manifest.snapshot_id
        pending.state = await load_manifests(self._store, pending.state)
        state, manifests_replaced = await maybe_merge(self._store, pending.state, snapshot_id=snapshot_id)
        return plan_append(
            state,
            pending.flush,
            manifest=pending.manifest.described,
            snapshot_id=snapshot_id,
            list_location=new_list_location(pending.state, snapshot_id),
            now_ms=self._now_ms(),
            manifests_replaced=manifests_replaced,
            generation=self._generation,
        )

    async def _check_all(self, pendings: Sequence[_Pending]) -> bool:
        """Check the outcome of flushes; return whether any of their tables differs from what was known."""
        return any([await self._check(pending) for pending in pendings])

    async def _check(self, pending: _Pending) -> bool:
        """Load the table and set the flush's result, or the state to build the next attempt on."""
        state, flush = pending.state, pending.flush
        document = await self._catalog.load_table(state.name)
        fresh = table_state_from(state.name, document)
        outcome = read_outcome(pending.base, fresh, document, flush)
        if outcome is Outcome.LANDED:
            snapshot_id = find_flush(document, flush.id)
            assert snapshot_id is not None
            pending.result = CommitResult(snapshot_id, fresh)
            return True
        check_fence(fresh.progress, node=flush.node, generation=self._generation)
        if outcome is Outcome.OVERTAKEN:
            message = f"rows are already in the table: table={state.name} flush={flush.id}"
            raise RowsAlreadyCommitted(message, table=state.name, marks=fresh.progress.marks_in(flush.spans))
        is_same_snapshot = fresh.snapshot_id == state.snapshot_id
        pending.state = replace(fresh, manifests=state.manifests) if is_same_snapshot else fresh
        return replace(fresh, manifests=None) != replace(state, manifests=None)
