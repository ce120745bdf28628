"""Replays changes out of quarantine: appends them to their table, each once, whatever is killed in between.

Owns the order of the steps; a crash after each leaves:

    1. settle: what the table's note says was replayed and the quarantine does not, is said there     nothing to redo
    2. look into the table for changes that it has after all (an answer was lost, or another node)    nothing
    3. decode as ever; what fails again stays where it is                                             nothing
    4. commit the rows, with the note                                                                 step 1 finds it
    5. say in the quarantine that they were replayed                                                  done

Sources, sequences, operations and times stay as they were. The marks of the sources are left alone: that a change is
not written once more when the log is read again is the work of the quarantine's marks (tables/quarantine.py).
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import functools
import itertools
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from lakefeed.contract import changes as cdc
from lakefeed.contract import properties
from lakefeed.contract.changes import Position, SourceId, Span, TableName, table_name_of
from lakefeed.contract.errors import (
    CatalogError,
    CommitConflict,
    RowsAlreadyCommitted,
    RowsUnfit,
    TableMissing,
    TableReplaced,
    WriterError,
)
from lakefeed.contract.properties import Kind, Reason, Refusal, moved_marks, quarantine_of
from lakefeed.iceberg.types import StructType
from lakefeed.writer.commit.state import TableState
from lakefeed.writer.files.scan import find_files, read_columns
from lakefeed.writer.quarantine import store as core
from lakefeed.writer.quarantine.store import ID, MARK, Contents, Filter, Quarantine, append_rows
from lakefeed.writer.rows.groups import ArrowGroup, Group, JsonGroup, Run, frame_of_record, group_frames
from lakefeed.writer.rows.runs import reason_of
from lakefeed.writer.rows.values import BASE64_KEY, Image
from lakefeed.writer.tables.columns import TableColumns, TableContext
from lakefeed.writer.tables.quarantine import quarantine_rows

# --- writer.quarantine.replay_plan ------------------------------------------------------------------------------------
#
# What a replay decides: what it appends, and the note by which the next one knows. Core; replay.py acts.
#
# A replay appends changes to their table and then says so in the quarantine. These are two commits, and it may be
# killed
# between them. So the first one leaves a note in the table, in the same atomic act as the rows:
#
#     lakefeed.quarantine.replayed   {"number": 7, "ranges": {"<mark>": [[<epoch>, <first>, <last sequence>], ...]}}
#
# The note holds the last replay only, because the one before it was settled in the quarantine first. A range stands for
# the changes in it that were open then: rows of one mark come in order, so nothing is put into a range afterwards.
# Replays number their commits as a source does its changes (the mark `replay`), so of two at once one finds itself
# overtaken, and plans again.


REPLAYED_PROPERTY = "lakefeed.quarantine.replayed"
REPLAYS = properties.command_mark("replay")

# Bounds the note: a replay whose changes need more ranges goes in several commits. Mostly one is enough.
RANGES_MAX = 256

# What is read of the quarantine to append a change as it came.
READ_COLUMNS = (
    *(cdc.ROW_ID, cdc.TIMESTAMP, cdc.INGESTED_AT),
    *(properties.SOURCE, properties.EPOCH, properties.SEQUENCE, properties.OPERATION, properties.ROW_ID),
    *(
        properties.ROW,
        properties.BEFORE,
        properties.UNCHANGED,
        properties.METADATA,
        properties.DECLARED,
        properties.LOG_OFFSET,
    ),
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
            epochs, sequences = own.column(properties.EPOCH), own.column(properties.SEQUENCE)
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
    order = [(name, "ascending") for name in (MARK, properties.EPOCH, properties.SEQUENCE)]
    slim = entries.select([ID, MARK, properties.EPOCH, properties.SEQUENCE])
    ordered = slim.set_column(1, MARK, slim.column(MARK).cast(pa.string())).sort_by(order)
    is_in = pc.is_in(ordered.column(ID), pa.array(ids, pa.string())).to_numpy()
    marks = ordered.column(MARK).to_numpy()
    epochs, sequences = (ordered.column(name).to_numpy() for name in (properties.EPOCH, properties.SEQUENCE))
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
    ordered = rows.sort_by([(name, "ascending") for name in (properties.SOURCE, properties.EPOCH, properties.SEQUENCE)])
    batches: list[pa.Table] = []
    start = 0
    for _, same in itertools.groupby(ordered.column(properties.DECLARED).to_pylist()):
        stop = start + sum(1 for _ in same)
        batches += [ordered.slice(at, min(max_rows, stop - at)) for at in range(start, stop, max_rows)]
        start = stop
    return batches


def change_group(rows: pa.Table, table: TableName) -> JsonGroup:
    """Make the group again that the changes of a batch once were. Its times are left to `with_times`."""
    columns: Mapping[str, list[Any]] = {name: rows.column(name).to_pylist() for name in READ_COLUMNS[3:]}
    return JsonGroup(
        table=str(table),
        sequences=columns[properties.SEQUENCE],
        timestamps=[0] * rows.num_rows,
        operations=columns[properties.OPERATION],
        row_ids=columns[properties.ROW_ID],
        images=[image_of(text) for text in columns[properties.ROW]],
        befores=[_ABSENT if text is None else image_of(text) for text in columns[properties.BEFORE]],
        unchanged=columns[properties.UNCHANGED],
        metadata=[_ABSENT if text is None else image_of(text) for text in columns[properties.METADATA]],
        runs=tuple(_runs(rows)),
        declared=tuple(columns[properties.DECLARED][0] or ()),
    )


def _runs(rows: pa.Table) -> list[Run]:
    received_at_us = rows.column(cdc.INGESTED_AT).cast(pa.int64()).to_pylist()
    shared = zip(
        *(rows.column(name).to_pylist() for name in (properties.SOURCE, properties.EPOCH)),
        received_at_us,
        rows.column(properties.LOG_OFFSET).to_pylist(),
        strict=True,
    )
    runs: list[Run] = []
    for row, (source, epoch, received, offset) in enumerate(shared):
        run = Run(row, row + 1, SourceId(source), epoch, received, offset)
        if runs and runs[-1].key == run.key:
            run = replace(run, start=runs.pop().start)
        runs.append(run)
    return runs


def image_of(text: str) -> Image:
    """Give a row's JSON as it was received, from the text that values.text_of made of it."""
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
        *(rows.column(name).to_pylist() for name in (properties.SOURCE, properties.EPOCH, properties.SEQUENCE)),
        strict=True,
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
    return _tuples(
        rows, (properties.SOURCE, properties.SEQUENCE, properties.OPERATION, properties.ROW_ID), epoch=properties.EPOCH
    )


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


