"""Spark's errors, told apart without importing Spark. Owns what they mean to us and which of their words are shown."""

from __future__ import annotations

from pipeline.errors import SparkUnavailable
from pipeline.runtime import S3_INSTALL_HINT
from pipeline.spark_versions import SPARK_3_5, SparkVersion, installed_version

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
