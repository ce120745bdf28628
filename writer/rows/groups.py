"""Frames of the log taken apart by table: the changes of one table, in log order, their rows still undecoded.

Owns the order of changes, which image stands for a row, and the cut at a source's mark. Columns belong to decode.py.

A group keeps one list per envelope field instead of one object per change, and what a whole frame shares (source,
epoch, time of receipt, log offset) once per run of changes:

    sequences  41 42 43 | 7 8 | 44 45        images  {"id":9} {"id":4} ...
    runs       shop-1@0 | s-2 | shop-1@0     (start, stop, source, epoch, received_at_us, offset)
"""

from __future__ import annotations

import base64
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self, TypeAlias, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from lakefeed.contract import changes as names
from lakefeed.contract.changes import Position, SourceId
from lakefeed.contract.errors import WriterError
from lakefeed.writer.wal.payload import Encoding, Frame
from lakefeed.writer.wire.arrow_frame import TABLE_KEY, open_stream
from lakefeed.writer.wire.arrow_types import plain_rows
from lakefeed.writer.wire.json_batch import Event, decode_batch

# --- writer.rows.groups -----------------------------------------------------------------------------------------------


# A row as JSON text: as it was received, or rewritten by json_exact.py.
Image: TypeAlias = msgspec.Raw | bytes

_Item = TypeVar("_Item")

_NULL = msgspec.Raw(b"null")
_EMPTY = msgspec.Raw(b"{}")
_LENGTH_OF_NULL = 4

_decode_declared = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


@dataclass(frozen=True, slots=True)
class Run:
    """Neighbouring changes of a group that came in one frame.

    `body` is the frame's, where the group leaves out something of its changes; their images keep it in memory anyway.
    """

    start: int
    stop: int
    source: SourceId
    epoch: int
    received_at_us: int
    offset: int
    body: bytes = field(default=b"", repr=False, compare=False)


class Group(ABC):
    """Changes of one source table in log order, however their rows are encoded. Sequences rise within a run."""

    __slots__ = ()

    table: str
    runs: tuple[Run, ...]
    # What sources declared of the table along with these changes, each as JSON (declaration.py).
    declared: tuple[str, ...]

    @abstractmethod
    def sequence_at(self, row: int) -> int:
        """Give the sequence of a change."""

    @abstractmethod
    def _first_after(self, run: Run, sequence: int) -> int:
        """Find the first row of a run that is above a sequence; the run's stop if none is."""

    @abstractmethod
    def _keep(self, kept: list[tuple[int, int]]) -> Self:
        """Keep of each run the rows of its (start, stop)."""

    def __len__(self) -> int:
        return self.runs[-1].stop if self.runs else 0

    @property
    def first_offset(self) -> int:
        """The log offset of the first frame in this group."""
        return self.runs[0].offset

    @property
    def last_offset(self) -> int:
        """The log offset of the last frame in this group."""
        return self.runs[-1].offset

    def positions(self) -> dict[SourceId, tuple[Position, Position]]:
        """Give the first and the last position of each source."""
        ends: dict[SourceId, tuple[Position, Position]] = {}
        for run in self.runs:
            first, last = self._position(run, run.start), self._position(run, run.stop - 1)
            ends[run.source] = (ends[run.source][0] if run.source in ends else first, last)
        return ends

    def after(self, marks: Mapping[SourceId, Position]) -> Self:
        """Drop the changes at or below their source's mark; the group itself when there are none."""
        kept = [(self._first_above(run, marks.get(run.source)), run.stop) for run in self.runs]
        if all(start == run.start for (start, _), run in zip(kept, self.runs, strict=True)):
            return self
        return self._keep(kept)

    def between(self, start: int, stop: int) -> Self:
        """Cut out the changes from `start` up to `stop`."""
        return self._keep([(max(run.start, start), min(run.stop, stop)) for run in self.runs])

    def _position(self, run: Run, row: int) -> Position:
        return Position(run.epoch, self.sequence_at(row))

    def _first_above(self, run: Run, mark: Position | None) -> int:
        if mark is None or self._position(run, run.start) > mark:
            return run.start
        if self._position(run, run.stop - 1) <= mark:
            return run.stop
        # Neither end decides, so run and mark share their epoch.
        return self._first_after(run, mark.sequence)


