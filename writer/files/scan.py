"""Reading a table's rows back, for commands that look at what was written. Owns finding its files and their columns.

    snapshot -> manifest list -> manifests -> data files, oldest first, but for those whose bounds say "not here"

The change tables are append-only, so a row that is in a file is in the table. A table with delete files, which only
somebody else can have made, is refused rather than read wrongly. Columns go by field id, as files outlive names; one
that a file does not have is null.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from lakefeed.aio import map_parallel
from lakefeed.contract import changes as cdc
from lakefeed.contract.changes import Operation, SourceId
from lakefeed.contract.errors import CatalogError, WriterError
from lakefeed.contract.ledger import RowFacts, join_facts
from lakefeed.iceberg.arrow import FIELD_ID_KEY, to_arrow_type
from lakefeed.iceberg.manifests import Entry, Manifest, Status, column_value, list_manifests, read_entries
from lakefeed.iceberg.types import Field
from lakefeed.iceberg.values import decode_bound
from lakefeed.storage.store import ObjectStore
from lakefeed.writer.commit.state import TableState
from lakefeed.writer.files.row_hash import tally_rows

# --- writer.table_scan ------------------------------------------------------------------------------------------------


# Manifests are small and many: enough at once to hide a far store's delay.
PARALLEL_READS = 16


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A data file of a table, in the order of its commits."""

    sequence_number: int
    location: str
    record_count: int


async def find_files(
    state: TableState, store: ObjectStore, *, within: Mapping[str, tuple[Any, Any]] | None = None
) -> list[StoredFile]:
    """Find the data files that may hold rows whose columns lie within these bounds, the oldest first.

    Bounds are given as Iceberg stores values: longs as numbers, moments in microseconds, text as text.

    Raises:
        CatalogError: the table has delete files.
    """
    if state.manifest_list is None:
        return []
    manifests = list_manifests(await store.read(state.manifest_list), state.manifest_list)
    if any(manifest.holds_deletes for manifest in manifests):
        raise CatalogError(f"table has delete files, which are not read here: table={state.name}")
    slots = asyncio.Semaphore(PARALLEL_READS)

    async def read(manifest: Manifest) -> list[StoredFile]:
        async with slots:
            data = await store.read(manifest.location)
        return [
            StoredFile(entry.sequence_number, entry.file["file_path"], entry.file["record_count"])
            for entry in read_entries(data, manifest)
            if entry.status is not Status.DELETED and all(each.may_be_in(entry.file) for each in wanted)
        ]

    wanted = [_Wanted.of(state, name, *bounds) for name, bounds in (within or {}).items()]
    found = await asyncio.gather(*(read(manifest) for manifest in manifests), return_exceptions=True)
    failed = next((each for each in found if isinstance(each, BaseException)), None)
    if failed is not None:
        raise failed
    files = [file for each in found if not isinstance(each, BaseException) for file in each]
    return sorted(files, key=lambda file: (file.sequence_number, file.location))


@dataclass(frozen=True, slots=True)
class _Wanted:
    """The values that a reader looks for in one column."""

    field_id: int
    type: str
    lowest: Any
    highest: Any

    @classmethod
    def of(cls, state: TableState, name: str, lowest: Any, highest: Any) -> _Wanted:
        field = _field(state, name)
        assert isinstance(field.type, str), "bounds are of columns without parts"
        return cls(field.id, field.type, lowest, highest)

    def may_be_in(self, data_file: Mapping[str, Any]) -> bool:
        lower, upper = (
            decode_bound(self.type, column_value(data_file, name, self.field_id))
            for name in ("lower_bounds", "upper_bounds")
        )
        return (lower is None or lower <= self.highest) and (upper is None or upper >= self.lowest)


async def read_columns(file: StoredFile, state: TableState, store: ObjectStore, *, names: Sequence[str]) -> pa.Table:
    """Read columns of a file as the table has them now."""
    data = await store.read(file.location)
    fields = [_field(state, name) for name in names]
    return await asyncio.to_thread(_decode, data, fields)


