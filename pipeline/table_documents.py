"""A table's metadata as Iceberg writes it, as a JSON document. Owns the way to it, through Spark's JVM.

Spark SQL shows most of it, but neither field ids nor dropped columns. Spark Connect has no way to a JVM, so that what
needs the document does not work there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pipeline.errors import PipelineError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class NoDocument(PipelineError):
    """The session has no JVM that can be asked: use --master or spark-submit in place of --remote."""


def has_jvm(spark: SparkSession) -> bool:
    """Tell whether the session's JVM can be reached from here: over Spark Connect it cannot."""
    return hasattr(spark, "_jvm") and hasattr(spark, "_jsparkSession")


def load_document(spark: SparkSession, table: str) -> dict[str, Any]:
    """Load a table, by its name in SQL, and give its current metadata.

    Raises: NoDocument.
    """
    if not has_jvm(spark):
        raise NoDocument(
            "field ids cannot be seen over Spark Connect, use --master or spark-submit in place of --remote"
        )
    jvm: Any = spark._jvm  # noqa: SLF001 - PySpark has no public way to its JVM
    iceberg = jvm.org.apache.iceberg
    loaded = iceberg.spark.Spark3Util.loadIcebergTable(spark._jsparkSession, table)  # noqa: SLF001
    document: dict[str, Any] = json.loads(iceberg.TableMetadataParser.toJson(loaded.operations().current()))
    return document


def load_uuid(spark: SparkSession, table: str) -> str | None:
    """Give a table's uuid, which a table that was made anew under its name does not have; None without a JVM."""
    if not has_jvm(spark):
        return None
    jvm: Any = spark._jvm  # noqa: SLF001 - as above
    loaded = jvm.org.apache.iceberg.spark.Spark3Util.loadIcebergTable(spark._jsparkSession, table)  # noqa: SLF001
    return str(loaded.uuid().toString())


def current_fields(document: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """Give the columns of a table's current schema."""
    return fields_of(document, document["current-schema-id"])


def fields_of(document: Mapping[str, Any], schema_id: int) -> Sequence[Mapping[str, Any]]:
    """Give the columns of one of a table's schemas."""
    fields: Sequence[Mapping[str, Any]] = next(
        schema["fields"] for schema in document["schemas"] if schema["schema-id"] == schema_id
    )
    return fields


def field_ids(fields: Sequence[Mapping[str, Any]]) -> set[int]:
    """Give the ids of all fields, at any depth."""
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