def keep_of_runs(runs: Sequence[Run], kept: Sequence[tuple[int, int]]) -> tuple[tuple[Run, ...], list[slice]]:
    """Keep of each run the rows of its (start, stop): the runs that are left, and where their rows were."""
    left: list[Run] = []
    spans: list[slice] = []
    size = 0
    for run, (start, stop) in zip(runs, kept, strict=True):
        if start < stop:
            left.append(replace(run, start=size, stop=size + stop - start))
            spans.append(slice(start, stop))
            size += stop - start
    return tuple(left), spans


@dataclass(frozen=True, slots=True)
class ChangeGroup(Group):
    """Changes that came as JSON. Timestamps are in ms; 0 means the time of receipt."""

    table: str
    sequences: list[int]
    timestamps: list[int]
    operations: list[str]
    row_ids: list[str]
    images: list[Image]
    befores: list[Image] | None
    unchanged: list[list[str] | None] | None
    metadata: list[Image] | None
    runs: tuple[Run, ...]
    declared: tuple[str, ...] = ()

    def sequence_at(self, row: int) -> int:
        """Give the sequence of a change."""
        return self.sequences[row]

    def _first_after(self, run: Run, sequence: int) -> int:
        return bisect_right(self.sequences, sequence, run.start, run.stop)

    def _keep(self, kept: list[tuple[int, int]]) -> Self:
        runs, spans = keep_of_runs(self.runs, kept)
        return replace(
            self,
            sequences=_pick(self.sequences, spans),
            timestamps=_pick(self.timestamps, spans),
            operations=_pick(self.operations, spans),
            row_ids=_pick(self.row_ids, spans),
            images=_pick(self.images, spans),
            befores=None if self.befores is None else _pick(self.befores, spans),
            unchanged=None if self.unchanged is None else _pick(self.unchanged, spans),
            metadata=None if self.metadata is None else _pick(self.metadata, spans),
            runs=runs,
        )


def _pick(items: list[_Item], spans: list[slice]) -> list[_Item]:
    return [item for span in spans for item in items[span]]


def split_frames(
    frames: Iterable[tuple[int, Frame]], *, keep_before: bool = False, name_of: Callable[[str], str] = str
) -> dict[str, ChangeGroup]:
    """Group the changes of (log offset, frame) pairs by table, dropping what admission had taken before.

    `name_of` tells which table a source's table is: where two are one, so is their group, in the order of the log.

    Raises: BatchMalformed for a body that admission cannot have let through.
    """
    pending: dict[str, _Pending] = {}
    for offset, frame in frames:
        assert frame.encoding is Encoding.JSON_BATCH, f"encoding is not known here: {frame.encoding!r}"
        events = decode_batch(frame.body).events
        if events and events[0].sequence <= frame.after_sequence:
            events = [event for event in events if event.sequence > frame.after_sequence]
        for table, own in _by_table(events, name_of).items():
            group = pending.setdefault(table, _Pending(table))
            group.add(own, offset=offset, frame=frame, keep_before=keep_before)
            group.declared += declared_of(frame, table, name_of)
    return {table: each.finish(keep_before=keep_before) for table, each in pending.items()}


def declared_of(frame: Frame, table: str, name_of: Callable[[str], str]) -> tuple[str, ...]:
    """Pick what a frame declares of a table, under any of the names that mean it."""
    if not frame.declared:
        return ()
    every = _decode_declared(frame.declared)
    return tuple(bytes(each).decode() for name, each in every.items() if name_of(name) == table)


def _by_table(events: list[Event], name_of: Callable[[str], str]) -> dict[str, list[Event]]:
    tables = {table: name_of(table) for table in dict.fromkeys([event.table for event in events])}
    groups: dict[str, list[Event]] = {table: [] for table in tables.values()}
    if len(groups) == 1:
        return dict.fromkeys(groups, events)
    for event in events:
        groups[tables[event.table]].append(event)
    return groups


