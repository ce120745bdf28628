"""Commits flushes to tables over the REST catalog. Owns the order of writes, retries and looking again.

A commit goes through these steps; a crash after each one leaves:

    1. manifest and manifest list are written     files that nothing refers to; orphan removal takes them
    2. the catalog takes the request              the rows, with the progress marker: one atomic act
    3. the answer reaches us                      nothing more to do

No file is ever deleted here: a request whose outcome we do not know may have made a snapshot of it.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from writer.changes import TableName
from writer.commit_plan import (
    AppendPlan,
    Flush,
    Outcome,
    find_flush,
    plan_append,
    plan_schema,
    read_outcome,
)
from writer.config import WriterConfig
from writer.errors import (
    CatalogError,
    CatalogUnavailable,
    CommitConflict,
    CommitUnknown,
    RowsAlreadyCommitted,
    StorageError,
    TableMissing,
)
from writer.iceberg.catalog_client import CatalogClient, parse_table
from writer.iceberg.manifest_merge import OWN_MANIFEST_PREFIX, apply_merge, decode_entries, plan_merge
from writer.iceberg.manifests import (
    ManifestFile,
    ManifestUnreadable,
    decode_manifest_list,
    describe_manifest,
    encode_entries,
    encode_manifest,
    encode_manifest_list,
)
from writer.iceberg.partitions import parse_partition
from writer.iceberg.table_state import TableState, metadata_location, table_state_from
from writer.storage import ObjectStore
from writer.types import Schema

T = TypeVar("T")

_log = logging.getLogger(__name__)

# Tries of one commit: with the pauses below about half a minute, after which the caller has better things to do.
ATTEMPTS_MAX = 10
PAUSE_FIRST_S = 0.05
PAUSE_MAX_S = 5.0
# Small files, read once in a hundred commits: enough at once to hide a far store's delay.
MERGE_PARALLEL_READS = 16

_SNAPSHOT_ID_BITS = 63  # a positive long, as all writers use


@dataclass(frozen=True, slots=True)
class CommitResult:
    """A committed flush: its snapshot, and the table as it is now."""

    snapshot_id: int
    state: TableState


@dataclass(slots=True)
class _Pending:
    """A flush on its way: its manifest fits every attempt, so it is encoded and written once."""

    flush: Flush
    snapshot_id: int
    manifest: ManifestFile
    manifest_bytes: bytes
    manifest_is_durable: bool = False


class Committer:
    """Commits to the tables of one catalog. It keeps no state of its own: any number of tables may use it at once."""

    def __init__(self, catalog: CatalogClient, store: ObjectStore, *, clock: Callable[[], float] = time.time) -> None:
        self._catalog = catalog
        self._store = store
        self._clock = clock
        self._random = random.SystemRandom()

    async def load(self, name: TableName) -> TableState:
        """Load a table.

        Raises:
            TableMissing: there is none of this name.
        """
        return table_state_from(name, (await self._catalog.load_table(name)).document)

    async def load_or_create(self, name: TableName, schema: Schema, config: WriterConfig) -> TableState:
        """Load a table, or create it with these columns; go on with the columns of the state, which has field ids."""
        try:
            return await self.load(name)
        except TableMissing:
            await self._catalog.ensure_namespace(name.namespace)
        try:
            spec = parse_partition(config.partition, schema)
            created = await self._catalog.create_table(
                name, schema=schema, spec=spec, properties=table_properties(config)
            )
        except (CommitConflict, CommitUnknown):  # somebody else was first, or we were and never heard of it
            return await self.load(name)
        return table_state_from(name, created.document)

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

    async def commit(self, state: TableState, flush: Flush) -> CommitResult:
        """Commit a flush exactly once. After any error it may be committed: call again with the same flush.

        Cancelling leaves it committed or not; the next commit of the same flush finds out.

        Raises:
            RowsAlreadyCommitted: some of its rows are in the table; carries the marks.
            TableMissing, TableReplaced: the table is gone.
            CommitConflict, CommitUnknown, CatalogUnavailable: no luck within the attempts; try again later.
            StorageError: manifests could not be written; try again later.
        """
        assert flush.files, "a flush without rows is not committed"
        pending = _prepare(state, flush, snapshot_id=self._random.getrandbits(_SNAPSHOT_ID_BITS))
        # Marks that stand at our rows are ours, if an earlier call did commit, or another node's.
        must_look = state.progress.is_ahead_of(flush.spans)
        failure: CatalogError | None = None
        for number in range(ATTEMPTS_MAX):
            await self._pause(number)
            try:
                if must_look:
                    found = await self._look(state, flush)
                    if isinstance(found, CommitResult):
                        return found
                    state, must_look = found, False
                return await self._try_commit(state, pending)
            except CatalogUnavailable as error:
                failure = failure or error  # an outcome that was unknown stays so
            except (CommitConflict, CommitUnknown) as error:
                failure, must_look = error, True
            _log.warning("commit_retried", extra={"table": str(state.name), "flush": flush.id, "reason": str(failure)})
        assert failure is not None
        raise failure

    async def _try_commit(self, state: TableState, pending: _Pending) -> CommitResult:
        state = await self._maybe_merge(await self._with_manifests(state), pending.snapshot_id)
        name = f"snap-{pending.snapshot_id}-{uuid.uuid4()}.avro"  # new with each attempt: an earlier one may be in use
        plan = plan_append(
            state,
            pending.flush,
            manifest=pending.manifest,
            snapshot_id=pending.snapshot_id,
            list_location=metadata_location(state, name),
            now_ms=int(self._clock() * 1000),
        )
        await self._write_metadata(plan, pending)
        await self._catalog.commit_table(state.name, plan.request)
        return CommitResult(pending.snapshot_id, plan.next_state)

    async def _write_metadata(self, plan: AppendPlan, pending: _Pending) -> None:
        """Write list and manifest side by side: nothing refers to either before the commit."""
        location = plan.next_state.manifest_list
        assert location is not None
        writes = [self._store.write(location, encode_manifest_list(plan.manifests, plan.header))]
        if not pending.manifest_is_durable:
            writes.append(self._store.write(pending.manifest["manifest_path"], pending.manifest_bytes))
        for result in await asyncio.gather(*writes, return_exceptions=True):
            _or_raise(result)
        pending.manifest_is_durable = True

    async def _look(self, state: TableState, flush: Flush) -> CommitResult | TableState:
        """Load the table and see what became of the flush; the fresh state if nothing did."""
        document = (await self._catalog.load_table(state.name)).document
        fresh = table_state_from(state.name, document)
        match read_outcome(state, fresh, document, flush):
            case Outcome.LANDED:
                snapshot_id = find_flush(document, flush.id)
                assert snapshot_id is not None
                return CommitResult(snapshot_id, fresh)
            case Outcome.OVERTAKEN:
                marks = fresh.progress.marks_in(flush.spans)
                raise RowsAlreadyCommitted(f"rows are in the table: table={state.name} flush={flush.id}", marks=marks)
            case Outcome.RETRY:
                unmoved = fresh.snapshot_id == state.snapshot_id
                return replace(fresh, manifests=state.manifests) if unmoved else fresh

    async def _with_manifests(self, state: TableState) -> TableState:
        if state.manifests is not None:
            return state
        assert state.manifest_list is not None
        return replace(state, manifests=decode_manifest_list(await self._store.read(state.manifest_list)))

    async def _maybe_merge(self, state: TableState, snapshot_id: int) -> TableState:
        """Merge small manifests if there are many; one that cannot be read now only puts it off."""
        assert state.manifests is not None
        chosen = plan_merge(state.manifests, state.shape, state.properties)
        if not chosen:
            return state
        location = metadata_location(state, _new_manifest_name())
        try:
            encoded = encode_entries(await self._read_entries(chosen), state.shape)
            await self._store.write(location, encoded)
        except (StorageError, ManifestUnreadable) as error:
            _log.warning("merge_put_off", extra={"table": str(state.name), "reason": str(error)})
            return state
        merged = apply_merge(
            state.manifests,
            chosen,
            shape=state.shape,
            snapshot_id=snapshot_id,
            sequence_number=state.last_sequence_number + 1,
            location=location,
            size_bytes=len(encoded),
        )
        return replace(state, manifests=merged)

    async def _read_entries(self, manifests: Sequence[ManifestFile]) -> list[dict[str, Any]]:
        slots = asyncio.Semaphore(MERGE_PARALLEL_READS)

        async def read(manifest: ManifestFile) -> list[dict[str, Any]]:
            async with slots:
                return decode_entries(await self._store.read(manifest["manifest_path"]), manifest)

        found = await asyncio.gather(*(read(manifest) for manifest in manifests), return_exceptions=True)
        return [entry for entries in map(_or_raise, found) for entry in entries]

    async def _pause(self, number: int) -> None:
        """Wait before another try, at random, so that writers who met once do not meet again."""
        if number:
            await asyncio.sleep(self._random.uniform(0, min(PAUSE_MAX_S, PAUSE_FIRST_S * 2**number)))


def _prepare(state: TableState, flush: Flush, *, snapshot_id: int) -> _Pending:
    encoded = encode_manifest(flush.files, shape=state.shape, snapshot_id=snapshot_id)
    manifest = describe_manifest(
        flush.files,
        shape=state.shape,
        snapshot_id=snapshot_id,
        location=metadata_location(state, _new_manifest_name()),
        size_bytes=len(encoded),
    )
    return _Pending(flush, snapshot_id, manifest, encoded)


def _new_manifest_name() -> str:
    return f"{OWN_MANIFEST_PREFIX}{uuid.uuid4()}.avro"


def _or_raise(result: T | BaseException) -> T:
    """Unwrap what gather collected, so that all of its parts have ended before the first failure is told."""
    if isinstance(result, BaseException):
        raise result
    return result


def table_properties(config: WriterConfig) -> dict[str, str]:
    """Give the properties of a new change table."""
    return {
        "format-version": str(config.format_version),
        "lakefeed.append-only": "true",
        "write.parquet.compression-codec": "zstd",
    }
