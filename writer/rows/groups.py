"""Frames of the log taken apart by table: the changes of one table, in log order, their rows still undecoded.

Owns the order of changes, which image stands for a row, and the cut at a source's mark. Columns belong to decode.py.

A group keeps one list per envelope field instead of one object per change, and what a whole frame shares (source,
epoch, time of receipt, log offset) once per run of changes:

    sequences  41 42 43 | 7 8 | 44 45        images  {"id":9} {"id":4} ...
    runs       shop-1@0 | s-2 | shop-1@0     (start, stop, source, epoch, received_at_us, offset)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self, TypeAlias, TypeVar

import msgspec

from writer.changes import Position, SourceId
from writer.envelope import Event, decode_batch
from writer.frames import Encoding, Frame

# A row as JSON text: as it was received, or rewritten by misfits.py.
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
    # What sources declared of the table along with these changes, each as JSON (declared.py).
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