@dataclass(slots=True)
class _Pending:
    """A group while frames are being added to it."""

    table: str
    sequences: list[int] = field(default_factory=list)
    timestamps: list[int] = field(default_factory=list)
    operations: list[str] = field(default_factory=list)
    row_ids: list[str] = field(default_factory=list)
    images: list[Image] = field(default_factory=list)
    befores: list[Image] = field(default_factory=list)
    unchanged: list[Any] = field(default_factory=list)
    metadata: list[Image] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)
    declared: tuple[str, ...] = ()

    def add(self, events: list[Event], *, offset: int, frame: Frame, keep_before: bool) -> None:
        start = len(self.sequences)
        self.sequences += [event.sequence for event in events]
        self.timestamps += [event.timestamp for event in events]
        self.operations += [event.operation for event in events]
        self.row_ids += [event.row_id for event in events]
        self.images += _images_of(events)
        self.unchanged += [event.unchanged for event in events]
        self.metadata += [event.metadata for event in events]
        if keep_before:
            self.befores += [event.before for event in events]
        self.runs.append(
            Run(
                start,
                len(self.sequences),
                frame.source,
                frame.epoch,
                frame.received_at_us,
                offset,
                b"" if keep_before else frame.body,
            )
        )

    def finish(self, *, keep_before: bool) -> ChangeGroup:
        return ChangeGroup(
            table=self.table,
            sequences=self.sequences,
            timestamps=self.timestamps,
            operations=self.operations,
            row_ids=self.row_ids,
            images=self.images,
            befores=self.befores if keep_before else None,
            unchanged=self.unchanged if any(self.unchanged) else None,
            metadata=self.metadata if any(self.metadata) else None,
            runs=tuple(self.runs),
            declared=self.declared,
        )


def with_befores(group: ChangeGroup) -> ChangeGroup:
    """Give a group with the images from before its changes, out of its frames if it was made without them."""
    if group.befores is not None:
        return group
    befores: list[Image] = []
    for run in group.runs:
        own = {event.sequence: event.before for event in decode_batch(run.body).events}
        befores += [own[sequence] for sequence in group.sequences[run.start : run.stop]]
    return replace(group, befores=befores)


def _images_of(events: list[Event]) -> list[Image]:
    """Choose each change's row. None of them is `null`: pyarrow.json crashes the process if the first one is."""
    images: list[Image] = [event.before if event.operation == "DELETE" else event.after for event in events]
    # An image as short as `null` may be missing. Rows are rarely that short, so most frames end here.
    if min(map(len, images)) > _LENGTH_OF_NULL:
        return images
    return [
        next((image for image in _by_preference(event) if image and image != _NULL), _EMPTY)
        if len(chosen) <= _LENGTH_OF_NULL
        else chosen
        for event, chosen in zip(events, images, strict=True)
    ]


def _by_preference(event: Event) -> tuple[msgspec.Raw, msgspec.Raw]:
    return (event.before, event.after) if event.operation == "DELETE" else (event.after, event.before)


# --- writer.rows.change_columns ---------------------------------------------------------------------------------------
#
# The `_cdc_` columns of a group as Arrow arrays. Owns their values; their names belong to lakefeed/contract/changes.py.


_US_PER_MS = 1000

# A row whose bytes are not UTF-8 is kept as {"_cdc_base64": "..."}: the prefix is ours, no row is mistaken for it.
BASE64_KEY = "_cdc_base64"


