"""Building blocks for asyncio: bounded parallel calls, single flight, keyed locks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Hashable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from lakefeed.contract.errors import TooManyWaiting

S = TypeVar("S")
T = TypeVar("T")


async def map_parallel(action: Callable[[S], Awaitable[T]], items: Iterable[S], *, at_once: int) -> list[T]:
    """Run an action on every item, at most `at_once` at a time. Return the results in order.

    All actions have ended when this returns or raises, so that no request is left running. Cancelling cancels them.

    Raises: the error of the first item that failed.
    """
    slots = asyncio.Semaphore(at_once)

    async def act(item: S) -> T:
        async with slots:
            return await action(item)

    results = await asyncio.gather(*(act(item) for item in items), return_exceptions=True)
    return [or_raise(result) for result in results]


def or_raise(result: T | BaseException) -> T:
    """Return a result of `gather(..., return_exceptions=True)`, or raise it if it is an error."""
    if isinstance(result, BaseException):
        raise result
    return result


@dataclass(slots=True)
class _Flight(Generic[T]):
    task: asyncio.Task[T]
    waiting: int = 0


class SingleFlight(Generic[T]):
    """Calls by key: callers that ask for a key while its call runs share that call and its outcome.

    The call runs in a task of its own, so it survives the caller that started it; it is cancelled when no caller waits
    any more. An error goes to all waiting callers: if each of n tried again in turn, the last one would wait n times as
    long for a store that does not respond. Callers that come after the end start a new call.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._flights: dict[Hashable, _Flight[T]] = {}

    async def run(self, key: Hashable, call: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Return the outcome of the running call for a key, or of a new one. Cancelling leaves other callers theirs.

        Raises: what the call raises.
        """
        flight = self._flights.get(key)
        if flight is None:
            flight = self._flights[key] = _Flight(asyncio.create_task(call(), name=self._name))
            flight.task.add_done_callback(lambda _: self._end(key, flight))
        flight.waiting += 1
        try:
            return await asyncio.shield(flight.task)
        finally:
            flight.waiting -= 1
            if not flight.waiting:
                self._end(key, flight)
                flight.task.cancel()

    def _end(self, key: Hashable, flight: _Flight[T]) -> None:
        if self._flights.get(key) is flight:
            del self._flights[key]


class KeyedLocks:
    """A lock per key, first come, first served, with at most `waiting_max` waiting callers per key.

    As the commit queue of a table this only saves work: waiting is cheaper than losing the swap of the pointer. Other
    processes do not take part, so the swap in the database decides.
    """

    def __init__(self, *, waiting_max: int) -> None:
        self._waiting_max = waiting_max
        self._locks: dict[Hashable, asyncio.Lock] = {}
        self._callers: dict[Hashable, int] = {}

    @asynccontextmanager
    async def hold(self, key: Hashable) -> AsyncIterator[None]:
        """Wait for the lock of a key and hold it, or raise TooManyWaiting. A cancelled caller leaves the queue."""
        callers = self._callers.get(key, 0)
        if callers > self._waiting_max:
            raise TooManyWaiting(f"Too many requests wait: {key}")
        self._callers[key] = callers + 1
        try:
            async with self._locks.setdefault(key, asyncio.Lock()):
                yield
        finally:
            self._callers[key] -= 1
            if not self._callers[key]:
                del self._callers[key], self._locks[key]
