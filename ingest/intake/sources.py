"""Sources: their durable state in the log, and where a source resumes that this log does not know.

Every segment of the log begins with the state of all sources at the time it was started:

    {"marks": {source: [epoch, sequence]}, "origins": {source: text}}

A start therefore reads the newest segment alone, and trimming older ones loses nothing.

A source that numbers its changes needs no adapter. An adapter that numbers them for it (Debezium's does) keeps a text
per source. The text becomes durable in the same record as the changes it describes, so the two always agree.

A source may have been on another node, or on this one before its log was lost. The tables then know more than the log:
up to where everything of the source is committed, and which epochs are over. The source resumes there. That position is
not a mark: whatever the source sends is logged, and each table skips what it has. A change that only the lost log had
is therefore accepted when it comes again, even if later changes are committed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

import msgspec

from lakefeed.contract.changes import Position, SourceId
from lakefeed.ingest.intake.dedup import MARKS_MAX_BYTES, Dedup
from lakefeed.writer.wal.payload import decode_frame
from lakefeed.writer.wal.protocol import Log

# What a segment holds of itself besides the head; far more than it needs.
SEGMENT_HEADER_MAX_BYTES = 4096

# The texts of all adapters: some thousand sources at a few hundred bytes each.
ADAPTER_STATES_MAX_BYTES = 4 * 1024 * 1024

# Reading all tables serves every source that connects within this time. An old position is too low at worst, which only
# makes the source send more than is missing.
RESUME_MAX_AGE_S = 30.0


class _Head(msgspec.Struct):
    marks: dict[str, tuple[int, int]] = {}
    origins: dict[str, str] = {}


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(_Head).decode


@dataclass(slots=True)
class AdapterStates:
    """The newest durable text of each source. Bounded in total, because it is at the head of every segment."""

    max_bytes: int
    _texts: dict[SourceId, str] = field(default_factory=dict)
    _bytes: int = 0

    def get(self, source: SourceId) -> str:
        """Return a source's text, empty if it has none."""
        return self._texts.get(source, "")

    def has_room_for(self, source: SourceId, text: str) -> bool:
        """Return whether a text fits besides those of the other sources."""
        return self._bytes - self._size_of(source) + len(source.encode()) + len(text.encode()) <= self.max_bytes

    def record(self, source: SourceId, text: str) -> None:
        """Keep a text that is now durable; an empty one changes nothing."""
        if text:
            self._bytes -= self._size_of(source)
            self._texts[source] = text
            self._bytes += self._size_of(source)

    def texts(self) -> Mapping[SourceId, str]:
        """Return all texts."""
        return self._texts

    def _size_of(self, source: SourceId) -> int:
        return len(source.encode()) + len(self._texts[source].encode()) if source in self._texts else 0


def encode_head(marks: Mapping[SourceId, Position], adapter_states: Mapping[SourceId, str]) -> bytes:
    """Encode the head of a segment."""
    positions = {str(source): (mark.epoch, mark.sequence) for source, mark in marks.items()}
    return _encode(_Head(positions, {str(source): text for source, text in adapter_states.items()}))


def decode_head(head: bytes) -> tuple[dict[SourceId, Position], dict[SourceId, str]]:
    """Return the marks and adapter states of a segment's head."""
    document = _decode(head)
    marks = {SourceId(source): Position(*mark) for source, mark in document.marks.items()}
    return marks, {SourceId(source): text for source, text in document.origins.items()}


def load_source_state(log: Log) -> tuple[Dedup, AdapterStates]:
    """Rebuild the state from the newest segment: its head, then the records behind it."""
    # A segment's head may be as large as a group: the log gives each of them half of a segment.
    room_bytes = log.group_max_bytes - SEGMENT_HEADER_MAX_BYTES
    states = AdapterStates(max_bytes=min(ADAPTER_STATES_MAX_BYTES, room_bytes // 4))
    dedup = Dedup(marks_max_bytes=min(MARKS_MAX_BYTES, room_bytes - 2 * states.max_bytes))  # JSON may escape a text
    if log.head is not None:
        marks, texts = decode_head(log.head)
        for source, position in marks.items():
            dedup.restore(source, position)
        for source, text in texts.items():
            states.record(source, text)
    for record in log.newest_records():
        frame = decode_frame(record.payload)
        dedup.restore(frame.source, Position(frame.epoch, frame.last_sequence))
        states.record(frame.source, frame.origin)
    return dedup, states


class ResumePositions:
    """The positions as of the last read of the tables; reads do not overlap."""

    def __init__(
        self, load: Callable[[], Awaitable[Mapping[SourceId, Position]]], *, clock: Callable[[], float]
    ) -> None:
        self._load = load
        self._clock = clock
        self._loading = asyncio.Lock()
        self._loaded_at: float | None = None
        self._positions: Mapping[SourceId, Position] = {}

    async def find(self, source: SourceId) -> Position | None:
        """Return where a source resumes, reading the tables if needed; None if no table knows it.

        Raises: CatalogError.
        """
        if self._loaded_at is None or self._clock() - self._loaded_at > RESUME_MAX_AGE_S:
            await self.refresh(max_age_s=RESUME_MAX_AGE_S)
        return self._positions.get(source)

    async def refresh(self, *, max_age_s: float = 0.0) -> None:
        """Read the tables, unless a read began since this call or `max_age_s` before it. Cancelling it changes nothing.

        Raises: CatalogError.
        """
        asked_at = self._clock()
        async with self._loading:
            if self._loaded_at is not None and asked_at - self._loaded_at < max_age_s:
                return
            began_at = self._clock()
            self._positions = await self._load()
            self._loaded_at = began_at

    def last_known(self, source: SourceId) -> Position | None:
        """Return what the last read found."""
        return self._positions.get(source)
