"""Runs of the log decoded in worker threads. Owns how a run is cut and tried; what fits is schema.py's.

Pure functions of records and columns, so that they can run beside each other in threads (or, one day, in processes).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa

from writer.changes import SourceId, Span
from writer.decode import decode_group
from writer.frames import decode_frame
from writer.groups import ChangeGroup, split_frames
from writer.parse_types import Vacancies
from writer.schema import Fitted, fit_group
from writer.text_values import Misfit
from writer.types import StructType
from writer.wal.record import Record


@dataclass(frozen=True, slots=True)
class Expected:
    """What rows of a table are decoded to: its columns, and the fields that have only been null so far."""

    columns: StructType
    vacant: Vacancies


@dataclass(frozen=True, slots=True)
class Decoded:
    """The changes of one source table in a run; `rows` is None where the strict decoder refused or had no columns."""

    group: ChangeGroup
    rows: pa.Table | None


@dataclass(frozen=True, slots=True)
class DecodedRun:
    """A run of the log: its tables, and the offset behind it."""

    tables: Sequence[Decoded]
    next_offset: int


def decode_run(
    records: Sequence[Record],
    expected: Mapping[str, Expected],
    *,
    keep_before: bool,
    next_offset: int | None = None,
) -> DecodedRun:
    """Take records apart by table and decode what fits the columns known so far.

    `next_offset` is needed where it is not the one behind the last record: the log goes on after a gap, or ends in one.
    """
    frames = ((record.offset, decode_frame(record.payload)) for record in records)
    groups = split_frames(frames, keep_before=keep_before)
    tables = [
        Decoded(part, _try_decode(part, expected.get(table)))
        for table, group in groups.items()
        for part in split_epochs(group)
    ]
    return DecodedRun(tables, records[-1].offset + 1 if next_offset is None else next_offset)


def _try_decode(group: ChangeGroup, expected: Expected | None) -> pa.Table | None:
    if expected is None:
        return None
    try:
        return decode_group(group, expected.columns, expected.vacant)
    except Misfit:
        return None


def decode_or_fit(group: ChangeGroup, expected: Expected, *, last_field_id: int) -> Fitted:
    """Decode strictly, or exactly where that refuses; the columns may evolve."""
    try:
        rows = decode_group(group, expected.columns, expected.vacant)
        return Fitted(expected.columns, last_field_id, rows, (), expected.vacant)
    except Misfit:
        return fit_group(group, expected.columns, next_field_id=last_field_id + 1, vacant=expected.vacant)


def split_epochs(group: ChangeGroup) -> Iterable[ChangeGroup]:
    """Cut a group where a source starts a new epoch, so that within a part a sequence names one change."""
    start = 0
    epochs: dict[SourceId, int] = {}
    for run in group.runs:
        if epochs.setdefault(run.source, run.epoch) != run.epoch:
            yield group.between(start, run.start)
            start = run.start
            epochs = {run.source: run.epoch}
    yield group.between(start, len(group)) if start else group


def spans_of(group: ChangeGroup) -> dict[SourceId, Span]:
    """Tell which positions of which sources a group covers."""
    return {source: Span(first, last) for source, (first, last) in group.positions().items()}
