"""Commits flushes to tables over the REST catalog. Owns the order of writes, retries and looking again.

A commit goes through these steps; a crash after each one leaves:

    1. manifest and manifest list are written     files that nothing refers to; orphan removal takes them
    2. the catalog takes the request              the rows, with the progress marker: one atomic act
    3. the answer reaches us                      nothing more to do

No file is ever deleted here: a request whose outcome we do not know may have made a snapshot of it. Old snapshots and
what only they used go by another way, between flushes (expiry.py).
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from lakefeed.aio import Backoff, or_raise
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
from lakefeed.contract.properties import UPKEEP_PROPERTIES
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
from lakefeed.writer.config import WriterConfig
from lakefeed.writer.rows.table_settings import TableSettings

_log = logging.getLogger(__name__)

# Tries of one commit: with the pauses below about half a minute, after which the caller has better things to do.
ATTEMPTS_MAX = 10
BACKOFF = Backoff(first_s=0.1, max_s=5.0)

# Rows must not wait for tidiness: what is not done by then is done next time, or left to orphan removal.
EXPIRY_MAX_S = 30.0

_CODEC_NAMES = {"none": "uncompressed"}  # where Iceberg has another word than we
_SNAPSHOT_ID_BITS = 63  # a positive long, as all writers use


@dataclass(frozen=True, slots=True)
class CommitResult:
    """A committed flush: its snapshot, and the table as it is now."""

    snapshot_id: int
    state: TableState


@dataclass(slots=True)
class _Pending:
    """A flush on its way, and what it has come to. Its files were written for `base`; `state` is the table by now."""

    base: TableState
    state: TableState
    flush: Flush
    manifest: FreshManifest
    result: CommitResult | None = None


class Committer:
    """Commits to the tables of one catalog. It keeps no state of its own: any number of tables may use it at once."""

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
        self._random = random.SystemRandom()

    async def load(self, name: TableName) -> TableState:
        """Load a table.

        Raises:
            TableMissing: there is none of this name.
        """
        return table_state_from(name, (await self._catalog.load_table(name)).document)

    async def load_or_create(self, name: TableName, schema: Schema, settings: TableSettings) -> TableState:
        """Load a table, or create it with these columns; go on with the columns of the state, which has field ids.

        Raises:
            PartitionRejected: it cannot be partitioned as configured by the columns that have come so far.
        """
        try:
            return await self.load(name)
        except TableMissing:
            await self._catalog.ensure_namespace(name.namespace)
        layout = plan_new_layout(schema, settings)
        properties = {**table_properties(settings.config), **layout.properties}
        try:
            created = await self._catalog.create_table(
                name, schema=schema, spec=layout.spec, order=layout.order, properties=properties
            )
        except (CommitConflict, CommitUnknown):  # somebody else was first, or we were and never heard of it
            return await self.load(name)
        return table_state_from(name, created.document)

    async def commit_layout(self, state: TableState, request: Request) -> TableState:
        """Change a table's layout as planned.

        Raises:
            CommitConflict: the table changed meanwhile: load it and plan again.
        """
        return table_state_from(state.name, parse_table(await self._catalog.commit_table(state.name, request)).document)

    async def commit_schema(self, state: TableState, schema: Schema) -> TableState:
        """Make `schema` the table's current one.

        Raises:
            CommitConflict: the columns changed meanwhile: load, evolve again from there.
        """
        try:
            answer = await self._catalog.commit_table(state.name, plan_schema(state, schema))
        except CommitUnknown:
            fresh = await self.load(state.name)
            if fresh.uuid == state.uuid and fresh.schema.columns == schema.columns:
                return fresh
            raise
        return table_state_from(state.name, parse_table(answer).document)

    async def commit(
        self, state: TableState, flush: Flush, *, on_retry: Callable[[str], object] = lambda _: None
    ) -> CommitResult:
        """Commit a flush exactly once. After any error it may be committed: call again with the same flush.

        Cancelling leaves it committed or not; the next commit of the same flush finds out. `on_retry` hears why a try
        has failed that is followed by another.

        Raises:
            Fenced: a later service commits under our node id.
            RowsAlreadyCommitted: some of its rows are in the table; carries the marks.
            TableMissing, TableReplaced: the table is gone.
            ColumnsChanged: columns of its files are gone; write the rows again for those that there are.
            CommitConflict, CommitUnknown, CatalogUnavailable: no luck within the attempts; try again later.
            CatalogError: refused, and nothing that we know of the table is to blame.
            StorageError: manifests could not be written; try again later.
        """
        [result] = await self.commit_all([(state, flush)], on_retry=on_retry)
        return result

    @property
    def has_transactions(self) -> bool:
        """Tell whether the catalog commits to several tables at once."""
        return self._catalog.has_transactions

    async def commit_all(
        self,
        flushes: Sequence[tuple[TableState, Flush]],
        *,
        on_retry: Callable[[str], object] = lambda _: None,
        attempts_max: int | None = None,
    ) -> list[CommitResult]:
        """Commit flushes of different tables exactly once, and together: readers see all of them or none.

        What `commit` says of one flush holds for all; an error may be of any of the tables. Two tables and more need
        a catalog that has transactions.
        """
        pendings = [self._prepare(state, flush) for state, flush in flushes]
        # Marks that stand at our rows are ours, if an earlier call did commit, or another node's.
        must_look = any(state.progress.is_ahead_of(flush.spans) for state, flush in flushes)
        failure: CatalogError | None = None
        for number in range(attempts_max or ATTEMPTS_MAX):
            await self._pause(number)
            try:
                if must_look:
                    await self._look_at_all(pendings)
                    must_look = False
                await self._try_commit([pending for pending in pendings if pending.result is None])
                return [pending.result for pending in pendings if pending.result is not None]
            except CatalogUnavailable as error:
                failure = failure or error  # an outcome that was unknown stays so
            except ColumnsChanged:
                raise
            except CommitRefused as error:
                if not await self._look_at_all(pendings):  # it would be refused again
                    raise
                failure = error
            except (CommitConflict, CommitUnknown) as error:
                failure, must_look = error, True
            _log.warning("commit_retried", extra={"reason": str(failure), **_facts(pendings)})
            on_retry(str(failure))
        assert failure is not None
        raise failure

    def _prepare(self, state: TableState, flush: Flush) -> _Pending:
        assert flush.files, "a flush without rows is not committed"
        check_fence(state.progress, node=flush.node, generation=self._generation)
        snapshot_id = self._random.getrandbits(_SNAPSHOT_ID_BITS)
        return _Pending(state, state, flush, prepare_manifest(state, flush, snapshot_id=snapshot_id))

    async def maybe_expire(self, state: TableState) -> TableState:
        """Remove old snapshots if it is time to; the state after it. A failure is logged and waits for the next time.

        Called between flushes: the next one waits for it, but not for long.
        """
        if not is_due(state):
            return state
        try:
            async with asyncio.timeout(EXPIRY_MAX_S):
                return await expire_snapshots(self._catalog, self._store, state, now_ms=self._now_ms())
        except (WriterError, TimeoutError) as error:
            _log.warning("expiry_put_off", extra={"table": str(state.name), "reason": str(error) or "timed out"})
            return state

    @property
    def _generation(self) -> int:
        return self._fence.generation if self._fence else 0

    def _now_ms(self) -> int:
        return int(self._clock() * 1000)

    async def _try_commit(self, pendings: Sequence[_Pending]) -> None:
        if not pendings:  # all of them had landed
            return
        plans = [await self._plan(pending) for pending in pendings]
        writes = [write_metadata(self._store, plan, p.manifest) for plan, p in zip(plans, pendings, strict=True)]
        for written in await asyncio.gather(*writes, return_exceptions=True):
            or_raise(written)
        await self._send(plans)
        for pending, plan in zip(pendings, plans, strict=True):
            pending.result = CommitResult(pending.manifest.snapshot_id, plan.next_state)

    async def _plan(self, pending: _Pending) -> AppendPlan:
        snapshot_id = pending.manifest.snapshot_id
        pending.state = await load_manifests(self._store, pending.state)
        merged = await maybe_merge(self._store, pending.state, snapshot_id=snapshot_id)
        return plan_append(
            merged.state,
            pending.flush,
            manifest=pending.manifest.described,
            snapshot_id=snapshot_id,
            list_location=new_list_location(pending.state, snapshot_id),
            now_ms=self._now_ms(),
            manifests_replaced=merged.replaced,
            generation=self._generation,
        )

    async def _send(self, plans: Sequence[AppendPlan]) -> None:
        if len(plans) == 1:
            [plan] = plans
            await self._catalog.commit_table(plan.next_state.name, plan.request, needs_answer=False)
        else:
            await self._catalog.commit_transaction({plan.next_state.name: plan.request for plan in plans})

    async def _look_at_all(self, pendings: Sequence[_Pending]) -> bool:
        """Look what became of flushes; tell whether there is anything that we did not know."""
        news = [await self._look(pending) for pending in pendings]
        return any(news)

    async def _look(self, pending: _Pending) -> bool:
        """Load the table and see what became of the flush: its result, or a fresh state to build on."""
        state, flush = pending.state, pending.flush
        document = (await self._catalog.load_table(state.name)).document
        fresh = table_state_from(state.name, document)
        outcome = read_outcome(pending.base, fresh, document, flush)
        if outcome is Outcome.LANDED:
            snapshot_id = find_flush(document, flush.id)
            assert snapshot_id is not None
            pending.result = CommitResult(snapshot_id, fresh)
            return True
        check_fence(fresh.progress, node=flush.node, generation=self._generation)
        if outcome is Outcome.OVERTAKEN:
            message = f"rows are in the table: table={state.name} flush={flush.id}"
            raise RowsAlreadyCommitted(message, table=state.name, marks=fresh.progress.marks_in(flush.spans))
        unmoved = fresh.snapshot_id == state.snapshot_id
        pending.state = replace(fresh, manifests=state.manifests) if unmoved else fresh
        return replace(fresh, manifests=None) != replace(state, manifests=None)

    async def _pause(self, number: int) -> None:
        """Wait before another try, at random, so that writers who met once do not meet again."""
        if number:
            await asyncio.sleep(self._random.uniform(0, BACKOFF.limit_s(number)))


def _facts(pendings: Sequence[_Pending]) -> dict[str, str]:
    return {
        "table": ",".join(str(pending.state.name) for pending in pendings),
        "flush": ",".join(pending.flush.id for pending in pendings),
    }


def table_properties(config: WriterConfig) -> dict[str, str]:
    """Give the properties of a new change table."""
    return {
        "format-version": str(config.format_version),
        "lakefeed.append-only": "true",
        "write.parquet.compression-codec": _CODEC_NAMES.get(config.parquet_compression, config.parquet_compression),
        **UPKEEP_PROPERTIES,
    }
