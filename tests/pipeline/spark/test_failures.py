from __future__ import annotations

import pytest
from py4j.protocol import Py4JError
from pyspark.errors import PySparkException, UnsupportedOperationException

from lakefeed.pipeline.spark.failures import is_unreadable_table, message_of, spark_errors
from lakefeed.pipeline.spark.runtime import S3_INSTALL_HINT


class JavaError(Py4JError):
    def __init__(self, text: str, *, jvm_is_gone: bool = False) -> None:
        super().__init__(text)
        self._jvm_is_gone = jvm_is_gone

    def __str__(self) -> str:
        if self._jvm_is_gone:
            raise ConnectionRefusedError
        return super().__str__()


def test_sparks_errors_are_those_of_pyspark_and_py4j():
    assert isinstance(PySparkException("x"), spark_errors())
    assert isinstance(JavaError("x"), spark_errors())
    assert not isinstance(ValueError(), spark_errors())


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (UnsupportedOperationException("Spark does not support time fields"), True),
        (PySparkException("[TABLE_OR_VIEW_NOT_FOUND] gone"), True),
        (PySparkException("Connection refused"), False),
        (ValueError("TABLE_OR_VIEW_NOT_FOUND"), False),
    ],
)
def test_only_tables_that_spark_cannot_read_are_skipped(error, expected):
    assert is_unreadable_table(error) is expected


def test_message_is_sparks_without_the_java_frames():
    error = JavaError("java.lang.Error: no\n\tat a.b.C(C.java:1)\nCaused by: yes\n\t... 3 more\n")

    assert message_of(error) == "java.lang.Error: no\nCaused by: yes"


def test_message_of_an_error_whose_jvm_is_gone_is_its_class():
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
