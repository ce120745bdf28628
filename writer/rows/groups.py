"""Groups: the changes of one table in log order, and how they become rows in the table's columns.

    frames --group_frames--> one group per table and encoding --decode, fit--> Arrow rows with their `_cdc_` columns

Neighbouring changes that came in one frame share their source, epoch, time of receipt and log offset. A group keeps
these once per run of changes, and everything else in one list or array per column:

    sequences  41 42 43 | 7 8 | 44 45        images  {"id":9} {"id":4} ...
    runs       shop-1@0 | s-2 | shop-1@0     (start, stop, source, epoch, received_at_us, offset)

There is one class of groups per encoding of frames:

    JSON_BATCH     JsonGroup    rows stay JSON text; json_strict.py decodes them, else json_exact.py fits them
    ARROW_STREAM   ArrowGroup   rows stay in the frames' own bytes; arrow.py fits them. Frames that follow each other
                                with the same schema are one group

A record that cannot be read becomes an `UnreadableRecord`: one change, which no table takes, with the whole record as
its row. Admission has decoded every frame before it was logged, so only a defect of ours leads here. The record goes to
the quarantine; its source's marks and the log wait for it like for any change. Once the defect is fixed, a replay
rebuilds the frame from the row:

    {"encoding": "JSON_BATCH", "body": "<base64>", "afterSequence": 41, "declared": "{...}"}
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import ClassVar, Self, TypeAlias, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from lakefeed.contract import changes as names
from lakefeed.contract.changes import Position, SourceId, Span
from lakefeed.contract.errors import WriterError
from lakefeed.iceberg.arrow import to_arrow_schema
from lakefeed.iceberg.types import Schema, StructType
from lakefeed.writer.rows.arrow import fit_columns
from lakefeed.writer.rows.declaration import Declared, declaration_from_text, declare_columns
from lakefeed.writer.rows.evolution import FittedRows, own_fields
from lakefeed.writer.rows.json_exact import fit_rows, to_json
from lakefeed.writer.rows.json_strict import decode_rows
from lakefeed.writer.rows.values import Image, Misfit, text_of
from lakefeed.writer.wal.payload import Encoding, Frame
from lakefeed.writer.wire.arrow_frame import CHANGE_COLUMNS, TABLE_KEY, open_stream
from lakefeed.writer.wire.arrow_types import json_values, plain_rows
from lakefeed.writer.wire.json_batch import BatchMalformed, Event, decode_batch

# Named like a source's table, so that the quarantine of the default namespace keeps it.
UNREADABLE_TABLE = "lakefeed_unreadable"

# Rows are copied out of their frames if the frames hold more than this many times the rows' own size.
HELD_MAX_RATIO = 2

# Versions of tables' columns whose Arrow schema is cached.
SCHEMAS_MAX = 1024

_US_PER_MS = 1000
_NULL = msgspec.Raw(b"null")
_EMPTY = msgspec.Raw(b"{}")

_Item = TypeVar("_Item")
_Column: TypeAlias = pa.Array | pa.ChunkedArray
_ColumnBuilders: TypeAlias = Mapping[str, Callable[[], _Column]]

# A frame with its offset in the log.
NumberedFrame: TypeAlias = tuple[int, Frame]

_decode_declared = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


class RecordIncomplete(WriterError):
    """A quarantined record lacks what its frame needs: send its changes again from their source."""


@dataclass(frozen=True, slots=True)
class Expected:
    """The columns that rows of a table are decoded to; `nanoseconds` is whether the table's format has them."""

    columns: StructType
    nanoseconds: bool = False


@dataclass(frozen=True, slots=True)
class Fitted:
    """A group in its table's columns, which may have evolved for it: what changed, and what was refused."""

    columns: StructType
    last_field_id: int
    table: pa.Table
    changes: tuple[str, ...] = ()
    refusals: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Run:
    """Neighbouring changes of a group that came in one frame.

    `body` is the frame's if the group leaves out something of its changes; their images keep it in memory anyway.
    """

    start: int
    stop: int
    source: SourceId
    epoch: int
    received_at_us: int
    offset: int
    body: bytes = field(default=b"", repr=False, compare=False)


