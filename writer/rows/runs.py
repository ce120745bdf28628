"""Runs of the log decoded in worker threads. Owns how a run is cut and tried; what fits is json_exact.py's.

Pure functions of records and columns, so that they can run beside each other in threads (or, one day, in processes).
Each is a boundary: whatever one record makes our code do is told of that record, and its neighbours go on.
"""

from __future__ import annotations

import enum
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Generic, TypeAlias, TypeVar

import pyarrow as pa

from lakefeed.contract.changes import SourceId, Span
from lakefeed.contract.errors import WriterError
from lakefeed.contract.properties import Reason, Refusal
from lakefeed.iceberg.types import StructType
from lakefeed.writer.rows.arrow import fit_arrow_group
from lakefeed.writer.rows.declaration import declaration_from_text
from lakefeed.writer.rows.groups import (
    UNREADABLE_TABLE,
    ArrowGroup,
    ChangeGroup,
    Group,
    UnreadableGroup,
    split_arrow_frames,
    split_frames,
    unreadable_group,
)
from lakefeed.writer.rows.json_exact import Evolved, Fitted, declare_columns, fit_group
from lakefeed.writer.rows.json_strict import Vacancies, decode_group
from lakefeed.writer.rows.values import Misfit
from lakefeed.writer.wal.payload import Encoding, Frame, decode_frame, open_transaction_of, payload_facts
from lakefeed.writer.wal.records import Record
from lakefeed.writer.wire.json_batch import BatchMalformed

# --- writer.transactions ----------------------------------------------------------------------------------------------
#
# Which transactions of the sources are open at a place of the log. Owns where the log may be cut so that none is torn.
#
# A frame's header names the transaction of its source that goes on behind it, if one does. A source's transactions come
# one after the other. Between two records, then, each source has one open transaction or none, and where none has, all
# before belongs together and nothing behind belongs to it:
#
#     records    a1  b  a2  c |  d1  d2 |  e1      (x1, x2: parts of the transaction x)
#     open       a   a  -   -    d   -     e
#                      runs --> Gate: those up to a bar go on together, e1 waits
#
# The wait is bounded by bytes and by time. A transaction that is still open then is given up: its parts go on as they
# come, and it is not waited for again.


# Transactions that are open, by their source.
Open: TypeAlias = Mapping[SourceId, str]

NONE_OPEN: Open = {}

Run = TypeVar("Run")


class Split(enum.Enum):
    """Why changes of one transaction may not have become visible together."""

    TOO_LONG = "too_long"
    TOO_LARGE = "too_large"
    TABLE_LEFT = "table_left"
    TABLE_OUT = "table_out"
    CUT_SHORT = "cut_short"


@dataclass(slots=True)
class OpenTransactions:
    """The transactions that are open behind the records passed so far, without those that were given up."""

    _open: dict[SourceId, str] = field(default_factory=dict)
    _given_up: dict[SourceId, str] = field(default_factory=dict)

    def pass_records(self, records: Sequence[Record]) -> None:
        """Go on behind records."""
        for record in records:
            self._pass(record)

    def _pass(self, record: Record) -> None:
        source, transaction = open_transaction_of(record.payload)
        if transaction:
            self._open[source] = transaction
        else:
            self._open.pop(source, None)
        if self._given_up.get(source) != transaction:
            self._given_up.pop(source, None)

    def last_end(self, records: Sequence[Record]) -> int:
        """Tell behind how many of the next records no transaction was open last; 0 if there is no such place."""
        ahead = OpenTransactions(dict(self._open), dict(self._given_up))
        found = 0
        for index, record in enumerate(records, start=1):
            ahead._pass(record)
            if not ahead.awaited():
                found = index
        return found

    def awaited(self) -> Open:
        """Give those that are worth waiting for."""
        return self.without_given_up(self._open) if self._open else NONE_OPEN

    def without_given_up(self, transactions: Open) -> Open:
        """Leave out those that were given up."""
        return {source: each for source, each in transactions.items() if self._given_up.get(source) != each}

    def give_up(self, transactions: Open) -> None:
        """Wait for these no more."""
        self._given_up.update(transactions)


