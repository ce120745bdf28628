"""Durable state of sources: high-water marks, and what adapters remember of a source's own positions.

Every segment of the log begins with the state of all sources at the time it was started:

    {"marks": {source: [epoch, sequence]}, "origins": {source: text}}

A start therefore reads the newest segment alone, and trimming older ones loses nothing.

A source that numbers its changes needs no adapter. An adapter that numbers them for it (Debezium's does) keeps a text
per source. The text becomes durable in the same record as the changes it describes, so the two always agree.
"""

from __future__ import annotations

from collections.abc import Mapping
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
