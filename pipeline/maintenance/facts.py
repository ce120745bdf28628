"""What a table is made of: its files by partition, manifests, snapshots, properties. Owns reading it through Spark.

Iceberg's metadata tables only: no data file is opened.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeline.consumers.registry import load_history
from pipeline.maintenance.sizes import LARGE_SHARE, SMALL_SHARE, PartitionFiles, Sizes, TableFacts
from pipeline.tables import properties

if TYPE_CHECKING:
    from pyspark.sql import Row, SparkSession

_DATA = 0
_POSITION_DELETES = 1


def load_facts(spark: SparkSession, table: str, *, target_file_bytes: int) -> TableFacts:
    """Read a table's facts. `table` is its name as SQL has it."""
    history = load_history(spark, table)
    partitions = _load_partitions(spark, table, target_file_bytes)
    data = [row for row in partitions if row["content"] == _DATA]
    sizes = Sizes(
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
    """Count the files of each partition: all, the small ones, and those that a rewrite would take up."""
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
