"""Quarantine of a namespace, as commands see it: what is open, reading it, recording what became of changes.

A change is open if it was quarantined and is neither replayed nor dropped. The quarantine is an append-only change
table: a change that was replayed or dropped stays readable, and one more row under its id says so. Saying it twice is
harmless, so a command that was killed is simply run again. A change that two nodes quarantined is one, by its id.

Entries are an Arrow table of all that is open, in the order of commits, without images, which stay in their files:

    id  kind  table_name  source  reason  reason_text  epoch  sequence  recorded_at  file

Commands go through the REST catalog, so they run beside a service, on another machine, or on another catalog.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from lakefeed.contract import changes as cdc
from lakefeed.contract import properties
from lakefeed.contract.changes import SourceId, Span, TableName
from lakefeed.contract.errors import (
    CatalogError,
    CommitConflict,
    RowsAlreadyCommitted,
    RowsUnfit,
    TableMissing,
    TableReplaced,
    WriterError,
)
from lakefeed.contract.properties import Kind
from lakefeed.writer.commit.state import TableState
from lakefeed.writer.files.scan import LiveFile, find_files, read_columns
from lakefeed.writer.tables.columns import TableColumns
from lakefeed.writer.tables.context import TableContext
from lakefeed.writer.tables.flush_policy import FlushPolicy
from lakefeed.writer.tables.quarantine import COLUMNS, RESOLUTIONS, resolution_rows
from lakefeed.writer.tables.rounds import write_flush

# The service or another command may commit first a few times; after that it is better to run the command again.
ATTEMPTS_MAX = 10

# All that `show` prints of a change.
SHOWN_COLUMNS = (cdc.ROW_ID, cdc.TIMESTAMP, cdc.INGESTED_AT, *COLUMNS.names)

ID = "id"
FILE = "file"

# The columns of entries beside these two; of the first ones, many rows share few values.
_REPEATING = (properties.KIND, properties.TABLE_NAME, properties.SOURCE, properties.REASON, properties.REASON_TEXT)
ENTRY_COLUMNS = (*_REPEATING, properties.EPOCH, properties.SEQUENCE, properties.RECORDED_AT)
NO_ENTRIES = pa.schema(
    [(ID, pa.string()), *(COLUMNS.field(name) for name in ENTRY_COLUMNS), (FILE, pa.int32())]
).empty_table()


class NotInQuarantine(WriterError):
    """No open change, or more than one, has the given id: look it up with `quarantine list`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Filter:
    """Which changes a command selects; None selects all. Times are those of the quarantining."""

    table: str | None = None
    source: str | None = None
    reason: str | None = None
    since: dt.datetime | None = None
    until: dt.datetime | None = None
    ids: tuple[str, ...] = ()


def entries_of(parts: Sequence[pa.Table]) -> pa.Table:
    """Join what was read of each file, in the order of files."""
    joined = []
    for number, part in enumerate(parts):
        entries = part.select([cdc.ROW_ID, *ENTRY_COLUMNS]).rename_columns([ID, *ENTRY_COLUMNS])
        for index, name in enumerate(_REPEATING, start=1):
            entries = entries.set_column(index, name, entries.column(name).dictionary_encode())
        joined.append(entries.append_column(FILE, pa.repeat(pa.scalar(number, pa.int32()), part.num_rows)))
    return pa.concat_tables(joined).unify_dictionaries()


def open_entries(entries: pa.Table) -> pa.Table:
    """Return the entries that were neither replayed nor dropped."""
    kinds = entries.column(properties.KIND).cast(pa.string())
    is_kept = pc.equal(kinds, Kind.QUARANTINED.value)
    resolved = entries.filter(pc.invert(is_kept)).column(ID).combine_chunks()
    return entries.filter(pc.and_(is_kept, pc.invert(pc.is_in(entries.column(ID), resolved))))


def with_ids(entries: pa.Table, ids: Sequence[str]) -> pa.Table:
    """Return the entries with these ids."""
    return entries.filter(pc.is_in(entries.column(ID), pa.array(ids, pa.string())))


def apply_filter(entries: pa.Table, wanted: Filter) -> pa.Table:
    """Return the entries that a filter selects.

    Raises: NotInQuarantine if an id names no entry, or several.
    """
    for name, value in (
        (properties.TABLE_NAME, wanted.table),
        (properties.SOURCE, wanted.source),
        (properties.REASON, wanted.reason),
    ):
        if value is not None:
            entries = entries.filter(pc.equal(entries.column(name).cast(pa.string()), value))
    for compare, time_ in ((pc.greater_equal, wanted.since), (pc.less, wanted.until)):
        if time_ is not None:
            limit = pa.scalar(time_.astimezone(dt.UTC), pa.timestamp("us", "UTC"))
            entries = entries.filter(compare(entries.column(properties.RECORDED_AT), limit))
    if wanted.ids:
        entries = with_ids(entries, [find_id(entries, start) for start in wanted.ids])
    return entries


def find_id(entries: pa.Table, start: str) -> str:
    """Return the one id with this prefix.

    Raises: NotInQuarantine if there is none, or if there are several.
    """
    column = entries.column(ID)
    found = pc.unique(column.filter(pc.starts_with(column, pattern=start.lower()))).to_pylist()
    if len(found) != 1:
        rule = "several changes have an id with this prefix" if found else "no open change has an id with this prefix"
        raise NotInQuarantine(f"{rule}: id={start}")
    only: str = found[0]
    return only