# --- writer.quarantine.replay -----------------------------------------------------------------------------------------


# Changes in one commit: large enough that commits are few, small enough to decode, hold and start over at once.
BATCH_MAX_ROWS = 20_000
# The service, or another replay, may commit first a few times; after that it is better to run the command again.
ATTEMPTS_MAX = 10
# Failures that a report names; all are counted.
FAILURES_MAX = 100

_MOVED_ON = (RowsAlreadyCommitted, RowsUnfit, CommitConflict, TableMissing, TableReplaced)


@dataclass(frozen=True, slots=True)
class Failure:
    """A change that its table still cannot take, and why not."""

    id: str
    reason: str


@dataclass(slots=True)
class ReplayReport:
    """What a replay did: appended now, found in the table already, and not possible."""

    replayed: int = 0
    found: int = 0
    failed: int = 0
    failures: list[Failure] = field(default_factory=list)

    def add_failures(self, failures: Sequence[Failure]) -> None:
        """Count failures, and keep the first ones."""
        self.failed += len(failures)
        self.failures += failures[: FAILURES_MAX - len(self.failures)]


class Replay:
    """One replay of one table's changes."""

    def __init__(
        self,
        table: TableName,
        contents: Contents,
        context: TableContext,
        *,
        now_us: Callable[[], int],
        on_changes: Callable[[int], object] = lambda _: None,
    ) -> None:
        self.report = ReplayReport()
        self._table = table
        self._contents = contents
        # All open entries of the table, whatever is asked for: notes are written in terms of them.
        self._open = core.apply_filter(contents.entries, Filter(table=str(table)))
        self._context = context
        self._now_us = now_us
        self._on_changes = on_changes
        self._quarantine = Quarantine(table.namespace, context)

    async def run(self, wanted: Filter) -> ReplayReport:
        """Replay the changes of the table that a filter asks for. Cancelling it, or a crash, leaves what is done done.

        Raises: WriterError if it did not get to the end: run it again.
        """
        return await self._run(core.apply_filter(self._open, wanted))

    async def run_ids(self, ids: Sequence[str]) -> ReplayReport:
        """Replay those of some changes that are open, as `run` does."""
        return await self._run(core.with_ids(self._open, ids))

    async def _run(self, entries: pa.Table) -> ReplayReport:
        await self._settle(await self._load())
        gathered: list[pa.Table] = []
        for file in core.files_with(entries):
            gathered.append(await self._quarantine.read(self._contents, entries, file=file, columns=READ_COLUMNS))
            if sum(rows.num_rows for rows in gathered) >= BATCH_MAX_ROWS:
                await self._replay_all(gathered)
                gathered = []
        await self._replay_all(gathered)
        return self.report

    async def _replay_all(self, gathered: Sequence[pa.Table]) -> None:
        if not gathered:
            return
        rows = each_once(self._still_open(pa.concat_tables(gathered)))
        batches = deque(plan_batches(rows, max_rows=BATCH_MAX_ROWS))
        while batches:
            rows = batches.popleft()
            if not await self._replay_batch(rows):
                half = rows.num_rows // 2
                batches.extendleft((rows.slice(half), rows.slice(0, half)))

    async def _replay_batch(self, rows: pa.Table) -> bool:
        """Replay changes together; False if that would take too long a note, so that they must go in parts."""
        for _ in range(ATTEMPTS_MAX):
            try:
                return await self._try_batch(rows)
            except _MOVED_ON:
                continue  # plan again on what the table is now
        raise CatalogError(f"table is written by others all the time: table={self._table} attempts={ATTEMPTS_MAX}")

    async def _try_batch(self, rows: pa.Table) -> bool:
        columns = TableColumns(self._table, self._context)
        await columns.open()
        await self._settle(columns.state)
        rows = self._still_open(rows)
        present = await self._find_present(rows, columns.state)
        decoded = await self._decode(_rows_without(rows, present), columns)
        ranges = plan_ranges(self._open, decoded.ids)
        if are_too_many(ranges):
            return False
        if decoded.ids:
            mark = columns.marks.get(REPLAYS)
            position = Position(0, mark.sequence + 1 if mark else 1)
            note = Replayed(position.sequence, ranges)
            await append_rows(
                decoded.tables,
                columns,
                self._context,
                spans={REPLAYS: Span(position, position)},
                properties={REPLAYED_PROPERTY: note.to_text()},
            )
        await self._say_replayed([*decoded.ids, *present])
        self.report.replayed += len(decoded.ids)
        self.report.found += len(present)
        self.report.add_failures(decoded.failures)
        self._on_changes(rows.num_rows)
        return True

    async def _load(self) -> TableState | None:
        try:
            return await self._context.committer.load(self._table)
        except TableMissing:
            return None

    async def _settle(self, state: TableState | None) -> None:
        """Say in the quarantine what the last replay has done and could not say any more."""
        note = replayed_from_text(state.properties.get(REPLAYED_PROPERTY)) if state else None
        ids = note.ids_in(self._open) if note else []
        await self._say_replayed(ids)
        self.report.replayed += len(ids)
        self._on_changes(len(ids))

    async def _say_replayed(self, ids: Sequence[str]) -> None:
        if ids:
            await self._quarantine.resolve(ids, kind=Kind.REPLAYED, table=self._table, now_us=self._now_us())
            self._open = core.without(self._open, ids)

    def _still_open(self, rows: pa.Table) -> pa.Table:
        return rows.filter(pc.is_in(rows.column(cdc.ROW_ID), self._open.column(core.ID).combine_chunks()))

    async def _find_present(self, rows: pa.Table, state: TableState | None) -> list[str]:
        """Find changes that are in their table already, by all that tells one from another there."""
        if state is None or not rows.num_rows:
            return []
        times_us = rows.column(cdc.TIMESTAMP).cast(pa.int64())
        within = {
            cdc.SEQUENCE: _ends(rows.column(properties.SEQUENCE)),
            cdc.TIMESTAMP: _ends(times_us),
            cdc.SOURCE: _ends(rows.column(properties.SOURCE)),
        }
        ids = dict(zip(identities(rows), rows.column(cdc.ROW_ID).to_pylist(), strict=True))
        sequences = rows.column(properties.SEQUENCE).combine_chunks()
        columns = identity_columns(state.schema.columns)
        found = []
        for file in await find_files(state, self._context.store, within=within):
            stored = await read_columns(file, state, self._context.store, names=columns)
            near = stored.filter(pc.is_in(stored.column(cdc.SEQUENCE), sequences))
            found += [ids[identity] for identity in stored_identities(near) if identity in ids]
        return sorted(set(found))

    async def _decode(self, rows: pa.Table, columns: TableColumns) -> _Decoded:
        done = _Decoded()
        if rows.num_rows:
            fitted = await columns.decode(change_group(rows, self._table))
            for part, decoded in fitted.kept:
                own = rows_of(part, rows)
                done.tables.append(with_times(decoded, own))
                done.ids += own.column(cdc.ROW_ID).to_pylist()
            for part, reason in fitted.refused:
                done.failures += [Failure(id_, reason.text) for id_ in rows_of(part, rows)[cdc.ROW_ID].to_pylist()]
        return done


