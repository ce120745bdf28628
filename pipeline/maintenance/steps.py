"""A table in numbers, and Iceberg's procedures: their SQL, their runs and retries, and what they report.

A rewrite that conflicts with another commit is rejected as a whole and changes nothing: Iceberg retries the commit a
few times, then the step runs again. A commit with an unknown outcome is not retried, because it could happen twice; the
next run plans on what it finds.

Tables are names in SQL with the catalog first: `lake`.`sales`.`orders`. Timestamps carry their zone, because Spark
would read them in the session's own.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from lakefeed.pipeline.consumers.registry import load_history
from lakefeed.pipeline.maintenance.plan import (
    LARGE_SHARE,
    SMALL_SHARE,
    MaintenanceSettings,
    PartitionFiles,
    Step,
    TableFacts,
    TablePlan,
    TableSizes,
    plan_table,
)
from lakefeed.pipeline.spark.failures import first_line, retry_on_conflict
from lakefeed.pipeline.spark.tables import properties, text_literal

if TYPE_CHECKING:
    from pyspark.sql import Row, SparkSession


_log = logging.getLogger(__name__)

SORT_ORDER = "sort-order"

# Values of the column `content`.
_DATA = 0
_POSITION_DELETES = 1

# A larger rewrite is committed in parts, so that a failure does not lose all of it.
PARTS_FROM_BYTES = 8 << 30
PARTS_MAX = 10

# Columns of a procedure's result that are reported, and their names in the report.
_REPORTED: Mapping[Step, Mapping[str, str]] = {
    Step.COMPACT: {
        "rewritten_data_files_count": "files_rewritten",
        "added_data_files_count": "files_added",
        "rewritten_bytes_count": "bytes_rewritten",
        "failed_data_files_count": "files_failed",
        "removed_delete_files_count": "delete_files_removed",
    },
    Step.DELETES: {
        "rewritten_delete_files_count": "files_rewritten",
        "added_delete_files_count": "files_added",
        "rewritten_bytes_count": "bytes_rewritten",
    },
    Step.MANIFESTS: {"rewritten_manifests_count": "manifests_rewritten", "added_manifests_count": "manifests_added"},
    Step.EXPIRE: {
        "deleted_data_files_count": "data_files_deleted",
        "deleted_position_delete_files_count": "delete_files_deleted",
        "deleted_manifest_files_count": "manifests_deleted",
        "deleted_manifest_lists_count": "manifest_lists_deleted",
    },
}

_EXPIRY_ONLY = MaintenanceSettings(run=(Step.EXPIRE,))


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step did: its counts, or the problem that stopped it."""

    step: Step
    seconds: float = 0.0
    counts: Mapping[str, Any] = field(default_factory=dict)
    problem: str | None = None


# -- facts: from metadata tables only, no data file is opened


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


# -- one step of a run


def run_step(
    spark: SparkSession,
    table: str,
    step: Step,
    *,
    plan: TablePlan,
    facts: TableFacts,
    settings: MaintenanceSettings,
    location: str,
    is_dry_run: bool = False,
) -> StepResult:
    """Run one step of the plan. A failure is part of the result, so that other steps and tables go on."""
    match step:
        case Step.COMPACT:
            assert plan.compaction is not None
            statement = rewrite_data_files(table, settings, facts, rewrite_bytes=plan.compaction.bytes)
        case Step.DELETES:
            statement = rewrite_position_delete_files(table, settings)
        case Step.MANIFESTS:
            statement = rewrite_manifests(table)
        case Step.EXPIRE:
            assert plan.expiry is not None
            statement = expire_snapshots(table, older_than_ms=plan.expiry.older_than_ms)
        case Step.ORPHANS:
            assert plan.orphans_before_ms is not None
            before_ms = plan.orphans_before_ms
            statement = remove_orphan_files(table, older_than_ms=before_ms, location=location, is_dry_run=is_dry_run)
    started = time.monotonic()
    try:
        rows = retry_on_conflict(lambda: spark.sql(statement).collect(), what=f"{step.value} {table}")
    except Exception as error:  # noqa: BLE001 - a step's boundary
        problem = first_line(error)
        _log.error("maintenance_failed", extra={"table": table, "step": step.value, "reason": problem})
        return StepResult(step, time.monotonic() - started, problem=problem)
    return StepResult(step, time.monotonic() - started, _counts(step, rows))


