"""Table metadata and commit properties, through Spark's JVM. Neither works over Spark Connect, which has no JVM here.

Spark SQL shows most of a table, but neither field ids nor dropped columns nor the uuid. DataFrame writes take snapshot
properties as the option `snapshot-property.<key>`; SQL statements have no such option, so `commit_with_properties` sets
them on the thread that commits.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lakefeed.pipeline.errors import PipelineError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class MetadataUnavailable(PipelineError):
    """The session has no JVM: use --master or spark-submit instead of --remote."""


def has_jvm(spark: SparkSession) -> bool:
    """Return whether the session's JVM can be reached; over Spark Connect it cannot."""
    return hasattr(spark, "_jvm") and hasattr(spark, "_jsparkSession")


def load_metadata(spark: SparkSession, table: str) -> dict[str, Any]:
    """Return a table's current metadata document. `table` is its name in SQL.

    Raises: MetadataUnavailable.
    """
    if not has_jvm(spark):
        raise MetadataUnavailable(
            "table metadata cannot be read over Spark Connect, use --master or spark-submit instead of --remote:"
            f" table={table}"
        )
    loaded = _load_table(spark, table)
    parser = spark._jvm.org.apache.iceberg.TableMetadataParser  # type: ignore[union-attr]  # noqa: SLF001 - no public way
    document: dict[str, Any] = json.loads(parser.toJson(loaded.operations().current()))
    return document


def load_uuid(spark: SparkSession, table: str) -> str | None:
    """Return a table's uuid, which a table recreated under the same name does not share; None without a JVM."""
    return str(_load_table(spark, table).uuid().toString()) if has_jvm(spark) else None


def _load_table(spark: SparkSession, table: str) -> Any:
    jvm: Any = spark._jvm  # noqa: SLF001 - PySpark has no public way to its JVM
    return jvm.org.apache.iceberg.spark.Spark3Util.loadIcebergTable(spark._jsparkSession, table)  # noqa: SLF001


def current_fields(metadata: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """Return the fields of a table's current schema."""
    return fields_of(metadata, metadata["current-schema-id"])


def fields_of(metadata: Mapping[str, Any], schema_id: int) -> Sequence[Mapping[str, Any]]:
    """Return the fields of one of a table's schemas."""
    fields: Sequence[Mapping[str, Any]] = next(
        schema["fields"] for schema in metadata["schemas"] if schema["schema-id"] == schema_id
    )
    return fields


def field_ids(fields: Sequence[Mapping[str, Any]]) -> set[int]:
    """Return the ids of all fields, at any depth."""
    return {field_id for field in fields for field_id in (field["id"], *_inner_ids(field["type"]))}


def _inner_ids(type_: Any) -> set[int]:
    match type_:
        case {"type": "struct", "fields": fields}:
            return field_ids(fields)
        case {"type": "list", "element-id": element_id, "element": element}:
            return {element_id, *_inner_ids(element)}
        case {"type": "map", "key-id": key_id, "key": key, "value-id": value_id, "value": value}:
            return {key_id, value_id, *_inner_ids(key), *_inner_ids(value)}
    return set()


def commit_with_properties(spark: SparkSession, properties: Mapping[str, str], statement: str) -> None:
    """Run one SQL statement, and put properties into the summary of the snapshot that it commits."""
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
        # The statement's own error is the cause; py4j only reports that a callback has failed.
        if call.error is not None:
            raise call.error  # noqa: B904
        raise
    if call.error is not None:
        raise call.error


class _Call:
    """A java.util.concurrent.Callable. It keeps its error, which would lose its type as a Java exception."""

    def __init__(self, action: Callable[[], Any]) -> None:
        self._action = action
        self.error: BaseException | None = None

    def call(self) -> None:
        try:
            self._action()
        except BaseException as error:  # noqa: BLE001 - raised again by commit_with_properties
            self.error = error

    class Java:
        """Declare the Java interface to py4j."""

        implements = ("java.util.concurrent.Callable",)
