"""Several remote calls at once, with a limit. Owns nothing but the waiting."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

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
