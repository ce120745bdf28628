"""Maintenance: compaction, expiry of snapshots and removal of orphan files, beside running writers and readers.

    commands -> runner --facts--> table in numbers --plan--> what is worth doing --steps--> Iceberg's procedures

`plan` and `locations` are pure. `compact` and `expire` are for jobs that own a table and maintain it between their own
writes, as mirrors do. Imported by mirrors; imports consumers and spark.
"""

from lakefeed.pipeline.maintenance.steps import Compacted, compact, expire

__all__ = ["Compacted", "compact", "expire"]
