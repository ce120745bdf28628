"""Runs of the log: cut into parts, decoded to Arrow rows by table, with bad rows found by bisection.

    records --cut_run, cut_whole--> parts --decode_run--> DecodedRun: per table a group, and its rows if they fitted
                                             fit_or_bisect: fits refused groups one table at a time, columns may evolve

All of it is pure: records and columns in, groups and Arrow rows out. Inputs and results can be pickled, and there is no
global state beside caches, so runs can be decoded in threads, in other processes or on other machines. A record that
makes our code fail is reported as that record, and its neighbours are decoded.

Source transactions. A frame's header names the transaction of its source that continues after it, if one does. The
transactions of one source follow each other. So between two records each source has at most one open transaction, and
where no source has one, everything before belongs together:

    records    a1  b  a2  c |  d1  d2 |  e1      (x1, x2: parts of the transaction x)
    open       a   a  -   -    d   -     e
                     runs --> TransactionGate: those up to a bar pass together, e1 waits

The wait is bounded by bytes and by time. After that the transaction is given up: its parts pass as they come, and it is
not waited for again.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Generic, TypeAlias, TypeVar

import pyarrow as pa

from lakefeed.contract.changes import SourceId
from lakefeed.contract.errors import WriterError
from lakefeed.contract.properties import Reason, Refusal
from lakefeed.iceberg.types import StructType
from lakefeed.writer.rows.groups import (
    UNREADABLE_TABLE,
    Expected,
    Group,
    NameOf,
    NumberedFrame,
    group_frames,
    unreadable_record,
)
from lakefeed.writer.wal.payload import decode_frame, open_transaction_of, payload_facts
from lakefeed.writer.wal.records import Record

logger = logging.getLogger(__name__)

# Open transactions, by their source.
Open: TypeAlias = Mapping[SourceId, str]

NONE_OPEN: Open = {}

_Held = TypeVar("_Held")
_Group = TypeVar("_Group", bound=Group)


class SplitReason(enum.Enum):
    """Why changes of one transaction may not have become visible together."""

    TOO_LONG = "too_long"
    TOO_LARGE = "too_large"
    TABLE_LEFT = "table_left"
    TABLE_OUT = "table_out"
    CUT_SHORT = "cut_short"


@dataclass(slots=True)
class OpenTransactions:
    """The transactions that are open after the records read so far, without those that were given up."""

    _open: dict[SourceId, str] = field(default_factory=dict)
    _given_up: dict[SourceId, str] = field(default_factory=dict)

    def pass_records(self, records: Sequence[Record]) -> None:
        """Continue after records."""
        for record in records:
            source, transaction = open_transaction_of(record.payload)
            if transaction:
                self._open[source] = transaction
            else:
                self._open.pop(source, None)
            if self._given_up.get(source) != transaction:
                self._given_up.pop(source, None)

    def last_end(self, records: Sequence[Record]) -> int:
        """Return the highest number of next records after which no transaction is open; 0 if there is none."""
        ahead = OpenTransactions(dict(self._open), dict(self._given_up))
        found = 0
        for index, record in enumerate(records, start=1):
            ahead.pass_records([record])
            if not ahead.awaited():
                found = index
        return found

    def awaited(self) -> Open:
        """Return the open transactions that are worth waiting for."""
        return self.without_given_up(self._open) if self._open else NONE_OPEN

    def without_given_up(self, transactions: Open) -> Open:
        """Return transactions without those that were given up."""
        return {source: each for source, each in transactions.items() if self._given_up.get(source) != each}

    def give_up(self, transactions: Open) -> None:
        """Stop waiting for transactions."""
        self._given_up.update(transactions)


@dataclass(slots=True)
class TransactionGate(Generic[_Held]):
    """Runs of the log that wait for the end of a transaction, in order."""

    transactions: OpenTransactions
    max_bytes: int
    max_wait_s: float
    held_bytes: int = 0
    awaited: Open = field(default_factory=dict)
    held_since: float | None = None
    _held: list[_Held] = field(default_factory=list)

    def take(self, run: _Held, awaited: Open, *, size_bytes: int, now: float) -> list[_Held]:
        """Take the next run and what is open after it; return the runs that may pass now."""
        self._held.append(run)
        self.held_bytes += size_bytes
        # Transactions that were given up since the run was cut are not waited for either.
        self.awaited = self.transactions.without_given_up(awaited)
        if not self.awaited:
            return self._release()
        self.held_since = now if self.held_since is None else self.held_since
        return []

    def limit_reached(self, *, now: float) -> SplitReason | None:
        """Return why the wait has to end now, or None."""
        if self.held_bytes > self.max_bytes:
            return SplitReason.TOO_LARGE
        return SplitReason.TOO_LONG if self.wait_s(now=now) == 0 else None

    def wait_s(self, *, now: float) -> float | None:
        """Return how much longer the gate waits for the end of a transaction; None if it does not wait."""
        return None if self.held_since is None else max(0.0, self.held_since + self.max_wait_s - now)

    def give_up(self) -> list[_Held]:
        """Stop waiting for what is open; return everything that was held."""
        self.transactions.give_up(self.awaited)
        return self._release()

    def _release(self) -> list[_Held]:
        released, self._held = self._held, []
        self.held_bytes = 0
        self.awaited = NONE_OPEN
        self.held_since = None
        return released


def cut_run(records: Sequence[Record], *, max_bytes: int, next_offset: int) -> Iterator[tuple[Sequence[Record], int]]:
    """Cut records so that decoding a part takes at most `max_bytes`, except for a part of one record.

    A record that declares columns begins a part, because rows before it do not have them. Each part comes with the
    offset after it; the last one's is `next_offset`.
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
    """Records to decode together, the offset after them, and the transactions that are open there."""

    records: Sequence[Record]
    next_offset: int
    open_transactions: Open = field(default_factory=dict)


