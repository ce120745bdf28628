"""Where sources stand that this node's log does not know. Owns how often the tables are asked, and what they said.

A source may have been on another node, or on this one before its log was lost: the tables then say more than the log
(table_marks.py): up to where everything of the source is committed, and which epochs are over. There it is told to
resume. That is no mark of ours: whatever the source sends is logged, and each table takes of it what it does not have.
So a change that only the lost log had is taken when it comes again, though others behind it are committed.

One look reads all tables and serves every source that comes within its age; looks do not overlap.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

import msgspec

from lakefeed.contract.changes import Position, SourceId

# --- ingest.origins ---------------------------------------------------------------------------------------------------
#
# What a source's adapter remembers of the source's own positions. Owns the text per source, not its meaning.
#
# A source that numbers its changes itself needs none. An adapter that does it for one (Debezium's does) keeps here what
# it compared last; the text becomes durable in the same record as the changes it speaks of, so the two never disagree.


@dataclass(slots=True)
class Origins:
    """The newest durable text of each source, bounded in all, because it stands at the head of every segment."""

    max_bytes: int
    _texts: dict[SourceId, str] = field(default_factory=dict)
    _bytes: int = 0

    def get(self, source: SourceId) -> str:
        """Give a source's text, empty if it has none."""
        return self._texts.get(source, "")

    def has_room_for(self, source: SourceId, text: str) -> bool:
        """Tell whether a text can be kept."""
        return self._bytes - self._size_of(source) + len(source.encode()) + len(text.encode()) <= self.max_bytes

    def record(self, source: SourceId, text: str) -> None:
        """Keep a text that is now durable; an empty one says nothing new."""
        if text:
            self._bytes -= self._size_of(source)
            self._texts[source] = text
            self._bytes += self._size_of(source)

    def texts(self) -> Mapping[SourceId, str]:
        """Show all texts."""
        return self._texts

    def _size_of(self, source: SourceId) -> int:
        return len(source.encode()) + len(self._texts[source].encode()) if source in self._texts else 0


# --- ingest.segment_head ----------------------------------------------------------------------------------------------
#
# What every segment of the log begins with: where all sources stood when it was begun. Owns the layout.
#
#     > {"marks": {source: [epoch, sequence]}, "origins": {source: text}}
#
# So a start reads the newest segment alone, and trimming the older ones forgets nothing.


class _Document(msgspec.Struct):
    marks: dict[str, tuple[int, int]] = {}
    origins: dict[str, str] = {}


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(_Document).decode


def encode_head(marks: Mapping[SourceId, Position], origins: Mapping[SourceId, str]) -> bytes:
    """Lay out the head of a segment."""
    positions = {str(source): (mark.epoch, mark.sequence) for source, mark in marks.items()}
    return _encode(_Document(positions, {str(source): text for source, text in origins.items()}))


def decode_head(head: bytes) -> tuple[dict[SourceId, Position], dict[SourceId, str]]:
    """Read the head of a segment: marks, origins."""
    document = _decode(head)
    marks = {SourceId(source): Position(*mark) for source, mark in document.marks.items()}
    return marks, {SourceId(source): text for source, text in document.origins.items()}


# --- ingest.resume_points ---------------------------------------------------------------------------------------------


# A resume point that is too low makes the source send more than is missing, and no more; so an old look does as well,
# and sources that come one by one do not have all tables read each time.
LOOK_MAX_AGE_S = 30.0


class ResumePoints:
    """The tables' word on sources, as of the last look."""

    def __init__(
        self, load: Callable[[], Awaitable[Mapping[SourceId, Position]]], *, clock: Callable[[], float]
    ) -> None:
        self._load = load
        self._clock = clock
        self._turn = asyncio.Lock()
        self._looked_at: float | None = None
        self._points: Mapping[SourceId, Position] = {}

    async def find(self, source: SourceId) -> Position | None:
        """Tell where a source is to resume; None if no table knows it. Cancelling it changes nothing.

        Raises: CatalogError.
        """
        async with self._turn:
            if self._looked_at is None or self._clock() - self._looked_at > LOOK_MAX_AGE_S:
                await self._look()
        return self._points.get(source)

    async def look(self) -> None:
        """Read the tables.

        Raises: CatalogError.
        """
        async with self._turn:
            await self._look()

    async def _look(self) -> None:
        began_at = self._clock()
        self._points = await self._load()
        self._looked_at = began_at

    def last_seen(self, source: SourceId) -> Position | None:
        """Tell what the last look found."""
        return self._points.get(source)
