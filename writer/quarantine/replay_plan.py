"""What a replay decides: what it appends, and the note by which the next one knows. Core; replay.py acts.

A replay appends changes to their table and then says so in the quarantine. These are two commits, and it may be killed
between them. So the first one leaves a note in the table, in the same atomic act as the rows:

    lakefeed.quarantine.replayed   {"number": 7, "ranges": {"<mark>": [[<epoch>, <first>, <last sequence>], ...]}}

The note holds the last replay only, because the one before it was settled in the quarantine first. A range stands for
the changes in it that were open then: rows of one mark come in order, so nothing is put into a range afterwards.
Replays number their commits as a source does its changes (the mark `replay`), so of two at once one finds itself
overtaken, and plans again.
"""

from __future__ import annotations

import base64
import binascii
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from writer import columns as cdc
from writer.changes import SourceId, TableName
from writer.errors import WriterError
from writer.quarantine import names
from writer.quarantine.entries import ID, MARK
from writer.rows.change_columns import BASE64_KEY
from writer.rows.groups import ChangeGroup, Group, Image, Run
from writer.types import StructType

REPLAYED_PROPERTY = "lakefeed.quarantine.replayed"
REPLAYS = names.command_mark("replay")

# Bounds the note: a replay whose changes need more ranges goes in several commits. Mostly one is enough.
RANGES_MAX = 256

# What is read of the quarantine to append a change as it came.
READ_COLUMNS = (
    *(cdc.ROW_ID, cdc.TIMESTAMP, cdc.INGESTED_AT),
    *(names.SOURCE, names.EPOCH, names.SEQUENCE, names.OPERATION, names.ROW_ID),
    *(names.ROW, names.BEFORE, names.UNCHANGED, names.METADATA, names.DECLARED, names.LOG_OFFSET),
)

# A change as its table has it: source, sequence, operation, row id, time in microseconds, epoch.
Identity: TypeAlias = tuple[str, int, str, str, int, int]

Ranges: TypeAlias = dict[str, list[tuple[int, int, int]]]

_ABSENT = msgspec.Raw(b"")


class NoteUnreadable(WriterError):
    """A table's note of its last replay is damaged: a person has to look before anything is replayed."""


class _Document(msgspec.Struct):
    number: int
    ranges: dict[str, list[tuple[int, int, int]]]


@dataclass(frozen=True, slots=True)
class Replayed:
    """The note of a replay: its number, and per mark the (epoch, first, last) ranges of what it appended."""

    number: int
    ranges: Ranges

    def to_text(self) -> str:
        """Render the table property."""
        return msgspec.json.encode(_Document(self.number, self.ranges)).decode()

    def ids_in(self, entries: pa.Table) -> list[str]:
        """Find the changes among open entries that this replay has appended."""
        found = [pa.array([], pa.string())]
        marks = entries.column(MARK).cast(pa.string())
        for mark, ranges in self.ranges.items():
            own = entries.filter(pc.equal(marks, mark))
            epochs, sequences = own.column(names.EPOCH), own.column(names.SEQUENCE)
            for epoch, first, last in ranges:
                within = pc.and_(pc.greater_equal(sequences, first), pc.less_equal(sequences, last))
                found += own.filter(pc.and_(within, pc.equal(epochs, epoch))).column(ID).chunks
        return sorted(set(pa.chunked_array(found).to_pylist()))


def replayed_from_text(text: str | None) -> Replayed | None:
    """Read the table property; a table without one has had no replay.

    Raises:
        NoteUnreadable: the text is no note.
    """
    if text is None:
        return None
    try:
        document = msgspec.json.decode(text, type=_Document)
    except msgspec.MsgspecError as error:
        raise NoteUnreadable(f"note of the last replay is damaged: {error}: property={REPLAYED_PROPERTY}") from error
    return Replayed(document.number, document.ranges)


def plan_ranges(entries: pa.Table, ids: Sequence[str]) -> Ranges:
    """Describe changes as ranges of the open entries of their table: a range ends before one that is not among them."""
    order = [(name, "ascending") for name in (MARK, names.EPOCH, names.SEQUENCE)]
    slim = entries.select([ID, MARK, names.EPOCH, names.SEQUENCE])
    ordered = slim.set_column(1, MARK, slim.column(MARK).cast(pa.string())).sort_by(order)
    is_in = pc.is_in(ordered.column(ID), pa.array(ids, pa.string())).to_numpy()
    marks = ordered.column(MARK).to_numpy()
    epochs, sequences = (ordered.column(name).to_numpy() for name in (names.EPOCH, names.SEQUENCE))
    is_new = (marks[1:] != marks[:-1]) | (epochs[1:] != epochs[:-1]) | (is_in[1:] != is_in[:-1])
    cuts = [0, *(np.flatnonzero(is_new) + 1).tolist(), len(is_in)]
    ranges: Ranges = {}
    for start, stop in itertools.pairwise(cuts):
        if start < stop and is_in[start]:
            found = (int(epochs[start]), int(sequences[start]), int(sequences[stop - 1]))
            ranges.setdefault(str(marks[start]), []).append(found)
    return ranges


def are_too_many(ranges: Ranges) -> bool:
    """Tell whether a note of these ranges would be too long."""
    return sum(map(len, ranges.values())) > RANGES_MAX


def each_once(rows: pa.Table) -> pa.Table:
    """Leave out what is there again."""
    ids = rows.column(cdc.ROW_ID)
    return rows.take(pc.index_in(pc.unique(ids), ids))


