"""Groups: the changes of one table in log order, and how they become rows in the table's columns.

    frames --group_frames--> one group per table and encoding --decode, fit--> Arrow rows with their `_cdc_` columns

Neighbouring changes that came in one frame share their source, epoch, time of receipt and log offset. A group keeps
these once per run of changes:

    sequences  41 42 43 | 7 8 | 44 45
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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, ClassVar, Self, TypeAlias

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
from lakefeed.writer.rows.declaration import declaration_from_text, declare_columns
from lakefeed.writer.rows.evolution import SchemaUpdate, own_fields
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
_MOMENT = pa.timestamp("us", tz="UTC")
_ARROW_DEFAULTS = {names.OPERATION: "INSERT", names.ROW_ID: ""}
_NULL = msgspec.Raw(b"null")
_EMPTY = msgspec.Raw(b"{}")

_Column: TypeAlias = pa.Array | pa.ChunkedArray

# From the name of a source's table to the name of a table.
NameOf: TypeAlias = Callable[[str], str]

# A frame with its offset in the log.
NumberedFrame: TypeAlias = tuple[int, Frame]

_decode_declared = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


class RecordIncomplete(WriterError):
    """A quarantined record lacks what its frame needs: send its changes again from their source."""


@dataclass(frozen=True, slots=True)
class Expected:
    """The columns that rows of a table are decoded to.

    `nanoseconds` is whether the table's format has them. Without `keep_before`, the column `_cdc_before` stays null.
    """

    columns: StructType
    nanoseconds: bool = False
    keep_before: bool = True


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
    """Neighbouring changes of a group that came in one frame."""

    start: int
    stop: int
    source: SourceId
    epoch: int
    received_at_us: int
    offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Group(ABC):
    """Changes of one source table in log order, in any encoding. Sequences rise within a run.

    `held_bytes` is the memory that the group keeps from release. `declared` is what sources declared about the table
    with these changes, each as JSON (declaration.py).
    """

    # The name of the encoding in the quarantine.
    encoding: ClassVar[str]

    table: str
    sequences: npt.NDArray[np.int64]
    runs: tuple[Run, ...]
    held_bytes: int
    declared: tuple[str, ...] = ()

    @abstractmethod
    def json_rows(self) -> list[str]:
        """Return the rows as JSON texts."""

    @abstractmethod
    def strict(self, expected: Expected) -> pa.Table | None:
        """Decode the rows into columns that stay as they are; None if they do not fit."""

    @abstractmethod
    def exact(self, expected: Expected, update: SchemaUpdate) -> pa.Table:
        """Decode any rows, whatever they hold; the columns of the update may evolve for them."""

    @abstractmethod
    def _parts_in(self, spans: Sequence[slice]) -> Mapping[str, Any]:
        """Return the attributes of this encoding, with the rows of these spans only."""

    @abstractmethod
    def _brought_column(self, name: str) -> _Column | None:
        """Return a `_cdc_` column that the frames bring, None if they do not."""

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

    def sequence_at(self, row: int) -> int:
        """Return the sequence of a change."""
        return int(self.sequences[row])

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

    def _keep(self, kept: Sequence[tuple[int, int]]) -> Self:
        """Keep of each run the rows of its (start, stop)."""
        runs: list[Run] = []
        spans: list[slice] = []
        for run, (start, stop) in zip(self.runs, kept, strict=True):
            if start < stop:
                before = runs[-1].stop if runs else 0
                runs.append(replace(run, start=before, stop=before + stop - start))
                spans.append(slice(start, stop))
        sequences = np.concatenate([self.sequences[span] for span in spans]) if spans else self.sequences[:0]
        return replace(self, sequences=sequences, runs=tuple(runs), **self._parts_in(spans))

    def decode(self, expected: Expected) -> pa.Table | None:
        """Decode strictly; None if the rows, or what their sources declared, need other columns."""
        update = SchemaUpdate(expected.columns, 0)
        self._declare(update, expected)
        return self.strict(expected) if update.columns == expected.columns else None

    def fit(self, expected: Expected, *, last_field_id: int, refused_for: StructType | None = None) -> Fitted:
        """Decode strictly, else exactly. Columns evolve for what is declared, then for the values.

        `refused_for` are columns for which `decode` has refused the group: for those it is not tried again.
        """
        update = SchemaUpdate(expected.columns, last_field_id)
        self._declare(update, expected)
        refusals = tuple(update.refusals)  # only what sources declared is reported, not what an Arrow schema implies
        expected = replace(expected, columns=update.columns)
        rows = None if update.columns == refused_for else self.strict(expected)
        if rows is None:
            rows = self.exact(expected, update)
        return Fitted(update.columns, update.last_field_id, rows, tuple(update.changes), refusals)

    def _declare(self, update: SchemaUpdate, expected: Expected) -> None:
        for text in self.declared:
            declare_columns(update, declaration_from_text(text), nanoseconds=expected.nanoseconds)

    def _assemble(
        self, expected: Expected, own: Sequence[_Column], rescued: Sequence[str | None] | None = None
    ) -> pa.Table:
        schema = _arrow_schema(expected.columns)
        every = self.change_columns(schema, rescued=rescued, keep_before=expected.keep_before)
        every |= {each.name: array for each, array in zip(own_fields(expected.columns), own, strict=True)}
        return pa.table([every[name] for name in schema.names], schema=schema)

    def change_columns(
        self, schema: pa.Schema, *, rescued: Sequence[str | None] | None = None, keep_before: bool = True
    ) -> dict[str, _Column]:
        """Build the `_cdc_` columns of a schema. Those that this version does not fill are null."""
        columns: dict[str, _Column] = {}
        for field in schema:
            column: _Column | None = None
            match field.name:
                case names.SEQUENCE:
                    column = pa.array(self.sequences)
                case names.SOURCE:
                    sources = pa.array([run.source for run in self.runs], pa.string())
                    column = sources.take(pa.array(self.by_run(range(len(self.runs)))))
                case names.EPOCH if any(run.epoch for run in self.runs):
                    # Null is the first epoch, 0, in which nearly every source stays.
                    epochs = self.by_run([run.epoch for run in self.runs])
                    column = pa.array(epochs, mask=epochs == 0)
                case names.INGESTED_AT:
                    column = _timestamps(self._received_at_us())
                case names.RESCUED if rescued is not None:
                    column = pa.array(rescued, pa.string())
                case name if not name.startswith(names.RESERVED_PREFIX):
                    continue
                case name if name in CHANGE_COLUMNS and (keep_before or name != names.BEFORE):
                    column = self._brought_column(name)
            columns[field.name] = pa.nulls(len(self), field.type) if column is None else column.cast(field.type)
        return columns

    def by_run(self, values: Sequence[int]) -> npt.NDArray[np.int64]:
        """Repeat a value of each run for each of its changes."""
        return np.repeat(np.array(values, np.int64), [run.stop - run.start for run in self.runs])

    def _received_at_us(self) -> npt.NDArray[np.int64]:
        return self.by_run([run.received_at_us for run in self.runs])

    def _or_receipt(self, times_us: _Column) -> _Column:
        """Return the times of changes; null is the time of receipt. Admission bounds them, so microseconds fit."""
        times = times_us.cast(_MOMENT)
        return pc.coalesce(times, _timestamps(self._received_at_us())) if times.null_count else times

    def _position(self, run: Run, row: int) -> Position:
        return Position(run.epoch, self.sequence_at(row))

    def _first_above(self, run: Run, mark: Position | None) -> int:
        if mark is None or self._position(run, run.start) > mark:
            return run.start
        if self._position(run, run.stop - 1) <= mark:
            return run.stop
        # Neither end decides, so run and mark share their epoch.
        return run.start + _count_up_to(self.sequences[run.start : run.stop], mark.sequence)


@lru_cache(maxsize=SCHEMAS_MAX)
def _arrow_schema(columns: StructType) -> pa.Schema:
    return to_arrow_schema(Schema(0, columns))


def _timestamps(times_us: npt.NDArray[np.int64]) -> pa.Array:
    """Return microseconds as timestamps, which mean the same whatever unit a table's column has."""
    return pa.array(times_us, pa.int64()).cast(_MOMENT)


