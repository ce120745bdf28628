"""Tables through Spark: SQL text, names, properties, snapshots, metadata documents, properties of a commit.

Functions that take a session use SQL and Iceberg's metadata tables, so that they also work over Spark Connect; only
the last part, metadata and commit properties, needs Spark's JVM. A parameter `table` is a name in SQL, as
`TableIdentifier.sql` returns it.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lakefeed.contract.properties import TABLE as QUARANTINE
from lakefeed.pipeline.errors import PipelineError
from lakefeed.pipeline.spark.failures import first_line, is_unreadable_table
from lakefeed.settings import SettingsError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, Row, SparkSession
    from pyspark.sql.types import DataType


_log = logging.getLogger(__name__)

APPEND_ONLY = "lakefeed.append-only"


# -- SQL text: the only place of the pipeline that quotes


def quoted(identifier: str) -> str:
    """Quote one part of a name."""
    return f"`{identifier.replace('`', '``')}`"


def text_literal(text: str) -> str:
    """Write a text as a literal. Spark would replace `${name}` by a variable's value, so `$` is escaped too."""
    escaped = text.replace("\\", "\\\\").replace("'", "\\'").replace("$", "\\u0024")
    return f"'{escaped}'"


def property_pairs(table_properties: Mapping[str, str]) -> str:
    """Write properties as TBLPROPERTIES takes them between its brackets."""
    return ", ".join(f"{text_literal(key)} = {text_literal(value)}" for key, value in table_properties.items())


def type_sql(type_: DataType) -> str:
    """Write a type, with the names inside it quoted."""
    from pyspark.sql import types  # noqa: PLC0415 - optional and slow to import, as all of Spark

    match type_:
        case types.ArrayType():
            return f"ARRAY<{type_sql(type_.elementType)}>"
        case types.MapType():
            return f"MAP<{type_sql(type_.keyType)}, {type_sql(type_.valueType)}>"
        case types.StructType():
            return f"STRUCT<{', '.join(f'{quoted(each.name)}: {type_sql(each.dataType)}' for each in type_.fields)}>"
    return type_.simpleString()


# -- names


@dataclass(frozen=True, slots=True, order=True)
class TableIdentifier:
    """A table's namespace and name, without its catalog."""

    namespace: tuple[str, ...]
    name: str

    @classmethod
    def parse(cls, text: str, default_namespace: str = "default") -> TableIdentifier:
        """Read `sales.orders`, or `users` in the default namespace. Raise SettingsError for other texts."""
        parts = text.split(".")
        if not all(parts):
            raise SettingsError(f"a table name must not have empty parts: {text!r}")
        return cls(tuple(parts[:-1]) or (default_namespace,), parts[-1])

    def sql(self, catalog: str) -> str:
        """Return the full name, quoted for SQL."""
        return ".".join(quoted(part) for part in (catalog, *self.namespace, self.name))

    def with_name(self, name: str) -> TableIdentifier:
        """Return the identifier of another table in the same namespace."""
        return TableIdentifier(self.namespace, name)

    def __str__(self) -> str:
        return ".".join((*self.namespace, self.name))


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One snapshot of a table, with the part of its summary that was asked for."""

    snapshot_id: int
    parent_id: int | None
    committed_ms: int
    operation: str
    summary: Mapping[str, str]


def catalog_of(spark: SparkSession) -> str:
    """Return the name of the session's current catalog."""
    name: str = spark.sql("SELECT current_catalog()").collect()[0][0]
    return name


# -- which tables exist


def change_tables(spark: SparkSession, catalog: str) -> list[TableIdentifier]:
    """List the change tables of a catalog, sorted, without the quarantine. Tables that Spark cannot read are logged."""
    found = all_tables(spark, catalog)
    return [name for name, own in found.items() if is_change_table(own) and name.name != QUARANTINE]


