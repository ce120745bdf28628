"""Verifies a table: its records against one another, its files against its records. Owns the order of the work.

    1. records     ledgers, marks and totals agree                            lakefeed/contract/verification.py
    2. files       every live file is read once, in the order of its lowest sequence, and counted per snapshot
    3. snapshots   of each append whose files are all live: ledger = files    lakefeed/contract/verification.py
    4. totals      of the newest snapshot: totals = all files; after rewrites and expiry this is what counts
    5. duplicates  no change twice                                            duplicates.py

Nothing is written. A file is held whole, one ahead of the one being counted; rows are decoded in batches.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence, Set
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from lakefeed.contract import changes as cdc
from lakefeed.contract.changes import TableName
from lakefeed.contract.errors import WriterError
from lakefeed.contract.ledger import (
    TOTALS_PROPERTY,
    Facts,
    LedgerUnreadable,
    Totals,
    count_backfilled,
    join_facts,
    totals_from_text,
)
from lakefeed.contract.progress import PROGRESS_PROPERTY, Progress, progress_from_text
from lakefeed.contract.properties import MAIN_BRANCH
from lakefeed.contract.verification import (
    Finding,
    History,
    Kind,
    Recorded,
    Report,
    State,
    check_history,
    choose_after,
    compare_ledger,
    compare_whole,
    describe_gone,
    read_history,
    sources_of_one_epoch,
)
from lakefeed.iceberg.arrow import FIELD_ID_KEY
from lakefeed.iceberg.types import schema_from_json
from lakefeed.storage.config import StorageConfig
from lakefeed.storage.store import ObjectStore, open_store
from lakefeed.writer.commit.rest_catalog import open_foreign_catalog
from lakefeed.writer.config import IcebergConfig
from lakefeed.writer.files.row_hash import hash_rows
from lakefeed.writer.files.scan import (
    READ_ROW,
    Extent,
    FileRows,
    LiveFile,
    load_added,
    load_contents,
    load_removed,
    read_rows,
)
from lakefeed.writer.files.xxh64 import hash_longs

# --- writer.verification.plan -----------------------------------------------------------------------------------------
#
# What one verification reads. Owns which snapshots and files are part of it.


@dataclass(frozen=True, slots=True)
class Range:
    """What to verify: the table as of a snapshot, and of that what came after another; both may be left open."""

    after_id: int | None = None
    to_id: int | None = None


class Plan:
    """What a verification reads: the snapshots to check, and the live files in the order of their lowest sequence."""

    def __init__(
        self, history: History, *, chosen: Sequence[Recorded], files: Sequence[LiveFile], is_whole: bool
    ) -> None:
        self.history = history
        self.chosen = chosen
        self.files = sorted(files, key=lambda file: (file.extent.lowest, file.location))
        self.is_whole = is_whole
        self._replaced: set[str] | None = None

    @property
    def rows(self) -> int:
        """Count the rows to read, by the manifests."""
        return sum(file.rows for file in self.files)

    async def load_replaced(self, store: ObjectStore) -> set[str]:
        """Read which files rewrites have replaced; once, as few verifications need it."""
        if self._replaced is None:
            parts = [
                await load_removed(store, each.manifest_list, snapshot_id=each.snapshot_id)
                for each in self.history.snapshots
                if each.is_rewrite
            ]
            self._replaced = set().union(*parts)
        return self._replaced


# --- writer.verification.duplicates -----------------------------------------------------------------------------------
#
# Looks for changes that are in a table more than once, in bounded memory. Owns the search; reading is the caller's.
#
# Files come in the order of their lowest sequence. What lies below the next file's lowest can meet nobody any more: it
# is
# looked through and forgotten, so only rows of files that overlap are held. Where those are too many, the rows are
# dealt
# out into parts by their sequence, and each part is a search of its own over all files.
#
#     a source that never started over     two rows with one sequence
#     any other                            two rows with one sequence that were received at the same moment: a sequence
#                                          comes once in each epoch, and old rows do not say theirs
#     rows that were only READ             two of one row that were received at the same moment: a backfill gives all
#                                          rows of a chunk the position as of which it has read them


# Rows of files that overlap, of about 30 bytes each; up to twice as many are held.
HELD_MAX_ROWS = 8_000_000
# Sequences that a report names of each source; all are counted.
EXAMPLES_MAX = 10
KEY_COLUMNS = (cdc.SOURCE, cdc.SEQUENCE, cdc.INGESTED_AT, READ_ROW)

_READ_ROW_FIELD = pa.field(READ_ROW, pa.string(), metadata={FIELD_ID_KEY: b"1"})
_AGAIN = "again"
_SEED = 7


@dataclass(slots=True)
class Doubled:
    """Rows of one source that are there again."""

    rows: int = 0
    examples: list[int] = field(default_factory=list)


def count_parts(extents: Sequence[Extent], *, held_max: int) -> int:
    """Tell into how many parts to deal the rows so that those held at once are within the limit."""
    ends = [(extent.lowest, 0, extent.rows) for extent in extents]
    ends += [(extent.highest, 1, -extent.rows) for extent in extents]
    held = most = 0
    for _, _, rows in sorted(ends):
        held += rows
        most = max(most, held)
    return max(1, -(-most // held_max))


class DuplicateSearch:
    """A search through one part of a table's rows. Give it files in the order of their lowest sequence."""

    def __init__(self, *, one_epoch: Set[str], part: int = 0, parts: int = 1) -> None:
        self.found: dict[str, Doubled] = {}
        self._one_epoch = one_epoch
        self._part = part
        self._parts = parts
        self._held: list[pa.Table] = []
        self._held_rows = 0
        self._settle_at = 0

    def add(self, keys: pa.Table, *, lowest: int) -> None:
        """Take the keys of a file's rows; no file after it has a sequence below this file's lowest."""
        if self._held_rows > self._settle_at:
            self._settle(lowest)
        keys = self._own_part(keys)
        self._held.append(keys)
        self._held_rows += keys.num_rows

    def finish(self) -> Mapping[str, Doubled]:
        """Look through what is left, and tell all that was found."""
        self._look_through(self._joined())
        self._held = []
        return self.found

    def _own_part(self, keys: pa.Table) -> pa.Table:
        if self._parts == 1:
            return keys
        hashes = hash_longs(keys.column(cdc.SEQUENCE).combine_chunks().cast(pa.int64()).to_numpy(), _SEED)
        if keys.column(READ_ROW).null_count < len(keys):
            hashes ^= hash_rows(keys.select([READ_ROW]), [_READ_ROW_FIELD])
        return keys.filter(pa.array(hashes % np.uint64(self._parts) == np.uint64(self._part)))

    def _settle(self, below: int) -> None:
        """Let go of what can meet nobody any more; the next time only when as many again have come."""
        held = self._joined()
        is_open = pc.greater_equal(held.column(cdc.SEQUENCE), below)
        self._look_through(held.filter(pc.invert(is_open)))
        left = held.filter(is_open)
        self._held, self._held_rows, self._settle_at = [left], left.num_rows, 2 * left.num_rows

    def _joined(self) -> pa.Table:
        return pa.concat_tables(self._held) if self._held else pa.table({name: [] for name in KEY_COLUMNS})

    def _look_through(self, keys: pa.Table) -> None:
        if not keys.num_rows:
            return
        counted = keys.group_by([cdc.SOURCE, cdc.SEQUENCE, READ_ROW]).aggregate(
            [(cdc.SEQUENCE, "count"), (cdc.INGESTED_AT, "count_distinct")]
        )
        one_epoch = pc.is_in(counted.column(cdc.SOURCE), pa.array(sorted(self._one_epoch), pa.string()))
        once = pc.and_(one_epoch, pc.is_null(counted.column(READ_ROW)))
        allowed = pc.if_else(once, 1, counted.column(f"{cdc.INGESTED_AT}_count_distinct"))
        again = pc.subtract(counted.column(f"{cdc.SEQUENCE}_count"), allowed)
        doubled = counted.append_column(_AGAIN, again).filter(pc.greater(again, 0))
        for source in pc.unique(doubled.column(cdc.SOURCE)).to_pylist():
            self._note(source, doubled.filter(pc.equal(doubled.column(cdc.SOURCE), source)))

    def _note(self, source: str, doubled: pa.Table) -> None:
        known = self.found.setdefault(source, Doubled())
        known.rows += pc.sum(doubled.column(_AGAIN)).as_py()
        examples = doubled.column(cdc.SEQUENCE).slice(0, EXAMPLES_MAX - len(known.examples))
        known.examples += sorted(examples.to_pylist())


