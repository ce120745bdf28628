"""Expiry for whoever owns a table and writes to it: its old snapshots go now and then, without another process."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from pipeline.conflicts import repeat_on_conflict
from pipeline.consumers.registry import load_history
from pipeline.maintenance.planning import plan_table
from pipeline.maintenance.settings import MaintenanceSettings, Step
from pipeline.maintenance.sizes import Sizes, TableFacts
from pipeline.maintenance.statements import expire_snapshots
from pipeline.tables import properties

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

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
