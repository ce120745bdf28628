"""Changes as rows of the quarantine. Owns how any group becomes one; which rows go there is decided by who calls.

    group (JSON or Arrow) --quarantine_rows--> group of `<namespace>.lakefeed_quarantine` --> its TableWriter

The quarantine is a change table like any other: what comes out is an ArrowGroup, which rows/runs.py, the table's writer
and its marks treat as if a source had sent it. So it is written once, whatever is killed or read again, if

    - rows of one source and table come in the order of the log,
    - what lies before them in the log is committed by their table before they are by the quarantine, and
    - what lies behind them is taken up by their table after that.

Then the quarantine's marks say, as the table's own do, that everything up to there has found its place: a table that
reads the log again leaves it out (names.moved_marks), also if the row would be well by now, and was even replayed.

    _cdc_source      source and table as one (names.py)             _cdc_sequence   as in its source
    _cdc_operation   INSERT                                         _cdc_row_id     the change's id in the quarantine
    _cdc_timestamp, _cdc_ingested_at                                as the change's own table would have them
    row_image, before_image, metadata                               the JSON that came; of Arrow rows as arrow/json.py
    declared                                                        what the source declared of the table with them
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
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
from lakefeed.writer.tables.columns import TableContext
from lakefeed.writer.tables.table import TableWriter

# --- writer.quarantine.rows -------------------------------------------------------------------------------------------


# A reason's text is for people; the first lines of an error say what it is.
REASON_TEXT_MAX_CHARS = 2_000

_MOMENT = pa.timestamp("us", tz="UTC")

# The columns that the quarantine has beside `_cdc_`, in their order.
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
    """Turn changes of a table, all of them refused for one reason, into a group of its namespace's quarantine."""
    change = group.whole().change_columns(_CHANGE_SCHEMA)
    own = {
        properties.TABLE_NAME: pa.repeat(str(table), len(group)),
        properties.SOURCE: change[cdc.SOURCE],
        properties.EPOCH: pa.array(_by_run(group, [run.epoch for run in group.runs])),
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
        properties.LOG_OFFSET: pa.array(_by_run(group, [run.offset for run in group.runs])),
    }
    ids = list(_ids(group, table))
    recorded = _record_rows(
        own, Kind.QUARANTINED, ids=ids, sequences=change[cdc.SEQUENCE], recorded_at_us=recorded_at_us
    )
    index = recorded.schema.get_field_index(cdc.TIMESTAMP)
    rows = recorded.set_column(index, cdc.TIMESTAMP, change[cdc.TIMESTAMP])
    runs = [replace(run, source=properties.mark_of(run.source, table)) for run in group.runs]
    return _group_of(rows, table, runs)


def resolution_rows(
    ids: Sequence[str], *, kind: Kind, table: TableName, after_sequence: int, recorded_at_us: int
) -> ArrowGroup:
    """Say what became of changes, as changes of a source of its own that has come to `after_sequence`.

    They are DELETEs of the ids: folded like any change table, the quarantine shows what is open.
    """
    sequences = pa.array(range(after_sequence + 1, after_sequence + 1 + len(ids)), pa.int64())
    own = {properties.TABLE_NAME: pa.repeat(str(table), len(ids))}
    rows = _record_rows(own, kind, ids=ids, sequences=sequences, recorded_at_us=recorded_at_us)
    run = Run(0, len(ids), RESOLUTIONS, epoch=0, received_at_us=recorded_at_us, offset=0)
    return _group_of(rows, table, [run])


def _record_rows(
    own: Mapping[str, Any], kind: Kind, *, ids: Sequence[str], sequences: pa.Array, recorded_at_us: int
) -> pa.Table:
    """Put columns of the quarantine into its order, beside those that make them changes; others are null."""
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
        frame_bytes=rows.nbytes,
    )


def _by_run(group: Group, values: Sequence[int]) -> np.ndarray:
    return np.repeat(np.array(values, np.int64), [run.stop - run.start for run in group.runs])


def _ids(group: Group, table: TableName) -> Iterator[str]:
    for run in group.runs:
        for row in range(run.start, run.stop):
            yield properties.change_id(run.source, epoch=run.epoch, sequence=group.sequence_at(row), table=table)


# --- writer.set_aside -------------------------------------------------------------------------------------------------
#
# The way of rows into the quarantine of their namespace. Owns the order: commit there, then go on.
#
# The quarantine is a table with a writer of its own, which is never parked: what it holds is bounded by those who wait
# for it, one group of each table at a time.


logger = logging.getLogger(__name__)

_US_PER_S = 1_000_000


class SetAside:
    """The quarantines of all namespaces, as the tables' writers use them."""

    def __init__(self, context: TableContext, *, writer_of: Callable[[TableName], TableWriter]) -> None:
        self._context = context
        self._writer_of = writer_of
        self._used: dict[TableName, TableWriter] = {}

    async def put(self, group: Group, *, table: TableName, reason: Reason) -> None:
        """Keep changes, whole; returns once they are committed there. Cancelling leaves them committed or not."""
        make = functools.partial(
            quarantine_rows,
            group,
            table=table,
            reason=reason,
            node=self._context.node,
            recorded_at_us=int(time.time() * _US_PER_S),
        )
        rows = await asyncio.get_running_loop().run_in_executor(self._context.decoders, make)
        writer = self._writer_of(quarantine_of(table))
        self._used[writer.name] = writer
        await writer.put(Decoded(rows, None, rows.held_bytes))
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

    async def moved_marks(self, table: TableName) -> Mapping[SourceId, Position]:
        """Tell up to where all of a table's changes were moved to its quarantine.

        Raises: CatalogUnavailable, after which to try again later.
        """
        try:
            state = await self._context.committer.load(quarantine_of(table))
        except TableMissing:
            return {}
        except CatalogUnavailable:
            raise
        except CatalogError as error:
            # Where we may not even look, we have hardly put anything; and a table must not wait for another.
            logger.warning("quarantine_not_looked_up", extra={"table": str(table), "error": str(error)})
            return {}
        return moved_marks(state.progress.sources, table)

    def problem_of(self, table: TableName) -> str | None:
        """Tell what keeps a table's quarantine from being written."""
        writer = self._used.get(quarantine_of(table))
        reason = writer.trouble.reason if writer is not None else None
        return f"{quarantine_of(table)} cannot be written: {reason}" if reason is not None else None
