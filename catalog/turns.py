"""Turns for the commits to one table or the requests of one key: first come, first served, and a limit on who may wait.

Waiting here is cheaper than losing the swap: the winner's document is in the cache when the next one starts. It is
no more than that. Other processes do not take part, so the swap in the database stays the truth.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Hashable
from contextlib import asynccontextmanager

from catalog.errors import TooManyWaiting


class Turns:
    """One lock for each thing that anybody holds or waits for."""

    def __init__(self, *, waiting_max: int) -> None:
        self._waiting_max = waiting_max
        self._locks: dict[Hashable, asyncio.Lock] = {}
        self._present: dict[Hashable, int] = {}

    @asynccontextmanager
    async def turn(self, thing: Hashable) -> AsyncIterator[None]:
        """Wait for the turn and hold it. Cancelling a waiter gives up its place.

        Raises: TooManyWaiting.
        """
        present = self._present.get(thing, 0)
        if present > self._waiting_max:
            raise TooManyWaiting(f"Too many requests wait: {thing}")
        self._present[thing] = present + 1
        try:
            async with self._locks.setdefault(thing, asyncio.Lock()):
                yield
        finally:
            self._present[thing] -= 1
            if not self._present[thing]:
                del self._present[thing], self._locks[thing]
