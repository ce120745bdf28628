"""Tables as Spark names and shows them: names, change tables, snapshots, properties. Owns reading them.

Spark SQL and Iceberg's metadata tables only, so that all of it also works over Spark Connect. A `table` here is a name
as SQL has it, which `TableName.sql` gives.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from lakefeed.pipeline.errors import PipelineError
from lakefeed.pipeline.spark.failures import is_unreadable_table, message_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, Row, SparkSession


# --- pipeline.tables --------------------------------------------------------------------------------------------------


_LOG = logging.getLogger(__name__)

APPEND_ONLY = "lakefeed.append-only"
PROGRESS = "lakefeed.progress"
QUARANTINE_TABLE = "lakefeed_quarantine"

# As a number: PySpark shows a moment in the zone of the machine, and does not say which.
_SNAPSHOT_COLUMNS = "snapshot_id, parent_id, unix_millis(committed_at) AS committed_ms, operation, summary"


@dataclass(frozen=True, slots=True, order=True)
class TableName:
    """A table without its catalog."""

    namespace: tuple[str, ...]
    name: str

    @classmethod
    def parse(cls, text: str, default_namespace: str = "default") -> TableName:
        """Read `sales.orders`, or `users` in the default namespace.

        Raises: ValueError.
        """
        parts = text.split(".")
        if not all(parts):
            raise ValueError(f"a table's name has no empty parts: {text!r}")
        return cls(tuple(parts[:-1]) or (default_namespace,), parts[-1])

    def sql(self, catalog: str) -> str:
        """Give the whole name, quoted for SQL."""
        return ".".join(quoted(part) for part in (catalog, *self.namespace, self.name))

    def with_name(self, name: str) -> TableName:
        """Name another table of the same namespace."""
        return TableName(self.namespace, name)

    def __str__(self) -> str:
        return ".".join((*self.namespace, self.name))


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One version of a table."""

    snapshot_id: int
    parent_id: int | None
    committed_at: datetime
    operation: str
    summary: Mapping[str, str]


def quoted(identifier: str) -> str:
    """Quote one part of a name for SQL."""
    return f"`{identifier.replace('`', '``')}`"


def catalog_of(spark: SparkSession) -> str:
    """Name the catalog that the session is attached to."""
    name: str = spark.sql("SELECT current_catalog()").collect()[0][0]
    return name


def change_tables(spark: SparkSession, catalog: str) -> list[TableName]:
    """List the change tables of a catalog, in order; the quarantine is none. What Spark cannot read is logged."""
    found = all_tables(spark, catalog)
    return [name for name, own in found.items() if is_change_table(own) and name.name != QUARANTINE_TABLE]


def all_tables(spark: SparkSession, catalog: str) -> dict[TableName, Mapping[str, str]]:
    """List all tables of a catalog, in order, with their properties; of those that Spark cannot read there are none."""
    return {name: _maybe_properties(spark, name.sql(catalog)) for name in table_names(spark, catalog)}


def table_names(spark: SparkSession, catalog: str) -> list[TableName]:
    """List the names of all tables of a catalog, in order, also of those that Spark cannot read."""
    return sorted(
        TableName(namespace, row["tableName"])
        for namespace in namespaces(spark, catalog)
        for row in spark.sql(f"SHOW TABLES IN {_sql_namespace(catalog, namespace)}").collect()
    )


def location_of(spark: SparkSession, table: str) -> str:
    """Tell where a table's files lie."""
    rows = spark.sql(f"DESCRIBE TABLE EXTENDED {table}").collect()
    location: str = next(row["data_type"] for row in reversed(rows) if row["col_name"] == "Location")
    return location


def _maybe_properties(spark: SparkSession, table: str) -> Mapping[str, str]:
    try:
        return properties(spark, table)
    except Exception as error:
        if not is_unreadable_table(error):
            raise
        _LOG.warning("table_passed_over table=%s reason=%s", table, message_of(error))
        return {}


def is_change_table(table_properties: Mapping[str, str]) -> bool:
    """Tell by its properties whether a table takes changes, and nothing but changes."""
    return table_properties.get(APPEND_ONLY, "").lower() == "true"