def _count_up_to(sequences: npt.NDArray[np.int64], mark: int) -> int:
    """Count those of rising sequences that are not above a mark."""
    return int(np.searchsorted(sequences, mark, side="right"))


def group_frames(frames: Sequence[NumberedFrame], *, name_of: NameOf = str) -> list[Group]:
    """Group changes by table, each table's groups in log order.

    `name_of` maps a source's table to a table. If two are the same table, they are one group, in log order.

    Raises: BatchMalformed for a body that admission cannot have let through.
    """
    groups: list[Group] = []
    for encoding, group_all in GROUPERS.items():
        if own := [each for each in frames if each[1].encoding is encoding]:
            groups += group_all(own, name_of=name_of)
    if len({(group.table, group.encoding) for group in groups}) == len({group.table for group in groups}):
        return groups
    # A table has several encodings: cut the frames wherever the encoding changes. Sources rarely change theirs.
    stretches = itertools.groupby(frames, key=lambda each: each[1].encoding)
    return [group for encoding, own in stretches for group in GROUPERS[encoding](list(own), name_of=name_of)]


def _declared_of(frame: Frame, table: str, name_of: NameOf) -> tuple[str, ...]:
    """Return what a frame declares about a table, under any of the names that mean it."""
    if not frame.declared:
        return ()
    every = _decode_declared(frame.declared)
    return tuple(bytes(each).decode() for name, each in every.items() if name_of(name) == table)


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonGroup(Group):
    """Changes that came as JSON, and of each change the row that its table gets."""

    encoding: ClassVar[str] = "json"

    events: list[Event]
    images: list[Image]

    @classmethod
    def of(
        cls, table: str, events: list[Event], runs: Sequence[Run], *, images: list[Image] | None = None, **more: Any
    ) -> Self:
        """Return a group of events; `images` are their rows if those are not in the events."""
        images = _images_of(events) if images is None else images
        return cls(
            table=table,
            sequences=np.array([event.sequence for event in events], np.int64),
            runs=tuple(runs),
            held_bytes=sum(map(len, images)),
            events=events,
            images=images,
            **more,
        )

    def json_rows(self) -> list[str]:
        """Return the rows as JSON texts."""
        return [text_of(image) for image in self.images]

    def strict(self, expected: Expected) -> pa.Table | None:
        """Decode the rows into columns that stay as they are; None if they do not fit."""
        try:
            own = decode_rows(self.images, own_fields(expected.columns))
        except Misfit:
            return None
        return self._assemble(expected, own)

    def exact(self, expected: Expected, update: SchemaUpdate) -> pa.Table:
        """Decode any rows, whatever they hold; the columns of the update may evolve for them."""
        own, rescued = fit_rows(self.images, update)
        return self._assemble(replace(expected, columns=update.columns), own, rescued)

    def _parts_in(self, spans: Sequence[slice]) -> Mapping[str, Any]:
        images = [image for span in spans for image in self.images[span]]
        events = [event for span in spans for event in self.events[span]]
        return {"events": events, "images": images, "held_bytes": sum(map(len, images))}

    def _brought_column(self, name: str) -> _Column | None:
        match name:
            case names.TIMESTAMP:
                times_ms = pa.array([event.timestamp for event in self.events], pa.int64())
                return self._or_receipt(pc.multiply(times_ms, _US_PER_MS))
            case names.OPERATION:
                return pa.array([event.operation for event in self.events], pa.string())
            case names.ROW_ID:
                return pa.array([event.row_id for event in self.events], pa.string())
            case names.BEFORE:
                return _texts([event.before for event in self.events])
            case names.UNCHANGED:
                unchanged = [event.unchanged for event in self.events]
                return pa.array(unchanged, pa.list_(pa.string())) if any(unchanged) else None
            case names.METADATA:
                return _texts([event.metadata for event in self.events])
        return None