@dataclass(slots=True)
class _Decoded:
    """Changes in their table's columns, and those that do not get there."""

    tables: list[pa.Table] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)


def _rows_without(rows: pa.Table, ids: Sequence[str]) -> pa.Table:
    """Leave out rows by the ids of their changes."""
    return rows.filter(pc.invert(pc.is_in(rows.column(cdc.ROW_ID), pa.array(ids, pa.string()))))


def _ends(column: pa.ChunkedArray) -> tuple[object, object]:
    ends = pc.min_max(column)
    return ends["min"].as_py(), ends["max"].as_py()


# --- writer.quarantine.records ----------------------------------------------------------------------------------------
#
# Replays whole records that could not be read when they came, after the fault is mended. Owns the order of the steps.
#
# A record becomes changes of its tables, which then go the way of every change in quarantine. A crash after each step
# leaves what running the command again finds:
#
#     1. take the record apart as ever; what fails again stays where it is                     nothing to redo
#     2. make sure that no log can bring its changes any more                                  nothing
#     3. keep them in the quarantines of their tables, under marks of their own (names.py)     their ids are there
#     4. replay them (replay.py)                                                               they are not open any
# more
#     5. say in the quarantine that the record was replayed                                    done
#
# Step 2: a service that is mended and reads the record again writes its rows as if nothing had been. Only where a
# table's
# own marks, or those of its quarantine, have passed the record is it sure that none does.


