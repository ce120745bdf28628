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

from writer.changes import Position, SourceId

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