def concat(loaded: Sequence[pa.Table]) -> pa.Table:
    """Join entries of several quarantines. Their file numbers have no meaning then."""
    return pa.concat_tables(loaded) if loaded else NO_ENTRIES


def once(rows: pa.Table, column: str) -> pa.Table:
    """Return the first of the rows with the same id, in the order of commits."""
    ids = rows.column(column)
    return rows.take(pc.index_in(pc.unique(ids), ids))


def summarise(entries: pa.Table) -> list[dict[str, Any]]:
    """Summarise entries by table and reason: `changes`, `sources`, `oldest`, `newest`, and the newest one's `text`."""
    renamed = {"table": properties.TABLE_NAME, "reason": properties.REASON, "source": properties.SOURCE}
    columns = {name: entries.column(column).cast(pa.string()) for name, column in renamed.items()}
    columns["text"] = entries.column(properties.REASON_TEXT).cast(pa.string()).fill_null("")
    rows = pa.table({**columns, "id": entries.column(ID), "at": entries.column(properties.RECORDED_AT)})
    aggregates = {
        "changes": ("id", "count_distinct"),
        "sources": ("source", "count_distinct"),
        "oldest": ("at", "min"),
        "newest": ("at", "max"),
        "text": ("text", "last"),
    }
    grouped = rows.sort_by("at").group_by(["table", "reason"], use_threads=False).aggregate([*aggregates.values()])
    grouped = grouped.select(["table", "reason", *("_".join(each) for each in aggregates.values())])
    summed = grouped.rename_columns(["table", "reason", *aggregates])
    found: list[dict[str, Any]] = summed.sort_by([("table", "ascending"), ("reason", "ascending")]).to_pylist()
    return found


def files_with(entries: pa.Table) -> list[int]:
    """Return the numbers of the files that hold these entries, in the order of commits."""
    return sorted(int(number) for number in np.unique(entries.column(FILE).to_numpy()))


# Returns the rows of a commit, decoded to the table's columns as they are now, and the spans that it covers.
AppendPlan: TypeAlias = Callable[[TableColumns], Awaitable[tuple[Sequence[pa.Table], Mapping[SourceId, Span]]]]


async def append_planned(table: TableName, plan: AppendPlan, context: TableContext) -> None:
    """Append rows to a table in one commit, beside a service that may be committing to it too.

    If another writer was first, everything is planned again for what the table is then. Cancelling leaves the rows
    committed or not; the table's marks show which.

    Raises: WriterError if they may not be committed.
    """
    for _ in range(ATTEMPTS_MAX):
        columns = TableColumns(table, context)
        await columns.open()
        rows, spans = await plan(columns)
        if not rows:
            return
        config = columns.settings.config
        try:
            state = await columns.agree()
            flush = await write_flush(rows, state, context, config=config, policy=FlushPolicy(config), spans=spans)
            await context.committer.commit(state, flush)
        except (RowsAlreadyCommitted, RowsUnfit, CommitConflict, TableMissing, TableReplaced):
            continue
        return
    raise CatalogError(f"other writers commit to the table all the time: table={table} attempts={ATTEMPTS_MAX}")


@dataclass(frozen=True, slots=True)
class Contents:
    """The quarantine as of one snapshot: its files, and its open entries."""

    state: TableState
    files: Sequence[LiveFile]
    entries: pa.Table


class Quarantine:
    """The quarantine of one namespace."""

    def __init__(self, namespace: tuple[str, ...], context: TableContext) -> None:
        self.name = TableName(namespace, properties.TABLE)
        self.context = context

    async def load(self, *, on_rows: Callable[[int], object] = lambda _: None) -> Contents | None:
        """Read what is open; None if nothing was ever quarantined. `on_rows` is called with the rows read so far."""
        try:
            state = await self.context.committer.load(self.name)
        except TableMissing:
            return None
        files = await find_files(state, self.context.store)
        if not files:
            return None
        parts = []
        for file in files:
            parts.append(await read_columns(file, state, self.context.store, names=[cdc.ROW_ID, *ENTRY_COLUMNS]))
            on_rows(file.rows)
        return Contents(state, files, open_entries(entries_of(parts)))

    async def read(
        self, contents: Contents, entries: pa.Table, *, file: int, columns: Sequence[str] = SHOWN_COLUMNS
    ) -> pa.Table:
        """Read the rows of those entries that are in one file."""
        store = self.context.store
        rows = await read_columns(contents.files[file], contents.state, store, names=list({*columns, properties.KIND}))
        ids = entries.filter(pc.equal(entries.column(FILE), file)).column(ID).combine_chunks()
        is_kept = pc.equal(rows.column(properties.KIND), Kind.QUARANTINED.value)
        found = rows.filter(pc.and_(is_kept, pc.is_in(rows.column(cdc.ROW_ID), ids)))
        return found.select(list(columns))

    async def resolve(self, ids: Sequence[str], *, kind: Kind, table: TableName, now_us: int) -> None:
        """Record what became of changes of one table.

        Raises: WriterError if it may not be committed: recording it again is harmless.
        """

        async def plan(columns: TableColumns) -> tuple[Sequence[pa.Table], Mapping[SourceId, Span]]:
            mark = columns.marks.get(RESOLUTIONS)
            after = mark.sequence if mark else 0
            group = resolution_rows(ids, kind=kind, table=table, after_sequence=after, recorded_at_us=now_us)
            fitted = await columns.decode(group)
            assert not fitted.refused, "these rows are our own"
            return [decoded for _, decoded in fitted.kept], group.spans()

        await append_planned(self.name, plan, self.context)
