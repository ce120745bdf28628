"""Tables as Spark names and shows them: names, change tables, snapshots, properties. Owns reading them.

Spark SQL and Iceberg's metadata tables only, so that all of it also works over Spark Connect. A `table` here is a name
as SQL has it, which `TableName.sql` gives.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from pipeline.spark_errors import is_unreadable_table, message_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, Row, SparkSession

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
