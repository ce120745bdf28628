"""Runs of the log decoded in worker threads. Owns how a run is cut and tried; what fits is schema.py's.

Pure functions of records and columns, so that they can run beside each other in threads (or, one day, in processes).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

import pyarrow as pa

from writer.arrow.groups import ArrowGroup, split_arrow_frames
from writer.arrow.rows import fit_arrow_group
from writer.changes import SourceId, Span
from writer.decode import decode_group
from writer.frames import Encoding, Frame, decode_frame, decoded_max_bytes
from writer.rows.groups import ChangeGroup, Group, split_frames
from writer.rows.parse_types import Vacancies
from writer.rows.text_values import Misfit
from writer.schema import Fitted, fit_group
from writer.types import StructType
from writer.wal.record import Record

_Group = TypeVar("_Group", bound=Group)
_NumberedFrame: TypeAlias = tuple[int, Frame]


@dataclass(frozen=True, slots=True)
class Expected:
    """What rows of a table are decoded to: its columns, and the fields that have only been null so far.

    `nanoseconds` tells whether the table's format has types for them.
    """

    columns: StructType
    vacant: Vacancies
    nanoseconds: bool = False


@dataclass(frozen=True, slots=True)
class Decoded:
    """The changes of one source table in a run; `rows` is None where the strict decoder refused or had no columns."""

    group: Group
    rows: pa.Table | None


@dataclass(frozen=True, slots=True)
class DecodedRun:
    """A run of the log: its tables, and the offset behind it."""

    tables: Sequence[Decoded]
    next_offset: int


def cut_run(records: Sequence[Record], *, max_bytes: int, next_offset: int) -> Iterator[tuple[Sequence[Record], int]]:
    """Cut records where decoding them together could take more than `max_bytes`; one alone may.

    Each part comes with the offset behind it; the last one's is `next_offset`.
    """
    start, size_bytes = 0, 0
    for index, record in enumerate(records):
        size_bytes += decoded_max_bytes(record.payload)
        if size_bytes > max_bytes and index > start:
            yield records[start:index], record.offset
            start, size_bytes = index, decoded_max_bytes(record.payload)
    yield records[start:], next_offset


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
    frames = [(record.offset, decode_frame(record.payload)) for record in records]
    tables = [
        Decoded(part, _try_decode(part, expected.get(group.table)))
        for group in _split_by_table(frames, keep_before=keep_before)
        for part in split_epochs(group)
    ]
    return DecodedRun(tables, records[-1].offset + 1 if next_offset is None else next_offset)


def _split_by_table(frames: Sequence[_NumberedFrame], *, keep_before: bool) -> list[Group]:
    """Group changes by table, each table's groups in log order. Frames of either encoding are gathered apart."""
    groups = _split_apart(frames, keep_before=keep_before)
    in_json = {group.table for group in groups if isinstance(group, ChangeGroup)}
    if in_json.isdisjoint(group.table for group in groups if isinstance(group, ArrowGroup)):
        return groups
    # A table has both: cut wherever the encoding changes. That is rare, as a source has its way of sending.
    stretches = itertools.groupby(frames, key=lambda each: each[1].encoding)
    return [group for _, stretch in stretches for group in _split_apart(list(stretch), keep_before=keep_before)]


def _split_apart(frames: Sequence[_NumberedFrame], *, keep_before: bool) -> list[Group]:
    in_json = [each for each in frames if each[1].encoding is Encoding.JSON_BATCH]
    in_arrow = [each for each in frames if each[1].encoding is Encoding.ARROW_STREAM]
    return [*split_frames(in_json, keep_before=keep_before).values(), *split_arrow_frames(in_arrow)]


def _try_decode(group: Group, expected: Expected | None) -> pa.Table | None:
    if expected is None:
        return None
    if isinstance(group, ArrowGroup):
        fitted = _fit_arrow(group, expected, last_field_id=0)
        return fitted.table if fitted.columns == expected.columns else None
    assert isinstance(group, ChangeGroup)
    try:
        return decode_group(group, expected.columns, expected.vacant)
    except Misfit:
        return None


def _fit_arrow(group: ArrowGroup, expected: Expected, *, last_field_id: int) -> Fitted:
    return fit_arrow_group(
        group,
        expected.columns,
        next_field_id=last_field_id + 1,
        vacant=expected.vacant,
        nanoseconds=expected.nanoseconds,
    )


def decode_or_fit(group: Group, expected: Expected, *, last_field_id: int) -> Fitted:
    """Decode strictly, or exactly where that refuses; the columns may evolve."""
    if isinstance(group, ArrowGroup):
        return _fit_arrow(group, expected, last_field_id=last_field_id)
    assert isinstance(group, ChangeGroup)
    try:
        rows = decode_group(group, expected.columns, expected.vacant)
        return Fitted(expected.columns, last_field_id, rows, (), expected.vacant)
    except Misfit:
        return fit_group(group, expected.columns, next_field_id=last_field_id + 1, vacant=expected.vacant)


def split_epochs(group: _Group) -> Iterable[_Group]:
    """Cut a group where a source starts a new epoch, so that within a part a sequence names one change."""
    start = 0
    epochs: dict[SourceId, int] = {}
    for run in group.runs:
        if epochs.setdefault(run.source, run.epoch) != run.epoch:
            yield group.between(start, run.start)
            start = run.start
            epochs = {run.source: run.epoch}
    yield group.between(start, len(group)) if start else group


def spans_of(group: Group) -> dict[SourceId, Span]:
    """Tell which positions of which sources a group covers."""
    return {source: Span(first, last) for source, (first, last) in group.positions().items()}