class Group(ABC):
    """Changes of one source table in log order, in any encoding. Sequences rise within a run."""

    __slots__ = ()

    # The name of the encoding in the quarantine.
    encoding: ClassVar[str]

    table: str
    runs: tuple[Run, ...]
    # What sources declared about the table with these changes, each as JSON (declaration.py).
    declared: tuple[str, ...]

    @property
    @abstractmethod
    def held_bytes(self) -> int:
        """The memory that the group keeps from release."""

    @abstractmethod
    def sequence_at(self, row: int) -> int:
        """Return the sequence of a change."""

    @abstractmethod
    def json_rows(self) -> list[str]:
        """Return the rows as JSON texts."""

    @abstractmethod
    def whole(self) -> Self:
        """Return the group with the images from before its changes, read from its frames if it has none."""

    @abstractmethod
    def strict(self, expected: Expected) -> pa.Table | None:
        """Decode the rows into columns that stay as they are; None if they do not fit."""

    @abstractmethod
    def exact(self, expected: Expected, *, last_field_id: int) -> Fitted:
        """Decode any rows, whatever they hold; the columns may evolve for them."""

    @abstractmethod
    def _first_after(self, run: Run, sequence: int) -> int:
        """Return the first row of a run that is above a sequence; the run's stop if none is."""

    @abstractmethod
    def _keep(self, kept: list[tuple[int, int]]) -> Self:
        """Keep of each run the rows of its (start, stop)."""

    @abstractmethod
    def _brought_columns(self) -> _ColumnBuilders:
        """Return what builds those `_cdc_` columns that the frames bring."""

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

    def spans(self) -> dict[SourceId, Span]:
        """Return the first and the last position of each source."""
        spans: dict[SourceId, Span] = {}
        for run in self.runs:
            own = Span(self._position(run, run.start), self._position(run, run.stop - 1))
            spans[run.source] = spans[run.source].joined(own) if run.source in spans else own
        return spans

    def after(self, marks: Mapping[SourceId, Position]) -> Self:
        """Return the changes above their source's mark; the group itself if that is all of them."""
        kept = [(self._first_above(run, marks.get(run.source)), run.stop) for run in self.runs]
        if all(start == run.start for (start, _), run in zip(kept, self.runs, strict=True)):
            return self
        return self._keep(kept)

    def between(self, start: int, stop: int) -> Self:
        """Return the changes from `start` up to `stop`."""
        return self._keep([(max(run.start, start), min(run.stop, stop)) for run in self.runs])

    def decode(self, expected: Expected) -> pa.Table | None:
        """Decode strictly; None if the rows, or what their sources declared, need other columns."""
        declared = self._declare(expected, last_field_id=0)
        return self.strict(expected) if declared.columns == expected.columns else None

    def fit(self, expected: Expected, *, last_field_id: int, refused_for: StructType | None = None) -> Fitted:
        """Decode strictly, else exactly. Columns evolve for what is declared, then for the values.

        `refused_for` are columns for which `decode` has refused the group: for those it is not tried again.
        """
        declared = self._declare(expected, last_field_id=last_field_id)
        expected = replace(expected, columns=declared.columns)
        rows = None if declared.columns == refused_for else self.strict(expected)
        if rows is None:
            fitted = self.exact(expected, last_field_id=declared.last_field_id)
        else:
            fitted = Fitted(declared.columns, declared.last_field_id, rows)
        return replace(fitted, changes=(*declared.changes, *fitted.changes), refusals=declared.refusals)

    def change_columns(self, schema: pa.Schema, *, rescued: Sequence[str | None] | None = None) -> dict[str, _Column]:
        """Build the `_cdc_` columns of a schema. Those that this version does not fill are null."""
        build: _ColumnBuilders = {
            **self._brought_columns(),
            names.SOURCE: self._sources,
            names.INGESTED_AT: lambda: _timestamps(self.by_run([run.received_at_us for run in self.runs])),
            names.RESCUED: lambda: pa.nulls(len(self)) if rescued is None else pa.array(rescued, pa.string()),
            names.EPOCH: self._epochs,
        }
        return {
            each.name: build[each.name]().cast(each.type) if each.name in build else pa.nulls(len(self), each.type)
            for each in schema
            if each.name.startswith(names.RESERVED_PREFIX)
        }

    def _declare(self, expected: Expected, *, last_field_id: int) -> Declared:
        result = Declared(expected.columns, last_field_id)
        for text in self.declared:
            after = declare_columns(
                result.columns,
                declaration_from_text(text),
                last_field_id=result.last_field_id,
                nanoseconds=expected.nanoseconds,
            )
            changes, refusals = (*result.changes, *after.changes), (*result.refusals, *after.refusals)
            result = replace(after, changes=changes, refusals=refusals)
        return result

    def _assemble(
        self, columns: StructType, own: Sequence[_Column], rescued: Sequence[str | None] | None = None
    ) -> pa.Table:
        schema = _arrow_schema(columns)
        every = self.change_columns(schema, rescued=rescued)
        every |= {each.name: array for each, array in zip(own_fields(columns), own, strict=True)}
        return pa.table([every[name] for name in schema.names], schema=schema)

    def _fitted(self, rows: FittedRows) -> Fitted:
        table = self._assemble(rows.columns, rows.own, rows.rescued)
        return Fitted(rows.columns, rows.last_field_id, table, rows.changes)

    def by_run(self, values: Sequence[int]) -> npt.NDArray[np.int64]:
        """Repeat a value of each run for each of its changes."""
        return np.repeat(np.array(values, np.int64), [run.stop - run.start for run in self.runs])

    def _sources(self) -> pa.Array:
        sources = pa.array([run.source for run in self.runs], pa.string())
        return sources.take(pa.array(self.by_run(range(len(self.runs)))))

    def _epochs(self) -> pa.Array:
        """Return the epoch of each change; null is the first one, 0, in which nearly every source stays."""
        if not any(run.epoch for run in self.runs):
            return pa.nulls(len(self), pa.int64())
        epochs = self.by_run([run.epoch for run in self.runs])
        return pa.array(epochs, mask=epochs == 0)

    def _or_receipt(self, times_us: npt.NDArray[np.int64]) -> pa.Array:
        """Return the times of changes; 0 is the time of receipt."""
        return _timestamps(np.where(times_us == 0, self.by_run([run.received_at_us for run in self.runs]), times_us))

    def _position(self, run: Run, row: int) -> Position:
        return Position(run.epoch, self.sequence_at(row))

    def _first_above(self, run: Run, mark: Position | None) -> int:
        if mark is None or self._position(run, run.start) > mark:
            return run.start
        if self._position(run, run.stop - 1) <= mark:
            return run.stop
        # Neither end decides, so run and mark share their epoch.
        return self._first_after(run, mark.sequence)


