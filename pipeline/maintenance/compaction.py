"""Compaction for whoever owns a table and writes to it: between two writes, so that neither thwarts the other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline.conflicts import repeat_on_conflict
from pipeline.maintenance.facts import load_facts
from pipeline.maintenance.planning import plan_compaction
from pipeline.maintenance.settings import MaintenanceSettings
from pipeline.maintenance.statements import rewrite_data_files

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

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