# What is read of the quarantine to make a record's frame again.
_READ_COLUMNS = (
    *(cdc.ROW_ID, cdc.INGESTED_AT),
    *(properties.SOURCE, properties.EPOCH, properties.SEQUENCE, properties.ROW, properties.NODE, properties.LOG_OFFSET),
)

_KEPT_FOR = Reason(Refusal.UNDECODABLE, "was in a record that could not be read")


@dataclass(frozen=True, slots=True)
class _Part:
    """The changes of one table that were in a record, and the last of them."""

    table: TableName
    source: SourceId
    last: Position
    kept: ArrowGroup


@dataclass(frozen=True, slots=True)
class _Record:
    id: str
    parts: Sequence[_Part]


class RecordReplay:
    """One replay of records that could not be read. `not_in_log`: whoever asks for it has looked, see step 2."""

    def __init__(
        self,
        table: TableName,
        contents: Contents,
        context: TableContext,
        *,
        now_us: Callable[[], int],
        on_changes: Callable[[int], object] = lambda _: None,
        not_in_log: bool = False,
    ) -> None:
        self.report = ReplayReport()
        self._table = table
        self._contents = contents
        self._context = context
        self._now_us = now_us
        self._on_records = on_changes
        self._not_in_log = not_in_log
        self._quarantine = Quarantine(table.namespace, context)

    async def run(self, wanted: Filter) -> ReplayReport:
        """Replay the records that a filter asks for. Cancelling it, or a crash, leaves what is done done.

        Raises: WriterError if it did not get to the end: run it again.
        """
        entries = core.apply_filter(core.apply_filter(self._contents.entries, Filter(table=str(self._table))), wanted)
        seen: set[str] = set()
        gathered: list[_Record] = []
        for file in core.files_with(entries):
            rows = await self._quarantine.read(self._contents, entries, file=file, columns=_READ_COLUMNS)
            for row in _rows_of(rows):
                if row[cdc.ROW_ID] in seen:
                    continue
                seen.add(row[cdc.ROW_ID])
                gathered += await self._read(row)
                if sum(len(part.kept) for record in gathered for part in record.parts) >= BATCH_MAX_ROWS:
                    await self._replay(gathered)
                    gathered = []
        await self._replay(gathered)
        return self.report

    async def _read(self, row: Mapping[str, Any]) -> list[_Record]:
        """Read a record; an empty list if it has to stay where it is."""
        take = functools.partial(
            _parts_of, row, default_namespace=self._context.config.default_namespace, now_us=self._now_us()
        )
        try:
            parts = await asyncio.get_running_loop().run_in_executor(self._context.decoders, take)
        except MemoryError:
            raise  # says nothing of the record
        except Exception as error:  # noqa: BLE001 - a boundary: it is told of the record, and others go on
            return self._refuse(row, f"still cannot be read: {reason_of(error).text}")
        for part in parts:
            if not self._not_in_log and not await self._is_past(part):
                return self._refuse(
                    row,
                    f"the log may still bring its changes: start the service that can read them, or say --not-in-log"
                    f" if its log has no such record any more: table={part.table} offset={row[properties.LOG_OFFSET]}",
                )
        return [_Record(row[cdc.ROW_ID], parts)]

    def _refuse(self, row: Mapping[str, Any], reason: str) -> list[_Record]:
        self.report.add_failures([Failure(row[cdc.ROW_ID], reason)])
        self._on_records(1)
        return []

    async def _is_past(self, part: _Part) -> bool:
        """Tell whether a service would leave these changes out if it read them again, or they are there by now."""
        marks = await self._marks(part.table)
        moved = moved_marks(await self._marks(quarantine_of(part.table)), part.table)
        known = (marks.get(part.source), moved.get(part.source))
        return any(mark is not None and mark >= part.last for mark in known)

    async def _marks(self, table: TableName) -> Mapping[SourceId, Position]:
        try:
            return (await self._context.committer.load(table)).progress.sources
        except TableMissing:
            return {}

    async def _replay(self, records: Sequence[_Record]) -> None:
        if not records:
            return
        parts = [part for record in records for part in record.parts]
        for namespace in dict.fromkeys(part.table.namespace for part in parts):
            own = [part for part in parts if part.table.namespace == namespace]
            quarantine = Quarantine(namespace, self._context)
            await quarantine.keep([part.kept for part in own])
            contents = await quarantine.load()
            assert contents is not None, "something was put there"
            for table in dict.fromkeys(part.table for part in own):
                ids = [id_ for part in own if part.table == table for id_ in part.kept.rows[cdc.ROW_ID].to_pylist()]
                replay = Replay(table, contents, self._context, now_us=self._now_us)
                self._count(await replay.run_ids(ids))
        ids = [record.id for record in records]
        await self._quarantine.resolve(ids, kind=Kind.REPLAYED, table=self._table, now_us=self._now_us())
        self._on_records(len(records))

    def _count(self, report: ReplayReport) -> None:
        self.report.replayed += report.replayed
        self.report.found += report.found
        self.report.add_failures(report.failures)
        self.report.failed += report.failed - len(report.failures)


