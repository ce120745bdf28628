"""Runs of the log decoded in worker threads. Owns how a run is cut and tried; what fits is schema.py's.

Pure functions of records and columns, so that they can run beside each other in threads (or, one day, in processes).
Each is a boundary: whatever one record makes our code do is told of that record, and its neighbours go on.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias, TypeVar

import pyarrow as pa

from writer.arrow.groups import ArrowGroup, split_arrow_frames
from writer.arrow.rows import fit_arrow_group
from writer.changes import SourceId, Span
from writer.decode import decode_group
from writer.envelope import BatchMalformed
from writer.frames import Encoding, Frame, decode_frame, payload_facts
from writer.rows.declared import declaration_from_text
from writer.rows.groups import ChangeGroup, Group, split_frames
from writer.rows.parse_types import Vacancies
from writer.rows.text_values import Misfit
from writer.rows.unreadable import UNREADABLE_TABLE, UnreadableGroup, unreadable_group
from writer.schema import Evolved, Fitted, declare_columns, fit_group
from writer.transactions import Open, OpenTransactions
from writer.types import StructType
from writer.wal.record import Record

logger = logging.getLogger(__name__)

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
    """The changes of one table in a run; `rows` is None where the strict decoder refused or had no columns.

    `held_bytes` is the memory that both keep from release. `columns` are those that the rows were decoded for: by the
    time they reach their table, it may have others that look the same in Arrow.
    """

    group: Group
    rows: pa.Table | None
    held_bytes: int
    columns: StructType | None = None


@dataclass(frozen=True, slots=True)
class DecodedRun:
    """A run of the log: its tables, and the offset behind it."""

    tables: Sequence[Decoded]
    next_offset: int

    @property
    def held_bytes(self) -> int:
        """The memory that it keeps from release."""
        return sum(decoded.held_bytes for decoded in self.tables)


@dataclass(frozen=True, slots=True)
class _Options:
    """How frames are taken apart: whether images from before are kept, and which table a source's table is."""

    keep_before: bool
    name_of: Callable[[str], str]


def cut_run(records: Sequence[Record], *, max_bytes: int, next_offset: int) -> Iterator[tuple[Sequence[Record], int]]:
    """Cut records where decoding them together could take more than `max_bytes`; one alone may.

    Also before one that declares columns, so that it stands first in its part: rows from before it are not its own.
    Each part comes with the offset behind it; the last one's is `next_offset`.
    """
    start, size_bytes = 0, 0
    for index, record in enumerate(records):
        facts = payload_facts(record.payload)
        size_bytes += facts.decoded_max_bytes
        if (size_bytes > max_bytes or facts.declares) and index > start:
            yield records[start:index], record.offset
            start, size_bytes = index, facts.decoded_max_bytes
    yield records[start:], next_offset


@dataclass(frozen=True, slots=True)
class Part:
    """Records to decode together, the offset behind them, and the transactions that are open there."""

    records: Sequence[Record]
    next_offset: int
    open_transactions: Open = field(default_factory=dict)


def cut_whole(
    records: Sequence[Record], transactions: OpenTransactions, *, max_bytes: int, next_offset: int
) -> Iterator[Part]:
    """Cut records as `cut_run` does, and also behind the last one behind which no transaction is open."""
    end = transactions.last_end(records)
    sections = [(records, next_offset)]
    if 0 < end < len(records):
        sections = [(records[:end], records[end].offset), (records[end:], next_offset)]
    for section, behind in sections:
        for part, offset in cut_run(section, max_bytes=max_bytes, next_offset=behind):
            transactions.pass_records(part)
            yield Part(part, offset, transactions.awaited())


def decode_run(
    records: Sequence[Record],
    expected: Mapping[str, Expected],
    *,
    keep_before: bool,
    next_offset: int | None = None,
    name_of: Callable[[str], str] = str,
    only: frozenset[str] | None = None,
) -> DecodedRun:
    """Take records apart by table and decode what fits the columns known so far; `only` some tables if told.

    `name_of` tells which table a source's table is; all else knows tables by that name.
    `next_offset` is needed where it is not the one behind the last record: the log goes on after a gap, or ends in one.
    """
    frames = [(record.offset, decode_frame(record.payload)) for record in records]
    groups = _split_what_can_be(frames, _Options(keep_before, name_of))
    tables = [
        _decode(part, expected.get(group.table))
        for group in groups
        if only is None or group.table in only
        for part in split_epochs(group)
    ]
    return DecodedRun(tables, records[-1].offset + 1 if next_offset is None else next_offset)