@lru_cache(maxsize=SCHEMAS_MAX)
def _arrow_schema(columns: StructType) -> pa.Schema:
    return to_arrow_schema(Schema(0, columns))


def _timestamps(times_us: npt.NDArray[np.int64]) -> pa.Array:
    """Return microseconds as timestamps, which mean the same whatever unit a table's column has."""
    return pa.array(times_us, pa.int64()).cast(pa.timestamp("us", tz="UTC"))


def _keep_runs(runs: Sequence[Run], kept: Sequence[tuple[int, int]]) -> tuple[tuple[Run, ...], list[slice]]:
    """Keep of each run the rows of its (start, stop): return the runs that are left, and where their rows were."""
    left: list[Run] = []
    spans: list[slice] = []
    size = 0
    for run, (start, stop) in zip(runs, kept, strict=True):
        if start < stop:
            left.append(replace(run, start=size, stop=size + stop - start))
            spans.append(slice(start, stop))
            size += stop - start
    return tuple(left), spans


def group_frames(
    frames: Sequence[NumberedFrame], *, keep_before: bool = False, name_of: Callable[[str], str] = str
) -> list[Group]:
    """Group changes by table, each table's groups in log order.

    `name_of` maps a source's table to a table. If two are the same table, they are one group, in log order.

    Raises: BatchMalformed for a body that admission cannot have let through.
    """

    def is_arrow(numbered: NumberedFrame) -> bool:
        return numbered[1].encoding is Encoding.ARROW_STREAM

    of_arrow = group_arrow([each for each in frames if is_arrow(each)], name_of=name_of)
    of_json = group_json([each for each in frames if not is_arrow(each)], keep_before=keep_before, name_of=name_of)
    if {group.table for group in of_arrow}.isdisjoint(group.table for group in of_json):
        return of_json + of_arrow
    # A table has both encodings: cut the frames wherever the encoding changes. Sources rarely change theirs.
    grouped: list[Group] = []
    for in_arrow, stretch in itertools.groupby(frames, key=is_arrow):
        if in_arrow:
            grouped += group_arrow(list(stretch), name_of=name_of)
        else:
            grouped += group_json(list(stretch), keep_before=keep_before, name_of=name_of)
    return grouped