def plan_batches(rows: pa.Table, *, max_rows: int) -> list[pa.Table]:
    """Sort changes as their sources sent them, and cut where they came with another declaration or get too many."""
    ordered = rows.sort_by([(name, "ascending") for name in (names.SOURCE, names.EPOCH, names.SEQUENCE)])
    batches: list[pa.Table] = []
    start = 0
    for _, same in itertools.groupby(ordered.column(names.DECLARED).to_pylist()):
        stop = start + sum(1 for _ in same)
        batches += [ordered.slice(at, min(max_rows, stop - at)) for at in range(start, stop, max_rows)]
        start = stop
    return batches


def change_group(rows: pa.Table, table: TableName) -> ChangeGroup:
    """Make the group again that the changes of a batch once were. Its times are left to `with_times`."""
    columns: Mapping[str, list[Any]] = {name: rows.column(name).to_pylist() for name in READ_COLUMNS[3:]}
    return ChangeGroup(
        table=str(table),
        sequences=columns[names.SEQUENCE],
        timestamps=[0] * rows.num_rows,
        operations=columns[names.OPERATION],
        row_ids=columns[names.ROW_ID],
        images=[image_of(text) for text in columns[names.ROW]],
        befores=[_ABSENT if text is None else image_of(text) for text in columns[names.BEFORE]],
        unchanged=columns[names.UNCHANGED],
        metadata=[_ABSENT if text is None else image_of(text) for text in columns[names.METADATA]],
        runs=tuple(_runs(rows)),
        declared=tuple(columns[names.DECLARED][0] or ()),
    )


def _runs(rows: pa.Table) -> list[Run]:
    received_at_us = rows.column(cdc.INGESTED_AT).cast(pa.int64()).to_pylist()
    shared = zip(
        *(rows.column(name).to_pylist() for name in (names.SOURCE, names.EPOCH)),
        received_at_us,
        rows.column(names.LOG_OFFSET).to_pylist(),
        strict=True,
    )
    runs: list[Run] = []
    for row, (source, epoch, received, offset) in enumerate(shared):
        run = Run(row, row + 1, SourceId(source), epoch, received, offset)
        if runs and (run.source, run.epoch, run.received_at_us, run.offset) == _shared(runs[-1]):
            run = Run(runs.pop().start, row + 1, run.source, epoch, received, offset)
        runs.append(run)
    return runs


def _shared(run: Run) -> tuple[SourceId, int, int, int]:
    return run.source, run.epoch, run.received_at_us, run.offset


def image_of(text: str) -> Image:
    """Give a row's JSON as it was received, from the text that change_columns.text_of made of it."""
    if BASE64_KEY in text:
        try:
            document = msgspec.json.decode(text, type=dict[str, str])
            data = base64.b64decode(document[BASE64_KEY], validate=True)
            data.decode()
        except UnicodeDecodeError:
            return data  # what is not text was put into base64, and nothing else was
        except (msgspec.MsgspecError, KeyError, binascii.Error):
            pass  # a text of the source that only looks like ours
    return text.encode()


def rows_of(part: Group, rows: pa.Table) -> pa.Table:
    """Find the rows of the quarantine that a part of their group was made of."""
    positions = zip(
        *(rows.column(name).to_pylist() for name in (names.SOURCE, names.EPOCH, names.SEQUENCE)), strict=True
    )
    places = {position: place for place, position in enumerate(positions)}
    wanted = [
        places[run.source, run.epoch, part.sequence_at(row)] for run in part.runs for row in range(run.start, run.stop)
    ]
    return rows.take(pa.array(wanted, pa.int64()))


def with_times(decoded: pa.Table, rows: pa.Table) -> pa.Table:
    """Give decoded changes their times, to the microsecond."""
    index = decoded.schema.get_field_index(cdc.TIMESTAMP)
    field = decoded.schema.field(index)
    return decoded.set_column(index, field, rows.column(cdc.TIMESTAMP).cast(field.type))


def identities(rows: pa.Table) -> list[Identity]:
    """Tell changes in quarantine from one another as their table would."""
    return _tuples(rows, (names.SOURCE, names.SEQUENCE, names.OPERATION, names.ROW_ID), epoch=names.EPOCH)


def stored_identities(rows: pa.Table) -> list[Identity]:
    """Tell changes of a table from one another; of those in it only the columns for that were read."""
    return _tuples(rows, (cdc.SOURCE, cdc.SEQUENCE, cdc.OPERATION, cdc.ROW_ID), epoch=cdc.EPOCH)


def identity_columns(table: StructType) -> list[str]:
    """Name the columns that `stored_identities` needs; a table to which no epoch has come yet may lack one."""
    wanted = (cdc.SOURCE, cdc.SEQUENCE, cdc.OPERATION, cdc.ROW_ID, cdc.TIMESTAMP)
    return [*wanted, cdc.EPOCH] if table.field(cdc.EPOCH) else [*wanted]


def _tuples(rows: pa.Table, own: Sequence[str], *, epoch: str) -> list[Identity]:
    times_us = rows.column(cdc.TIMESTAMP).cast(pa.int64())
    epochs = rows.column(epoch).fill_null(0) if epoch in rows.column_names else pa.repeat(0, rows.num_rows)
    columns = (*(rows.column(name) for name in own), times_us, epochs)
    return list(zip(*(column.to_pylist() for column in columns), strict=True))
