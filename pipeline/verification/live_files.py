"""The data files of snapshots, from Iceberg's metadata tables. Owns the queries.

A file's snapshot is the one that added it. Snapshots that a compaction has emptied are looked up in one query over all
of them, because there may be hundreds.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

PATH, SNAPSHOT, RECORDS = "path", "snapshot_id", "records"

_ADDED, _DELETED = 1, 2
_DATA = 0


@dataclass(frozen=True, slots=True)
class Held:
    """How much of a snapshot is part of the table: rows, by the manifests, and files."""

    rows: int
    files: int


def live_files(spark: SparkSession, table: str, version: int) -> DataFrame:
    """Give the data files of a version: path, snapshot and how many records the manifest says."""
    return spark.sql(
        f"SELECT data_file.file_path AS {PATH}, {SNAPSHOT}, data_file.record_count AS {RECORDS}"
        f" FROM {table}.entries VERSION AS OF {version} WHERE status <> {_DELETED} AND data_file.content = {_DATA}"
    )


def count_delete_files(spark: SparkSession, table: str, version: int) -> int:
    """Count the delete files of a version."""
    found = spark.sql(f"SELECT count(*) FROM {table}.delete_files VERSION AS OF {version}").collect()
    count: int = found[0][0]
    return count


def held_by_snapshot(files: DataFrame) -> dict[int, Held]:
    """Count what is left of each snapshot."""
    rows = files.groupBy(SNAPSHOT).agg({RECORDS: "sum", PATH: "count"}).collect()
    return {row[SNAPSHOT]: Held(row[f"sum({RECORDS})"], row[f"count({PATH})"]) for row in rows}


def find_gone(
    spark: SparkSession, table: str, *, live: DataFrame, snapshot_ids: Collection[int], rewrite_ids: Collection[int]
) -> dict[int, set[str]]:
    """Find files that snapshots have added, that are not live, and that no rewrite says it has replaced."""
    if not snapshot_ids:
        return {}
    entries = spark.sql(
        f"SELECT DISTINCT {SNAPSHOT}, status, data_file.file_path AS {PATH} FROM {table}.all_entries"
        f" WHERE data_file.content = {_DATA} AND status IN ({_ADDED}, {_DELETED})"
    )
    added = entries.where((entries["status"] == _ADDED) & entries[SNAPSHOT].isin(*snapshot_ids))
    removed = entries.where((entries["status"] == _DELETED) & entries[SNAPSHOT].isin(*(rewrite_ids or [-1])))
    gone = added.join(live.select(PATH), on=PATH, how="left_anti").join(removed.select(PATH), on=PATH, how="left_anti")
    found: dict[int, set[str]] = {}
    for row in gone.collect():
        found.setdefault(row[SNAPSHOT], set()).add(row[PATH])
    return found
