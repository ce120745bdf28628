"""Replays changes out of quarantine: appends them to their table, each once, whatever is killed in between.

Owns the order of the steps; a crash after each leaves:

    1. settle: what the table's note says was replayed and the quarantine does not, is said there     nothing to redo
    2. look into the table for changes that it has after all (an answer was lost, or another node)    nothing
    3. decode as ever; what fails again stays where it is                                             nothing
    4. commit the rows, with the note                                                                 step 1 finds it
    5. say in the quarantine that they were replayed                                                  done

Sources, sequences, operations and times stay as they were. The marks of the sources are left alone: that a change is
not written once more when the log is read again is the work of the quarantine's marks (rows.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pyarrow as pa
import pyarrow.compute as pc

from writer import columns as cdc
from writer.changes import Position, Span, TableName
from writer.errors import (
    CatalogError,
    CommitConflict,
    RowsAlreadyCommitted,
    RowsUnfit,
    TableMissing,
    TableReplaced,
)
from writer.iceberg.table_state import TableState
from writer.quarantine import entries as core
from writer.quarantine import names
from writer.quarantine.append import append_rows
from writer.quarantine.entries import Filter
from writer.quarantine.names import Kind
from writer.quarantine.replay_plan import (
    READ_COLUMNS,
    REPLAYED_PROPERTY,
    REPLAYS,
    Replayed,
    are_too_many,
    change_group,
    each_once,
    identities,
    identity_columns,
    plan_batches,
    plan_ranges,
    replayed_from_text,
    rows_of,
    stored_identities,
    with_times,
)
from writer.quarantine.store import Contents, Quarantine
from writer.table_columns import TableColumns
from writer.table_context import TableContext
from writer.table_scan import find_files, read_columns

# Changes in one commit: large enough that commits are few, small enough to decode, hold and start over at once.
BATCH_MAX_ROWS = 20_000
# The service, or another replay, may commit first a few times; after that it is better to run the command again.
ATTEMPTS_MAX = 10
# Failures that a report names; all are counted.
FAILURES_MAX = 100

_MOVED_ON = (RowsAlreadyCommitted, RowsUnfit, CommitConflict, TableMissing, TableReplaced)


@dataclass(frozen=True, slots=True)
class Failure:
    """A change that its table still cannot take, and why not."""

    id: str
    reason: str


@dataclass(slots=True)
class ReplayReport:
    """What a replay did: appended now, found in the table already, and not possible."""

    replayed: int = 0
    found: int = 0
    failed: int = 0
    failures: list[Failure] = field(default_factory=list)

    def add_failures(self, failures: Sequence[Failure]) -> None:
        """Count failures, and keep the first ones."""
        self.failed += len(failures)
        self.failures += failures[: FAILURES_MAX - len(self.failures)]


class Replay:
    """One replay of one table's changes."""

    def __init__(
        self,
        table: TableName,
        contents: Contents,
        context: TableContext,
        *,
        now_us: Callable[[], int],
        on_changes: Callable[[int], object] = lambda _: None,
    ) -> None:
        self.report = ReplayReport()
        self._table = table
        self._contents = contents
        # All open entries of the table, whatever is asked for: notes are written in terms of them.
        self._open = core.apply_filter(contents.entries, Filter(table=str(table)))
        self._context = context
        self._now_us = now_us
        self._on_changes = on_changes
        self._quarantine = Quarantine(table.namespace, context)

    async def run(self, wanted: Filter) -> ReplayReport:
        """Replay the changes of the table that a filter asks for. Cancelling it, or a crash, leaves what is done done.

        Raises: WriterError if it did not get to the end: run it again.
        """
        return await self._run(core.apply_filter(self._open, wanted))

    async def run_ids(self, ids: Sequence[str]) -> ReplayReport:
        """Replay those of some changes that are open, as `run` does."""
        return await self._run(core.with_ids(self._open, ids))

    async def _run(self, entries: pa.Table) -> ReplayReport:
        await self._settle(await self._load())
        gathered: list[pa.Table] = []
        for file in core.files_with(entries):
            gathered.append(await self._quarantine.read(self._contents, entries, file=file, columns=READ_COLUMNS))
            if sum(rows.num_rows for rows in gathered) >= BATCH_MAX_ROWS:
                await self._replay_all(gathered)
                gathered = []
        await self._replay_all(gathered)
        return self.report

    async def _replay_all(self, gathered: Sequence[pa.Table]) -> None:
        if not gathered:
            return
        rows = each_once(self._still_open(pa.concat_tables(gathered)))
        batches = deque(plan_batches(rows, max_rows=BATCH_MAX_ROWS))
        while batches:
            rows = batches.popleft()
            if not await self._replay_batch(rows):
                half = rows.num_rows // 2
                batches.extendleft((rows.slice(half), rows.slice(0, half)))

    async def _replay_batch(self, rows: pa.Table) -> bool:
        """Replay changes together; False if that would take too long a note, so that they must go in parts."""
        for _ in range(ATTEMPTS_MAX):
            try:
                return await self._try_batch(rows)
            except _MOVED_ON:
                continue  # plan again on what the table is now
        raise CatalogError(f"table is written by others all the time: table={self._table} attempts={ATTEMPTS_MAX}")

    async def _try_batch(self, rows: pa.Table) -> bool:
        columns = TableColumns(self._table, self._context)
        await columns.open()
        await self._settle(columns.state)
        rows = self._still_open(rows)
        present = await self._find_present(rows, columns.state)
        decoded = await self._decode(_rows_without(rows, present), columns)
        ranges = plan_ranges(self._open, decoded.ids)
        if are_too_many(ranges):
            return False
        if decoded.ids:
            mark = columns.marks.get(REPLAYS)
            position = Position(0, mark.sequence + 1 if mark else 1)
            note = Replayed(position.sequence, ranges)
            await append_rows(
                decoded.tables,
                columns,
                self._context,
                spans={REPLAYS: Span(position, position)},
                properties={REPLAYED_PROPERTY: note.to_text()},
            )
        await self._say_replayed([*decoded.ids, *present])
        self.report.replayed += len(decoded.ids)
        self.report.found += len(present)
        self.report.add_failures(decoded.failures)
        self._on_changes(rows.num_rows)
        return True

    async def _load(self) -> TableState | None:
        try:
            return await self._context.committer.load(self._table)
        except TableMissing:
            return None

    async def _settle(self, state: TableState | None) -> None:
        """Say in the quarantine what the last replay has done and could not say any more."""
        note = replayed_from_text(state.properties.get(REPLAYED_PROPERTY)) if state else None
        ids = note.ids_in(self._open) if note else []
        await self._say_replayed(ids)
        self.report.replayed += len(ids)
        self._on_changes(len(ids))

    async def _say_replayed(self, ids: Sequence[str]) -> None:
        if ids:
            await self._quarantine.resolve(ids, kind=Kind.REPLAYED, table=self._table, now_us=self._now_us())
            self._open = core.without(self._open, ids)

    def _still_open(self, rows: pa.Table) -> pa.Table:
        return rows.filter(pc.is_in(rows.column(cdc.ROW_ID), self._open.column(core.ID).combine_chunks()))

    async def _find_present(self, rows: pa.Table, state: TableState | None) -> list[str]:
        """Find changes that are in their table already, by all that tells one from another there."""
        if state is None or not rows.num_rows:
            return []
        times_us = rows.column(cdc.TIMESTAMP).cast(pa.int64())
        within = {
            cdc.SEQUENCE: _ends(rows.column(names.SEQUENCE)),
            cdc.TIMESTAMP: _ends(times_us),
            cdc.SOURCE: _ends(rows.column(names.SOURCE)),
        }
        ids = dict(zip(identities(rows), rows.column(cdc.ROW_ID).to_pylist(), strict=True))
        sequences = rows.column(names.SEQUENCE).combine_chunks()
        columns = identity_columns(state.schema.columns)
        found = []
        for file in await find_files(state, self._context.store, within=within):
            stored = await read_columns(file, state, self._context.store, names=columns)
            near = stored.filter(pc.is_in(stored.column(cdc.SEQUENCE), sequences))
            found += [ids[identity] for identity in stored_identities(near) if identity in ids]
        return sorted(set(found))

    async def _decode(self, rows: pa.Table, columns: TableColumns) -> _Decoded:
        done = _Decoded()
        if rows.num_rows:
            sifted = await columns.decode(change_group(rows, self._table))
            for part, decoded in sifted.kept:
                own = rows_of(part, rows)
                done.tables.append(with_times(decoded, own))
                done.ids += own.column(cdc.ROW_ID).to_pylist()
            for part, reason in sifted.refused:
                done.failures += [Failure(id_, reason.text) for id_ in rows_of(part, rows)[cdc.ROW_ID].to_pylist()]
        return done


@dataclass(slots=True)
class _Decoded:
    """Changes in their table's columns, and those that do not get there."""

    tables: list[pa.Table] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)


def _rows_without(rows: pa.Table, ids: Sequence[str]) -> pa.Table:
    """Leave out rows by the ids of their changes."""
    return rows.filter(pc.invert(pc.is_in(rows.column(cdc.ROW_ID), pa.array(ids, pa.string()))))


def _ends(column: pa.ChunkedArray) -> tuple[object, object]:
    ends = pc.min_max(column)
    return ends["min"].as_py(), ends["max"].as_py()
