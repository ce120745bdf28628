"""What is in quarantine and open: every change that was put there and is neither replayed nor dropped. Core.

Owns the reading of the quarantine as a whole, without the rows' images, which stay in their files until one is needed.
Entries are an Arrow table with one row per time that a change was put there, in the order of commits:

    id  kind  table_name  source  mark  epoch  sequence  reason  reason_text  recorded_at  file

A change that is there twice (two nodes put it there) is one change all the same, by its id.
"""

from __future__ import annotations

import datetime as dt
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from prometheus_client import CollectorRegistry

from lakefeed.contract import changes as cdc
from lakefeed.contract import properties
from lakefeed.contract.changes import Position, SourceId, Span, TableName
from lakefeed.contract.errors import (
    CatalogError,
    CommitConflict,
    RowsAlreadyCommitted,
    RowsUnfit,
    TableMissing,
    WriterError,
)
from lakefeed.contract.properties import Kind
from lakefeed.storage.config import StorageConfig
from lakefeed.storage.store import open_store
from lakefeed.writer.commit.committer import CommitResult, Committer
from lakefeed.writer.commit.plan import Flush
from lakefeed.writer.commit.rest_catalog import CatalogClient, open_foreign_catalog
from lakefeed.writer.commit.state import TableState
from lakefeed.writer.config import IcebergConfig, WriterConfig
from lakefeed.writer.files.scan import StoredFile, find_files, read_columns
from lakefeed.writer.files.write import write_files
from lakefeed.writer.metrics import WriterMetrics
from lakefeed.writer.rows.groups import ArrowGroup
from lakefeed.writer.rows.runs import spans_of
from lakefeed.writer.rows.table_settings import TableSections
from lakefeed.writer.tables.columns import TableColumns, TableContext
from lakefeed.writer.tables.flush_policy import FlushControl
from lakefeed.writer.tables.quarantine import COLUMNS, RECORDS, RESOLUTIONS, resolution_rows, without_changes

# --- writer.quarantine.entries ----------------------------------------------------------------------------------------


ID = "id"
MARK = "mark"
FILE = "file"

# What is read of each file of the quarantine, and what it is called here.
READ_COLUMNS = {
    cdc.ROW_ID: ID,
    properties.KIND: properties.KIND,
    properties.TABLE_NAME: properties.TABLE_NAME,
    properties.SOURCE: properties.SOURCE,
    cdc.SOURCE: MARK,
    properties.EPOCH: properties.EPOCH,
    properties.SEQUENCE: properties.SEQUENCE,
    properties.REASON: properties.REASON,
    properties.REASON_TEXT: properties.REASON_TEXT,
    properties.RECORDED_AT: properties.RECORDED_AT,
}

# Few values in many rows.
_REPEATING = (
    properties.KIND,
    properties.TABLE_NAME,
    properties.SOURCE,
    MARK,
    properties.REASON,
    properties.REASON_TEXT,
)


_TYPES = {
    properties.EPOCH: pa.int64(),
    properties.SEQUENCE: pa.int64(),
    properties.RECORDED_AT: pa.timestamp("us", "UTC"),
}
NO_ENTRIES = pa.schema(
    [(name, _TYPES.get(name, pa.string())) for name in READ_COLUMNS.values()] + [(FILE, pa.int32())]
).empty_table()


class NotInQuarantine(WriterError):
    """No open change, or more than one, has the id that was given: look it up again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Filter:
    """Which changes a command is about; what is None does not matter. Times are those of the quarantining."""

    table: str | None = None
    source: str | None = None
    reason: str | None = None
    since: dt.datetime | None = None
    until: dt.datetime | None = None
    ids: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Summary:
    """The open changes of one table that were refused for one reason; `text` is the newest one's."""

    table: str
    reason: str
    changes: int
    sources: int
    oldest: dt.datetime
    newest: dt.datetime
    text: str


def entries_of(parts: Sequence[pa.Table]) -> pa.Table:
    """Gather what was read of each file, one or more of them, in their order."""
    numbered = [
        part.rename_columns([READ_COLUMNS[name] for name in part.column_names]).append_column(
            FILE, pa.repeat(pa.scalar(number, pa.int32()), part.num_rows)
        )
        for number, part in enumerate(parts)
    ]
    return pa.concat_tables(_compact(part) for part in numbered).unify_dictionaries()


def _compact(part: pa.Table) -> pa.Table:
    for name in _REPEATING:
        index = part.column_names.index(name)
        part = part.set_column(index, name, part.column(name).dictionary_encode())
    return part


def open_entries(entries: pa.Table) -> pa.Table:
    """Leave those that nothing has become of yet."""
    kinds = entries.column(properties.KIND).cast(pa.string())
    is_kept = pc.equal(kinds, Kind.QUARANTINED.value)
    resolved = entries.filter(pc.invert(is_kept)).column(ID).combine_chunks()
    return entries.filter(pc.and_(is_kept, pc.invert(pc.is_in(entries.column(ID), resolved))))


