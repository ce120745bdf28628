"""Work whose outcome many wait for. Owns that it is done once for all who ask at the same time, well or badly.

Whoever comes first begins it, in a task of its own, so that it goes on when that one leaves; when the last one has
left, it is given up. An error goes to all who wait: were each to try again in turn, the last of n would wait n times as
long for a store that does not answer. Who comes after the end begins anew. Who may wait is bounded by the connections.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Hashable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

_T = TypeVar("_T")


@dataclass(slots=True)
class _Running(Generic[_T]):
    task: asyncio.Task[_T]
    waiting: int = 0


class SharedWork(Generic[_T]):
    """The work of one kind that is being done, by what it is about."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._running: dict[Hashable, _Running[_T]] = {}

    async def outcome(self, about: Hashable, work: Callable[[], Coroutine[Any, Any, _T]]) -> _T:
        """Give what the work that is being done comes to, beginning it if none is. Cancelling leaves the others theirs.

        Raises: what the work raises.
        """
        running = self._running.get(about) or self._begin(about, work)
        running.waiting += 1
        try:
            return await asyncio.shield(running.task)
        finally:
            running.waiting -= 1
            if not running.waiting:
                self._end(about, running)
                running.task.cancel()

    def _begin(self, about: Hashable, work: Callable[[], Coroutine[Any, Any, _T]]) -> _Running[_T]:
        running = self._running[about] = _Running(asyncio.create_task(work(), name=self._name))
        running.task.add_done_callback(lambda _: self._end(about, running))
        return running

    def _end(self, about: Hashable, running: _Running[_T]) -> None:
        if self._running.get(about) is running:
            del self._running[about]
