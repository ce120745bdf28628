from __future__ import annotations

import pytest

from lakefeed.pipeline.spark.failures import is_spark_error, is_unreadable_table, message_of
from lakefeed.pipeline.spark.runtime import S3_INSTALL_HINT


class SparkError(Exception):
    __module__ = "pyspark.errors.exceptions"


class UnsupportedOperationException(SparkError):
    __module__ = "pyspark.errors.exceptions"


class JavaError(Exception):
    __module__ = "py4j.protocol"

    def __init__(self, text: str, *, jvm_is_gone: bool = False) -> None:
        super().__init__(text)
        self._jvm_is_gone = jvm_is_gone

    def __str__(self) -> str:
        if self._jvm_is_gone:
            raise ConnectionRefusedError
        return super().__str__()


def test_sparks_errors_are_told_by_where_they_were_made():
    assert is_spark_error(SparkError())
    assert is_spark_error(JavaError("x"))
    assert not is_spark_error(ValueError())


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (UnsupportedOperationException("Spark does not support time fields"), True),
        (SparkError("[TABLE_OR_VIEW_NOT_FOUND] gone"), True),
        (SparkError("Connection refused"), False),
        (ValueError("TABLE_OR_VIEW_NOT_FOUND"), False),
    ],
)
def test_only_tables_that_spark_cannot_have_are_passed_over(error, expected):
    assert is_unreadable_table(error) is expected


def test_message_is_what_spark_says_without_the_java_frames():
    error = JavaError("java.lang.Error: no\n\tat a.b.C(C.java:1)\nCaused by: yes\n\t... 3 more\n")

    assert message_of(error) == "java.lang.Error: no\nCaused by: yes"


def test_message_of_a_jvm_that_is_gone_is_at_least_the_kind():
    assert message_of(JavaError("x", jvm_is_gone=True)) == "JavaError"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Failed to get file system for path: s3://b/t", S3_INSTALL_HINT),
        (
            "ClassNotFoundException: Class org.apache.hadoop.fs.s3a.S3AFileSystem not found",
            "org.apache.hadoop:hadoop-aws:",
        ),
    ],
)
def test_missing_jars_for_s3_are_named_with_what_to_do(text, words):
    message = message_of(JavaError(text))

    assert words in message
    assert message.endswith(text)
