"""Reading a table's rows back, for commands that look at what was written. Owns finding its files and their columns.

    snapshot -> manifest list -> manifests -> data files, oldest first, but for those whose bounds say "not here"

The change tables are append-only, so a row that is in a file is in the table. A table with delete files, which only
somebody else can have made, is refused rather than read wrongly. Columns go by field id, as files outlive names; one
that a file does not have is null.
"""

from __future__ import annotations

import asyncio
import struct
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
from lakefeed.iceberg.manifests import ManifestFile, decode_avro, decode_manifest_list
from lakefeed.iceberg.types import Field
from lakefeed.iceberg.values import comparable_bound, encode_single_value
from lakefeed.storage.store import ObjectStore
from lakefeed.writer.commit.state import TableState
from lakefeed.writer.files.row_hash import tally_rows

# --- writer.table_scan ------------------------------------------------------------------------------------------------


# Manifests are small and many: enough at once to hide a far store's delay.
PARALLEL_READS = 16

_DATA = 0
_DELETED = 2


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
    manifests = decode_manifest_list(await store.read(state.manifest_list)).manifests
    if any(manifest["content"] != _DATA for manifest in manifests):
        raise CatalogError(f"table has delete files, which are not read here: table={state.name}")
    slots = asyncio.Semaphore(PARALLEL_READS)

    async def read(manifest: ManifestFile) -> list[StoredFile]:
        async with slots:
            entries = decode_avro(await store.read(manifest["manifest_path"]))[1]
        return list(_files_of(entries, manifest, wanted))

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
        ends = (comparable_bound(field.type, encode_single_value(field.type, end)) for end in (lowest, highest))
        return cls(field.id, field.type, *ends)

    def may_be_in(self, data_file: Mapping[str, Any]) -> bool:
        lower, upper = (_bound(data_file[name], self.field_id) for name in ("lower_bounds", "upper_bounds"))
        if lower is not None and comparable_bound(self.type, lower) > self.highest:
            return False
        return upper is None or comparable_bound(self.type, upper) >= self.lowest


def _bound(pairs: Sequence[Mapping[str, Any]] | None, field_id: int) -> bytes | None:
    return next((pair["value"] for pair in pairs or () if pair["key"] == field_id), None)


def _files_of(entries: list[dict[str, Any]], manifest: ManifestFile, wanted: Sequence[_Wanted]) -> Iterator[StoredFile]:
    for entry in entries:
        data_file = entry["data_file"]
        if entry["status"] != _DELETED and all(each.may_be_in(data_file) for each in wanted):
            number = entry["sequence_number"]  # null where it is the manifest's own
            yield StoredFile(
                manifest["sequence_number"] if number is None else number,
                data_file["file_path"],
                data_file["record_count"],
            )


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


@dataclass(frozen=True, slots=True)
class LiveFile:
    """A data file that is part of a table."""

    location: str
    snapshot_id: int
    extent: Extent

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
    manifests = decode_manifest_list(await store.read(manifest_list)).manifests
    entries = await _load_entries(store, [each for each in manifests if each["content"] == _DATA])
    files = [_live_file(entry, sequence_id) for entry in entries if entry["status"] != _DELETED]
    others = (each for each in manifests if each["content"] != _DATA)
    return Contents(files, sum(each["added_files_count"] + each["existing_files_count"] for each in others))


async def load_added(store: ObjectStore, manifest_list: str, *, snapshot_id: int) -> set[str]:
    """Read which files a snapshot added, from its own manifests."""
    return {_path(entry) for entry in await _load_own(store, manifest_list, snapshot_id) if entry["status"] != _DELETED}


async def load_removed(store: ObjectStore, manifest_list: str, *, snapshot_id: int) -> set[str]:
    """Read which files a snapshot says that it removed."""
    return {_path(entry) for entry in await _load_own(store, manifest_list, snapshot_id) if entry["status"] == _DELETED}


async def _load_own(store: ObjectStore, manifest_list: str, snapshot_id: int) -> list[dict[str, Any]]:
    manifests = decode_manifest_list(await store.read(manifest_list)).manifests
    own = [each for each in manifests if each["added_snapshot_id"] == snapshot_id and each["content"] == _DATA]
    return [entry for entry in await _load_entries(store, own) if entry["snapshot_id"] == snapshot_id]


async def _load_entries(store: ObjectStore, manifests: Iterable[ManifestFile]) -> list[dict[str, Any]]:
    async def load(manifest: ManifestFile) -> list[dict[str, Any]]:
        entries = decode_avro(await store.read(manifest["manifest_path"]))[1]
        inherited = {"snapshot_id": manifest["added_snapshot_id"]}
        return [{**entry, **inherited} if entry["snapshot_id"] is None else entry for entry in entries]

    parts = await map_parallel(load, manifests, at_once=PARALLEL_READS)
    return [entry for part in parts for entry in part]


def _live_file(entry: Mapping[str, Any], sequence_id: int) -> LiveFile:
    data_file = entry["data_file"]
    lowest = _live_files_bound(data_file["lower_bounds"], sequence_id)
    highest = _live_files_bound(data_file["upper_bounds"], sequence_id)
    extent = Extent(
        _LONG_MIN if lowest is None else lowest, _LONG_MAX if highest is None else highest, data_file["record_count"]
    )
    return LiveFile(data_file["file_path"], entry["snapshot_id"], extent)


def _live_files_bound(pairs: Sequence[Mapping[str, Any]] | None, field_id: int) -> int | None:
    value = next((pair["value"] for pair in pairs or () if pair["key"] == field_id), None)
    return None if value is None else int(struct.unpack("<q", value)[0])


def _path(entry: Mapping[str, Any]) -> str:
    return str(entry["data_file"]["file_path"])


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
