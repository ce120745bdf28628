"""Tombstones of a mirror: a table of the deletes and truncates that were merged.

The mirror has no row that could keep the position of a delete. Without tombstones a row that was read before the delete
and merged after it, or replayed from the quarantine, would come back. Each batch appends its deletes and truncates here
*before* it changes the mirror: a crash in between leaves tombstones of rows that still exist, and the batch is merged
again.

An append costs one small file. Tombstones beyond the horizon are removed from time to time. Truncates are kept, because
the last one of a source covers all its earlier rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - the usual name
from pyspark.sql.types import StructField, StructType, TimestampType

from lakefeed.contract import changes as cdc
from lakefeed.pipeline.mirrors.fold import DELETE, TRUNCATE, Truncate, latest_truncates, truncates_in
from lakefeed.pipeline.mirrors.settings import MirrorNames, MirrorSettings
from lakefeed.pipeline.mirrors.table import (
    POSITION_COLUMNS,
    Layout,
    MirrorOrigin,
    check_origin,
    create_or_alter,
    load_properties,
    retention_properties,
)
from lakefeed.pipeline.spark.tables import quoted, text_literal

_DELETED_AT = "_cdc_deleted_at"
# A rewrite is worth it above this number of files beyond one per day.
_FILES_MAX = 64


class Tombstones:
    """The tombstones of one mirror. `truncates` has the last known one of each source."""

    def __init__(
        self, names: MirrorNames, layout: Layout, *, settings: MirrorSettings, origin: MirrorOrigin | None = None
    ) -> None:
        self._table = names.tombstones_sql
        self._name = str(names.tombstones)
        self._origin = origin or MirrorOrigin(str(names.table), None)
        self._settings = settings
        self._layout = layout
        self._columns = tuple(dict.fromkeys((*layout.key, *POSITION_COLUMNS)))
        self._is_empty = True
        self.truncates: tuple[Truncate, ...] = ()

    def load(self, spark: SparkSession) -> None:
        """Create the table or alter it to the present key columns, and load its truncates."""
        present = load_properties(spark, self._table)
        if present is not None:
            check_origin(present, self._origin, name=self._name)
        fields = [self._layout.schema[name] for name in self._columns]
        create_or_alter(
            spark,
            self._table,
            StructType([*fields, StructField(_DELETED_AT, TimestampType())]),
            partition=f"days({_DELETED_AT})",
            wanted={"format-version": "2", **retention_properties(self._settings), **self._origin.to_properties()},
            present=present,
        )
        self.truncates = latest_truncates(truncates_in(spark.table(self._table)))
        self._is_empty = not spark.table(self._table).limit(1).collect()

    def deletes(self, spark: SparkSession) -> DataFrame | None:
        """Return the tombstones of single rows; None if there are none."""
        return None if self._is_empty else spark.table(self._table).where(f"{cdc.OPERATION} = '{DELETE}'")

    def add(self, deletes: DataFrame, truncates: Sequence[Truncate], *, now: float) -> None:
        """Append the deletes of a batch and its truncates."""
        deleted_at = datetime.fromtimestamp(now, UTC).isoformat()
        rows = deletes.select(*(F.col(quoted(name)) for name in self._columns))
        kinds = {name: self._layout.schema[name].dataType.simpleString() for name in self._columns}
        for each in truncates:
            values = {
                cdc.SOURCE: text_literal(each.source),
                cdc.EPOCH: str(each.epoch),
                cdc.SEQUENCE: str(each.sequence),
                cdc.TIMESTAMP: "NULL" if each.time is None else text_literal(each.time),
                cdc.OPERATION: text_literal(TRUNCATE),
            }
            cells = (f"CAST({values.get(name, 'NULL')} AS {kind}) AS {quoted(name)}" for name, kind in kinds.items())
            rows = rows.unionByName(deletes.sparkSession.sql(f"SELECT {', '.join(cells)}"))
        rows.withColumn(_DELETED_AT, F.lit(deleted_at).cast("timestamp")).writeTo(self._table).append()
        self._is_empty = False
        self.truncates = latest_truncates((*self.truncates, *truncates))

    def purge(self, spark: SparkSession, *, now: float) -> None:
        """Remove tombstones beyond the horizon once a whole day or many files are worth it, and compact many files."""
        if self._is_empty:
            return
        until = datetime.fromtimestamp(now, UTC) - timedelta(seconds=self._settings.tombstone_horizon_s)
        # Whole days, because files are partitioned by day: those of the horizon's own day would be rewritten each time.
        # Their number alone is not enough, because maintenance may have compacted them.
        old_days = f"count_if(partition.{_DELETED_AT}_day < DATE '{until.date()}')"
        joinable = "count(*) - count(DISTINCT partition)"
        found = spark.sql(f"SELECT {joinable} > {_FILES_MAX}, {old_days} > 0 FROM {self._table}.files").collect()[0]
        has_many_files, has_old_days = found
        if has_old_days and not has_many_files:
            # Days beyond the horizon may have nothing but truncates, which stay.
            first_kept = until.replace(hour=0, minute=0, second=0, microsecond=0)
            deletes = spark.sql(f"SELECT 1 FROM {self._table} WHERE {_deleted_before(first_kept)} LIMIT 1")
            has_old_days = bool(deletes.collect())
        if has_many_files or has_old_days:
            spark.sql(f"DELETE FROM {self._table} WHERE {_deleted_before(until)}")
        if has_many_files:
            catalog, _, name = self._table.partition(".")
            spark.sql(f"CALL {catalog}.system.rewrite_data_files(table => {text_literal(name)})")


def _deleted_before(until: datetime) -> str:
    """Return the condition that a row is a delete from before a time."""
    return f"{cdc.OPERATION} = '{DELETE}' AND {_DELETED_AT} < CAST('{until.isoformat()}' AS timestamp)"