def _field(state: TableState, name: str) -> Field:
    field = state.schema.columns.field(name)
    if field is None:
        raise CatalogError(f"table lacks a column: table={state.name} column={name}")
    return field


def _decode(data: bytes, fields: Sequence[Field]) -> pa.Table:
    with pq.ParquetFile(pa.BufferReader(data)) as file:
        names = {_field_id(stored): stored.name for stored in file.schema_arrow}
        count = file.metadata.num_rows
        rows = file.read(columns=[names[field.id] for field in fields if field.id in names])
    columns = [
        rows.column(names[field.id]).cast(to_arrow_type(field.type))
        if field.id in names
        else pa.chunked_array([pa.nulls(count, to_arrow_type(field.type))])
        for field in fields
    ]
    return pa.table(columns, names=[field.name for field in fields])


def _field_id(field: pa.Field) -> int | None:
    text = (field.metadata or {}).get(FIELD_ID_KEY)
    return None if text is None else int(text)


# The row id of rows that were READ; null of changes, which have a sequence of their own.
READ_ROW = "read_row"


@dataclass(frozen=True, slots=True)
class Extent:
    """The sequences that a file may hold, and how many rows."""

    lowest: int
    highest: int
    rows: int


# --- writer.verification.live_files -----------------------------------------------------------------------------------
#
# The data files of snapshots, with the snapshot that added each. Owns how manifests are read for that.


_LONG_MIN, _LONG_MAX = -(1 << 63), (1 << 63) - 1
_NO_SNAPSHOT = -1  # as Iceberg writes it


@dataclass(frozen=True, slots=True)
class LiveFile:
    """A data file that is part of a table."""

    location: str
    snapshot_id: int
    extent: Extent
    partition: tuple[Any, ...] = ()

    @property
    def rows(self) -> int:
        """How many rows it has, by its manifest."""
        return self.extent.rows


@dataclass(frozen=True, slots=True)
class Contents:
    """What a snapshot's manifests name: data files, and how many delete files."""

    files: Sequence[LiveFile]
    delete_files: int


async def load_contents(store: ObjectStore, manifest_list: str, *, sequence_id: int) -> Contents:
    """Read which files are part of a snapshot; `sequence_id` is the field whose bounds are kept.

    Raises:
        WriterError: a manifest cannot be read.
    """
    manifests = list_manifests(await store.read(manifest_list), manifest_list)
    entries = await _load_entries(store, [each for each in manifests if not each.holds_deletes])
    files = [_live_file(entry, sequence_id) for entry in entries if entry.status is not Status.DELETED]
    return Contents(files, sum(each.files_count or 0 for each in manifests if each.holds_deletes))


async def load_added(store: ObjectStore, manifest_list: str, *, snapshot_id: int) -> set[str]:
    """Read which files a snapshot added, from its own manifests."""
    entries = await _load_own(store, manifest_list, snapshot_id)
    return {entry.file["file_path"] for entry in entries if entry.status is not Status.DELETED}


async def load_removed(store: ObjectStore, manifest_list: str, *, snapshot_id: int) -> set[str]:
    """Read which files a snapshot says that it removed."""
    entries = await _load_own(store, manifest_list, snapshot_id)
    return {entry.file["file_path"] for entry in entries if entry.status is Status.DELETED}


async def _load_own(store: ObjectStore, manifest_list: str, snapshot_id: int) -> list[Entry]:
    manifests = list_manifests(await store.read(manifest_list), manifest_list)
    own = [each for each in manifests if each.snapshot_id == snapshot_id and not each.holds_deletes]
    return [entry for entry in await _load_entries(store, own) if entry.snapshot_id == snapshot_id]


async def _load_entries(store: ObjectStore, manifests: Iterable[Manifest]) -> list[Entry]:
    async def load(manifest: Manifest) -> list[Entry]:
        return list(read_entries(await store.read(manifest.location), manifest))

    parts = await map_parallel(load, manifests, at_once=PARALLEL_READS)
    return [entry for part in parts for entry in part]