def _texts(images: Sequence[Image]) -> pa.Array | None:
    present = (text_of(image) if image and image != _NULL else None for image in images)
    return pa.array(present, pa.string()) if any(images) else None


def group_json(frames: Sequence[NumberedFrame], *, name_of: NameOf = str) -> list[Group]:
    """Group the changes of JSON frames by table, without what admission had taken before.

    Raises: BatchMalformed for a body that admission cannot have let through.
    """
    found: dict[str, tuple[list[Event], list[Run], list[str]]] = {}
    for offset, frame in frames:
        events = decode_batch(frame.body).events
        if events and events[0].sequence <= frame.after_sequence:
            events = [event for event in events if event.sequence > frame.after_sequence]
        tables = {table: name_of(table) for table in dict.fromkeys([event.table for event in events])}
        for table in dict.fromkeys(tables.values()):
            own = events if len(tables) == 1 else [event for event in events if tables[event.table] == table]
            gathered, runs, declared = found.setdefault(table, ([], [], []))
            start, stop = len(gathered), len(gathered) + len(own)
            gathered += own
            runs.append(Run(start, stop, frame.source, frame.epoch, frame.received_at_us, offset))
            declared += _declared_of(frame, table, name_of)
    return [
        JsonGroup.of(table, events, runs, declared=tuple(declared)) for table, (events, runs, declared) in found.items()
    ]


