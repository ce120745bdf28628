"""Runs the steps of a plan in Spark. Owns what each one tells of itself, and what is tried again.

A rewrite that meets another writer's commit is refused whole and changes nothing: Iceberg tries the commit itself a few
times, then the step is run again. A commit whose outcome is unknown is left alone, because trying again could do it
twice; the next run finds what there is then.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from lakefeed.pipeline.consumers.registry import load_history
from lakefeed.pipeline.maintenance.plan import Sizes, TableFacts, TablePlan, load_facts, plan_compaction, plan_table
from lakefeed.pipeline.maintenance.settings import MaintenanceSettings, Step
from lakefeed.pipeline.spark.failures import message_of, repeat_on_conflict
from lakefeed.pipeline.spark.tables import properties

if TYPE_CHECKING:
    from pyspark.sql import Row, SparkSession


# --- pipeline.maintenance.statements ----------------------------------------------------------------------------------
#
# Iceberg's procedures as SQL. Core: owns their names, arguments and quoting.
#
# A table is given as SQL has it, with its catalog first: `lake`.`sales`.`orders`. Moments carry their zone, because
# Spark
# would read them in the session's own.


SORT_ORDER = "sort-order"

# A rewrite of more than this is committed in parts, so that a failure does not lose all of it.
PARTS_FROM_BYTES = 8 << 30
PARTS_MAX = 10


def rewrite_data_files(table: str, settings: MaintenanceSettings, facts: TableFacts, *, rewrite_bytes: int) -> str:
    """Spell a compaction: in the order that is set, else in the table's own, else as the rows come."""
    arguments = {"table": literal(table)}
    if settings.zorder:
        arguments |= {"strategy": "'sort'", "sort_order": literal(f"zorder({', '.join(settings.zorder)})")}
    elif settings.sort:
        arguments |= {"strategy": "'sort'", "sort_order": literal(settings.sort)}
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
    return call(table, "rewrite_data_files", {**arguments, "options": _map(options)})


def rewrite_position_delete_files(table: str, settings: MaintenanceSettings) -> str:
    """Spell the joining of small position-delete files."""
    options = {"min-input-files": str(settings.min_input_files)}
    return call(table, "rewrite_position_delete_files", {"table": literal(table), "options": _map(options)})


def rewrite_manifests(table: str) -> str:
    """Spell the joining of small manifests. Without the cache: it would hold all entries in memory."""
    return call(table, "rewrite_manifests", {"table": literal(table), "use_caching": "false"})


def expire_snapshots(table: str, *, older_than_ms: int) -> str:
    """Spell the expiry of snapshots; how many stay however old they are, is the table's own setting."""
    arguments = {"table": literal(table), "older_than": moment(older_than_ms), "stream_results": "true"}
    return call(table, "expire_snapshots", arguments)


def remove_orphan_files(table: str, *, older_than_ms: int, location: str, is_dry_run: bool) -> str:
    """Spell the removal of files that nothing names. Object stores are listed by the table's own access to them."""
    arguments = {
        "table": literal(table),
        "older_than": moment(older_than_ms),
        "dry_run": str(is_dry_run).lower(),
        "prefix_listing": str(not location.startswith(("file:", "hdfs:", "/"))).lower(),
    }
    return call(table, "remove_orphan_files", arguments)


def call(table: str, procedure: str, arguments: Mapping[str, str]) -> str:
    """Spell a call of a procedure of the catalog that has the table."""
    catalog = table.partition(".")[0]
    return f"CALL {catalog}.system.{procedure}({', '.join(f'{key} => {value}' for key, value in arguments.items())})"


def literal(text: str) -> str:
    """Quote text for SQL. Spark would put a variable's value where it finds `${name}`."""
    escaped = text.replace("\\", "\\\\").replace("'", "\\'").replace("$", "\\u0024")
    return f"'{escaped}'"


