"""When a request to a store is tried again. Owns the tries, their pauses and their time limits; stores say what failed.

A few tries hide what a busy store does now and then. An outage is not waited out here: the flush that needed the
object says so in /status, and begins again for as long as it takes.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Hashable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from lakefeed.contract.errors import TooManyWaiting

# --- writer.parallel --------------------------------------------------------------------------------------------------
#
# Several remote calls at once, with a limit. Owns nothing but the waiting.


S = TypeVar("S")
T = TypeVar("T")


async def map_parallel(action: Callable[[S], Awaitable[T]], items: Iterable[S], *, at_once: int) -> list[T]:
    """Do something with every item, a few at a time; results in order.

    All have ended when this returns or raises, so that no request is left running. Cancelling it cancels them.

    Raises: what the first item that failed raised.
    """
    slots = asyncio.Semaphore(at_once)

    async def act(item: S) -> T:
        async with slots:
            return await action(item)

    results = await asyncio.gather(*(act(item) for item in items), return_exceptions=True)
    return [or_raise(result) for result in results]


def or_raise(result: T | BaseException) -> T:
    """Unwrap what gather collected, so that all of its parts have ended before the first failure is told."""
    if isinstance(result, BaseException):
        raise result
    return result


# --- catalog.shared_work ----------------------------------------------------------------------------------------------
#
# Work whose outcome many wait for. Owns that it is done once for all who ask at the same time, well or badly.
#
# Whoever comes first begins it, in a task of its own, so that it goes on when that one leaves; when the last one has
# left, it is given up. An error goes to all who wait: were each to try again in turn, the last of n would wait n times
# as
# long for a store that does not answer. Who comes after the end begins anew. Who may wait is bounded by the
# connections.


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


# --- catalog.turns ----------------------------------------------------------------------------------------------------
#
# Turns for the commits to one table or the requests of one key: first come, first served, and a limit on who may wait.
#
# Waiting here is cheaper than losing the swap: the winner's document is in the cache when the next one starts. It is
# no more than that. Other processes do not take part, so the swap in the database stays the truth.


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


# --- writer.storage.retries -------------------------------------------------------------------------------------------


# With the pauses below about two seconds, unless tries time out.
ATTEMPTS_MAX = 5
PAUSE_FIRST_S = 0.1
PAUSE_MAX_S = 5.0

_TOO_MANY_REQUESTS = 429
_REQUEST_TIMEOUT = 408
_FIRST_SERVER_ERROR = 500


def is_transient_status(status: int) -> bool:
    """Tell whether the same request may be answered otherwise in a moment; a refusal (400, 403, 404) will not be."""
    return status in {_REQUEST_TIMEOUT, _TOO_MANY_REQUESTS} or status >= _FIRST_SERVER_ERROR


def longest_pause_s(tries: int) -> float:
    """Tell the longest pause after so many tries; the true one is drawn below it, so that writers do not meet again."""
    return float(min(PAUSE_MAX_S, PAUSE_FIRST_S * 2 ** (tries - 1)))


async def with_retries(
    request: Callable[[], Awaitable[T]],
    *,
    failures: tuple[type[Exception], ...],
    is_transient: Callable[[Exception], bool],
    timeout_s: float,
) -> T:
    """Make a request until it works, fails for good, or has failed often enough: then with its last error.

    Each try has `timeout_s`. Cancelling it leaves the outcome of the running try unknown.
    """
    for tries in range(1, ATTEMPTS_MAX):
        try:
            return await _try_once(request, timeout_s)
        except failures as error:
            if not is_transient(error):
                raise
        await asyncio.sleep(random.uniform(0, longest_pause_s(tries)))  # noqa: S311 - spreads load, guards nothing
    return await _try_once(request, timeout_s)


async def _try_once(request: Callable[[], Awaitable[T]], timeout_s: float) -> T:
    async with asyncio.timeout(timeout_s):
        return await request()