def _images_of(events: list[Event]) -> list[Image]:
    """Choose each change's row. No image is `null`: pyarrow.json crashes the process if the first one is."""
    images: list[Image] = [event.before if event.operation == "DELETE" else event.after for event in events]
    # An image as short as `null` may be missing. Rows are rarely that short, so most groups end here.
    if min(map(len, images)) > len(_NULL):
        return images
    for index, (event, chosen) in enumerate(zip(events, images, strict=True)):
        if len(chosen) <= len(_NULL):
            either = (event.before, event.after) if event.operation == "DELETE" else (event.after, event.before)
            images[index] = next((image for image in either if image and image != _NULL), _EMPTY)
    return images


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrowGroup(Group):
    """Changes that came as Arrow, with all their columns. The rows may keep whole frames from release."""

    encoding: ClassVar[str] = "arrow"

    rows: pa.Table

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

    def strict(self, expected: Expected) -> pa.Table | None:
        """Decode the rows into columns that stay as they are; None if they do not fit."""
        update = SchemaUpdate(expected.columns, 0)
        rows = fit_columns(self.rows, update, nanoseconds=expected.nanoseconds)
        return self._release(self._assemble(expected, *rows)) if update.columns == expected.columns else None

    def exact(self, expected: Expected, update: SchemaUpdate) -> pa.Table:
        """Decode any rows, whatever they hold; the columns of the update may evolve for them."""
        rows = fit_columns(self.rows, update, nanoseconds=expected.nanoseconds)
        return self._release(self._assemble(replace(expected, columns=update.columns), *rows))

    def _release(self, table: pa.Table) -> pa.Table:
        """Copy rows out of their frames if these hold much more memory."""
        is_small = table.nbytes * HELD_MAX_RATIO < self.held_bytes
        return table.take(pa.array(np.arange(table.num_rows))) if is_small else table

    def _parts_in(self, spans: Sequence[slice]) -> Mapping[str, Any]:
        parts = [self.rows.slice(span.start, span.stop - span.start) for span in spans]
        return {"rows": pa.concat_tables(parts) if parts else self.rows.slice(0, 0)}

    def _brought_column(self, name: str) -> _Column | None:
        if name == names.TIMESTAMP:
            return self._or_receipt(self._times_us())
        default = _ARROW_DEFAULTS.get(name)
        if name not in self.rows.column_names:
            return None if default is None else pa.repeat(default, len(self))
        column = self.rows.column(name)
        if default is None or not column.null_count:
            return column
        return column.cast(pa.string()).fill_null(default)

    def _times_us(self) -> _Column:
        """Return the time of each change, null if it has none."""
        if names.TIMESTAMP not in self.rows.column_names:
            return pa.nulls(len(self), pa.int64())
        column = self.rows.column(names.TIMESTAMP)
        if pt.is_timestamp(column.type):
            return column.cast(pa.timestamp("us", column.type.tz)).cast(pa.int64())
        return pc.multiply(column.cast(pa.int64()), _US_PER_MS)


