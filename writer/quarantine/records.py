"""Replays whole records that could not be read when they came, after the fault is mended. Owns the order of the steps.

A record becomes changes of its tables, which then go the way of every change in quarantine. A crash after each step
leaves what running the command again finds:

    1. take the record apart as ever; what fails again stays where it is                     nothing to redo
    2. make sure that no log can bring its changes any more                                  nothing
    3. keep them in the quarantines of their tables, under marks of their own (names.py)     their ids are there
    4. replay them (replay.py)                                                               they are not open any more
    5. say in the quarantine that the record was replayed                                    done

Step 2: a service that is mended and reads the record again writes its rows as if nothing had been. Only where a table's
own marks, or those of its quarantine, have passed the record is it sure that none does.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from writer import columns as cdc
from writer.arrow.groups import ArrowGroup
from writer.changes import Position, SourceId, TableName, table_name_of
from writer.decoding import take_apart
from writer.errors import TableMissing
from writer.quarantine import entries as core
from writer.quarantine import names
from writer.quarantine.entries import Filter
from writer.quarantine.names import Kind, Refusal, moved_marks, quarantine_of
from writer.quarantine.replay import BATCH_MAX_ROWS, Failure, Replay, ReplayReport
from writer.quarantine.rows import Reason, quarantine_rows
from writer.quarantine.store import Contents, Quarantine
from writer.rows.groups import Group
from writer.rows.unreadable import frame_of_record
from writer.sifting import reason_of
from writer.table_context import TableContext

# What is read of the quarantine to make a record's frame again.
_READ_COLUMNS = (
    *(cdc.ROW_ID, cdc.INGESTED_AT),
    *(names.SOURCE, names.EPOCH, names.SEQUENCE, names.ROW, names.NODE, names.LOG_OFFSET),
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
                    f" if its log has no such record any more: table={part.table} offset={row[names.LOG_OFFSET]}",
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
    source, last = SourceId(row[names.SOURCE]), Position(row[names.EPOCH], row[names.SEQUENCE])
    frame = frame_of_record(row[names.ROW], source=source, last=last, received_at_us=row[cdc.INGESTED_AT])

    def name_of(source_table: str) -> str:
        return str(table_name_of(source_table, default_namespace))

    def part_of(group: Group) -> _Part:
        table = table_name_of(group.table, default_namespace)
        kept = quarantine_rows(
            group,
            table=table,
            reason=_KEPT_FOR,
            node=row[names.NODE],
            recorded_at_us=now_us,
            record=last.sequence,
        )
        return _Part(table, source, group.positions()[source][1], kept)

    return [part_of(group) for group in take_apart(frame, offset=row[names.LOG_OFFSET], name_of=name_of)]