def cut_whole(
    records: Sequence[Record], transactions: OpenTransactions, *, max_bytes: int, next_offset: int
) -> Iterator[Part]:
    """Cut records like `cut_run`, and also after the last record after which no transaction is open."""
    end = transactions.last_end(records)
    sections = [(records, next_offset)]
    if 0 < end < len(records):
        sections = [(records[:end], records[end].offset), (records[end:], next_offset)]
    for section, after in sections:
        for part, offset in cut_run(section, max_bytes=max_bytes, next_offset=after):
            transactions.pass_records(part)
            yield Part(part, offset, transactions.awaited())


@dataclass(frozen=True, slots=True)
class Decoded:
    """The changes of one table in a run; `rows` is None if the strict decoder refused them or had no columns.

    `held_bytes` is the memory that both keep from release. `columns` are those that the rows were decoded for, or
    refused for: by the time they reach their table, it may have others that look the same in Arrow.
    """

    group: Group
    rows: pa.Table | None
    held_bytes: int
    columns: StructType | None = None


@dataclass(frozen=True, slots=True)
class DecodedRun:
    """A run of the log: its tables, and the offset after it."""

    tables: Sequence[Decoded]
    next_offset: int

    @property
    def held_bytes(self) -> int:
        """The memory that the run keeps from release."""
        return sum(decoded.held_bytes for decoded in self.tables)


def decode_run(
    records: Sequence[Record],
    expected: Mapping[str, Expected],
    *,
    next_offset: int | None = None,
    name_of: NameOf = str,
    only: frozenset[str] | None = None,
) -> DecodedRun:
    """Group records by table and decode what fits the columns known so far; of all tables, or `only` of some.

    `name_of` maps a source's table to a table. `next_offset` is needed unless it is the one after the last record: the
    log may continue after a gap, or end in one.
    """
    frames = [(record.offset, decode_frame(record.payload)) for record in records]
    tables = [
        _decode(part, expected.get(group.table))
        for group in _group_readable(frames, name_of)
        if only is None or group.table in only
        for part in split_epochs(group)
    ]
    return DecodedRun(tables, records[-1].offset + 1 if next_offset is None else next_offset)


def _group_readable(frames: Sequence[NumberedFrame], name_of: NameOf) -> list[Group]:
    """Group frames by table; a frame that cannot be read is a group of its own."""
    try:
        return group_frames(frames, name_of=name_of)
    except Exception as error:
        if len(frames) == 1:
            ((offset, frame),) = frames
            logger.exception("record_unreadable", extra={"offset": offset, "source": frame.source})
            table = name_of(UNREADABLE_TABLE)
            return [unreadable_record(frame, table=table, offset=offset, reason=type(error).__name__)]
    # Read them one by one, which also keeps their order.
    return [group for frame in frames for group in _group_readable([frame], name_of)]


def _decode(group: Group, expected: Expected | None) -> Decoded:
    try:
        rows = None if expected is None else group.decode(expected)
    except Exception:  # noqa: BLE001 - a boundary; `fit_or_bisect` meets the error again and finds the rows
        rows = None
    columns = None if expected is None else expected.columns
    return Decoded(group, rows, group.held_bytes + (0 if rows is None else rows.nbytes), columns)


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


@dataclass(slots=True)
class FittedParts:
    """The parts of a group with their rows, the parts that were refused, and the columns after that.

    `refusals` are about what sources declared, and concern no row.
    """

    expected: Expected
    last_field_id: int
    kept: list[tuple[Group, pa.Table]] = field(default_factory=list)
    refused: list[tuple[Group, Reason]] = field(default_factory=list)
    changes: list[str] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)


def fit_or_bisect(
    group: Group, expected: Expected, *, last_field_id: int, refused_for: StructType | None = None
) -> FittedParts:
    """Fit a group into its table's columns, and find the rows that make this fail, whatever the reason.

    A group that fails is cut in two, and each half again, until what fails is one row: a bad row costs a few more
    attempts, and its neighbours are decoded together. Columns evolve from part to part, in order. `refused_for` are
    columns for which `decode_run` has refused the group.
    """
    parts = FittedParts(expected, last_field_id)
    refused: list[tuple[int, int, Reason]] = []
    waiting = [(0, len(group))]  # the next part is the last one
    while waiting:
        start, stop = waiting.pop()
        part = group if stop - start == len(group) else group.between(start, stop)
        try:
            fitted = part.fit(
                parts.expected,
                last_field_id=parts.last_field_id,
                refused_for=refused_for if part is group else None,
            )
        except MemoryError:
            raise  # does not depend on the rows
        except Exception as error:  # noqa: BLE001 - a boundary; the error is kept with the row
            if stop - start > 1:
                middle = (start + stop) // 2
                waiting += [(middle, stop), (start, middle)]
                continue
            reason = reason_of(error)
            if refused and refused[-1][1:] == (start, reason):
                start, _, _ = refused.pop()
            refused.append((start, stop, reason))
        else:
            parts.kept.append((part, fitted.table))
            parts.expected = replace(parts.expected, columns=fitted.columns)
            parts.last_field_id = fitted.last_field_id
            parts.changes += fitted.changes
            parts.refusals += [each for each in fitted.refusals if each not in parts.refusals]  # all parts have them
    parts.refused = [(group.between(start, stop), reason) for start, stop, reason in refused]
    return parts


def reason_of(error: Exception) -> Reason:
    """Return the reason for quarantining a row. Only messages of our own errors are known to hold no values."""
    text = f"{type(error).__name__}: {error}" if isinstance(error, WriterError) else type(error).__name__
    return Reason(Refusal.UNDECODABLE, text)