def change_columns(
    group: ChangeGroup, schema: pa.Schema, *, rescued: Sequence[str | None] | None
) -> dict[str, pa.Array]:
    """Build those `_cdc_` columns of a group that its table has."""
    build: dict[str, Callable[[pa.DataType], pa.Array]] = {
        names.SEQUENCE: lambda type_: pa.array(group.sequences, type_),
        names.TIMESTAMP: lambda type_: moments(_timestamps_us(group)).cast(type_),
        names.OPERATION: lambda type_: pa.array(group.operations, type_),
        names.ROW_ID: lambda type_: pa.array(group.row_ids, type_),
        names.SOURCE: lambda type_: sources_of(group).cast(type_),
        names.INGESTED_AT: lambda type_: moments(received_at_us(group)).cast(type_),
        names.BEFORE: lambda type_: _or_nulls(group, _texts_of(group.befores), type_),
        names.UNCHANGED: lambda type_: _or_nulls(group, group.unchanged, type_),
        names.METADATA: lambda type_: _or_nulls(group, _texts_of(group.metadata), type_),
        names.RESCUED: lambda type_: _or_nulls(group, rescued, type_),
        names.EPOCH: lambda type_: epochs_of(group).cast(type_),
    }
    built = {name: make(schema.field(name).type) for name, make in build.items() if name in schema.names}
    return _unfilled_columns(len(group), schema, built) | built


def _unfilled_columns(rows: int, schema: pa.Schema, built: Collection[str]) -> dict[str, pa.Array]:
    """Build the reserved columns that this version does not fill, such as `_cdc_partition` of an earlier one: nulls."""
    return {
        field.name: pa.nulls(rows, field.type)
        for field in schema
        if field.name.startswith(names.RESERVED_PREFIX) and field.name not in built
    }


def text_of(image: Image) -> str:
    """Give a row's JSON text, as it was received where it is UTF-8."""
    try:
        return bytes(image).decode()
    except UnicodeDecodeError:
        return msgspec.json.encode({BASE64_KEY: base64.b64encode(bytes(image)).decode()}).decode()


def _texts_of(images: Sequence[Image] | None) -> list[str | None] | None:
    if images is None:
        return None
    return [text_of(image) if image and image != _NULL else None for image in images]


def _or_nulls(group: ChangeGroup, values: Sequence[object] | None, type_: pa.DataType) -> pa.Array:
    return pa.nulls(len(group), type_) if values is None else pa.array(values, type_)


def _run_lengths(group: Group) -> list[int]:
    return [run.stop - run.start for run in group.runs]


def sources_of(group: Group) -> pa.Array:
    """Give the source of each change."""
    sources = [run.source for run in group.runs]
    rows = np.repeat(np.arange(len(sources)), _run_lengths(group))
    return pa.array(sources, pa.string()).take(pa.array(rows))


def epochs_of(group: Group) -> pa.Array:
    """Give the epoch of each change; null stands for the first one, 0, in which nearly every source stays."""
    if not any(run.epoch for run in group.runs):
        return pa.nulls(len(group), pa.int64())
    epochs = np.repeat(np.array([run.epoch for run in group.runs], np.int64), _run_lengths(group))
    return pa.array(epochs, mask=epochs == 0)


def received_at_us(group: Group) -> npt.NDArray[np.int64]:
    """Give the time of receipt of each change."""
    return np.repeat(np.array([run.received_at_us for run in group.runs], np.int64), _run_lengths(group))


def moments(times_us: npt.NDArray[np.int64]) -> pa.Array:
    """Give microseconds as moments, which stay the same whatever a table's column counts in."""
    return pa.array(times_us, pa.int64()).cast(pa.timestamp("us", tz="UTC"))


def _timestamps_us(group: ChangeGroup) -> np.ndarray:
    """Give the time of each change; admission has bounded it, so that microseconds fit. 0 is the time of receipt."""
    timestamps_ms = np.array(group.timestamps, np.int64)
    return np.where(timestamps_ms == 0, received_at_us(group), timestamps_ms * _US_PER_MS)


# --- writer.rows.unreadable -------------------------------------------------------------------------------------------
#
# A record of the log that cannot be taken apart by table, as one change, and back. Owns its shape, nothing else.
#
# Admission has decoded every frame before it was logged, so only a fault of ours leads here. The record then goes whole
# to the quarantine, as a change of a table that has no other: its source's marks, the log and the receipts wait for it
# as for any change. Once the fault is mended, a replay makes the frame of it again (quarantine/records.py).
#
#     > {"encoding": "JSON_BATCH", "body": "<base64>", "afterSequence": 41, "declared": "{...}"}