def _rows_of(rows: pa.Table) -> list[dict[str, Any]]:
    moments = rows.column(cdc.INGESTED_AT).cast(pa.int64())
    index = rows.column_names.index(cdc.INGESTED_AT)
    found: list[dict[str, Any]] = rows.set_column(index, cdc.INGESTED_AT, moments).to_pylist()
    return found


def _parts_of(row: Mapping[str, Any], *, default_namespace: str, now_us: int) -> list[_Part]:
    """Take a record apart, as a run of the log is. Whatever our code raises for it is raised."""
    source, last = SourceId(row[properties.SOURCE]), Position(row[properties.EPOCH], row[properties.SEQUENCE])
    frame = frame_of_record(row[properties.ROW], source=source, last=last, received_at_us=row[cdc.INGESTED_AT])

    def name_of(source_table: str) -> str:
        return str(table_name_of(source_table, default_namespace))

    def part_of(group: Group) -> _Part:
        table = table_name_of(group.table, default_namespace)
        kept = quarantine_rows(
            group,
            table=table,
            reason=_KEPT_FOR,
            node=row[properties.NODE],
            recorded_at_us=now_us,
            record=last.sequence,
        )
        return _Part(table, source, group.positions()[source][1], kept)

    return [
        part_of(group)
        for group in group_frames([(row[properties.LOG_OFFSET], frame)], keep_before=True, name_of=name_of)
    ]
