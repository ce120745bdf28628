"""Runs the steps of a plan in Spark. Owns what each one tells of itself, and what is tried again.

A rewrite that meets another writer's commit is refused whole and changes nothing: Iceberg tries the commit itself a few
times, then the step is run again. A commit whose outcome is unknown is left alone, because trying again could do it
twice; the next run finds what there is then.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pipeline.conflicts import repeat_on_conflict
from pipeline.maintenance import statements
from pipeline.maintenance.planning import TablePlan
from pipeline.maintenance.settings import MaintenanceSettings, Step
from pipeline.maintenance.sizes import TableFacts
from pipeline.spark_errors import message_of

if TYPE_CHECKING:
    from pyspark.sql import Row, SparkSession

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
        return statements.rewrite_data_files(table, settings, facts, rewrite_bytes=plan.compaction.bytes)
    if step is Step.DELETES:
        return statements.rewrite_position_delete_files(table, settings)
    if step is Step.MANIFESTS:
        return statements.rewrite_manifests(table)
    if step is Step.EXPIRE:
        assert plan.expiry is not None
        return statements.expire_snapshots(table, older_than_ms=plan.expiry.older_than_ms)
    assert plan.orphans_before_ms is not None
    return statements.remove_orphan_files(
        table, older_than_ms=plan.orphans_before_ms, location=location, is_dry_run=dry
    )


def _told(step: Step, rows: list[Row]) -> dict[str, Any]:
    if step is Step.ORPHANS:
        return {"orphans": len(rows)}
    [row] = rows
    answer = row.asDict()
    return {name: answer[column] for column, name in _TOLD[step].items() if column in answer}