def _declared_of(frame: Frame, table: str, name_of: Callable[[str], str]) -> tuple[str, ...]:
    """Return what a frame declares about a table, under any of the names that mean it."""
    if not frame.declared:
        return ()
    every = _decode_declared(frame.declared)
    return tuple(bytes(each).decode() for name, each in every.items() if name_of(name) == table)


@dataclass(frozen=True, slots=True)
class JsonGroup(Group):
    """Changes that came as JSON. Timestamps are in ms; 0 means the time of receipt."""

    encoding: ClassVar[str] = "json"

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

    @property
    def held_bytes(self) -> int:
        """The memory that the group keeps from release."""
        return sum(map(len, self.images))

    def sequence_at(self, row: int) -> int:
        """Return the sequence of a change."""
        return self.sequences[row]

    def json_rows(self) -> list[str]:
        """Return the rows as JSON texts."""
        return [text_of(image) for image in self.images]

    def whole(self) -> Self:
        """Return the group with the images from before its changes, read from its frames if it has none."""
        if self.befores is not None:
            return self
        befores: list[Image] = []
        for run in self.runs:
            own = {event.sequence: event.before for event in decode_batch(run.body).events}
            befores += [own[sequence] for sequence in self.sequences[run.start : run.stop]]
        return replace(self, befores=befores)

    def strict(self, expected: Expected) -> pa.Table | None:
        """Decode the rows into columns that stay as they are; None if they do not fit."""
        try:
            own = decode_rows(self.images, own_fields(expected.columns))
        except Misfit:
            return None
        return self._assemble(expected.columns, own)

    def exact(self, expected: Expected, *, last_field_id: int) -> Fitted:
        """Decode any rows, whatever they hold; the columns may evolve for them."""
        return self._fitted(fit_rows(self.images, expected.columns, last_field_id=last_field_id))

    def _first_after(self, run: Run, sequence: int) -> int:
        return bisect_right(self.sequences, sequence, run.start, run.stop)

    def _keep(self, kept: list[tuple[int, int]]) -> Self:
        runs, spans = _keep_runs(self.runs, kept)

        def pick(items: list[_Item]) -> list[_Item]:
            return [item for span in spans for item in items[span]]

        return replace(
            self,
            sequences=pick(self.sequences),
            timestamps=pick(self.timestamps),
            operations=pick(self.operations),
            row_ids=pick(self.row_ids),
            images=pick(self.images),
            befores=None if self.befores is None else pick(self.befores),
            unchanged=None if self.unchanged is None else pick(self.unchanged),
            metadata=None if self.metadata is None else pick(self.metadata),
            runs=runs,
        )

    def _brought_columns(self) -> _ColumnBuilders:
        def texts(images: Sequence[Image] | None) -> pa.Array:
            present = (text_of(image) if image and image != _NULL else None for image in images or ())
            return pa.nulls(len(self)) if images is None else pa.array(present, pa.string())

        unchanged = self.unchanged or [None] * len(self)
        return {
            names.SEQUENCE: lambda: pa.array(self.sequences, pa.int64()),
            # Admission bounds timestamps, so that microseconds fit.
            names.TIMESTAMP: lambda: self._or_receipt(np.array(self.timestamps, np.int64) * _US_PER_MS),
            names.OPERATION: lambda: pa.array(self.operations, pa.string()),
            names.ROW_ID: lambda: pa.array(self.row_ids, pa.string()),
            names.BEFORE: lambda: texts(self.befores),
            names.UNCHANGED: lambda: pa.array(unchanged, pa.list_(pa.string())),
            names.METADATA: lambda: texts(self.metadata),
        }