def all_tables(spark: SparkSession, catalog: str) -> dict[TableIdentifier, Mapping[str, str]]:
    """List all tables of a catalog, sorted, with their properties; empty for tables that Spark cannot read."""
    found: dict[TableIdentifier, Mapping[str, str]] = {}
    for name in table_names(spark, catalog):
        try:
            found[name] = properties(spark, name.sql(catalog))
        except Exception as error:
            if not is_unreadable_table(error):
                raise
            _log.warning("table_skipped", extra={"table": name.sql(catalog), "reason": first_line(error)})
            found[name] = {}
    return found


def table_names(spark: SparkSession, catalog: str) -> list[TableIdentifier]:
    """List the names of all tables of a catalog, sorted, including those that Spark cannot read."""
    return sorted(
        TableIdentifier(namespace, row["tableName"])
        for namespace in namespaces(spark, catalog)
        for row in spark.sql(f"SHOW TABLES IN {_namespace_sql(catalog, namespace)}").collect()
    )


def namespaces(spark: SparkSession, catalog: str, parent: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """List the namespaces of a catalog, at any depth."""
    for row in spark.sql(f"SHOW NAMESPACES IN {_namespace_sql(catalog, parent)}").collect():
        namespace = (*parent, _last_part(row["namespace"]))
        yield namespace
        yield from namespaces(spark, catalog, namespace)


def _namespace_sql(catalog: str, namespace: tuple[str, ...]) -> str:
    return ".".join(map(quoted, (catalog, *namespace)))


def _last_part(shown: str) -> str:
    """Return the last part of a namespace. Spark puts backquotes around parts with dots or other special characters."""
    if shown.endswith("`"):
        return shown[shown[:-1].replace("``", "\0\0").rindex("`") + 1 : -1].replace("``", "`")
    return shown.rpartition(".")[2]


# -- one table


def is_change_table(table_properties: Mapping[str, str]) -> bool:
    """Return whether a table's properties declare it as append-only, which only change tables are."""
    return table_properties.get(APPEND_ONLY, "").lower() == "true"


def exists(spark: SparkSession, table: str) -> bool:
    """Return whether the table exists."""
    return bool(spark.catalog.tableExists(table))


def properties(spark: SparkSession, table: str) -> dict[str, str]:
    """Return a table's properties, with those that Iceberg adds, such as `current-snapshot-id`."""
    return {row["key"]: row["value"] for row in spark.sql(f"SHOW TBLPROPERTIES {table}").collect()}


def set_properties(spark: SparkSession, table: str, changed: Mapping[str, str]) -> None:
    """Set properties of a table; none is no commit."""
    if changed:
        spark.sql(f"ALTER TABLE {table} SET TBLPROPERTIES ({property_pairs(changed)})")


def location_of(spark: SparkSession, table: str) -> str:
    """Return the location of a table's files."""
    rows = spark.sql(f"DESCRIBE TABLE EXTENDED {table}").collect()
    location: str = next(row["data_type"] for row in reversed(rows) if row["col_name"] == "Location")
    return location


def read_as_of(spark: SparkSession, table: str, snapshot_id: int) -> DataFrame:
    """Read a table as of a snapshot. By SQL, because Spark 4 has dropped Iceberg's read option."""
    return spark.sql(f"SELECT * FROM {table} VERSION AS OF {snapshot_id}")


# -- snapshots


def snapshots(spark: SparkSession, table: str) -> list[Snapshot]:
    """Return all snapshots that a table still has, of every branch, oldest first."""
    found = [_snapshot(row) for row in _snapshot_rows(spark, table, "s.summary")]
    return sorted(found, key=lambda each: each.committed_ms)


def current_snapshot_id(table_properties: Mapping[str, str]) -> int | None:
    """Return the newest snapshot of the main branch, which Iceberg lists as a property; None if there is none."""
    text = table_properties.get("current-snapshot-id", "none")
    return None if text == "none" else int(text)


def lineage(spark: SparkSession, table: str, *, summary_keys: Sequence[str] | None = None) -> list[Snapshot]:
    """Return the snapshots of the main branch, newest first, back to the oldest that has not expired.

    `summary_keys` limits what is read of the summaries: tables without maintenance have thousands of snapshots.
    """
    summary = "s.summary"
    if summary_keys is not None:
        keys = ", ".join(map(text_literal, summary_keys))
        summary = f"map_filter(s.summary, (key, value) -> key IN ({keys}))"
    rows = _snapshot_rows(spark, table, summary)
    newest = next((row["snapshot_id"] for row in rows if row["is_main"]), None)
    return ancestors(map(_snapshot, rows), newest)


def ancestors(snapshots_: Iterable[Snapshot], newest_id: int | None) -> list[Snapshot]:
    """Follow snapshots from the newest to its parents, until one has expired."""
    by_id = {snapshot.snapshot_id: snapshot for snapshot in snapshots_}
    found = []
    while newest_id is not None and (snapshot := by_id.pop(newest_id, None)) is not None:
        found.append(snapshot)
        newest_id = snapshot.parent_id
    return found


def _snapshot_rows(spark: SparkSession, table: str, summary: str) -> list[Row]:
    # Times as numbers: PySpark returns timestamps in the driver's zone, where an hour may occur twice.
    return spark.sql(
        f"SELECT s.snapshot_id, s.parent_id, unix_millis(s.committed_at) AS committed_ms, s.operation,"
        f" {summary} AS summary, r.name IS NOT NULL AS is_main FROM {table}.snapshots s"
        f" LEFT JOIN {table}.refs r ON r.snapshot_id = s.snapshot_id AND r.name = 'main'"
    ).collect()


def _snapshot(row: Row) -> Snapshot:
    return Snapshot(row["snapshot_id"], row["parent_id"], row["committed_ms"], row["operation"], dict(row["summary"]))


# -- table metadata and commit properties, through the JVM


class MetadataUnavailable(PipelineError):
    """The session has no JVM: use --master or spark-submit instead of --remote."""


def has_jvm(spark: SparkSession) -> bool:
    """Return whether the session's JVM can be reached; over Spark Connect it cannot."""
    return hasattr(spark, "_jvm") and hasattr(spark, "_jsparkSession")


def load_metadata(spark: SparkSession, table: str) -> dict[str, Any]:
    """Return a table's current metadata document. Raise MetadataUnavailable without a JVM."""
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


def fields_of(metadata: Mapping[str, Any], schema_id: int | None = None) -> Sequence[Mapping[str, Any]]:
    """Return the fields of one of a table's schemas; of its current one without an id."""
    wanted = metadata["current-schema-id"] if schema_id is None else schema_id
    fields: Sequence[Mapping[str, Any]] = next(
        schema["fields"] for schema in metadata["schemas"] if schema["schema-id"] == wanted
    )
    return fields


def names_by_id(fields: Sequence[Mapping[str, Any]]) -> dict[int, str]:
    """Return the names of all fields by their ids, at any depth."""
    names, pending = {}, list(fields)
    while pending:
        field = pending.pop()
        names[field["id"]] = field["name"]
        pending += inner_fields(field["type"])
    return names


def inner_fields(type_: Any) -> Sequence[Mapping[str, Any]]:
    """Return the fields inside a type. The parts of lists and maps are named as the type's keys name them."""
    match type_:
        case {"type": "struct", "fields": fields}:
            return list(fields)
        case {"type": "list", "element-id": element_id, "element": element}:
            return [{"id": element_id, "name": "element", "type": element}]
        case {"type": "map", "key-id": key_id, "key": key, "value-id": value_id, "value": value}:
            parts = (key_id, "key", key), (value_id, "value", value)
            return [{"id": part_id, "name": name, "type": each} for part_id, name, each in parts]
    return ()


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
