"""Replay of quarantined changes: appended to their tables, each once, whatever is killed in between.

    1. look for the changes in their table: an answer was lost, or they came another way
    2. decode the others as ever; what is refused again stays in quarantine
    3. commit them to the table
    4. record in the quarantine that they were replayed

A crash after step 3 is found by step 1 when the command runs again. Replays number their commits like a source numbers
its changes, under the mark `replay`: of two at once, one finds that the table has moved on, and starts over. Sources,
sequences, operations and times stay as they were, and the marks of the sources are not moved. A service that reads its
log again leaves these changes out by the quarantine's marks (tables/quarantine.py).

Records of the log that could not be read are in quarantine whole. A version that can read them appends the changes of
each record in the same way. A record is replayed when all of its changes are in their tables. The log must not bring
them any more: a service that can read the record writes its rows as if nothing had happened. Only a table whose own
marks, or those of its quarantine, are past the record is safe from that.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from lakefeed.contract import changes as cdc
from lakefeed.contract import properties
from lakefeed.contract.changes import Position, SourceId, Span, TableName, table_name_of
from lakefeed.contract.errors import TableMissing
from lakefeed.contract.properties import Kind, moved_marks, quarantine_of
from lakefeed.iceberg.arrow import to_arrow_schema
from lakefeed.iceberg.types import Schema
from lakefeed.writer.commit.state import TableState
from lakefeed.writer.files.scan import find_files, read_columns
from lakefeed.writer.quarantine import store as core
from lakefeed.writer.quarantine.store import Contents, Filter, Quarantine, append_planned
from lakefeed.writer.rows.evolution import initial_columns
from lakefeed.writer.rows.groups import UNREADABLE_TABLE, Group, JsonGroup, Run, frame_of_record, group_frames
from lakefeed.writer.rows.runs import reason_of
from lakefeed.writer.rows.values import BASE64_KEY, Image
from lakefeed.writer.tables.columns import TableColumns
from lakefeed.writer.tables.context import TableContext
from lakefeed.writer.tables.quarantine import change_ids
from lakefeed.writer.wire.json_batch import Event

# Changes in one commit: enough that commits are few, few enough to decode, hold and start over at once.
BATCH_MAX_ROWS = 20_000
# Failures that a report names; all are counted.
FAILURES_MAX = 100

REPLAYS = properties.command_mark("replay")

# What identifies a change: its id in the quarantine, and what its table has of it.
IDENTITY_COLUMNS = (
    *(cdc.ROW_ID, cdc.TIMESTAMP),
    *(properties.SOURCE, properties.EPOCH, properties.SEQUENCE, properties.OPERATION, properties.ROW_ID),
)
# What is read of the quarantine to append a change as it came, or to restore the frame of a record.
READ_COLUMNS = (
    *(*IDENTITY_COLUMNS, cdc.INGESTED_AT, properties.ROW, properties.BEFORE, properties.UNCHANGED),
    *(properties.METADATA, properties.DECLARED, properties.LOG_OFFSET),
)

# A change as its table has it: source, sequence, operation, row id, time in microseconds, epoch.
Identity: TypeAlias = tuple[str, int, str, str, int, int]

_CHANGE_SCHEMA = to_arrow_schema(Schema(0, initial_columns(keep_before=False)))


@dataclass(frozen=True, slots=True)
class Failure:
    """A change or record in quarantine that cannot be replayed yet, and why not."""

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


@dataclass(frozen=True, slots=True)
class Batch:
    """Changes of one table: as a group to decode, and what identifies each of them, with IDENTITY_COLUMNS.

    `record` is the id of the record in quarantine that holds them; None for changes that are in quarantine themselves.
    """

    table: TableName
    group: Group
    rows: pa.Table
    record: str | None = None


@dataclass(slots=True)
class Appended:
    """What became of some changes, by their ids."""

    appended: list[str] = field(default_factory=list)
    present: list[str] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)  # id to reason


async def append_once(batches: Sequence[Batch], table: TableName, context: TableContext) -> Appended:
    """Append those changes to a table, in one commit, that it does not have yet. Cancelling leaves them in it or not.

    Raises: WriterError if they may not have been committed: call it again.
    """
    result = Appended()

    async def plan(columns: TableColumns) -> tuple[Sequence[pa.Table], Mapping[SourceId, Span]]:
        nonlocal result
        found = [await _find_present(batch.rows, columns.state, context) for batch in batches]
        result = Appended(present=sorted(set().union(*found)))
        known = set(result.present)  # grows with what is decoded: two records may hold the same change
        decoded: list[pa.Table] = []
        for batch in batches:
            if known.issuperset(batch.rows[cdc.ROW_ID].to_pylist()):
                continue
            fitted = await columns.decode(batch.group)
            for part, part_rows in fitted.kept:
                own = rows_of(part, batch.rows)
                is_new = pa.array([id_ not in known for id_ in own[cdc.ROW_ID].to_pylist()], pa.bool_())
                decoded.append(with_times(part_rows, own).filter(is_new))
                result.appended += own.filter(is_new)[cdc.ROW_ID].to_pylist()
                known.update(result.appended)
            for part, reason in fitted.refused:
                ids = rows_of(part, batch.rows)[cdc.ROW_ID].to_pylist()
                result.refused |= {id_: reason.text for id_ in ids if id_ not in known}
        mark = columns.marks.get(REPLAYS)
        position = Position(0, mark.sequence + 1 if mark else 1)
        return decoded if result.appended else [], {REPLAYS: Span(position, position)}

    await append_planned(table, plan, context)
    return result


async def _find_present(rows: pa.Table, state: TableState | None, context: TableContext) -> list[str]:
    """Return the ids of changes that are in their table already, by all that identifies one there."""
    if state is None or not rows.num_rows:
        return []
    sequences = rows.column(properties.SEQUENCE).combine_chunks()
    within = {
        cdc.SEQUENCE: _ends(sequences),
        cdc.TIMESTAMP: _ends(rows.column(cdc.TIMESTAMP).cast(pa.int64())),
        cdc.SOURCE: _ends(rows.column(properties.SOURCE)),
    }
    own = (properties.SOURCE, properties.SEQUENCE, properties.OPERATION, properties.ROW_ID)
    ids = dict(zip(_identities(rows, own, epoch=properties.EPOCH), rows.column(cdc.ROW_ID).to_pylist(), strict=True))
    stored_columns = [cdc.SOURCE, cdc.SEQUENCE, cdc.OPERATION, cdc.ROW_ID]
    # A table that no source has started over in may lack the column for epochs.
    names = [*stored_columns, cdc.TIMESTAMP, *([cdc.EPOCH] if state.schema.columns.field(cdc.EPOCH) else [])]
    found = set()
    for file in await find_files(state, context.store, within=within):
        stored = await read_columns(file, state, context.store, names=names)
        near = stored.filter(pc.is_in(stored.column(cdc.SEQUENCE), sequences))
        found |= {ids[each] for each in _identities(near, stored_columns, epoch=cdc.EPOCH) if each in ids}
    return sorted(found)


def _identities(rows: pa.Table, own: Sequence[str], *, epoch: str) -> list[Identity]:
    times_us = rows.column(cdc.TIMESTAMP).cast(pa.int64())
    epochs = rows.column(epoch).fill_null(0) if epoch in rows.column_names else pa.repeat(0, rows.num_rows)
    columns = (*(rows.column(name) for name in own), times_us, epochs)
    return list(zip(*(column.to_pylist() for column in columns), strict=True))


def _ends(column: pa.ChunkedArray) -> tuple[object, object]:
    ends = pc.min_max(column)
    return ends["min"].as_py(), ends["max"].as_py()


class Replay:
    """One replay of one table's changes, or of records that could not be read.

    `not_in_log`: the user says that no log has these records any more.
    """

    def __init__(
        self,
        table: TableName,
        quarantine: Quarantine,
        *,
        now_us: Callable[[], int],
        on_entries: Callable[[int], object] = lambda _: None,
        not_in_log: bool = False,
    ) -> None:
        self.report = ReplayReport()
        self._table = table
        self._quarantine = quarantine
        self._context = quarantine.context
        self._now_us = now_us
        self._on_entries = on_entries
        self._not_in_log = not_in_log
        # Gathered from several files for one commit: changes as they were read, or those of records.
        self._changes: list[pa.Table] = []
        self._batches: list[Batch] = []

    async def run(self, contents: Contents, wanted: Filter) -> ReplayReport:
        """Replay what a filter selects of the table's entries. A crash or cancellation keeps what is done.

        Raises: WriterError if it did not finish: run it again.
        """
        entries = core.apply_filter(core.apply_filter(contents.entries, Filter(table=str(self._table))), wanted)
        replay = self._replay_records if self._table.name == UNREADABLE_TABLE else self._replay_changes
        entries = core.once(entries, core.ID)  # two nodes may have quarantined the same
        for file in core.files_with(entries):
            rows = await self._quarantine.read(contents, entries, file=file, columns=READ_COLUMNS)
            await replay(core.once(rows, cdc.ROW_ID))
        await self._append_changes()
        await self._append(self._batches)
        return self.report

    async def _replay_changes(self, rows: pa.Table) -> None:
        self._changes.append(rows)
        if sum(rows.num_rows for rows in self._changes) >= BATCH_MAX_ROWS:
            await self._append_changes()

    async def _append_changes(self) -> None:
        gathered, self._changes = self._changes, []
        for part in plan_batches(pa.concat_tables(gathered), max_rows=BATCH_MAX_ROWS) if gathered else ():
            await self._append([Batch(self._table, change_group(part, self._table), part)])

    async def _replay_records(self, rows: pa.Table) -> None:
        times_us = rows.column(cdc.INGESTED_AT).cast(pa.int64())
        rows = rows.set_column(rows.column_names.index(cdc.INGESTED_AT), cdc.INGESTED_AT, times_us)
        for row in rows.to_pylist():
            try:
                batches = await self._read_record(row)
                self._batches += batches
                if not batches:  # it turned out to have no change
                    await self._resolve([row[cdc.ROW_ID]])
            except _NotReplayable as error:
                self.report.add_failures([Failure(row[cdc.ROW_ID], str(error))])
                self._on_entries(1)
            if sum(batch.rows.num_rows for batch in self._batches) >= BATCH_MAX_ROWS:
                await self._append(self._batches)
                self._batches = []

    async def _read_record(self, row: Mapping[str, Any]) -> list[Batch]:
        """Read a record, and check that no log brings its changes.

        Raises: _NotReplayable.
        """
        split = functools.partial(_split_record, row, default_namespace=self._context.config.default_namespace)
        try:
            batches = await asyncio.get_running_loop().run_in_executor(self._context.decoders, split)
        except MemoryError:
            raise  # says nothing about the record
        except Exception as error:
            raise _NotReplayable(f"still cannot be read: {reason_of(error).text}") from error
        for batch in batches:
            if not self._not_in_log and not await self._is_past(batch):
                raise _NotReplayable(
                    f"the log may still bring its changes: start the service that can read them, or say --not-in-log"
                    f" if its log has no such record any more: table={batch.table} offset={row[properties.LOG_OFFSET]}"
                )
        return batches

    async def _is_past(self, batch: Batch) -> bool:
        """Return whether a service that read these changes again would leave them out."""
        marks = await self._marks(batch.table)
        moved = moved_marks(await self._marks(quarantine_of(batch.table)), batch.table)
        return all(
            any(mark is not None and mark >= span.last for mark in (marks.get(source), moved.get(source)))
            for source, span in batch.group.spans().items()
        )

    async def _marks(self, table: TableName) -> Mapping[SourceId, Position]:
        try:
            return (await self._context.committer.load(table)).progress.sources
        except TableMissing:
            return {}

    async def _append(self, batches: Sequence[Batch]) -> None:
        """Append changes, one commit per table, then record which entries are replayed: of a record, all changes."""
        refused: dict[str, str] = {}
        for table in dict.fromkeys(batch.table for batch in batches):
            result = await append_once([batch for batch in batches if batch.table == table], table, self._context)
            self.report.replayed += len(result.appended)
            self.report.found += len(result.present)
            refused |= result.refused
        failures: dict[str, list[Failure]] = {}
        for batch in batches:
            for id_ in batch.rows[cdc.ROW_ID].to_pylist():
                failed = failures.setdefault(batch.record or id_, [])
                if id_ in refused:
                    reason = f"table={batch.table}: {refused[id_]}" if batch.record else refused[id_]
                    failed.append(Failure(batch.record or id_, reason))
        for failed in failures.values():
            self.report.add_failures(failed)
        if done := [entry for entry, failed in failures.items() if not failed]:
            await self._resolve(done)
        self._on_entries(len(failures))

    async def _resolve(self, ids: Sequence[str]) -> None:
        await self._quarantine.resolve(ids, kind=Kind.REPLAYED, table=self._table, now_us=self._now_us())


def plan_batches(rows: pa.Table, *, max_rows: int) -> list[pa.Table]:
    """Sort changes as their sources sent them, and cut where they came with another declaration or are too many."""
    ordered = rows.sort_by([(name, "ascending") for name in (properties.SOURCE, properties.EPOCH, properties.SEQUENCE)])
    batches: list[pa.Table] = []
    start = 0
    for _, same in itertools.groupby(ordered.column(properties.DECLARED).to_pylist()):
        stop = start + sum(1 for _ in same)
        batches += [ordered.slice(at, min(max_rows, stop - at)) for at in range(start, stop, max_rows)]
        start = stop
    return batches


def change_group(rows: pa.Table, table: TableName) -> JsonGroup:
    """Build the group again that the changes of a batch once were. `with_times` sets the times later."""
    columns: Mapping[str, list[Any]] = {name: rows.column(name).to_pylist() for name in rows.column_names}
    received_at_us = rows.column(cdc.INGESTED_AT).cast(pa.int64()).to_pylist()
    runs: list[Run] = []
    for row, received in enumerate(received_at_us):
        source, epoch = SourceId(columns[properties.SOURCE][row]), columns[properties.EPOCH][row]
        run = Run(row, row + 1, source, epoch, received, columns[properties.LOG_OFFSET][row])
        if runs and replace(runs[-1], start=run.start, stop=run.stop) == run:
            run = replace(run, start=runs.pop().start)
        runs.append(run)
    befores, metadata = (
        [msgspec.Raw() if text is None else msgspec.Raw(image_of(text)) for text in columns[name]]
        for name in (properties.BEFORE, properties.METADATA)
    )
    events = [
        Event(
            sequence=columns[properties.SEQUENCE][row],
            operation=columns[properties.OPERATION][row],
            table=str(table),
            row_id=columns[properties.ROW_ID][row],
            unchanged=columns[properties.UNCHANGED][row],
            before=befores[row],
            metadata=metadata[row],
        )
        for row in range(rows.num_rows)
    ]
    images: list[Image] = [image_of(text) for text in columns[properties.ROW]]
    declared = tuple(columns[properties.DECLARED][0] or ())
    return JsonGroup.of(str(table), events, runs, images=images, declared=declared)


def image_of(text: str) -> Image:
    """Return a row's JSON as it was received, from the text that values.text_of made of it."""
    if BASE64_KEY in text:
        try:
            document = msgspec.json.decode(text, type=dict[str, str])
            data = base64.b64decode(document[BASE64_KEY], validate=True)
            data.decode()
        except UnicodeDecodeError:
            return data  # only what is not text was encoded
        except (msgspec.MsgspecError, KeyError, binascii.Error):
            pass  # a text of the source that only looks like ours
    return text.encode()


