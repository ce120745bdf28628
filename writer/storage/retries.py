"""When a request to a store is tried again. Owns the tries, their pauses and their time limits; stores say what failed.

A few tries hide what a busy store does now and then. An outage is not waited out here: the flush that needed the
object says so in /status, and begins again for as long as it takes.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")

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
