"""Reading a table's rows back, for commands that look at what was written. Owns finding its files and their columns.

    snapshot -> manifest list -> manifests -> data files, oldest first, but for those whose bounds say "not here"

The change tables are append-only, so a row that is in a file is in the table. A table with delete files, which only
somebody else can have made, is refused rather than read wrongly. Columns go by field id, as files outlive names; one
that a file does not have is null.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from writer.errors import CatalogError
from writer.iceberg.manifests import ManifestFile, decode_avro, decode_manifest_list
from writer.iceberg.single_values import comparable_bound, encode_single_value
from writer.iceberg.table_state import TableState
from writer.storage import ObjectStore
from writer.types import FIELD_ID_KEY, Field, to_arrow_type

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
