"""One namespace's quarantine as commands see it. Owns reading it and saying in it what became of changes.

Everything is appended, nothing is deleted: a change that was replayed or dropped stays readable, with a row more under
its id that says so. Saying it twice is harmless, so a command that was killed is simply run again.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from writer import columns as cdc
from writer.arrow.groups import ArrowGroup
from writer.changes import Position, SourceId, Span, TableName
from writer.decoding import spans_of
from writer.errors import CatalogError, CommitConflict, RowsAlreadyCommitted, TableMissing
from writer.iceberg.table_state import TableState
from writer.quarantine import entries as core
from writer.quarantine import names
from writer.quarantine.append import append_rows
from writer.quarantine.names import Kind
from writer.quarantine.rows import COLUMNS, RECORDS, RESOLUTIONS, resolution_rows, without_changes
from writer.table_columns import TableColumns
from writer.table_context import TableContext
from writer.table_scan import StoredFile, find_files, read_columns

# Two commands that say something at once meet once or twice; whoever loses so often has another problem.
ATTEMPTS_MAX = 10

# All that `show` prints of a change.
SHOWN_COLUMNS = (cdc.ROW_ID, cdc.TIMESTAMP, cdc.INGESTED_AT, *COLUMNS.names)


@dataclass(frozen=True, slots=True)
class Contents:
    """The quarantine as of one snapshot: its files, and what of it is open."""

    state: TableState
    files: Sequence[StoredFile]
    entries: pa.Table


class Quarantine:
    """The quarantine of one namespace."""

    def __init__(self, namespace: tuple[str, ...], context: TableContext) -> None:
        self.name = TableName(namespace, names.TABLE)
        self._context = context

    async def load(self, *, on_rows: Callable[[int], object] = lambda _: None) -> Contents | None:
        """Read what is open; None if nothing was ever put there. `on_rows` hears of rows as they are read."""
        try:
            state = await self._context.committer.load(self.name)
        except TableMissing:
            return None
        files = await find_files(state, self._context.store)
        if not files:
            return None
        parts = []
        for file in files:
            parts.append(await read_columns(file, state, self._context.store, names=list(core.READ_COLUMNS)))
            on_rows(file.record_count)
        return Contents(state, files, core.open_entries(core.entries_of(parts)))

    async def read(
        self, contents: Contents, entries: pa.Table, *, file: int, columns: Sequence[str] = SHOWN_COLUMNS
    ) -> pa.Table:
        """Read those of some entries that are in one file."""
        store = self._context.store
        rows = await read_columns(contents.files[file], contents.state, store, names=list({*columns, names.KIND}))
        ids = entries.filter(pc.equal(entries.column(core.FILE), file)).column(core.ID).combine_chunks()
        is_kept = pc.equal(rows.column(names.KIND), Kind.QUARANTINED.value)
        found = rows.filter(pc.and_(is_kept, pc.is_in(rows.column(cdc.ROW_ID), ids)))
        return found.select(list(columns))

    async def resolve(self, ids: Sequence[str], *, kind: Kind, table: TableName, now_us: int) -> None:
        """Say what became of changes of one table.

        Raises: WriterError if that is not known to be committed: saying it again does no harm.
        """

        async def attempt(columns: TableColumns) -> None:
            after = _sequence_of(columns, RESOLUTIONS)
            group = resolution_rows(ids, kind=kind, table=table, after_sequence=after, recorded_at_us=now_us)
            await self._append([group], columns, spans=spans_of(group))

        await self._until_first(attempt)

    async def keep(self, groups: Sequence[ArrowGroup]) -> None:
        """Keep changes that a command has taken out of records, once; the marks of their sources are left alone.

        Raises: WriterError if that is not known to be committed: keeping them again does no harm.
        """

        async def attempt(columns: TableColumns) -> None:
            known = await self._known_ids(groups, columns.state)
            fresh = [left for group in groups if len(left := without_changes(group, known))]
            if fresh:
                position = Position(0, _sequence_of(columns, RECORDS) + 1)
                await self._append(fresh, columns, spans={RECORDS: Span(position, position)})

        await self._until_first(attempt)

    async def _until_first(self, attempt: Callable[[TableColumns], Awaitable[None]]) -> None:
        for _ in range(ATTEMPTS_MAX):
            columns = TableColumns(self.name, self._context)
            await columns.open()
            try:
                return await attempt(columns)
            except (RowsAlreadyCommitted, CommitConflict):
                continue  # another command spoke first: go on behind it
        raise CatalogError(f"quarantine is written by others all the time: table={self.name} attempts={ATTEMPTS_MAX}")

    async def _known_ids(self, groups: Sequence[ArrowGroup], state: TableState | None) -> pa.Array:
        """Find which of these changes are there, open or not."""
        wanted = pa.concat_arrays([group.rows.column(cdc.ROW_ID).combine_chunks() for group in groups])
        found = [wanted.slice(0, 0)]
        if state is None:
            return found[0]
        for file in await find_files(state, self._context.store):
            ids = (await read_columns(file, state, self._context.store, names=[cdc.ROW_ID])).column(cdc.ROW_ID)
            found += ids.filter(pc.is_in(ids, wanted)).chunks
        return pa.concat_arrays(found)

    async def _append(
        self, groups: Sequence[ArrowGroup], columns: TableColumns, *, spans: Mapping[SourceId, Span]
    ) -> None:
        rows: list[pa.Table] = []
        for group in groups:
            sifted = await columns.decode(group)
            assert not sifted.refused, "these rows are our own"
            rows += [decoded for _, decoded in sifted.kept]
        await append_rows(rows, columns, self._context, spans=spans, properties={})


def _sequence_of(columns: TableColumns, command: SourceId) -> int:
    mark = columns.marks.get(command)
    return mark.sequence if mark else 0
