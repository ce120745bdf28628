"""Changes as rows of the quarantine. Owns how any group becomes one; which rows go there is decided by who calls.

    group (JSON or Arrow) --quarantine_rows--> group of `<namespace>.lakefeed_quarantine` --> its TableWriter

The quarantine is a change table like any other: what comes out is an ArrowGroup, which decoding.py, the table's writer
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

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from writer import columns as cdc
from writer.arrow.checks import CHANGE_COLUMNS
from writer.arrow.groups import ArrowGroup, arrow_change_columns
from writer.arrow.json import json_values
from writer.changes import Operation, TableName
from writer.quarantine import names
from writer.quarantine.names import Kind, Refusal
from writer.rows.change_columns import change_columns, text_of
from writer.rows.groups import ChangeGroup, Group, Run, with_befores
from writer.schema import initial_columns
from writer.types import Schema, to_arrow_schema

# A reason's text is for people; the first lines of an error say what it is.
REASON_TEXT_MAX_CHARS = 2_000

_MOMENT = pa.timestamp("us", tz="UTC")

# The columns that the quarantine has beside `_cdc_`, in their order.
COLUMNS = pa.schema(
    [
        (names.KIND, pa.string()),
        (names.TABLE_NAME, pa.string()),
        (names.SOURCE, pa.string()),
        (names.EPOCH, pa.int64()),
        (names.SEQUENCE, pa.int64()),
        (names.OPERATION, pa.string()),
        (names.ROW_ID, pa.string()),
        (names.ROW, pa.string()),
        (names.BEFORE, pa.string()),
        (names.UNCHANGED, pa.list_(pa.string())),
        (names.METADATA, pa.string()),
        (names.DECLARED, pa.list_(pa.string())),
        (names.ENCODING, pa.string()),
        (names.REASON, pa.string()),
        (names.REASON_TEXT, pa.string()),
        (names.NODE, pa.string()),
        (names.LOG_OFFSET, pa.int64()),
        (names.RECORDED_AT, _MOMENT),
    ]
)

# Who says what became of changes: the commands do, all of them in one order. Who takes records apart: they too.
RESOLUTIONS = names.command_mark("resolve")
RECORDS = names.command_mark("record")

_CHANGE_SCHEMA = to_arrow_schema(Schema(0, initial_columns(keep_before=True)))

_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class Reason:
    """Why rows are in quarantine: the kind of refusal, and the facts for people, without values of rows."""

    refusal: Refusal
    text: str


def quarantine_rows(
    group: Group, *, table: TableName, reason: Reason, node: str, recorded_at_us: int, record: int | None = None
) -> ArrowGroup:
    """Turn changes of a table, all of them refused for one reason, into a group of its namespace's quarantine.

    `record` is the sequence of the record that they were in, if that could not be read.
    """
    change = _change_columns(group)
    own = {
        names.TABLE_NAME: pa.repeat(str(table), len(group)),
        names.SOURCE: change[cdc.SOURCE],
        names.EPOCH: pa.array(_by_run(group, [run.epoch for run in group.runs])),
        names.SEQUENCE: change[cdc.SEQUENCE],
        names.OPERATION: change[cdc.OPERATION],
        names.ROW_ID: change[cdc.ROW_ID],
        names.ROW: pa.array(_row_texts(group), pa.string()),
        names.BEFORE: change[cdc.BEFORE],
        names.UNCHANGED: change[cdc.UNCHANGED],
        names.METADATA: change[cdc.METADATA],
        names.DECLARED: pa.repeat(pa.scalar(list(group.declared), pa.list_(pa.string())), len(group)),
        names.ENCODING: pa.repeat("arrow" if isinstance(group, ArrowGroup) else "json", len(group)),
        names.REASON: pa.repeat(reason.refusal.value, len(group)),
        names.REASON_TEXT: pa.repeat(reason.text[:REASON_TEXT_MAX_CHARS], len(group)),
        names.NODE: pa.repeat(node, len(group)),
        names.LOG_OFFSET: pa.array(_by_run(group, [run.offset for run in group.runs])),
    }
    ids = list(_ids(group, table))
    recorded = _record_rows(
        own, Kind.QUARANTINED, ids=ids, sequences=change[cdc.SEQUENCE], recorded_at_us=recorded_at_us
    )
    index = recorded.schema.get_field_index(cdc.TIMESTAMP)
    rows = recorded.set_column(index, cdc.TIMESTAMP, change[cdc.TIMESTAMP])
    runs = [replace(run, source=names.mark_of(run.source, table, record=record)) for run in group.runs]
    return _group_of(rows, table, runs)


def resolution_rows(
    ids: Sequence[str], *, kind: Kind, table: TableName, after_sequence: int, recorded_at_us: int
) -> ArrowGroup:
    """Say what became of changes, as changes of a source of its own that has come to `after_sequence`.

    They are DELETEs of the ids: folded like any change table, the quarantine shows what is open.
    """
    sequences = pa.array(range(after_sequence + 1, after_sequence + 1 + len(ids)), pa.int64())
    own = {names.TABLE_NAME: pa.repeat(str(table), len(ids))}
    rows = _record_rows(own, kind, ids=ids, sequences=sequences, recorded_at_us=recorded_at_us)
    run = Run(0, len(ids), RESOLUTIONS, epoch=0, received_at_us=recorded_at_us, offset=0)
    return _group_of(rows, table, [run])


def without_changes(group: ArrowGroup, ids: pa.Array) -> ArrowGroup:
    """Leave out rows of a group that came in one frame, by the ids of their changes."""
    rows = group.rows.filter(pc.invert(pc.is_in(group.rows.column(cdc.ROW_ID), ids)))
    (run,) = group.runs
    left = (replace(run, stop=rows.num_rows),) if rows.num_rows else ()
    return replace(group, rows=rows, sequences=rows.column(cdc.SEQUENCE).to_numpy(), runs=left)


def _record_rows(
    own: Mapping[str, Any], kind: Kind, *, ids: Sequence[str], sequences: pa.Array, recorded_at_us: int
) -> pa.Table:
    """Put columns of the quarantine into its order, beside those that make them changes; others are null."""
    count = len(ids)
    moments = pa.repeat(pa.scalar(recorded_at_us, _MOMENT), count)
    given = {**own, names.KIND: pa.repeat(kind.value, count), names.RECORDED_AT: moments}
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
        table=str(names.quarantine_of(table)),
        rows=rows,
        sequences=rows.column(cdc.SEQUENCE).to_numpy(),
        runs=tuple(runs),
        held_bytes=rows.nbytes,
    )


def _change_columns(group: Group) -> Mapping[str, Any]:
    if isinstance(group, ArrowGroup):
        return arrow_change_columns(group, _CHANGE_SCHEMA, rescued=None)
    assert isinstance(group, ChangeGroup)
    return change_columns(with_befores(group), _CHANGE_SCHEMA, rescued=None)


def _by_run(group: Group, values: Sequence[int]) -> np.ndarray:
    return np.repeat(np.array(values, np.int64), [run.stop - run.start for run in group.runs])


def _ids(group: Group, table: TableName) -> Iterator[str]:
    for run in group.runs:
        for row in range(run.start, run.stop):
            yield names.change_id(run.source, epoch=run.epoch, sequence=group.sequence_at(row), table=table)


def _row_texts(group: Group) -> list[str]:
    if isinstance(group, ArrowGroup):
        return [_encode(row).decode() for row in _arrow_rows(group.rows)]
    assert isinstance(group, ChangeGroup)
    return [text_of(image) for image in group.images]


def _arrow_rows(rows: pa.Table) -> Iterator[dict[str, Any]]:
    brought = [name for name in rows.column_names if name not in CHANGE_COLUMNS]
    if not brought:
        yield from ({} for _ in range(rows.num_rows))
    for batch in rows.select(brought).to_batches():
        columns = [json_values(column) for column in batch.columns]
        yield from (dict(zip(brought, row, strict=True)) for row in zip(*columns, strict=True))