def with_ids(entries: pa.Table, ids: Sequence[str]) -> pa.Table:
    """Keep changes by their ids."""
    return entries.filter(pc.is_in(entries.column(ID), pa.array(ids, pa.string())))


def without(entries: pa.Table, ids: Sequence[str]) -> pa.Table:
    """Leave out changes by their ids."""
    return entries.filter(pc.invert(pc.is_in(entries.column(ID), pa.array(ids, pa.string()))))


def apply_filter(entries: pa.Table, wanted: Filter) -> pa.Table:
    """Keep what a filter asks for.

    Raises:
        NotInQuarantine: an id names no entry, or several.
    """
    for name, value in (
        (properties.TABLE_NAME, wanted.table),
        (properties.SOURCE, wanted.source),
        (properties.REASON, wanted.reason),
    ):
        if value is not None:
            entries = entries.filter(pc.equal(entries.column(name).cast(pa.string()), value))
    recorded = entries.column(properties.RECORDED_AT)
    if wanted.since is not None:
        entries = entries.filter(pc.greater_equal(recorded, _moment(wanted.since)))
        recorded = entries.column(properties.RECORDED_AT)
    if wanted.until is not None:
        entries = entries.filter(pc.less(recorded, _moment(wanted.until)))
    if wanted.ids:
        entries = with_ids(entries, [find_id(entries, start) for start in wanted.ids])
    return entries


def _moment(time: dt.datetime) -> pa.Scalar:
    return pa.scalar(time.astimezone(dt.UTC), pa.timestamp("us", "UTC"))


def find_id(entries: pa.Table, start: str) -> str:
    """Find the one id that starts so.

    Raises:
        NotInQuarantine: none does, or several do.
    """
    column = entries.column(ID)
    found = pc.unique(column.filter(pc.starts_with(column, pattern=start.lower()))).to_pylist()
    if len(found) != 1:
        rule = "several changes have an id that starts so" if found else "no open change has an id that starts so"
        raise NotInQuarantine(f"{rule}: id={start}")
    only: str = found[0]
    return only


def concat(loaded: Sequence[pa.Table]) -> pa.Table:
    """Put entries of several quarantines together; their file numbers then mean nothing."""
    return pa.concat_tables(loaded) if loaded else NO_ENTRIES


def change_ids(entries: pa.Table) -> list[str]:
    """Name each change once, in the order of commits."""
    ids: list[str] = pc.unique(entries.column(ID)).to_pylist()
    return ids


def count_changes(entries: pa.Table) -> int:
    """Count changes; one that is there twice is one."""
    count: int = pc.count_distinct(entries.column(ID)).as_py()
    return count


def summarise(entries: pa.Table) -> list[Summary]:
    """Sum entries up by table and reason."""
    names_only = pa.table(
        {
            "table": entries.column(properties.TABLE_NAME).cast(pa.string()),
            "reason": entries.column(properties.REASON).cast(pa.string()),
            "id": entries.column(ID),
            "source": entries.column(properties.SOURCE).cast(pa.string()),
            "at": entries.column(properties.RECORDED_AT),
            "text": entries.column(properties.REASON_TEXT).cast(pa.string()),
        }
    )
    grouped = names_only.sort_by("at").group_by(["table", "reason"], use_threads=False)
    wanted = [("id", "count_distinct"), ("source", "count_distinct"), ("at", "min"), ("at", "max"), ("text", "last")]
    rows = grouped.aggregate(wanted).sort_by([("table", "ascending"), ("reason", "ascending")])
    return [_summary(row) for row in rows.to_pylist()]


def _summary(row: dict[str, Any]) -> Summary:
    return Summary(
        table=row["table"],
        reason=row["reason"],
        changes=row["id_count_distinct"],
        sources=row["source_count_distinct"],
        oldest=row["at_min"],
        newest=row["at_max"],
        text=row["text_last"] or "",
    )


def files_with(entries: pa.Table) -> list[int]:
    """Find the files that hold these entries, by their numbers, in the order of commits."""
    return sorted(int(number) for number in np.unique(entries.column(FILE).to_numpy()))


# --- writer.quarantine.append -----------------------------------------------------------------------------------------
#
# Appending rows to a table from a command: beside the service, which may be committing to it at the same time.
#
# Owns the way from decoded rows to their snapshot: agree on columns, write files, commit. Unlike a flush it is never
# mended on the way: if the table has moved past the plan, the caller hears of it and plans again.


