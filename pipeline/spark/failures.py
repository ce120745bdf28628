"""Spark's errors, recognised without importing Spark, and retries after conflicts between commits.

A commit that is rejected because another one came first can be retried as a whole, and so can a job whose snapshot
expired while it was reading. A commit with an unknown outcome may have landed, so it is retried only if it is
idempotent.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from typing import TypeVar

from lakefeed.backoff import Backoff
from lakefeed.pipeline.spark.runtime import S3_INSTALL_HINT, installed_version_or_default

_log = logging.getLogger(__name__)

T = TypeVar("T")

# The bases of Spark's errors.
_ERRORS = {"pyspark.errors": "PySparkException", "py4j.protocol": "Py4JError", "grpc": "RpcError"}
_MESSAGE_MAX_LINES = 4
_MESSAGE_MAX_CHARS = 1_000

# Spark has no type for the time of day before 4.1: a table with such a column cannot be opened at all.
_UNREADABLE = "UnsupportedOperationException"
_MISSING = ("TABLE_OR_VIEW_NOT_FOUND", "NoSuchTableException")

# Without jars for S3, Iceberg falls back to Hadoop, which does not know the scheme either.
_WITHOUT_S3_JARS = ('No FileSystem for scheme "s3"', "Failed to get file system for path: s3://")
_WITHOUT_S3A_JARS = ("org.apache.hadoop.fs.s3a.S3A", "Failed to get file system for path: s3a://")

# Iceberg itself retries a commit several times before it reports a conflict.
ATTEMPTS_MAX = 3
_BACKOFF = Backoff(first_s=0.4, max_s=3.0)

# Another commit came first, or a snapshot expired while a job was reading it.
_CONFLICTS = (
    "CommitFailedException",
    "ValidationException",
    "Missing required files to delete",
    "iceberg.exceptions.NotFoundException",
    "NoSuchKeyException",  # NotFoundException, as the S3 client reports it
)
# The commit may or may not have landed. A lost connection is reported as RESTException.
_UNKNOWN = ("CommitStateUnknownException", "iceberg.exceptions.RESTException")


def spark_errors() -> tuple[type[BaseException], ...]:
    """Return the classes of all errors that Spark raises, for an `except` clause. A class not loaded is not raised."""
    return tuple(getattr(sys.modules[module], name) for module, name in _ERRORS.items() if module in sys.modules)


def is_unreadable_table(error: BaseException) -> bool:
    """Return whether the table is gone or has types that Spark lacks: a reason to skip it, not to stop."""
    if not isinstance(error, spark_errors()):
        return False
    return type(error).__name__ == _UNREADABLE or any(mark in str(error) for mark in _MISSING)


def message_of(error: BaseException) -> str:
    """Return Spark's message without Java frames, preceded by the remedy where one is known."""
    try:
        whole = str(error)
        java = getattr(error, "java_exception", None)
        text = whole if java is None else str(java.toString())
    except Exception:  # noqa: BLE001 - the message of a Java error is in the JVM, which may be gone
        return type(error).__name__
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith(("at ", "..."))]
    return _remedy(whole) + "\n".join(lines[:_MESSAGE_MAX_LINES])[:_MESSAGE_MAX_CHARS]


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, for log events and reports."""
    return message_of(error).partition("\n")[0] or type(error).__name__


def root_cause_of(error: BaseException) -> str:
    """Return the innermost of Java's causes, which says why a job failed."""
    causes = [line for line in str(error).splitlines() if line.startswith("Caused by: ")]
    return causes[-1].removeprefix("Caused by: ")[:_MESSAGE_MAX_CHARS] if causes else message_of(error)


def _remedy(text: str) -> str:
    version = installed_version_or_default()
    if any(mark in text for mark in _WITHOUT_S3_JARS):
        return f"tables on S3 need the AWS jars, {S3_INSTALL_HINT}, or --packages {version.aws_package}: "
    if "ClassNotFoundException" in text and any(mark in text for mark in _WITHOUT_S3A_JARS):
        return f"files on s3a:// need Hadoop's S3A, --packages {version.s3a_package}: "
    return ""


def retry_on_conflict(
    action: Callable[[], T],
    *,
    what: str,
    attempts_max: int = ATTEMPTS_MAX,
    backoff: Backoff = _BACKOFF,
    is_idempotent: bool = False,
) -> T:
    """Run an action, and retry it if another commit came first. `what` names it in the log.

    An idempotent action is also retried if its outcome is unknown.
    """
    for attempt in range(1, attempts_max):
        try:
            return action()
        except Exception as error:
            message = str(error)
            is_unknown = any(name in message for name in _UNKNOWN)
            may_retry = is_idempotent if is_unknown else any(name in message for name in _CONFLICTS)
            if not may_retry:
                raise
            _log.warning("conflict_retried", extra={"what": what, "reason": first_line(error)})
            time.sleep(backoff.jittered_s(attempt))
    return action()
