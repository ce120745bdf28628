"""Turns for the commits to one table: first come, first served, with a limit on how many may wait.

Waiting here is cheaper than losing the swap: the winner's document is in the cache when the next one starts. It is
no more than that. Other processes do not take part, so the swap in the database stays the truth.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from catalog.errors import TooManyCommits
from catalog.names import EntryId


class Turns:
    """One lock per table that anybody holds or waits for."""

    def __init__(self, *, waiting_max: int) -> None:
        self._waiting_max = waiting_max
        self._locks: dict[EntryId, asyncio.Lock] = {}
        self._present: dict[EntryId, int] = {}

    @asynccontextmanager
    async def turn(self, table: EntryId) -> AsyncIterator[None]:
        """Wait for the turn and hold it. Cancelling a waiter gives up its place.

        Raises: TooManyCommits.
        """
        present = self._present.get(table, 0)
        if present > self._waiting_max:
            raise TooManyCommits(f"Too many commits wait: {table}")
        self._present[table] = present + 1
        try:
            async with self._locks.setdefault(table, asyncio.Lock()):
                yield
        finally:
            self._present[table] -= 1
            if not self._present[table]:
                del self._present[table], self._locks[table]
