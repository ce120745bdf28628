"""Table scan: a table's data files and their rows, read back for verification and quarantine commands.

    snapshot -> manifest list -> manifests -> data files -> rows

Change tables are append-only, so a row of a data file is a row of the table. Only another writer can add delete files;
`find_files` refuses a table that has some. Columns are matched by field id, because names change; a column that a file
does not have is null.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
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

# Manifests are small and many: enough at once to hide the latency of a remote store.
PARALLEL_READS = 16
# Rows decoded at once: bounds memory for files of any size.
BATCH_ROWS = 131_072

# Column of the row ids of READ operations; null for other changes, which have a sequence of their own.
READ_ROW = "read_row"

_LONG_MIN, _LONG_MAX = -(1 << 63), (1 << 63) - 1
_NO_SNAPSHOT = -1  # as Iceberg writes it

_KEY_TYPES = pa.schema(
    [
        (cdc.SOURCE, pa.string()),
        (cdc.SEQUENCE, pa.int64()),
        (cdc.INGESTED_AT, pa.timestamp("us", tz="UTC")),
        (READ_ROW, pa.string()),
    ]
)
# The columns that the keys are computed from.
_KEY_SOURCES = (cdc.SOURCE, cdc.SEQUENCE, cdc.INGESTED_AT, cdc.OPERATION, cdc.ROW_ID)


@dataclass(frozen=True, slots=True)
class LiveFile:
    """A data file of a snapshot: the snapshot that added it, its number of rows, and the sequences it may have."""

    location: str
    snapshot_id: int
    rows: int
    lowest: int
    highest: int
    partition: tuple[Any, ...] = ()


# -- files by column bounds


async def find_files(
    state: TableState, store: ObjectStore, *, within: Mapping[str, tuple[Any, Any]] | None = None
) -> list[LiveFile]:
    """Find the data files that may have rows whose columns are within these bounds, the oldest first.

    Bounds are values as Iceberg stores them: longs as numbers, timestamps in microseconds, text as text.

    Raises: CatalogError if the table has delete files.
    """
    if state.manifest_list is None:
        return []
    manifests = list_manifests(await store.read(state.manifest_list), state.manifest_list)
    if any(manifest.holds_deletes for manifest in manifests):
        raise CatalogError(f"table has delete files, which are not read here: table={state.name}")
    wanted = [(_field(state, name), *ends) for name, ends in (within or {}).items()]

    def is_wanted(entry: Entry) -> bool:
        return entry.status is not Status.DELETED and all(_may_be_in(entry.file, *each) for each in wanted)

    entries = await _load_entries(store, manifests, is_wanted)
    entries.sort(key=lambda entry: (entry.sequence_number, entry.file["file_path"]))
    sequence_id = _field(state, cdc.SEQUENCE).id
    return [_live_file(entry, sequence_id) for entry in entries]


def _may_be_in(data_file: Mapping[str, Any], field: Field, lowest: Any, highest: Any) -> bool:
    """Return whether a file may have values of a column between two ends, by the bounds in its manifest."""
    assert isinstance(field.type, str), "bounds exist for primitive types only"
    lower, upper = _bounds(data_file, field.id, field.type)
    return (lower is None or lower <= highest) and (upper is None or upper >= lowest)


def _bounds(data_file: Mapping[str, Any], field_id: int, type_: str) -> tuple[Any, Any]:
    lower, upper = (column_value(data_file, name, field_id) for name in ("lower_bounds", "upper_bounds"))
    return decode_bound(type_, lower), decode_bound(type_, upper)


async def read_columns(file: LiveFile, state: TableState, store: ObjectStore, *, names: Sequence[str]) -> pa.Table:
    """Read columns of a file under the table's current names and types."""
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
        names = {id_: field.name for field in file.schema_arrow if (id_ := _field_id(field)) is not None}
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


# -- files of a snapshot


@dataclass(frozen=True, slots=True)
class SnapshotFiles:
    """The data files of a snapshot, and its number of delete files."""

    files: Sequence[LiveFile]
    delete_files: int


async def load_contents(store: ObjectStore, manifest_list: str, *, sequence_id: int) -> SnapshotFiles:
    """Load the files of a snapshot; `sequence_id` is the field of sequences.

    Raises: WriterError if a manifest cannot be read.
    """
    manifests = list_manifests(await store.read(manifest_list), manifest_list)
    data = [each for each in manifests if not each.holds_deletes]
    entries = await _load_entries(store, data, lambda entry: entry.status is not Status.DELETED)
    files = [_live_file(entry, sequence_id) for entry in entries]
    return SnapshotFiles(files, sum(each.files_count or 0 for each in manifests if each.holds_deletes))


