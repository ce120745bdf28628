"""Resume positions of sources that this node's log does not know, read from the tables.

A source may have been on another node, or on this one before its log was lost. The tables then know more than the log:
up to where everything of the source is committed, and which epochs are over. The source resumes there. That
position is not a mark: whatever the source sends is logged, and each table skips what it has. A change that only the
lost log had is therefore accepted when it comes again, even if later changes are committed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping

from lakefeed.contract.changes import Position, SourceId

# Reading all tables serves every source that connects within this time. An old position is too low at worst, which only
# makes the source send more than is missing.
MAX_AGE_S = 30.0


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
        if self._loaded_at is None or self._clock() - self._loaded_at > MAX_AGE_S:
            await self.refresh(max_age_s=MAX_AGE_S)
        return self._positions.get(source)

    async def refresh(self, *, max_age_s: float = 0.0) -> None:
        """Read the tables, unless another caller did so within `max_age_s`. Cancelling it changes nothing.

        Raises: CatalogError.
        """
        async with self._loading:
            began_at = self._clock()
            if self._loaded_at is not None and began_at - self._loaded_at < max_age_s:
                return
            self._positions = await self._load()
            self._loaded_at = began_at

    def last_known(self, source: SourceId) -> Position | None:
        """Return what the last read found."""
        return self._positions.get(source)
