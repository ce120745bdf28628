"""A table in numbers: files by partition, manifests, snapshots. Reads metadata tables only and opens no data file."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lakefeed.contract.consumers import History
from lakefeed.pipeline.consumers.registry import load_history
from lakefeed.pipeline.spark.tables import properties

if TYPE_CHECKING:
    from pyspark.sql import Row, SparkSession


# The shares of Iceberg's own planner: a file between them, relative to the target size, is neither small nor large.
SMALL_SHARE = 0.75
LARGE_SHARE = 1.8

# Values of the column `content`.
_DATA = 0
_POSITION_DELETES = 1


@dataclass(frozen=True, slots=True)
class PartitionFiles:
    """The data files of one partition that are too small or too large."""

    count: int
    bytes: int
    largest_bytes: int


@dataclass(frozen=True, slots=True)
class TableSizes:
    """A table's counts, for the report before and after."""

    data_files: int
    data_bytes: int
    small_files: int
    delete_files: int
    manifests: int
    snapshots: int

    def to_json(self) -> dict[str, int]:
        """Return the counts by name."""
        return dataclasses.asdict(self)


@dataclass(frozen=True, slots=True)
class TableFacts:
    """Everything that a plan needs to know about a table."""

    properties: Mapping[str, str]
    sizes: TableSizes
    wrong_sizes: Sequence[PartitionFiles]
    position_deletes: int
    history: History


def load_facts(spark: SparkSession, table: str, *, target_file_bytes: int) -> TableFacts:
    """Load a table's facts. `table` is its name in SQL."""
    history = load_history(spark, table)
    partitions = _load_partitions(spark, table, target_file_bytes)
    data = [row for row in partitions if row["content"] == _DATA]
    sizes = TableSizes(
        data_files=sum(row["files"] for row in data),
        data_bytes=sum(row["bytes"] for row in data),
        small_files=sum(row["small_files"] for row in data),
        delete_files=sum(row["files"] for row in partitions if row["content"] != _DATA),
        manifests=spark.sql(f"SELECT count(*) FROM {table}.manifests").collect()[0][0],
        snapshots=len(history.moments),
    )
    return TableFacts(
        properties=properties(spark, table),
        sizes=sizes,
        wrong_sizes=[
            PartitionFiles(row["wrong_files"], row["wrong_bytes"], row["wrong_largest"])
            for row in data
            if row["wrong_files"]
        ],
        position_deletes=sum(row["files"] for row in partitions if row["content"] == _POSITION_DELETES),
        history=history,
    )


def _load_partitions(spark: SparkSession, table: str, target_file_bytes: int) -> list[Row]:
    """Count the files of each partition: all, the small ones, and those that a rewrite would take."""
    least, most = int(target_file_bytes * SMALL_SHARE), int(target_file_bytes * LARGE_SHARE)
    # A table that was never partitioned has no such column.
    is_partitioned = "partition" in spark.table(f"{table}.files").columns
    key = "content, spec_id, cast(partition AS string)" if is_partitioned else "content, spec_id"
    size, is_wrong = "file_size_in_bytes", f"(file_size_in_bytes < {least} OR file_size_in_bytes > {most})"
    return spark.sql(
        f"SELECT content, count(*) AS files, sum({size}) AS bytes, count_if({size} < {least}) AS small_files, "
        f"count_if({is_wrong}) AS wrong_files, sum(if({is_wrong}, {size}, 0)) AS wrong_bytes, "
        f"max(if({is_wrong}, {size}, 0)) AS wrong_largest FROM {table}.files GROUP BY {key}"
    ).collect()