async def load_changed(store: ObjectStore, manifest_list: str, *, snapshot_id: int) -> tuple[set[str], set[str]]:
    """Load the locations of the files that a snapshot added and of those that it removed, from its own manifests."""
    manifests = list_manifests(await store.read(manifest_list), manifest_list)
    own = [each for each in manifests if each.snapshot_id == snapshot_id and not each.holds_deletes]
    entries = await _load_entries(store, own, lambda entry: entry.snapshot_id == snapshot_id)
    removed = {entry.file["file_path"] for entry in entries if entry.status is Status.DELETED}
    return {entry.file["file_path"] for entry in entries if entry.status is not Status.DELETED}, removed


async def _load_entries(
    store: ObjectStore, manifests: Iterable[Manifest], is_wanted: Callable[[Entry], bool]
) -> list[Entry]:
    async def load(manifest: Manifest) -> list[Entry]:
        return [entry for entry in read_entries(await store.read(manifest.location), manifest) if is_wanted(entry)]

    parts = await map_parallel(load, manifests, at_once=PARALLEL_READS)
    return [entry for part in parts for entry in part]


def _live_file(entry: Entry, sequence_id: int) -> LiveFile:
    lowest, highest = _bounds(entry.file, sequence_id, "long")
    return LiveFile(
        location=entry.file["file_path"],
        snapshot_id=_NO_SNAPSHOT if entry.snapshot_id is None else entry.snapshot_id,
        rows=entry.file["record_count"],
        lowest=_LONG_MIN if lowest is None else lowest,
        highest=_LONG_MAX if highest is None else highest,
        partition=tuple(entry.file["partition"].values()),
    )


# -- rows of a file


class FileUnreadable(WriterError):
    """A data file is not a Parquet file of this table, or is damaged."""


@dataclass(frozen=True, slots=True)
class ScannedFile:
    """The rows of a file: their number, ledger facts by source if they were counted, and the keys of changes."""

    rows: int
    facts: Mapping[SourceId, RowFacts]
    keys: pa.Table


def read_rows(data: bytes, names: Mapping[int, str], *, is_counted: bool) -> ScannedFile:
    """Read all rows of a file; `names` has the table's columns by field id. CPU work: callers run it in a thread.

    Raises: FileUnreadable if it is not a file of this table, or is damaged.
    """
    try:
        with pq.ParquetFile(pa.BufferReader(data)) as file:
            # Columns get the table's current names; dropped ones keep theirs.
            fields = {
                field.name: field.with_name(names.get(field_id, field.name))
                for field in file.schema_arrow
                if (field_id := _field_id(field)) is not None
            }
            wanted = fields if is_counted else {at: field for at, field in fields.items() if field.name in _KEY_SOURCES}
            return _count(file, wanted, is_counted=is_counted)
    except (pa.ArrowException, OSError, KeyError, ValueError) as error:
        raise FileUnreadable(f"not a readable file of this table: {type(error).__name__}: {error}") from error


def _count(file: pq.ParquetFile, fields: Mapping[str, pa.Field], *, is_counted: bool) -> ScannedFile:
    parts, keys, rows = [], [_KEY_TYPES.empty_table()], 0
    for read in file.iter_batches(BATCH_ROWS, columns=list(fields), use_threads=False):
        batch = pa.table([read.column(name) for name in fields], schema=pa.schema(list(fields.values())))
        rows += batch.num_rows
        if is_counted:
            parts.append(tally_rows(batch, list(fields.values())))
        if all(name in batch.column_names for name in _KEY_SOURCES):
            keys.append(_keys_of(batch))
    return ScannedFile(rows, join_facts(parts), pa.concat_tables(keys))


def _keys_of(batch: pa.Table) -> pa.Table:
    was_read = pc.equal(batch.column(cdc.OPERATION), Operation.READ.value)
    row_ids = pc.if_else(was_read, batch.column(cdc.ROW_ID), pa.scalar(None, pa.string()))
    own = batch.select([cdc.SOURCE, cdc.SEQUENCE, cdc.INGESTED_AT]).append_column(READ_ROW, row_ids)
    return own.cast(_KEY_TYPES).filter(pc.is_valid(own.column(cdc.SEQUENCE)))