def moment(ms: int) -> str:
    """Spell a moment, down to the millisecond."""
    at = datetime.fromtimestamp(ms // 1000, UTC)
    return f"TIMESTAMP '{at:%Y-%m-%d %H:%M:%S}.{ms % 1000:03d} UTC'"


def _map(options: Mapping[str, str]) -> str:
    return f"map({', '.join(f'{literal(key)}, {literal(value)}' for key, value in options.items())})"


# --- pipeline.maintenance.steps ---------------------------------------------------------------------------------------


_log = logging.getLogger(__name__)

# The columns of a procedure's answer that are worth telling, by the names that they get here.
_TOLD: Mapping[Step, Mapping[str, str]] = {
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


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step did; `problem` tells why it did not."""

    step: Step
    seconds: float = 0.0
    told: Mapping[str, Any] = field(default_factory=dict)
    problem: str | None = None


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
    """Run one step that the plan has. A failure is told, not raised."""
    statement = _statement(table, step, plan=plan, facts=facts, settings=settings, location=location, dry=is_dry_run)
    started = time.monotonic()
    try:
        rows = repeat_on_conflict(lambda: spark.sql(statement).collect(), what=f"{step.value} {table}")
    except Exception as error:  # noqa: BLE001 - one step or table that fails must not keep the others from being done
        problem = message_of(error).partition("\n")[0] or type(error).__name__
        _log.error("maintenance_failed", extra={"table": table, "step": step.value, "reason": problem})
        return StepResult(step, time.monotonic() - started, problem=problem)
    return StepResult(step, time.monotonic() - started, _told(step, rows))


def _statement(
    table: str,
    step: Step,
    *,
    plan: TablePlan,
    facts: TableFacts,
    settings: MaintenanceSettings,
    location: str,
    dry: bool,
) -> str:
    if step is Step.COMPACT:
        assert plan.compaction is not None
        return rewrite_data_files(table, settings, facts, rewrite_bytes=plan.compaction.bytes)
    if step is Step.DELETES:
        return rewrite_position_delete_files(table, settings)
    if step is Step.MANIFESTS:
        return rewrite_manifests(table)
    if step is Step.EXPIRE:
        assert plan.expiry is not None
        return expire_snapshots(table, older_than_ms=plan.expiry.older_than_ms)
    assert plan.orphans_before_ms is not None
    return remove_orphan_files(table, older_than_ms=plan.orphans_before_ms, location=location, is_dry_run=dry)


def _told(step: Step, rows: list[Row]) -> dict[str, Any]:
    if step is Step.ORPHANS:
        return {"orphans": len(rows)}
    [row] = rows
    answer = row.asDict()
    return {name: answer[column] for column, name in _TOLD[step].items() if column in answer}


# --- pipeline.maintenance.compaction ----------------------------------------------------------------------------------
#
# Compaction for whoever owns a table and writes to it: between two writes, so that neither thwarts the other.


_DEFAULTS = MaintenanceSettings()


@dataclass(frozen=True, slots=True)
class Compacted:
    """What a compaction did."""

    files_rewritten: int
    files_added: int


def compact(spark: SparkSession, table: str, *, settings: MaintenanceSettings = _DEFAULTS) -> Compacted | None:
    """Join a table's small files where there are enough of them; None if there was nothing worth doing.

    `table` is its name as SQL has it. A MERGE that runs meanwhile fails, and has to be repeated: call this between two.
    """
    facts = load_facts(spark, table, target_file_bytes=settings.target_file_bytes)
    plan = plan_compaction(facts, settings)
    if plan is None:
        return None
    statement = rewrite_data_files(table, settings, facts, rewrite_bytes=plan.bytes)
    [row] = repeat_on_conflict(lambda: spark.sql(statement).collect(), what=f"compact {table}")
    done = Compacted(row["rewritten_data_files_count"], row["added_data_files_count"])
    return done if done.files_rewritten else None


# --- pipeline.maintenance.expiry --------------------------------------------------------------------------------------
#
# Expiry for whoever owns a table and writes to it: its old snapshots go now and then, without another process.


_EXPIRY_ONLY = MaintenanceSettings(run=(Step.EXPIRE,))
# An expiry is planned by snapshots alone: files are not looked at.
_NO_SIZES = Sizes(data_files=0, data_bytes=0, small_files=0, delete_files=0, manifests=0, snapshots=0)


def expire(spark: SparkSession, table: str, *, clock: Callable[[], float] = time.time) -> int:
    """Remove a table's snapshots that are beyond its own limits, with the files that only they use; tell how many.

    `table` is its name as SQL has it. As with `lakefeed maintain`, what consumers need stays, and the newest snapshot
    that wrote rows. Writers are not disturbed.
    """
    facts = TableFacts(properties(spark, table), _NO_SIZES, (), 0, load_history(spark, table))
    plan = plan_table(facts, _EXPIRY_ONLY, now_ms=int(clock() * 1000)).expiry
    if plan is None:
        return 0
    statement = expire_snapshots(table, older_than_ms=plan.older_than_ms)
    repeat_on_conflict(lambda: spark.sql(statement).collect(), what=f"expire {table}")
    return plan.snapshots