@dataclass(slots=True)
class Gate(Generic[Run]):
    """Runs of the log that wait for the end of a transaction, in order."""

    transactions: OpenTransactions
    max_bytes: int
    max_wait_s: float
    held_bytes: int = 0
    awaited: Open = field(default_factory=dict)
    held_since: float | None = None
    _held: list[Run] = field(default_factory=list)

    def take(self, run: Run, awaited: Open, *, size_bytes: int, now: float) -> list[Run]:
        """Take the next run and what is open behind it; gives the runs that may go on now."""
        self._held.append(run)
        self.held_bytes += size_bytes
        # What was given up since the run was cut is not waited for either.
        self.awaited = self.transactions.without_given_up(awaited)
        if not self.awaited:
            return self._release()
        self.held_since = now if self.held_since is None else self.held_since
        return []

    def limit_reached(self, *, now: float) -> Split | None:
        """Tell why the wait has to end now, or None."""
        if self.held_bytes > self.max_bytes:
            return Split.TOO_LARGE
        return Split.TOO_LONG if self.wait_s(now=now) == 0 else None

    def wait_s(self, *, now: float) -> float | None:
        """Tell how long the end of a transaction may take yet; None if none is waited for."""
        return None if self.held_since is None else max(0.0, self.held_since + self.max_wait_s - now)

    def give_up(self) -> list[Run]:
        """Wait no more for what is open; gives all that was held."""
        self.transactions.give_up(self.awaited)
        return self._release()

    def _release(self) -> list[Run]:
        released, self._held = self._held, []
        self.held_bytes = 0
        self.awaited = NONE_OPEN
        self.held_since = None
        return released


# --- writer.decoding --------------------------------------------------------------------------------------------------


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


# --- writer.sifting ---------------------------------------------------------------------------------------------------
#
# A group sifted: the rows that can be decoded, and those that make decoding fail, whatever the reason. Slow and exact.
#
# Owns finding the culprits. A group that fails is cut in two, and each half again, until what fails is one row: so one
# bad row costs a few more tries, and its neighbours are decoded together. Columns evolve from part to part, in order.


@dataclass(frozen=True, slots=True)
class Sifted:
    """What became of a group: parts of it with their rows, parts that were refused, and the columns after that.

    `refusals` are of what sources declared about the columns, and concern no row.
    """

    kept: Sequence[tuple[Group, pa.Table]]
    refused: Sequence[tuple[Group, Reason]]
    expected: Expected
    last_field_id: int
    changes: Sequence[str]
    refusals: Sequence[str]


@dataclass(slots=True)
class _Refused:
    start: int
    stop: int
    reason: Reason


@dataclass(slots=True)
class _Sieve:
    group: Group
    expected: Expected
    last_field_id: int
    kept: list[tuple[Group, pa.Table]] = field(default_factory=list)
    refused: list[_Refused] = field(default_factory=list)
    changes: list[str] = field(default_factory=list)
    refusals: dict[str, None] = field(default_factory=dict)

    def sift(self, start: int, stop: int) -> None:
        part = self.group if stop - start == len(self.group) else self.group.between(start, stop)
        try:
            fitted = decode_or_fit(part, self.expected, last_field_id=self.last_field_id)
        except MemoryError:
            raise  # says nothing of the rows
        except Exception as error:  # noqa: BLE001 - the boundary of a decode thread; it is told with the row
            if stop - start == 1:
                self._refuse(start, reason_of(error))
                return
        else:
            self.kept.append((part, fitted.table))
            self.expected = replace(self.expected, columns=fitted.columns, vacant=fitted.vacant)
            self.last_field_id = fitted.last_field_id
            self.changes.extend(fitted.added)
            self.refusals |= dict.fromkeys(fitted.refused)  # each part says the same
            return
        middle = (start + stop) // 2
        self.sift(start, middle)
        self.sift(middle, stop)

    def _refuse(self, row: int, reason: Reason) -> None:
        last = self.refused[-1] if self.refused else None
        if last is not None and (last.stop, last.reason) == (row, reason):
            last.stop += 1
        else:
            self.refused.append(_Refused(row, row + 1, reason))


def reason_of(error: Exception) -> Reason:
    """Name the error. Only our own messages are known to hold no values."""
    text = f"{type(error).__name__}: {error}" if isinstance(error, WriterError) else type(error).__name__
    return Reason(Refusal.UNDECODABLE, text)


def sift_group(group: Group, expected: Expected, *, last_field_id: int) -> Sifted:
    """Decode what can be decoded of a group, and tell the rest apart."""
    sieve = _Sieve(group, expected, last_field_id)
    sieve.sift(0, len(group))
    refused = [(group.between(each.start, each.stop), each.reason) for each in sieve.refused]
    return Sifted(sieve.kept, refused, sieve.expected, sieve.last_field_id, sieve.changes, list(sieve.refusals))
