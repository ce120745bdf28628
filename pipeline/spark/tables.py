"""Tables by Spark SQL: names, properties, snapshots and their ancestry.

Only SQL and Iceberg's metadata tables are used, so that everything here also works over Spark Connect. A parameter
`table` is a name in SQL, as `TableIdentifier.sql` returns it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from lakefeed.pipeline.spark.failures import first_line, is_unreadable_table
from lakefeed.pipeline.spark.sql import property_pairs, quoted, text_literal
from lakefeed.settings import SettingsError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, Row, SparkSession


_log = logging.getLogger(__name__)

APPEND_ONLY = "lakefeed.append-only"
PROGRESS = "lakefeed.progress"
QUARANTINE_TABLE = "lakefeed_quarantine"


@dataclass(frozen=True, slots=True, order=True)
class TableIdentifier:
    """A table's namespace and name, without its catalog."""

    namespace: tuple[str, ...]
    name: str

    @classmethod
    def parse(cls, text: str, default_namespace: str = "default") -> TableIdentifier:
        """Read `sales.orders`, or `users` in the default namespace.

        Raises: SettingsError.
        """
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

    @property
    def committed_at(self) -> datetime:
        """Return the time of the commit, in UTC."""
        return datetime.fromtimestamp(self.committed_ms / 1000, UTC)


def catalog_of(spark: SparkSession) -> str:
    """Return the name of the session's current catalog."""
    name: str = spark.sql("SELECT current_catalog()").collect()[0][0]
    return name


# -- which tables exist


def change_tables(spark: SparkSession, catalog: str) -> list[TableIdentifier]:
    """List the change tables of a catalog, sorted, without the quarantine. Tables that Spark cannot read are logged."""
    found = all_tables(spark, catalog)
    return [name for name, own in found.items() if is_change_table(own) and name.name != QUARANTINE_TABLE]


def all_tables(spark: SparkSession, catalog: str) -> dict[TableIdentifier, Mapping[str, str]]:
    """List all tables of a catalog, sorted, with their properties; empty for tables that Spark cannot read."""
    return {name: _readable_properties(spark, name.sql(catalog)) for name in table_names(spark, catalog)}


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


def _readable_properties(spark: SparkSession, table: str) -> Mapping[str, str]:
    try:
        return properties(spark, table)
    except Exception as error:
        if not is_unreadable_table(error):
            raise
        _log.warning("table_skipped", extra={"table": table, "reason": first_line(error)})
        return {}


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


def current_snapshot(spark: SparkSession, table: str) -> Snapshot | None:
    """Return the newest snapshot of the main branch; None if the table has never been written to."""
    rows = _snapshot_rows(spark, table, "s.summary", condition="r.name IS NOT NULL")
    return _snapshot(rows[0]) if rows else None


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


def _snapshot_rows(spark: SparkSession, table: str, summary: str, *, condition: str = "true") -> list[Row]:
    # Times as numbers: PySpark returns timestamps in the driver's zone, where an hour may occur twice.
    return spark.sql(
        f"SELECT s.snapshot_id, s.parent_id, unix_millis(s.committed_at) AS committed_ms, s.operation,"
        f" {summary} AS summary, r.name IS NOT NULL AS is_main FROM {table}.snapshots s"
        f" LEFT JOIN {table}.refs r ON r.snapshot_id = s.snapshot_id AND r.name = 'main' WHERE {condition}"
    ).collect()


def _snapshot(row: Row) -> Snapshot:
    return Snapshot(row["snapshot_id"], row["parent_id"], row["committed_ms"], row["operation"], dict(row["summary"]))
