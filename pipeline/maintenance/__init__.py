"""Maintenance: small files made large, old snapshots and orphans removed, beside writers and readers.

    commands -> runner -> steps -> (planning, statements) -> Spark

facts.py reads what a table is made of, planning.py decides what is worth doing, statements.py spells it for Iceberg's
procedures, steps.py runs them. `compact` and `expire` are for whoever owns a table and sees to it between writes of its
own.
"""

from pipeline.maintenance.compaction import Compacted, compact
from pipeline.maintenance.expiry import expire

__all__ = ["Compacted", "compact", "expire"]