def _live_file(entry: Entry, sequence_id: int) -> LiveFile:
    lowest, highest = (
        decode_bound("long", column_value(entry.file, name, sequence_id)) for name in ("lower_bounds", "upper_bounds")
    )
    extent = Extent(
        _LONG_MIN if lowest is None else lowest, _LONG_MAX if highest is None else highest, entry.file["record_count"]
    )
    snapshot_id = _NO_SNAPSHOT if entry.snapshot_id is None else entry.snapshot_id
    return LiveFile(entry.file["file_path"], snapshot_id, extent, tuple(entry.file["partition"].values()))


# --- writer.verification.file_rows ------------------------------------------------------------------------------------
#
# Reads the rows of a data file back as ledgers count them. Owns which of its columns are which, by their field ids.


# Rows decoded at once: bounds memory for files of any size.
BATCH_ROWS = 131_072

_KEY_TYPES = pa.schema(
    [
        (cdc.SOURCE, pa.string()),
        (cdc.SEQUENCE, pa.int64()),
        (cdc.INGESTED_AT, pa.timestamp("us", tz="UTC")),
        (READ_ROW, pa.string()),
    ]
)
# What the keys are made from.
_KEY_SOURCES = (cdc.SOURCE, cdc.SEQUENCE, cdc.INGESTED_AT, cdc.OPERATION, cdc.ROW_ID)


class FileUnreadable(WriterError):
    """A data file is no Parquet file of this table, or is damaged."""


@dataclass(frozen=True, slots=True)
class FileRows:
    """What a file holds: rows by source, if it is to be counted, and what tells one change from another."""

    rows: int
    facts: Mapping[SourceId, RowFacts]
    keys: pa.Table


def read_rows(data: bytes, names: Mapping[int, str], *, is_counted: bool) -> FileRows:
    """Read a file whole; `names` has the table's columns by their ids. CPU work: callers run it in a thread.

    Raises:
        FileUnreadable: it cannot be read as a file of this table.
    """
    try:
        with pq.ParquetFile(pa.BufferReader(data)) as file:
            fields = _known_fields(file.schema_arrow, names)
            wanted = fields if is_counted else {at: field for at, field in fields.items() if field.name in _KEY_SOURCES}
            return _count(_batches(file, wanted), list(wanted.values()), is_counted=is_counted)
    except (pa.ArrowException, OSError, KeyError, ValueError) as error:
        raise FileUnreadable(f"not a readable file of this table: {type(error).__name__}: {error}") from error


def _known_fields(schema: pa.Schema, names: Mapping[int, str]) -> dict[str, pa.Field]:
    """Map the file's columns to fields under the names that the table has for them now; others keep theirs."""
    known = {}
    for field in schema:
        text = (field.metadata or {}).get(FIELD_ID_KEY)
        if text is not None:
            known[field.name] = field.with_name(names.get(int(text), field.name))
    return known


def _batches(file: pq.ParquetFile, fields: Mapping[str, pa.Field]) -> Iterator[pa.Table]:
    for batch in file.iter_batches(BATCH_ROWS, columns=list(fields), use_threads=False):
        yield pa.table([batch.column(name) for name in fields], schema=pa.schema(list(fields.values())))


def _count(batches: Iterator[pa.Table], fields: Sequence[pa.Field], *, is_counted: bool) -> FileRows:
    parts, keys, rows = [], [_KEY_TYPES.empty_table()], 0
    for batch in batches:
        rows += batch.num_rows
        if is_counted:
            parts.append(tally_rows(batch, fields))
        if all(name in batch.column_names for name in _KEY_SOURCES):
            keys.append(_keys_of(batch))
    return FileRows(rows, join_facts(parts), pa.concat_tables(keys))


def _keys_of(batch: pa.Table) -> pa.Table:
    was_read = pc.equal(batch.column(cdc.OPERATION), Operation.READ.value)
    row_ids = pc.if_else(was_read, batch.column(cdc.ROW_ID), pa.scalar(None, pa.string()))
    own = batch.select([cdc.SOURCE, cdc.SEQUENCE, cdc.INGESTED_AT]).append_column(READ_ROW, row_ids)
    return own.cast(_KEY_TYPES).filter(pc.is_valid(own.column(cdc.SEQUENCE)))