def _split_what_can_be(frames: Sequence[_NumberedFrame], options: _Options) -> list[Group]:
    try:
        return _split_by_table(frames, options)
    except Exception as error:
        if len(frames) == 1:
            ((offset, frame),) = frames
            logger.exception("record_unreadable", extra={"offset": offset, "source": frame.source})
            table = options.name_of(UNREADABLE_TABLE)
            return [unreadable_group(frame, table=table, offset=offset, reason=type(error).__name__)]
    # One of them cannot be read. The others can, one by one, which also keeps their order.
    return [group for frame in frames for group in _split_what_can_be([frame], options)]


def take_apart(frame: Frame, *, offset: int, name_of: Callable[[str], str]) -> list[Group]:
    """Group the changes of one frame by table, with all that they hold; whatever our code raises for it is raised."""
    return _split_by_table([(offset, frame)], _Options(keep_before=True, name_of=name_of))


def _split_by_table(frames: Sequence[_NumberedFrame], options: _Options) -> list[Group]:
    """Group changes by table, each table's groups in log order. Frames of either encoding are gathered apart."""
    groups = _split_apart(frames, options)
    in_json = {group.table for group in groups if isinstance(group, ChangeGroup)}
    if in_json.isdisjoint(group.table for group in groups if isinstance(group, ArrowGroup)):
        return groups
    # A table has both: cut wherever the encoding changes. That is rare, as a source has its way of sending.
    stretches = itertools.groupby(frames, key=lambda each: each[1].encoding)
    return [group for _, stretch in stretches for group in _split_apart(list(stretch), options)]


def _split_apart(frames: Sequence[_NumberedFrame], options: _Options) -> list[Group]:
    in_json = [each for each in frames if each[1].encoding is Encoding.JSON_BATCH]
    in_arrow = [each for each in frames if each[1].encoding is Encoding.ARROW_STREAM]
    json_groups = split_frames(in_json, keep_before=options.keep_before, name_of=options.name_of)
    return [*json_groups.values(), *split_arrow_frames(in_arrow, name_of=options.name_of)]


def _decode(group: Group, expected: Expected | None) -> Decoded:
    try:
        rows = _try_decode(group, expected)
    except Exception:  # noqa: BLE001 - a boundary, and the error comes again below
        rows = None  # the exact way is tried next, by whoever owns the columns; it tells which rows are to blame
    held_bytes = group.held_bytes if isinstance(group, ArrowGroup) else _image_bytes(group)
    columns = None if expected is None else expected.columns
    return Decoded(group, rows, held_bytes + (0 if rows is None else rows.nbytes), columns)


def _image_bytes(group: Group) -> int:
    assert isinstance(group, ChangeGroup)
    return sum(map(len, group.images))


def _try_decode(group: Group, expected: Expected | None) -> pa.Table | None:
    if expected is None or isinstance(group, UnreadableGroup):
        return None
    if _declare(group, expected, last_field_id=0).columns != expected.columns:
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
    """Decode strictly, or exactly where that refuses. Columns evolve by what is declared, then by the values."""
    declared = _declare(group, expected, last_field_id=last_field_id)
    expected = replace(expected, columns=declared.columns)
    fitted = _decode_or_fit(group, expected, last_field_id=declared.last_field_id)
    return replace(fitted, added=(*declared.changes, *fitted.added), refused=declared.refusals)


def _declare(group: Group, expected: Expected, *, last_field_id: int) -> Evolved:
    evolved = Evolved(expected.columns, last_field_id)
    for text in group.declared:
        after = declare_columns(
            evolved.columns,
            declaration_from_text(text),
            last_field_id=evolved.last_field_id,
            nanoseconds=expected.nanoseconds,
        )
        changes, refusals = (*evolved.changes, *after.changes), (*evolved.refusals, *after.refusals)
        evolved = replace(after, changes=changes, refusals=refusals)
    return evolved


def _decode_or_fit(group: Group, expected: Expected, *, last_field_id: int) -> Fitted:
    if isinstance(group, UnreadableGroup):
        raise BatchMalformed(f"record cannot be taken apart: error={group.reason}")
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
