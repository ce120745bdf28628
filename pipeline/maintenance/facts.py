"""What a table is made of: its files by partition, manifests, snapshots, properties. Owns reading it through Spark.

Iceberg's metadata tables only: no data file is opened.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeline.consumers.registry import load_history
from pipeline.consumers.tags import History
from pipeline.maintenance.sizes import LARGE_SHARE, SMALL_SHARE, PartitionFiles, Sizes, TableFacts
from pipeline.tables import properties

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def load_facts(spark: SparkSession, table: str, *, target_file_bytes: int) -> TableFacts:
    """Read a table's facts. `table` is its name as SQL has it."""
    history = load_history(spark, table)
    wrong_sizes = _load_wrong_sizes(spark, table, target_file_bytes)
    contents = {row["content"]: row for row in spark.sql(_CONTENTS.format(table=table)).collect()}
    data = contents.get(0)
    sizes = Sizes(
        data_files=data["files"] if data else 0,
        data_bytes=data["bytes"] if data else 0,
        small_files=_count_small(spark, table, target_file_bytes),
        delete_files=sum(row["files"] for content, row in contents.items() if content),
        manifests=spark.sql(f"SELECT count(*) FROM {table}.manifests").collect()[0][0],
        snapshots=len(history.moments),
    )
    return TableFacts(
        properties=properties(spark, table),
        sizes=sizes,
        wrong_sizes=wrong_sizes,
        position_deletes=contents[1]["files"] if 1 in contents else 0,
        history=history,
        newest_write_id=_newest_write(spark, table, history),
    )


_CONTENTS = "SELECT content, count(*) AS files, sum(file_size_in_bytes) AS bytes FROM {table}.files GROUP BY content"


def _count_small(spark: SparkSession, table: str, target_file_bytes: int) -> int:
    least = int(target_file_bytes * SMALL_SHARE)
    query = f"SELECT count(*) FROM {table}.data_files WHERE file_size_in_bytes < {least}"
    count: int = spark.sql(query).collect()[0][0]
    return count


def _load_wrong_sizes(spark: SparkSession, table: str, target_file_bytes: int) -> list[PartitionFiles]:
    """Gather by partition the files that a rewrite would take up."""
    least, most = int(target_file_bytes * SMALL_SHARE), int(target_file_bytes * LARGE_SHARE)
    # A table that was never partitioned has no such column.
    is_partitioned = "partition" in spark.table(f"{table}.data_files").columns
    key = "spec_id, cast(partition AS string)" if is_partitioned else "spec_id"
    rows = spark.sql(
        f"SELECT count(*), sum(file_size_in_bytes), max(file_size_in_bytes) FROM {table}.data_files "
        f"WHERE file_size_in_bytes < {least} OR file_size_in_bytes > {most} GROUP BY {key}"
    ).collect()
    return [PartitionFiles(*row) for row in rows]


def _newest_write(spark: SparkSession, table: str, history: History) -> int | None:
    """Find the newest snapshot of main that wrote rows, and did not only put them into other files."""
    rewrites = {
        row[0] for row in spark.sql(f"SELECT snapshot_id FROM {table}.snapshots WHERE operation = 'replace'").collect()
    }
    return next((m.snapshot_id for m in history.main_chain() if m.snapshot_id not in rewrites), None)
