"""Quarantine: changes as rows of `<namespace>.lakefeed_quarantine`, and the sink that writes them.

    group (JSON or Arrow) --quarantine_rows--> group of the quarantine table --> its TableWriter --> snapshot

The quarantine is a change table like any other: the result is an ArrowGroup, which rows/runs.py, the table's writer and
its marks treat as if a source had sent it. It is therefore written once, whatever is killed or read again, if

    - rows of one source and table come in log order,
    - their table commits everything before them in the log before the quarantine commits them, and
    - their table continues behind them after that.

Then the quarantine's marks mean what the table's own marks mean: everything up to there is in one of both. A table that
reads the log again leaves those rows out (properties.moved_marks), even if they could be decoded now, or were replayed.

    _cdc_source      source and table as one (properties.mark_of)   _cdc_sequence   as in its source
    _cdc_operation   INSERT                                         _cdc_row_id     the change's id in the quarantine
    _cdc_timestamp, _cdc_ingested_at                                as the change's own table would have them
    row_image, before_image, metadata                               the JSON that came; Arrow rows as JSON
    declared                                                        what the source declared of the table with them
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa

from lakefeed.contract import changes as cdc
from lakefeed.contract import properties
from lakefeed.contract.changes import Operation, Position, SourceId, TableName
from lakefeed.contract.errors import CatalogError, CatalogUnavailable, TableMissing
from lakefeed.contract.properties import Kind, Reason, moved_marks, quarantine_of
from lakefeed.iceberg.arrow import to_arrow_schema
from lakefeed.iceberg.types import Schema
from lakefeed.writer.rows.evolution import initial_columns
from lakefeed.writer.rows.groups import ArrowGroup, Group, Run
from lakefeed.writer.rows.runs import Decoded
from lakefeed.writer.tables.context import TableContext

logger = logging.getLogger(__name__)

_US_PER_S = 1_000_000

# A reason's text is read by people; the first lines of an error are enough.
REASON_TEXT_MAX_CHARS = 2_000

_MOMENT = pa.timestamp("us", tz="UTC")

# The columns of the quarantine beside `_cdc_`, in their order.
COLUMNS = pa.schema(
    [
        (properties.KIND, pa.string()),
        (properties.TABLE_NAME, pa.string()),
        (properties.SOURCE, pa.string()),
        (properties.EPOCH, pa.int64()),
        (properties.SEQUENCE, pa.int64()),
        (properties.OPERATION, pa.string()),
        (properties.ROW_ID, pa.string()),
        (properties.ROW, pa.string()),
        (properties.BEFORE, pa.string()),
        (properties.UNCHANGED, pa.list_(pa.string())),
        (properties.METADATA, pa.string()),
        (properties.DECLARED, pa.list_(pa.string())),
        (properties.ENCODING, pa.string()),
        (properties.REASON, pa.string()),
        (properties.REASON_TEXT, pa.string()),
        (properties.NODE, pa.string()),
        (properties.LOG_OFFSET, pa.int64()),
        (properties.RECORDED_AT, _MOMENT),
    ]
)

# Commands record what became of changes, all of them in one order.
RESOLUTIONS = properties.command_mark("resolve")

_CHANGE_SCHEMA = to_arrow_schema(Schema(0, initial_columns(keep_before=True)))


def quarantine_rows(group: Group, *, table: TableName, reason: Reason, node: str, recorded_at_us: int) -> ArrowGroup:
    """Return changes of a table, all refused for one reason, as a group of its namespace's quarantine."""
    change = group.change_columns(_CHANGE_SCHEMA)
    own = {
        properties.TABLE_NAME: pa.repeat(str(table), len(group)),
        properties.SOURCE: change[cdc.SOURCE],
        properties.EPOCH: pa.array(group.by_run([run.epoch for run in group.runs])),
        properties.SEQUENCE: change[cdc.SEQUENCE],
        properties.OPERATION: change[cdc.OPERATION],
        properties.ROW_ID: change[cdc.ROW_ID],
        properties.ROW: pa.array(group.json_rows(), pa.string()),
        properties.BEFORE: change[cdc.BEFORE],
        properties.UNCHANGED: change[cdc.UNCHANGED],
        properties.METADATA: change[cdc.METADATA],
        properties.DECLARED: pa.repeat(pa.scalar(list(group.declared), pa.list_(pa.string())), len(group)),
        properties.ENCODING: pa.repeat(group.encoding, len(group)),
        properties.REASON: pa.repeat(reason.refusal.value, len(group)),
        properties.REASON_TEXT: pa.repeat(reason.text[:REASON_TEXT_MAX_CHARS], len(group)),
        properties.NODE: pa.repeat(node, len(group)),
        properties.LOG_OFFSET: pa.array(group.by_run([run.offset for run in group.runs])),
    }
    recorded = _record_rows(
        own,
        Kind.QUARANTINED,
        ids=change_ids(group, table),
        sequences=change[cdc.SEQUENCE],
        recorded_at_us=recorded_at_us,
    )
    index = recorded.schema.get_field_index(cdc.TIMESTAMP)
    rows = recorded.set_column(index, cdc.TIMESTAMP, change[cdc.TIMESTAMP])
    runs = [replace(run, source=properties.mark_of(run.source, table)) for run in group.runs]
    return _group_of(rows, table, runs)


