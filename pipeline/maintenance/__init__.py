"""Maintenance: compaction, expiry of snapshots and removal of orphan files, beside running writers and readers.

    commands -> runner: table in numbers --plan--> what is worth doing --> Iceberg's procedures

`plan` is pure. Imported by mirrors, which expire the snapshots of their own tables; imports consumers and spark.
"""
