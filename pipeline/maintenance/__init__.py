"""Maintenance: small files made large, old snapshots and orphans removed, beside writers and readers.

    commands -> runner -> steps -> (planning, statements) -> Spark

plan.py reads what a table is made of, plan.py decides what is worth doing, steps.py spells it for Iceberg's
procedures, steps.py runs them. `compact` and `expire` are for whoever owns a table and sees to it between writes of its
own.
"""

from lakefeed.pipeline.maintenance.steps import Compacted, compact, expire

__all__ = ["Compacted", "compact", "expire"]