# --- writer.verification.verifier -------------------------------------------------------------------------------------


class Verifier:
    """One verification of one table, as of one version of its metadata."""

    def __init__(
        self,
        name: TableName,
        document: Mapping[str, Any],
        store: ObjectStore,
        *,
        on_rows: Callable[[int], object] = lambda _: None,
        held_max_rows: int = HELD_MAX_ROWS,
    ) -> None:
        self.report = Report(str(name))
        self._name = name
        self._document = document
        self._store = store
        self._on_rows = on_rows
        self._held_max_rows = held_max_rows
        properties = document.get("properties") or {}
        self._progress: Progress = progress_from_text(properties.get(PROGRESS_PROPERTY))
        self._totals = self._read_totals(properties)
        schemas = [schema_from_json(each).columns for each in document["schemas"]]
        current = next(each for each in document["schemas"] if each["schema-id"] == document["current-schema-id"])
        # Columns that were dropped or renamed go by what they were called last.
        columns = [field for schema in (*schemas, schema_from_json(current).columns) for field in schema.fields]
        self._names = {field.id: field.name for field in columns}
        self._by_snapshot: dict[int, list[Facts]] = {}

    def _read_totals(self, properties: Mapping[str, str]) -> Totals | None:
        try:
            return totals_from_text(properties.get(TOTALS_PROPERTY))
        except LedgerUnreadable as error:
            self.report.findings.append(Finding(Kind.UNREADABLE, str(error)))
            return None

    async def plan(self, wanted: Range) -> Plan:
        """Check the records, and find out which files are to be read.

        Raises:
            CatalogError: the table has no such snapshot.
            WriterError: manifests cannot be read.
        """
        refs = self._document.get("refs") or {}
        main_id = (refs.get(MAIN_BRANCH) or {}).get("snapshot-id")
        head_id = wanted.to_id if wanted.to_id is not None else main_id
        self.report.snapshot_id = head_id
        if head_id is None:
            return Plan(History(()), chosen=(), files=(), is_whole=True)
        history = read_history(self._document, head_id)
        is_whole = wanted.after_id is None and head_id == main_id
        totals = self._totals if is_whole else None
        self.report.findings += check_history(history, self._progress, totals)
        contents = await load_contents(self._store, history.snapshots[-1].manifest_list, sequence_id=self._sequence_id)
        if contents.delete_files:
            text = f"rows are deleted by delete files of somebody else: delete_files={contents.delete_files}"
            self.report.findings.append(Finding(Kind.LOSS, text, head_id))
        chosen = choose_after(history, wanted.after_id)
        ids = {snapshot.snapshot_id for snapshot in chosen}
        files = [file for file in contents.files if wanted.after_id is None or file.snapshot_id in ids]
        return Plan(history, chosen=chosen, files=files, is_whole=is_whole)

    @property
    def _sequence_id(self) -> int:
        return next((field_id for field_id, name in self._names.items() if name == cdc.SEQUENCE), 0)

    async def run(self, plan: Plan) -> Report:
        """Read all files and compare. Cancelling it leaves nothing behind.

        Raises:
            WriterError: metadata cannot be read; what is wrong with data files is a finding.
        """
        one_epoch = sources_of_one_epoch(self._progress, self._totals)
        parts = count_parts([file.extent for file in plan.files], held_max=self._held_max_rows)
        search = DuplicateSearch(one_epoch=one_epoch, parts=parts)
        appended = {each.snapshot_id for each in plan.history.snapshots if each.is_append and not each.is_own}
        async for file, rows in self._read(plan.files, uncounted=appended):
            self._count(file, rows)
            search.add(rows.keys, lowest=file.extent.lowest)
        self._note_duplicates(search)
        for part in range(1, parts):
            search = DuplicateSearch(one_epoch=one_epoch, part=part, parts=parts)
            every = {file.snapshot_id for file in plan.files}
            async for file, rows in self._read(plan.files, uncounted=every):
                search.add(rows.keys, lowest=file.extent.lowest)
            self._note_duplicates(search)
        await self._check_snapshots(plan)
        self._compare_totals(plan, appended)
        return self.report

    async def _read(
        self, files: Sequence[LiveFile], *, uncounted: set[int]
    ) -> AsyncIterator[tuple[LiveFile, FileRows]]:
        """Read files in order, the next one while one is counted; one that cannot be read is a finding."""
        ahead = asyncio.create_task(self._store.read(files[0].location)) if files else None
        try:
            for number, file in enumerate(files):
                assert ahead is not None
                reading, ahead = ahead, None
                await asyncio.wait([reading])
                if number + 1 < len(files):
                    ahead = asyncio.create_task(self._store.read(files[number + 1].location))
                try:
                    is_counted = file.snapshot_id not in uncounted
                    rows = await asyncio.to_thread(read_rows, reading.result(), self._names, is_counted=is_counted)
                except WriterError as error:
                    self._note_unreadable(file, error)
                    continue
                yield file, rows
        finally:
            if ahead is not None:
                ahead.cancel()
                await asyncio.gather(ahead, return_exceptions=True)

    def _note_unreadable(self, file: LiveFile, error: WriterError) -> None:
        finding = Finding(Kind.UNREADABLE, str(error), file.snapshot_id, file=file.location)
        if finding not in self.report.findings:
            self.report.findings.append(finding)
            self._on_rows(file.rows)

    def _count(self, file: LiveFile, rows: FileRows) -> None:
        self.report.rows += rows.rows
        self.report.files += 1
        self._on_rows(rows.rows)
        self._by_snapshot.setdefault(file.snapshot_id, []).append(rows.facts)
        if rows.rows != file.rows:
            kind = Kind.LOSS if rows.rows < file.rows else Kind.SURPLUS
            text = f"file has {rows.rows:,} rows, its manifest says {file.rows:,}"
            self.report.findings.append(Finding(kind, text, file.snapshot_id, file=file.location))

    def _note_duplicates(self, search: DuplicateSearch) -> None:
        for source, doubled in sorted(search.finish().items()):
            shown = ", ".join(map(str, doubled.examples))
            text = f"{doubled.rows:,} rows are there again, such as sequences {shown}"
            self.report.findings.append(Finding(Kind.DUPLICATE, text, source=source))

    async def _check_snapshots(self, plan: Plan) -> None:
        live: dict[int, int] = {}
        for file in plan.files:
            live[file.snapshot_id] = live.get(file.snapshot_id, 0) + file.rows
        for snapshot in plan.chosen:
            self.report.snapshots[snapshot.snapshot_id] = await self._check_snapshot(snapshot, plan, live)

    async def _check_snapshot(self, snapshot: Recorded, plan: Plan, live: Mapping[int, int]) -> State:
        if not snapshot.is_own or not snapshot.is_append:
            return State.REWRITE if snapshot.is_rewrite else State.FOREIGN
        if snapshot.ledger is None:
            return State.NOT_RECORDED
        if live.get(snapshot.snapshot_id, 0) < snapshot.ledger.rows:
            findings = await self._find_gone(snapshot, plan)
            self.report.findings += findings
            if not findings:
                return State.REWRITTEN
        found = join_facts(self._by_snapshot.get(snapshot.snapshot_id, ()))
        differences = list(compare_ledger(snapshot.ledger.facts, found, snapshot_id=snapshot.snapshot_id))
        self.report.findings += differences
        return State.DIFFERENT if differences else State.VERIFIED

    async def _find_gone(self, snapshot: Recorded, plan: Plan) -> list[Finding]:
        """Find files of a snapshot that are no longer in the table, and that no rewrite says it has replaced."""
        added = await load_added(self._store, snapshot.manifest_list, snapshot_id=snapshot.snapshot_id)
        gone = added - {file.location for file in plan.files}
        gone -= await plan.load_replaced(self._store)
        return [describe_gone(gone, snapshot_id=snapshot.snapshot_id)] if gone else []

    def _compare_totals(self, plan: Plan, appended: set[int]) -> None:
        self.report.facts = join_facts(
            facts for snapshot_id, parts in self._by_snapshot.items() if snapshot_id not in appended for facts in parts
        )
        snapshots = plan.history.snapshots
        backfilled = count_backfilled(
            self._document.get("properties") or {},
            ((each.chunk, each.ledger) for each in snapshots),
            known_after=plan.history.known_after,
        )
        compare_whole(self.report, self._totals, backfilled, is_whole=plan.is_whole)


# --- writer.verification.opening --------------------------------------------------------------------------------------
#
# What `lakefeed verify` needs to reach a table: catalog and store. Owns their lifetime.


@asynccontextmanager
async def open_verifier(
    iceberg: IcebergConfig,
    name: TableName,
    *,
    storage: StorageConfig,
    on_rows: Callable[[int], object] = lambda _: None,
) -> AsyncIterator[Verifier]:
    """Open a table to verify it as it is now, beside whoever commits to it.

    Raises:
        CatalogError, StorageError: it cannot be reached.
    """
    async with open_foreign_catalog(iceberg) as catalog:
        await catalog.load_config()
        document = (await catalog.load_table(name)).document
    # The table says where its files are; the settings, how to get there.
    async with open_store(replace(storage, warehouse=document["location"])) as store:
        yield Verifier(name, document, store, on_rows=on_rows)
