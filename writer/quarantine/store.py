"""Quarantine of a namespace, as commands see it: what is open, reading it, recording what became of changes.

A change is open if it was quarantined and is neither replayed nor dropped. The quarantine is an append-only change
table: a change that was replayed or dropped stays readable, and one more row under its id says so. Saying it twice is
harmless, so a command that was killed is simply run again. A change that two nodes quarantined is one, by its id.

Entries are an Arrow table of all that is open, in the order of commits, without images, which stay in their files:

    id  kind  table_name  source  mark  epoch  sequence  reason  reason_text  recorded_at  file

Commands go through the REST catalog, so they run beside a service, on another machine, or on another catalog.
"""

from __future__ import annotations

import datetime as dt
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from prometheus_client import CollectorRegistry

from lakefeed.contract import changes as cdc
from lakefeed.contract import properties
from lakefeed.contract.changes import SourceId, Span, TableName
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
from lakefeed.writer.rows.table_settings import TableSections
from lakefeed.writer.tables.columns import TableColumns
from lakefeed.writer.tables.context import TableContext
from lakefeed.writer.tables.flush_policy import FlushPolicy
from lakefeed.writer.tables.quarantine import COLUMNS, RESOLUTIONS, resolution_rows

# Two commands that write at once conflict once or twice; more conflicts have another cause.
ATTEMPTS_MAX = 10
# The node that commits, as snapshots name it.
NODE = "lakefeed-quarantine"

# All that `show` prints of a change.
SHOWN_COLUMNS = (cdc.ROW_ID, cdc.TIMESTAMP, cdc.INGESTED_AT, *COLUMNS.names)

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
    """Join what was read of each file, in the order of files."""
    joined = []
    for number, part in enumerate(parts):
        entries = part.rename_columns([READ_COLUMNS[name] for name in part.column_names])
        for name in _REPEATING:
            encoded = entries.column(name).dictionary_encode()
            entries = entries.set_column(entries.column_names.index(name), name, encoded)
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


def change_ids(entries: pa.Table) -> list[str]:
    """Return the id of each change once, in the order of commits."""
    ids: list[str] = pc.unique(entries.column(ID)).to_pylist()
    return ids


def count_changes(entries: pa.Table) -> int:
    """Return the number of changes; one that was quarantined twice is one."""
    count: int = pc.count_distinct(entries.column(ID)).as_py()
    return count


def summarise(entries: pa.Table) -> list[Summary]:
    """Summarise entries by table and reason."""
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
    return [
        Summary(
            table=row["table"],
            reason=row["reason"],
            changes=row["id_count_distinct"],
            sources=row["source_count_distinct"],
            oldest=row["at_min"],
            newest=row["at_max"],
            text=row["text_last"] or "",
        )
        for row in rows.to_pylist()
    ]


def files_with(entries: pa.Table) -> list[int]:
    """Return the numbers of the files that hold these entries, in the order of commits."""
    return sorted(int(number) for number in np.unique(entries.column(FILE).to_numpy()))


async def append_rows(
    rows: Sequence[pa.Table],
    columns: TableColumns,
    context: TableContext,
    *,
    spans: Mapping[SourceId, Span],
) -> CommitResult:
    """Commit rows that were decoded to these columns, beside a service that may be committing to the table too.

    Unlike a flush this is never planned again here: if the table has moved on, the caller gets the error. Cancelling
    leaves the rows committed or not; the table's marks show which.

    Raises: RowsAlreadyCommitted if the marks have moved past the spans; WriterError if it may not be committed.
    """
    state = await columns.agree()
    flush_id = str(uuid.uuid4())
    config = columns.settings.config
    files_for = FlushPolicy(config).files_for
    try:
        written = await write_files(
            context.store,
            context.encoders,
            rows,
            state,
            config=config,
            flush_id=flush_id,
            files_for=files_for,
            spans=spans,
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
        ledger=written.ledger,
    )
    result = await context.committer.commit(state, flush)
    columns.state = result.state
    return result


@dataclass(frozen=True, slots=True)
class Contents:
    """The quarantine as of one snapshot: its files, and its open entries."""

    state: TableState
    files: Sequence[StoredFile]
    entries: pa.Table


class Quarantine:
    """The quarantine of one namespace."""

    def __init__(self, namespace: tuple[str, ...], context: TableContext) -> None:
        self.name = TableName(namespace, properties.TABLE)
        self._context = context

    async def load(self, *, on_rows: Callable[[int], object] = lambda _: None) -> Contents | None:
        """Read what is open; None if nothing was ever quarantined. `on_rows` is called with the rows read so far."""
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
        """Read the rows of those entries that are in one file."""
        store = self._context.store
        rows = await read_columns(contents.files[file], contents.state, store, names=list({*columns, properties.KIND}))
        ids = entries.filter(pc.equal(entries.column(FILE), file)).column(ID).combine_chunks()
        is_kept = pc.equal(rows.column(properties.KIND), Kind.QUARANTINED.value)
        found = rows.filter(pc.and_(is_kept, pc.is_in(rows.column(cdc.ROW_ID), ids)))
        return found.select(list(columns))

    async def resolve(self, ids: Sequence[str], *, kind: Kind, table: TableName, now_us: int) -> None:
        """Record what became of changes of one table.

        Raises: WriterError if it may not be committed: recording it again is harmless.
        """
        for _ in range(ATTEMPTS_MAX):
            columns = TableColumns(self.name, self._context)
            await columns.open()
            mark = columns.marks.get(RESOLUTIONS)
            after = mark.sequence if mark else 0
            group = resolution_rows(ids, kind=kind, table=table, after_sequence=after, recorded_at_us=now_us)
            fitted = await columns.decode(group)
            assert not fitted.refused, "these rows are our own"
            try:
                rows = [decoded for _, decoded in fitted.kept]
                await append_rows(rows, columns, self._context, spans=group.spans())
            except (RowsAlreadyCommitted, CommitConflict):
                continue  # another command was first: number the rows after its own
            return
        raise CatalogError(
            f"other commands write to the quarantine all the time: table={self.name} attempts={ATTEMPTS_MAX}"
        )


@dataclass(frozen=True, slots=True)
class OpenLake:
    """The quarantines of a lake, and the context to read and write their tables."""

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
    """Open the quarantine of a namespace, or of all namespaces; None if there is none."""
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
