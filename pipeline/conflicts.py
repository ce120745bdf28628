"""Jobs that meet another writer's commit. Owns telling by Iceberg's words that they can be repeated, and doing so.

A commit that is refused because somebody else was first can be repeated whole, and so can a job whose snapshot expired
under it. A commit whose outcome is unknown cannot: it may have happened.
"""

from __future__ import annotations

import logging
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
_UNKNOWN = "CommitStateUnknownException"


def repeat_on_conflict(action: Callable[[], T], *, what: str, attempts_max: int = ATTEMPTS_MAX) -> T:
    """Do something again that another writer's commit has thwarted, a few times. `what` names it in the log."""
    for number in range(1, attempts_max):
        try:
            return action()
        except Exception as error:
            if not is_conflict(str(error)):
                raise
            _log.warning(
                "repeated_after_conflict", extra={"what": what, "reason": message_of(error).partition("\n")[0]}
            )
            time.sleep(_PAUSE_S * number)
    return action()


def is_conflict(message: str) -> bool:
    """Tell from Iceberg's words whether somebody else was first, so that trying again is right."""
    return _UNKNOWN not in message and any(name in message for name in _CONFLICTS)