def group_json(
    frames: Sequence[NumberedFrame], *, keep_before: bool = False, name_of: Callable[[str], str] = str
) -> list[Group]:
    """Group the changes of JSON frames by table, without what admission had taken before.

    Raises: BatchMalformed for a body that admission cannot have let through.
    """
    found: dict[str, _TableEvents] = {}
    for offset, frame in frames:
        events = decode_batch(frame.body).events
        if events and events[0].sequence <= frame.after_sequence:
            events = [event for event in events if event.sequence > frame.after_sequence]
        tables = {table: name_of(table) for table in dict.fromkeys([event.table for event in events])}
        for table in dict.fromkeys(tables.values()):
            own = events if len(tables) == 1 else [event for event in events if tables[event.table] == table]
            body = b"" if keep_before else frame.body
            found.setdefault(table, _TableEvents()).add(own, frame, offset=offset, body=body)
            found[table].declared += _declared_of(frame, table, name_of)
    return [each.to_group(table, keep_before=keep_before) for table, each in found.items()]


@dataclass(slots=True)
class _TableEvents:
    """The events of one table, while frames are being read."""

    events: list[Event] = field(default_factory=list)
    images: list[Image] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)
    declared: tuple[str, ...] = ()

    def add(self, events: list[Event], frame: Frame, *, offset: int, body: bytes) -> None:
        start = len(self.events)
        self.events += events
        self.images += _images_of(events)
        stop = len(self.events)
        self.runs.append(Run(start, stop, frame.source, frame.epoch, frame.received_at_us, offset, body))

    def to_group(self, table: str, *, keep_before: bool) -> JsonGroup:
        events = self.events
        unchanged = [event.unchanged for event in events]
        metadata: list[Image] = [event.metadata for event in events]
        return JsonGroup(
            table=table,
            sequences=[event.sequence for event in events],
            timestamps=[event.timestamp for event in events],
            operations=[event.operation for event in events],
            row_ids=[event.row_id for event in events],
            images=self.images,
            befores=[event.before for event in events] if keep_before else None,
            unchanged=unchanged if any(unchanged) else None,
            metadata=metadata if any(metadata) else None,
            runs=tuple(self.runs),
            declared=self.declared,
        )


def _images_of(events: list[Event]) -> list[Image]:
    """Choose each change's row. No image is `null`: pyarrow.json crashes the process if the first one is."""
    images: list[Image] = [event.before if event.operation == "DELETE" else event.after for event in events]
    # An image as short as `null` may be missing. Rows are rarely that short, so most frames end here.
    if min(map(len, images)) > len(_NULL):
        return images
    for index, (event, chosen) in enumerate(zip(events, images, strict=True)):
        if len(chosen) <= len(_NULL):
            either = (event.before, event.after) if event.operation == "DELETE" else (event.after, event.before)
            images[index] = next((image for image in either if image and image != _NULL), _EMPTY)
    return images


