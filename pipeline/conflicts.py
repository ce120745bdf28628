"""Jobs that meet another writer's commit. Owns telling by Iceberg's words that they can be repeated, and doing so.

A commit that is refused because somebody else was first can be repeated whole, and so can a job whose snapshot expired
under it. A commit whose outcome is unknown cannot, as it may have happened, unless doing it twice changes nothing.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from typing import TypeVar

from pipeline.spark_errors import message_of

_log = logging.getLogger(__name__)

T = TypeVar("T")

# Of something that Iceberg itself has tried several times before: whoever loses so often wants another hour of the day.
ATTEMPTS_MAX = 3
_PAUSE_S = 0.2

# What Iceberg says when somebody else was first, and when a snapshot has expired under a job that was reading it.
_CONFLICTS = (
    "CommitFailedException",
    "ValidationException",
    "Missing required files to delete",
    "iceberg.exceptions.NotFoundException",
    "NoSuchKeyException",  # the same, in the words of S3's library
)
# Nobody knows whether such a commit has happened; the second is what a lost connection is called.
_UNKNOWN = ("CommitStateUnknownException", "iceberg.exceptions.RESTException")


def repeat_on_conflict(
    action: Callable[[], T],
    *,
    what: str,
    attempts_max: int = ATTEMPTS_MAX,
    pause_s: float = _PAUSE_S,
    is_idempotent: bool = False,
) -> T:
    """Do something again that another writer's commit has thwarted, a few times. `what` names it in the log.

    What may be done twice without harm is also repeated where nobody knows whether it was done.
    """
    for number in range(1, attempts_max):
        try:
            return action()
        except Exception as error:
            if not (is_conflict(str(error)) or (is_idempotent and _is_unknown(str(error)))):
                raise
            _log.warning(
                "repeated_after_conflict", extra={"what": what, "reason": message_of(error).partition("\n")[0]}
            )
            time.sleep(pause_s * number * random.uniform(0.5, 1.5))  # noqa: S311 - jitter
    return action()


def is_conflict(message: str) -> bool:
    """Tell from Iceberg's words whether somebody else was first, so that trying again is right."""
    return not _is_unknown(message) and any(name in message for name in _CONFLICTS)


def _is_unknown(message: str) -> bool:
    return any(name in message for name in _UNKNOWN)
