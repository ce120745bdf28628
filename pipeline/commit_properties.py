"""Properties in the summary of the snapshot that a SQL statement commits. Owns the way to Iceberg's commit metadata.

DataFrame writes take the option `snapshot-property.<key>` for that. SQL has no such option; Iceberg reads the
properties from the thread that commits, so they hold for what this thread does inside the call and for nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def commit_with_properties(spark: SparkSession, properties: Mapping[str, str], statement: str) -> None:
    """Run one SQL statement; the snapshot that it commits carries the properties. Not possible over Spark Connect."""
    from py4j.java_gateway import java_import  # noqa: PLC0415 - optional, as all of Spark
    from pyspark.java_gateway import ensure_callback_server_started  # noqa: PLC0415

    context = spark.sparkContext
    ensure_callback_server_started(context._gateway)  # type: ignore[no-untyped-call]  # noqa: SLF001 - no public way
    jvm: Any = context._jvm  # noqa: SLF001
    java_import(jvm, "org.apache.iceberg.spark.CommitMetadata")
    java_properties = jvm.java.util.HashMap()
    for key, value in properties.items():
        java_properties.put(key, value)
    call = _Call(lambda: spark.sql(statement).collect())
    try:
        jvm.CommitMetadata.withCommitProperties(java_properties, call, jvm.java.lang.RuntimeException("").getClass())
    except Exception:
        # What the statement raised here is the error; py4j's view of it says only that a callback has failed.
        if call.error is not None:
            raise call.error  # noqa: B904
        raise
    if call.error is not None:
        raise call.error


class _Call:
    """A java.util.concurrent.Callable. Keeps its error: as a Java exception it would lose what it was."""

    def __init__(self, action: Callable[[], Any]) -> None:
        self._action = action
        self.error: BaseException | None = None

    def call(self) -> None:
        try:
            self._action()
        except BaseException as error:  # noqa: BLE001 - raised again where it was called
            self.error = error

    class Java:
        """What py4j needs to know of it."""

        implements = ("java.util.concurrent.Callable",)
