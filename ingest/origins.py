"""What a source's adapter remembers of the source's own positions. Owns the text per source, not its meaning.

A source that numbers its changes itself needs none. An adapter that does it for one (Debezium's does) keeps here what
it compared last; the text becomes durable in the same record as the changes it speaks of, so the two never disagree.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from writer.changes import SourceId


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