def resolution_rows(
    ids: Sequence[str], *, kind: Kind, table: TableName, after_sequence: int, recorded_at_us: int
) -> ArrowGroup:
    """Return what became of changes, as changes of a source of its own that has reached `after_sequence`.

    They are DELETEs of the ids: merged like any change table, the quarantine shows what is open.
    """
    sequences = pa.array(range(after_sequence + 1, after_sequence + 1 + len(ids)), pa.int64())
    own = {properties.TABLE_NAME: pa.repeat(str(table), len(ids))}
    rows = _record_rows(own, kind, ids=ids, sequences=sequences, recorded_at_us=recorded_at_us)
    run = Run(0, len(ids), RESOLUTIONS, epoch=0, received_at_us=recorded_at_us, offset=0)
    return _group_of(rows, table, [run])


def _record_rows(
    own: Mapping[str, Any], kind: Kind, *, ids: Sequence[str], sequences: pa.Array, recorded_at_us: int
) -> pa.Table:
    """Return columns of the quarantine in its order, beside those that make them changes; others are null."""
    count = len(ids)
    moments = pa.repeat(pa.scalar(recorded_at_us, _MOMENT), count)
    given = {**own, properties.KIND: pa.repeat(kind.value, count), properties.RECORDED_AT: moments}
    operation = Operation.INSERT if kind is Kind.QUARANTINED else Operation.DELETE
    change = {
        cdc.SEQUENCE: sequences,
        cdc.TIMESTAMP: moments,
        cdc.OPERATION: pa.repeat(operation.value, count),
        cdc.ROW_ID: pa.array(ids, pa.string()),
    }
    return pa.table(change | {field.name: given.get(field.name, pa.nulls(count, field.type)) for field in COLUMNS})


def _group_of(rows: pa.Table, table: TableName, runs: Sequence[Run]) -> ArrowGroup:
    return ArrowGroup(
        table=str(properties.quarantine_of(table)),
        rows=rows,
        sequences=rows.column(cdc.SEQUENCE).to_numpy(),
        runs=tuple(runs),
        held_bytes=rows.nbytes,
    )


def change_ids(group: Group, table: TableName) -> list[str]:
    """Return the id of each change in the quarantine."""
    return [
        properties.change_id(run.source, epoch=run.epoch, sequence=group.sequence_at(row), table=table)
        for run in group.runs
        for row in range(run.start, run.stop)
    ]


class QuarantineSink:
    """The quarantines of all namespaces, as the tables' writers use them.

    `write` returns once rows are committed to a quarantine; `failure_of` returns why one cannot be written, or None.
    """

    def __init__(
        self,
        context: TableContext,
        *,
        write: Callable[[TableName, Decoded], Awaitable[None]],
        failure_of: Callable[[TableName], str | None],
    ) -> None:
        self._context = context
        self._write = write
        self._failure_of = failure_of

    async def put(self, group: Group, *, table: TableName, reason: Reason) -> None:
        """Write whole changes; returns once they are committed. Cancelling leaves them committed or not."""
        make = functools.partial(
            quarantine_rows,
            group,
            table=table,
            reason=reason,
            node=self._context.node,
            recorded_at_us=int(time.time() * _US_PER_S),
        )
        rows = await asyncio.get_running_loop().run_in_executor(self._context.decoders, make)
        await self._write(quarantine_of(table), Decoded(rows, None, rows.held_bytes))
        self._context.metrics.quarantined_changes.labels(str(table)).inc(len(group))
        logger.warning(
            "rows_quarantined",
            extra={
                "table": str(table),
                "rows": len(group),
                "refusal": reason.refusal.value,
                "reason": reason.text,
                "log_offset": group.first_offset,
            },
        )

    async def quarantined_marks(self, table: TableName) -> Mapping[SourceId, Position]:
        """Return up to where all of a table's changes are in the table or in quarantine.

        Raises: CatalogUnavailable, after which to retry.
        """
        try:
            state = await self._context.committer.load(quarantine_of(table))
        except TableMissing:
            return {}
        except CatalogUnavailable:
            raise
        except CatalogError as error:
            # A quarantine that may not be read has hardly been written; and a table must not wait for another.
            logger.warning("quarantine_marks_unreadable", extra={"table": str(table), "error": str(error)})
            return {}
        return moved_marks(state.progress.sources, table)

    def problem_of(self, table: TableName) -> str | None:
        """Return why a table's quarantine cannot be written, or None."""
        reason = self._failure_of(quarantine_of(table))
        return f"{quarantine_of(table)} cannot be written: {reason}" if reason is not None else None