def namespaces(spark: SparkSession, catalog: str, parent: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """List the namespaces of a catalog, with those inside them."""
    for row in spark.sql(f"SHOW NAMESPACES IN {_sql_namespace(catalog, parent)}").collect():
        namespace = (*parent, _last_part(row["namespace"]))
        yield namespace
        yield from namespaces(spark, catalog, namespace)


def exists(spark: SparkSession, table: str) -> bool:
    """Tell whether there is such a table."""
    return bool(spark.catalog.tableExists(table))


def properties(spark: SparkSession, table: str) -> dict[str, str]:
    """Give a table's properties; Iceberg adds some of its own, such as `current-snapshot-id`."""
    return {row["key"]: row["value"] for row in spark.sql(f"SHOW TBLPROPERTIES {table}").collect()}


def snapshots(spark: SparkSession, table: str) -> list[Snapshot]:
    """Give all snapshots that a table still has, of every branch, oldest first."""
    rows = spark.sql(f"SELECT {_SNAPSHOT_COLUMNS} FROM {table}.snapshots").collect()
    return sorted(map(_snapshot, rows), key=lambda each: each.committed_at)


def current_snapshot(spark: SparkSession, table: str) -> Snapshot | None:
    """Give the newest snapshot of the main branch; None if the table has never been written to."""
    main = f"SELECT snapshot_id FROM {table}.refs WHERE name = 'main'"
    rows = spark.sql(f"SELECT {_SNAPSHOT_COLUMNS} FROM {table}.snapshots WHERE snapshot_id IN ({main})").collect()
    return _snapshot(rows[0]) if rows else None


def read_as_of(spark: SparkSession, table: str, snapshot_id: int) -> DataFrame:
    """Read a table as of a snapshot. In SQL, because Spark 4 no longer knows Iceberg's option for it."""
    return spark.sql(f"SELECT * FROM {table} VERSION AS OF {snapshot_id}")


def _snapshot(row: Row) -> Snapshot:
    return Snapshot(
        snapshot_id=row["snapshot_id"],
        parent_id=row["parent_id"],
        committed_at=datetime.fromtimestamp(row["committed_ms"] / 1000, UTC),
        operation=row["operation"],
        summary=dict(row["summary"]),
    )


def _sql_namespace(catalog: str, namespace: tuple[str, ...]) -> str:
    return ".".join(map(quoted, (catalog, *namespace)))


def _last_part(shown: str) -> str:
    """Read the last part of a namespace as Spark shows it: with backquotes where a part has a dot or other signs."""
    if shown.endswith("`"):
        return shown[shown[:-1].replace("``", "\0\0").rindex("`") + 1 : -1].replace("``", "`")
    return shown.rpartition(".")[2]


# --- pipeline.table_documents -----------------------------------------------------------------------------------------
#
# A table's metadata as Iceberg writes it, as a JSON document. Owns the way to it, through Spark's JVM.
#
# Spark SQL shows most of it, but neither field ids nor dropped columns. Spark Connect has no way to a JVM, so that what
# needs the document does not work there.


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


# --- pipeline.mirrors.sql_text ----------------------------------------------------------------------------------------
#
# Names and texts as SQL writes them. Owns their quoting.


def text_literal(text: str) -> str:
    """Write text so that it ends where it should. Spark would put a variable's value where it finds `${name}`."""
    escaped = text.replace("\\", "\\\\").replace("'", "\\'").replace("$", "\\u0024")
    return f"'{escaped}'"


def property_pairs(table_properties: Mapping[str, str]) -> str:
    """Write properties as TBLPROPERTIES has them between its brackets."""
    return ", ".join(f"{text_literal(key)} = {text_literal(value)}" for key, value in table_properties.items())


# --- pipeline.commit_properties ---------------------------------------------------------------------------------------
#
# Properties in the summary of the snapshot that a SQL statement commits. Owns the way to Iceberg's commit metadata.
#
# DataFrame writes take the option `snapshot-property.<key>` for that. SQL has no such option; Iceberg reads the
# properties from the thread that commits, so they hold for what this thread does inside the call and for nothing else.


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
