"""Reads the rows of a data file back as ledgers count them. Owns which of its columns are which, by their field ids."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from writer import columns as cdc
from writer.changes import Operation, SourceId
from writer.errors import WriterError
from writer.types import FIELD_ID_KEY
from writer.verification.duplicates import READ_ROW
from writer.verification.ledger import RowFacts, join_facts
from writer.verification.tally import tally_rows

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