def rows_of(part: Group, rows: pa.Table) -> pa.Table:
    """Return the rows that identify the changes of a part of their group."""
    positions = zip(
        *(rows.column(name).to_pylist() for name in (properties.SOURCE, properties.EPOCH, properties.SEQUENCE)),
        strict=True,
    )
    index = {position: number for number, position in enumerate(positions)}
    wanted = [
        index[run.source, run.epoch, part.sequence_at(row)] for run in part.runs for row in range(run.start, run.stop)
    ]
    return rows.take(pa.array(wanted, pa.int64()))


def with_times(decoded: pa.Table, rows: pa.Table) -> pa.Table:
    """Return decoded changes with their own times, to the microsecond."""
    index = decoded.schema.get_field_index(cdc.TIMESTAMP)
    field = decoded.schema.field(index)
    return decoded.set_column(index, field, rows.column(cdc.TIMESTAMP).cast(field.type))


class _NotReplayable(Exception):
    """A record has to stay in quarantine, for the reason that the message gives."""


def _split_record(row: Mapping[str, Any], *, default_namespace: str) -> list[Batch]:
    """Split a record into the changes of its tables, as a run of the log is. Raises whatever our code raises for it."""
    source, last = SourceId(row[properties.SOURCE]), Position(row[properties.EPOCH], row[properties.SEQUENCE])
    frame = frame_of_record(row[properties.ROW], source=source, last=last, received_at_us=row[cdc.INGESTED_AT])

    def name_of(source_table: str) -> str:
        return str(table_name_of(source_table, default_namespace))

    groups = group_frames([(row[properties.LOG_OFFSET], frame)], name_of=name_of)
    batches = []
    for group in groups:
        table = table_name_of(group.table, default_namespace)
        batches.append(Batch(table, group, _identity_rows(group, table), record=row[cdc.ROW_ID]))
    return batches


def _identity_rows(group: Group, table: TableName) -> pa.Table:
    change = group.change_columns(_CHANGE_SCHEMA)
    return pa.table(
        {
            cdc.ROW_ID: pa.array(change_ids(group, table), pa.string()),
            cdc.TIMESTAMP: change[cdc.TIMESTAMP],
            properties.SOURCE: change[cdc.SOURCE],
            properties.EPOCH: pa.array(group.by_run([run.epoch for run in group.runs]), pa.int64()),
            properties.SEQUENCE: change[cdc.SEQUENCE],
            properties.OPERATION: change[cdc.OPERATION],
            properties.ROW_ID: change[cdc.ROW_ID],
        }
    )