def group_arrow(frames: Sequence[NumberedFrame], *, name_of: NameOf = str) -> list[Group]:
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


def _arrow_group(frame: Frame, offset: int, name_of: NameOf) -> ArrowGroup:
    with open_stream(frame.body) as reader:
        table = name_of(reader.schema.metadata[TABLE_KEY].decode())
        rows = plain_rows(reader.read_all())
    sequences: npt.NDArray[np.int64] = rows.column(names.SEQUENCE).to_numpy()
    start = _count_up_to(sequences, frame.after_sequence)
    run = Run(0, len(sequences) - start, frame.source, frame.epoch, frame.received_at_us, offset)
    return ArrowGroup(
        table=table,
        rows=rows.slice(start),
        sequences=sequences[start:],
        runs=(run,) if run.stop else (),
        held_bytes=max(len(frame.body), rows.nbytes),
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
        held_bytes=sum(group.held_bytes for group in groups),
        declared=tuple(text for group in groups for text in group.declared),
    )


# How frames of each encoding become groups.
GROUPERS: Mapping[Encoding, Callable[..., list[Group]]] = {
    Encoding.JSON_BATCH: group_json,
    Encoding.ARROW_STREAM: group_arrow,
}


class _RecordRow(msgspec.Struct, rename="camel"):
    encoding: str
    body: bytes  # base64 in JSON, because it may be anything
    after_sequence: int
    declared: str = ""


_decode_record_row = msgspec.json.Decoder(_RecordRow).decode


@dataclass(frozen=True, slots=True, kw_only=True)
class UnreadableRecord(JsonGroup):
    """One change that is a whole record; no table can take it."""

    reason: str
    after_sequence: int

    def spans(self) -> dict[SourceId, Span]:
        """Return the first and the last position of the record: while it waits, all of its changes do."""
        run, last = self.runs[0], self._position(self.runs[0], 0)
        return {run.source: Span(Position(last.epoch, min(self.after_sequence + 1, last.sequence)), last)}

    def strict(self, expected: Expected) -> pa.Table | None:
        """Return None: no table can take the record."""
        return None

    def exact(self, expected: Expected, update: SchemaUpdate) -> pa.Table:
        """Raise BatchMalformed: no table can take the record."""
        raise BatchMalformed(f"record cannot be read: error={self.reason}")


def unreadable_record(frame: Frame, *, table: str, offset: int, reason: str) -> UnreadableRecord:
    """Return a record as one change: the row is its body, with what else reading it takes."""
    image = to_json(_RecordRow(frame.encoding.name, frame.body, frame.after_sequence, frame.declared))
    return UnreadableRecord.of(
        table,
        [Event(sequence=frame.last_sequence, operation="MESSAGE", table=table, after=msgspec.Raw(image))],
        [Run(0, 1, frame.source, frame.epoch, frame.received_at_us, offset)],
        reason=reason,
        after_sequence=frame.after_sequence,
    )


def frame_of_record(text: str, *, source: SourceId, last: Position, received_at_us: int) -> Frame:
    """Rebuild a record's frame from the row that was made of it.

    Raises: RecordIncomplete if the row is not of that shape.
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
