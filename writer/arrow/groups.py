"""Arrow frames of the log taken apart by table: the changes of one table, in log order, as the columns that came.

Owns reading a frame back, the cut at a source's mark, and the rows' change columns. Frames of one table that follow
each other with the same schema are one group; their columns stay where they are, in the frames' own bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from writer import columns as names
from writer.arrow.frames import TABLE_KEY, open_stream
from writer.arrow.plain import plain_rows
from writer.frames import Frame
from writer.rows.change_columns import epochs_of, moments, received_at_us, sources_of
from writer.rows.groups import Group, Run, declared_of, keep_of_runs

_US_PER_MS = 1000


@dataclass(frozen=True, slots=True)
class ArrowGroup(Group):
    """Changes that came as Arrow, with all their columns. `held_bytes` is the memory that `rows` keep from release."""

    table: str
    rows: pa.Table
    sequences: npt.NDArray[np.int64]
    runs: tuple[Run, ...]
    held_bytes: int
    declared: tuple[str, ...] = ()

    def sequence_at(self, row: int) -> int:
        """Give the sequence of a change."""
        return int(self.sequences[row])

    def _first_after(self, run: Run, sequence: int) -> int:
        return run.start + first_after(self.sequences[run.start : run.stop], sequence)

    def _keep(self, kept: list[tuple[int, int]]) -> Self:
        runs, spans = keep_of_runs(self.runs, kept)
        parts = [self.rows.slice(span.start, span.stop - span.start) for span in spans]
        rows = pa.concat_tables(parts) if parts else self.rows.slice(0, 0)
        return replace(self, rows=rows, sequences=_sequences_of(rows), runs=runs)


def split_arrow_frames(frames: Iterable[tuple[int, Frame]], *, name_of: Callable[[str], str] = str) -> list[ArrowGroup]:
    """Group the changes of (log offset, frame) pairs by table, dropping what admission had taken before.

    `name_of` tells which table a source's table is. Each table's groups come in log order.
    """
    open_groups: dict[str, list[ArrowGroup]] = {}
    done: list[ArrowGroup] = []
    for offset, frame in frames:
        group = _group_of(frame, offset, name_of)
        if not len(group):
            continue
        gathered = open_groups.setdefault(group.table, [])
        if gathered and not gathered[0].rows.schema.equals(group.rows.schema, check_metadata=True):
            done.append(_join(gathered))
            gathered.clear()
        gathered.append(group)
    return done + [_join(gathered) for gathered in open_groups.values()]


def _group_of(frame: Frame, offset: int, name_of: Callable[[str], str]) -> ArrowGroup:
    with open_stream(frame.body) as reader:
        table = name_of(reader.schema.metadata[TABLE_KEY].decode())
        rows = plain_rows(reader.read_all())
    held_bytes = max(len(frame.body), rows.nbytes)
    sequences = _sequences_of(rows)
    start = first_after(sequences, frame.after_sequence)
    run = Run(0, len(sequences) - start, frame.source, frame.epoch, frame.received_at_us, offset)
    declared = declared_of(frame, table, name_of)
    return ArrowGroup(table, rows.slice(start), sequences[start:], (run,) if run.stop else (), held_bytes, declared)


def _join(groups: list[ArrowGroup]) -> ArrowGroup:
    if len(groups) == 1:
        return groups[0]
    runs: list[Run] = []
    for group in groups:
        start = runs[-1].stop if runs else 0
        runs += [replace(run, start=start + run.start, stop=start + run.stop) for run in group.runs]
    return ArrowGroup(
        table=groups[0].table,
        rows=pa.concat_tables([group.rows for group in groups]),
        sequences=np.concatenate([group.sequences for group in groups]),
        runs=tuple(runs),
        held_bytes=sum(group.held_bytes for group in groups),
        declared=tuple(text for group in groups for text in group.declared),
    )


def _sequences_of(rows: pa.Table) -> npt.NDArray[np.int64]:
    sequences: npt.NDArray[np.int64] = rows.column(names.SEQUENCE).to_numpy()
    return sequences


def first_after(sequences: npt.NDArray[np.int64], sequence: int) -> int:
    """Find the first of rising sequences above another one."""
    return int(np.searchsorted(sequences, sequence, side="right"))


def arrow_change_columns(
    group: ArrowGroup, schema: pa.Schema, *, rescued: pa.Array | None
) -> Mapping[str, pa.Array | pa.ChunkedArray]:
    """Build those `_cdc_` columns of a group that its table has."""
    rows = group.rows
    every = {
        names.SEQUENCE: rows.column(names.SEQUENCE),
        names.TIMESTAMP: moments(_timestamps_us(group)),
        names.OPERATION: _column_or(rows, names.OPERATION, "INSERT"),
        names.ROW_ID: _column_or(rows, names.ROW_ID, ""),
        names.SOURCE: sources_of(group),
        names.INGESTED_AT: moments(received_at_us(group)),
        names.BEFORE: _column_or(rows, names.BEFORE, None),
        names.UNCHANGED: _column_or(rows, names.UNCHANGED, None),
        names.METADATA: _column_or(rows, names.METADATA, None),
        names.RESCUED: pa.nulls(len(group)) if rescued is None else rescued,
        names.PARTITION: pa.nulls(len(group)),  # filled by routing.py when all columns are there
        names.EPOCH: epochs_of(group),
    }
    return {name: column.cast(schema.field(name).type) for name, column in every.items() if name in schema.names}


def _column_or(rows: pa.Table, name: str, default: str | None) -> pa.Array | pa.ChunkedArray:
    if name not in rows.column_names:
        return pa.nulls(rows.num_rows) if default is None else pa.repeat(default, rows.num_rows)
    column = rows.column(name)
    if default is None or not column.null_count:
        return column
    return column.cast(pa.string()).fill_null(default)


def _timestamps_us(group: ArrowGroup) -> npt.NDArray[np.int64]:
    """Give the time of each change; admission has bounded it, so that microseconds fit. 0 is the time of receipt."""
    received_us = received_at_us(group)
    if names.TIMESTAMP not in group.rows.column_names:
        return received_us
    column = group.rows.column(names.TIMESTAMP)
    if pt.is_null(column.type):
        return received_us
    if pt.is_timestamp(column.type):
        given_us = column.cast(pa.timestamp("us", column.type.tz)).cast(pa.int64())
    else:
        given_us = pc.multiply(column, _US_PER_MS)
    numbers = given_us.fill_null(0).to_numpy()
    return np.where(numbers == 0, received_us, numbers)
