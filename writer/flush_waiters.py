"""Those who wait for commits of a table: up to an offset, or of certain rows. Owns when and what they are answered."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from writer.errors import WriterError
from writer.table_flush import Flushed


@dataclass(slots=True)
class _Waiter:
    """Somebody who waits, and what was committed meanwhile."""

    until: int
    future: asyncio.Future[Flushed]
    flushed: Flushed


@dataclass(slots=True)
class FlushWaiters:
    """All who wait for one table."""

    _waiters: list[_Waiter] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self._waiters)

    def add(self, until: int, *, snapshot_id: int | None) -> asyncio.Future[Flushed]:
        """Wait until everything below an offset is committed."""
        waiter = _Waiter(until, asyncio.get_running_loop().create_future(), Flushed(snapshot_id))
        self._waiters.append(waiter)
        return waiter.future

    def note(self, flushed: Flushed) -> None:
        """Count a flush for all who wait."""
        for waiter in self._waiters:
            waiter.flushed = waiter.flushed.joined(flushed)

    def answer(self, *, needed_offset: int | None) -> None:
        """Answer those for whom everything is committed."""
        for waiter in self._waiters:
            if (needed_offset is None or needed_offset >= waiter.until) and not waiter.future.done():
                waiter.future.set_result(waiter.flushed)
        self._waiters = [waiter for waiter in self._waiters if not waiter.future.done()]

    def refuse(self, problem: str | None) -> None:
        """Tell everybody that nothing will come of it for now."""
        for waiter in self._waiters:
            if not waiter.future.done():  # whoever waited may have given up
                waiter.future.set_result(waiter.flushed.refused(problem))
        self._waiters = []


def keep_promises(promises: list[asyncio.Future[None]]) -> None:
    """Tell those who wait for certain rows that these are committed."""
    for promise in promises:
        if not promise.done():  # whoever waited may have given up
            promise.set_result(None)


def break_promises(promises: list[asyncio.Future[None]]) -> None:
    """Tell those who wait for certain rows that these have left memory."""
    for promise in promises:
        if not promise.done():
            promise.set_exception(WriterError("rows have left memory before they were committed"))