# Named like a source's table, so that the quarantine of the default namespace keeps it.
UNREADABLE_TABLE = "lakefeed_unreadable"


class RecordIncomplete(WriterError):
    """What was kept of a record is not enough to make its frame again: send its changes again from their source."""


class _Kept(msgspec.Struct, rename="camel"):
    encoding: str
    body: bytes  # base64 in JSON, because it may be anything
    after_sequence: int
    declared: str = ""


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(_Kept).decode


@dataclass(frozen=True, slots=True)
class UnreadableGroup(ChangeGroup):
    """One change that stands for a whole record; no table can take it."""

    reason: str = ""
    after_sequence: int = 0

    def positions(self) -> dict[SourceId, tuple[Position, Position]]:
        """Give the first and the last position of the record: while it waits, all of its changes do."""
        [(source, (_, last))] = ChangeGroup.positions(self).items()
        return {source: (Position(last.epoch, min(self.after_sequence + 1, last.sequence)), last)}


def unreadable_group(frame: Frame, *, table: str, offset: int, reason: str) -> UnreadableGroup:
    """Make a change of a record: the row is its body, with what else it takes to read it."""
    image = _encode(_Kept(frame.encoding.name, frame.body, frame.after_sequence, frame.declared))
    return UnreadableGroup(
        table=table,
        sequences=[frame.last_sequence],
        timestamps=[0],
        operations=["MESSAGE"],
        row_ids=[""],
        images=[image],
        befores=[msgspec.Raw()],
        unchanged=None,
        metadata=None,
        runs=(Run(0, 1, frame.source, frame.epoch, frame.received_at_us, offset),),
        reason=reason,
        after_sequence=frame.after_sequence,
    )


def frame_of_record(text: str, *, source: SourceId, last: Position, received_at_us: int) -> Frame:
    """Make the frame again that a record was, from the row that was made of it.

    Raises:
        RecordIncomplete: the row is not of that shape.
    """
    try:
        kept = _decode(text)
        encoding = Encoding[kept.encoding]
    except (msgspec.MsgspecError, KeyError) as error:
        raise RecordIncomplete(f"record was not kept with all that a replay needs: {error}") from error
    return Frame(
        source=source,
        epoch=last.epoch,
        after_sequence=kept.after_sequence,
        last_sequence=last.sequence,
        received_at_us=received_at_us,
        encoding=encoding,
        body=kept.body,
        declared=kept.declared,
    )


# --- writer.arrow.groups ----------------------------------------------------------------------------------------------
#
# Arrow frames of the log taken apart by table: the changes of one table, in log order, as the columns that came.
#
# Owns reading a frame back, the cut at a source's mark, and the rows' change columns. Frames of one table that follow
# each other with the same schema are one group; their columns stay where they are, in the frames' own bytes.


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
        names.TIMESTAMP: moments(_arrow_timestamps_us(group)),
        names.OPERATION: _column_or(rows, names.OPERATION, "INSERT"),
        names.ROW_ID: _column_or(rows, names.ROW_ID, ""),
        names.SOURCE: sources_of(group),
        names.INGESTED_AT: moments(received_at_us(group)),
        names.BEFORE: _column_or(rows, names.BEFORE, None),
        names.UNCHANGED: _column_or(rows, names.UNCHANGED, None),
        names.METADATA: _column_or(rows, names.METADATA, None),
        names.RESCUED: pa.nulls(len(group)) if rescued is None else rescued,
        names.EPOCH: epochs_of(group),
    }
    built = {name: column.cast(schema.field(name).type) for name, column in every.items() if name in schema.names}
    return _unfilled_columns(len(group), schema, built) | built


def _column_or(rows: pa.Table, name: str, default: str | None) -> pa.Array | pa.ChunkedArray:
    if name not in rows.column_names:
        return pa.nulls(rows.num_rows) if default is None else pa.repeat(default, rows.num_rows)
    column = rows.column(name)
    if default is None or not column.null_count:
        return column
    return column.cast(pa.string()).fill_null(default)


def _arrow_timestamps_us(group: ArrowGroup) -> npt.NDArray[np.int64]:
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