@dataclass(frozen=True, slots=True)
class ArrowGroup(Group):
    """Changes that came as Arrow, with all their columns. `frame_bytes` is the memory that `rows` keep from release."""

    encoding: ClassVar[str] = "arrow"

    table: str
    rows: pa.Table
    sequences: npt.NDArray[np.int64]
    runs: tuple[Run, ...]
    frame_bytes: int
    declared: tuple[str, ...] = ()

    @property
    def held_bytes(self) -> int:
        """The memory that the group keeps from release."""
        return self.frame_bytes

    def sequence_at(self, row: int) -> int:
        """Return the sequence of a change."""
        return int(self.sequences[row])

    def json_rows(self) -> list[str]:
        """Return the rows as JSON texts."""
        brought = [name for name in self.rows.column_names if name not in CHANGE_COLUMNS]
        if not brought:
            return ["{}"] * self.rows.num_rows
        texts: list[str] = []
        for batch in self.rows.select(brought).to_batches():
            columns = [json_values(column) for column in batch.columns]
            texts += [to_json(dict(zip(brought, row, strict=True))).decode() for row in zip(*columns, strict=True)]
        return texts

    def whole(self) -> Self:
        """Return the group itself: Arrow columns are never left out."""
        return self

    def strict(self, expected: Expected) -> pa.Table | None:
        """Decode the rows into columns that stay as they are; None if they do not fit."""
        fitted = self.exact(expected, last_field_id=0)
        return fitted.table if fitted.columns == expected.columns else None

    def exact(self, expected: Expected, *, last_field_id: int) -> Fitted:
        """Decode any rows, whatever they hold; the columns may evolve for them."""
        rows = fit_columns(self.rows, expected.columns, last_field_id=last_field_id, nanoseconds=expected.nanoseconds)
        fitted = self._fitted(rows)
        if fitted.table.nbytes * HELD_MAX_RATIO < self.frame_bytes:
            return replace(fitted, table=fitted.table.take(pa.array(np.arange(fitted.table.num_rows))))
        return fitted

    def _first_after(self, run: Run, sequence: int) -> int:
        return run.start + _first_above(self.sequences[run.start : run.stop], sequence)

    def _keep(self, kept: list[tuple[int, int]]) -> Self:
        runs, spans = _keep_runs(self.runs, kept)
        parts = [self.rows.slice(span.start, span.stop - span.start) for span in spans]
        rows = pa.concat_tables(parts) if parts else self.rows.slice(0, 0)
        return replace(self, rows=rows, sequences=rows.column(names.SEQUENCE).to_numpy(), runs=runs)

    def _brought_columns(self) -> _ColumnBuilders:
        return {
            names.SEQUENCE: lambda: self.rows.column(names.SEQUENCE),
            names.TIMESTAMP: lambda: self._or_receipt(self._times_us()),
            names.OPERATION: lambda: self._column_or(names.OPERATION, "INSERT"),
            names.ROW_ID: lambda: self._column_or(names.ROW_ID, ""),
            names.BEFORE: lambda: self._column_or(names.BEFORE, None),
            names.UNCHANGED: lambda: self._column_or(names.UNCHANGED, None),
            names.METADATA: lambda: self._column_or(names.METADATA, None),
        }

    def _column_or(self, name: str, default: str | None) -> _Column:
        if name not in self.rows.column_names:
            return pa.nulls(len(self)) if default is None else pa.repeat(default, len(self))
        column = self.rows.column(name)
        if default is None or not column.null_count:
            return column
        return column.cast(pa.string()).fill_null(default)

    def _times_us(self) -> npt.NDArray[np.int64]:
        """Return the time of each change, 0 if it has none. Admission bounds them, so that microseconds fit."""
        column = self._column_or(names.TIMESTAMP, None)
        if pt.is_null(column.type):
            return np.zeros(len(self), np.int64)
        if pt.is_timestamp(column.type):
            times_us = column.cast(pa.timestamp("us", column.type.tz)).cast(pa.int64())
        else:
            times_us = pc.multiply(column, _US_PER_MS)
        numbers: npt.NDArray[np.int64] = times_us.fill_null(0).to_numpy()
        return numbers