async def append_rows(
    rows: Sequence[pa.Table],
    columns: TableColumns,
    context: TableContext,
    *,
    spans: Mapping[SourceId, Span],
    properties: Mapping[str, str],
) -> CommitResult:
    """Commit rows that were decoded to these columns, with the marks and properties that belong to them.

    Cancelling leaves them committed or not; the table's marks tell.

    Raises:
        RowsAlreadyCommitted: the marks have moved past the spans.
        WriterError: not committed, as far as we know.
    """
    state = await columns.agree()
    flush_id = str(uuid.uuid4())
    config = columns.settings.config
    files_for = FlushControl(config).files_for
    try:
        written = await write_files(
            rows, state, context, config=config, flush_id=flush_id, files_for=files_for, spans=spans
        )
    except pa.ArrowInvalid:
        raise RowsUnfit(f"rows do not fit the table's columns any more: table={state.name}") from None
    flush = Flush(
        id=flush_id,
        node=context.node,
        log_from=0,
        log_to=0,
        spans=spans,
        files=written.files,
        properties=properties,
        ledger=written.ledger,
    )
    result = await context.committer.commit(state, flush)
    columns.state = result.state
    return result


# --- writer.quarantine.store ------------------------------------------------------------------------------------------
#
# One namespace's quarantine as commands see it. Owns reading it and saying in it what became of changes.
#
# Everything is appended, nothing is deleted: a change that was replayed or dropped stays readable, with a row more
# under
# its id that says so. Saying it twice is harmless, so a command that was killed is simply run again.


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
        self.name = TableName(namespace, properties.TABLE)
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
            parts.append(await read_columns(file, state, self._context.store, names=list(READ_COLUMNS)))
            on_rows(file.record_count)
        return Contents(state, files, open_entries(entries_of(parts)))

    async def read(
        self, contents: Contents, entries: pa.Table, *, file: int, columns: Sequence[str] = SHOWN_COLUMNS
    ) -> pa.Table:
        """Read those of some entries that are in one file."""
        store = self._context.store
        rows = await read_columns(contents.files[file], contents.state, store, names=list({*columns, properties.KIND}))
        ids = entries.filter(pc.equal(entries.column(FILE), file)).column(ID).combine_chunks()
        is_kept = pc.equal(rows.column(properties.KIND), Kind.QUARANTINED.value)
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
            fitted = await columns.decode(group)
            assert not fitted.refused, "these rows are our own"
            rows += [decoded for _, decoded in fitted.kept]
        await append_rows(rows, columns, self._context, spans=spans, properties={})


def _sequence_of(columns: TableColumns, command: SourceId) -> int:
    mark = columns.marks.get(command)
    return mark.sequence if mark else 0


# --- writer.quarantine.opening ----------------------------------------------------------------------------------------
#
# What a command needs to reach the quarantines of a lake: catalog, store, threads. Owns their lifetime.
#
# Everything goes through the REST catalog, so a command runs beside a service, on another machine, or on a catalog that
# is not Lakefeed's own.


# Who commits, as snapshots name it.
NODE = "lakefeed-quarantine"


@dataclass(frozen=True, slots=True)
class OpenLake:
    """The quarantines of a lake, and what it takes to read and write their tables."""

    quarantines: Sequence[Quarantine]
    context: TableContext


@asynccontextmanager
async def open_quarantines(
    iceberg: IcebergConfig,
    *,
    namespace: tuple[str, ...] | None,
    writer: WriterConfig,
    storage: StorageConfig,
    tables: TableSections,
) -> AsyncIterator[OpenLake | None]:
    """Open the quarantine of a namespace, or those of all; None if there is none."""
    async with open_foreign_catalog(iceberg) as catalog:
        await catalog.load_config()
        namespaces = [namespace] if namespace is not None else await catalog.list_namespaces()
        found = [(each, location) for each in namespaces if (location := await _locate(catalog, each)) is not None]
        if not found:
            yield None
            return
        # The tables say where files are; the settings, how to get there.
        where = replace(storage, warehouse=found[0][1])
        with (
            ThreadPoolExecutor(1, thread_name_prefix="decode") as decoders,
            ThreadPoolExecutor(1, thread_name_prefix="parquet") as encoders,
        ):
            async with open_store(where) as store:
                context = TableContext(
                    node=NODE,
                    config=writer,
                    committer=Committer(catalog, store),
                    store=store,
                    decoders=decoders,
                    encoders=encoders,
                    metrics=WriterMetrics(CollectorRegistry()),
                    clock=time.monotonic,
                    tables=tables,
                )
                yield OpenLake([Quarantine(each, context) for each, _ in found], context)


async def _locate(catalog: CatalogClient, namespace: tuple[str, ...]) -> str | None:
    try:
        loaded = await catalog.load_table(TableName(namespace, properties.TABLE))
    except TableMissing:
        return None
    location: str = loaded.document["location"]
    return location
