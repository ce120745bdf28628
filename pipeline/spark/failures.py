"""Spark's errors, told apart without importing Spark. Owns what they mean to us and which of their words are shown."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from typing import TypeVar

from lakefeed.pipeline.errors import SparkUnavailable
from lakefeed.pipeline.spark.runtime import S3_INSTALL_HINT, SPARK_3_5, SparkVersion, installed_version

# --- pipeline.spark_errors --------------------------------------------------------------------------------------------


_PACKAGES = ("pyspark.", "py4j.", "grpc.")
_MESSAGE_MAX_LINES = 4
_MESSAGE_MAX_CHARS = 1_000

# Spark has no type for the time of day before 4.1: a table with such a column cannot be opened at all.
_UNREADABLE = "UnsupportedOperationException"
_MISSING = ("TABLE_OR_VIEW_NOT_FOUND", "NoSuchTableException")

# How it shows that there are no jars for S3: Iceberg turns to Hadoop for a scheme that it has no class for.
_WITHOUT_S3_JARS = ('No FileSystem for scheme "s3"', "Failed to get file system for path: s3://")
_WITHOUT_S3A_JARS = ("org.apache.hadoop.fs.s3a.S3A", "Failed to get file system for path: s3a://")


def is_spark_error(error: BaseException) -> bool:
    """Tell whether an error was raised by Spark."""
    return any(f"{kind.__module__}.".startswith(_PACKAGES) for kind in type(error).__mro__)


def is_unreadable_table(error: BaseException) -> bool:
    """Tell whether Spark has no types for a table, or the table is gone: a reason to pass over it, not to stop."""
    if not is_spark_error(error):
        return False
    return type(error).__name__ == _UNREADABLE or any(mark in str(error) for mark in _MISSING)


def message_of(error: BaseException) -> str:
    """Give what Spark says, without the Java frames, and what to do where that is known."""
    try:
        whole = str(error)
        java = getattr(error, "java_exception", None)
        text = whole if java is None else str(java.toString())
    except Exception:  # noqa: BLE001 - the words of a Java error are in the JVM, which may be gone
        return type(error).__name__
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith(("at ", "..."))]
    return _remedy(whole) + "\n".join(lines[:_MESSAGE_MAX_LINES])[:_MESSAGE_MAX_CHARS]


def root_cause_of(error: BaseException) -> str:
    """Give what was wrong in the first place, where a job has failed for it: the last of Java's causes."""
    lines = str(error).splitlines()
    causes = [line for line in lines if line.startswith("Caused by: ")]
    return causes[-1].removeprefix("Caused by: ")[:_MESSAGE_MAX_CHARS] if causes else message_of(error)


def _remedy(text: str) -> str:
    version = _version()
    if any(mark in text for mark in _WITHOUT_S3_JARS):
        return f"tables on S3 need the AWS jars, {S3_INSTALL_HINT}, or --packages {version.aws_package}: "
    if "ClassNotFoundException" in text and any(mark in text for mark in _WITHOUT_S3A_JARS):
        return f"files on s3a:// need Hadoop's S3A, --packages {version.s3a_package}: "
    return ""


def _version() -> SparkVersion:
    try:
        return installed_version()
    except SparkUnavailable:
        return SPARK_3_5


# --- pipeline.conflicts -----------------------------------------------------------------------------------------------
#
# Jobs that meet another writer's commit. Owns telling by Iceberg's words that they can be repeated, and doing so.
#
# A commit that is refused because somebody else was first can be repeated whole, and so can a job whose snapshot
# expired
# under it. A commit whose outcome is unknown cannot, as it may have happened, unless doing it twice changes nothing.


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