def group_arrow(frames: Sequence[NumberedFrame], *, name_of: Callable[[str], str] = str) -> list[Group]:
    """Group the changes of Arrow frames by table, without what admission had taken before; all columns are kept."""
    open_groups: dict[str, list[ArrowGroup]] = {}
    done: list[Group] = []
    for offset, frame in frames:
        group = _arrow_group(frame, offset, name_of)
        if not len(group):
            continue
        gathered = open_groups.setdefault(group.table, [])
        if gathered and not gathered[0].rows.schema.equals(group.rows.schema, check_metadata=True):
            done.append(_join(gathered))
            gathered.clear()
        gathered.append(group)
    return done + [_join(gathered) for gathered in open_groups.values()]


def _arrow_group(frame: Frame, offset: int, name_of: Callable[[str], str]) -> ArrowGroup:
    with open_stream(frame.body) as reader:
        table = name_of(reader.schema.metadata[TABLE_KEY].decode())
        rows = plain_rows(reader.read_all())
    sequences: npt.NDArray[np.int64] = rows.column(names.SEQUENCE).to_numpy()
    start = _first_above(sequences, frame.after_sequence)
    run = Run(0, len(sequences) - start, frame.source, frame.epoch, frame.received_at_us, offset)
    return ArrowGroup(
        table=table,
        rows=rows.slice(start),
        sequences=sequences[start:],
        runs=(run,) if run.stop else (),
        frame_bytes=max(len(frame.body), rows.nbytes),
        declared=_declared_of(frame, table, name_of),
    )


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
        frame_bytes=sum(group.frame_bytes for group in groups),
        declared=tuple(text for group in groups for text in group.declared),
    )


def _first_above(sequences: npt.NDArray[np.int64], sequence: int) -> int:
    """Return the index of the first of rising sequences above another one."""
    return int(np.searchsorted(sequences, sequence, side="right"))


class _RecordRow(msgspec.Struct, rename="camel"):
    encoding: str
    body: bytes  # base64 in JSON, because it may be anything
    after_sequence: int
    declared: str = ""


_decode_record_row = msgspec.json.Decoder(_RecordRow).decode


@dataclass(frozen=True, slots=True)
class UnreadableRecord(JsonGroup):
    """One change that is a whole record; no table can take it."""

    reason: str = ""
    after_sequence: int = 0

    def spans(self) -> dict[SourceId, Span]:
        """Return the first and the last position of the record: while it waits, all of its changes do."""
        run, last = self.runs[0], self._position(self.runs[0], 0)
        return {run.source: Span(Position(last.epoch, min(self.after_sequence + 1, last.sequence)), last)}

    def strict(self, expected: Expected) -> pa.Table | None:
        """Return None: no table can take the record."""
        return None

    def exact(self, expected: Expected, *, last_field_id: int) -> Fitted:
        """Raise BatchMalformed: no table can take the record."""
        raise BatchMalformed(f"record cannot be read: error={self.reason}")


def unreadable_record(frame: Frame, *, table: str, offset: int, reason: str) -> UnreadableRecord:
    """Return a record as one change: the row is its body, with what else reading it takes."""
    image = to_json(_RecordRow(frame.encoding.name, frame.body, frame.after_sequence, frame.declared))
    return UnreadableRecord(
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
    """Rebuild a record's frame from the row that was made of it.

    Raises:
        RecordIncomplete: the row is not of that shape.
    """
    try:
        row = _decode_record_row(text)
        encoding = Encoding[row.encoding]
    except (msgspec.MsgspecError, KeyError) as error:
        raise RecordIncomplete(f"record was not kept with all that a replay needs: {error}") from error
    return Frame(
        source=source,
        epoch=last.epoch,
        after_sequence=row.after_sequence,
        last_sequence=last.sequence,
        received_at_us=received_at_us,
        encoding=encoding,
        body=row.body,
        declared=row.declared,
    )