def _counts(step: Step, rows: list[Row]) -> dict[str, Any]:
    if step is Step.ORPHANS:
        return {"orphans": len(rows)}
    result = rows[0].asDict()
    return {name: result[column] for column, name in _REPORTED[step].items() if column in result}


# -- for jobs that own a table and maintain it between their own writes


def expire(spark: SparkSession, table: str, *, clock: Callable[[], float] = time.time) -> int:
    """Remove a table's snapshots beyond its own limits, with the files that only they use, and return their number.

    `table` is its name in SQL. As with `lakefeed maintain`, what consumers need stays, and the newest snapshot that
    wrote rows. Writers are not disturbed.
    """
    # Expiry is planned by snapshots alone, without the files.
    facts = TableFacts(properties(spark, table), load_history(spark, table))
    plan = plan_table(facts, _EXPIRY_ONLY, now_ms=int(clock() * 1000)).expiry
    if plan is None:
        return 0
    statement = expire_snapshots(table, older_than_ms=plan.older_than_ms)
    retry_on_conflict(lambda: spark.sql(statement).collect(), what=f"expire {table}")
    return plan.snapshots


# -- SQL of the procedures


def rewrite_data_files(table: str, settings: MaintenanceSettings, facts: TableFacts, *, rewrite_bytes: int) -> str:
    """Write a compaction: in the configured order, else in the table's sort order, else unsorted."""
    arguments = {"table": text_literal(table)}
    if settings.zorder:
        arguments |= {"strategy": "'sort'", "sort_order": text_literal(f"zorder({', '.join(settings.zorder)})")}
    elif settings.sort:
        arguments |= {"strategy": "'sort'", "sort_order": text_literal(settings.sort)}
    elif SORT_ORDER in facts.properties:
        arguments |= {"strategy": "'sort'"}
    options = {
        "target-file-size-bytes": str(settings.target_file_bytes),
        "min-input-files": str(settings.min_input_files),
    }
    if facts.sizes.delete_files:
        options["remove-dangling-deletes"] = "true"
    if rewrite_bytes > PARTS_FROM_BYTES:
        options |= {"partial-progress.enabled": "true", "partial-progress.max-commits": str(PARTS_MAX)}
    return _call(table, "rewrite_data_files", {**arguments, "options": _map(options)})


def rewrite_position_delete_files(table: str, settings: MaintenanceSettings) -> str:
    """Write a rewrite of small position-delete files."""
    options = {"min-input-files": str(settings.min_input_files)}
    return _call(table, "rewrite_position_delete_files", {"table": text_literal(table), "options": _map(options)})


def rewrite_manifests(table: str) -> str:
    """Write a rewrite of small manifests, without the cache, which would hold all entries in memory."""
    return _call(table, "rewrite_manifests", {"table": text_literal(table), "use_caching": "false"})


def expire_snapshots(table: str, *, older_than_ms: int) -> str:
    """Write an expiry of snapshots. The minimum number to keep is a property of the table."""
    arguments = {"table": text_literal(table), "older_than": timestamp_sql(older_than_ms), "stream_results": "true"}
    return _call(table, "expire_snapshots", arguments)


def remove_orphan_files(table: str, *, older_than_ms: int, location: str, is_dry_run: bool) -> str:
    """Write a removal of unreferenced files. Object stores are listed by the table's own file access."""
    arguments = {
        "table": text_literal(table),
        "older_than": timestamp_sql(older_than_ms),
        "dry_run": str(is_dry_run).lower(),
        "prefix_listing": str(not location.startswith(("file:", "hdfs:", "/"))).lower(),
    }
    return _call(table, "remove_orphan_files", arguments)


def timestamp_sql(ms: int) -> str:
    """Write a timestamp, to the millisecond."""
    at = datetime.fromtimestamp(ms // 1000, UTC)
    return f"TIMESTAMP '{at:%Y-%m-%d %H:%M:%S}.{ms % 1000:03d} UTC'"


def _call(table: str, procedure: str, arguments: Mapping[str, str]) -> str:
    catalog = table.partition(".")[0]
    return f"CALL {catalog}.system.{procedure}({', '.join(f'{key} => {value}' for key, value in arguments.items())})"


def _map(options: Mapping[str, str]) -> str:
    return f"map({', '.join(f'{text_literal(key)}, {text_literal(value)}' for key, value in options.items())})"
