"""Intake: from checked batches to the synced log, exactly once.

    websocket, http --> rows, debezium: number changes that have no numbers
           |                   |
           `--> Intake.offer --> queue --group--> dedup: decide --> log: persist --> dedup: record --> verdicts

    intake         the queue and group commit: the one task that touches dedup and the log
    dedup          high-water marks of sources, and refused batches that nothing may overtake
    source_state   what each segment of the log begins with: marks and the state of adapters
    resume         where sources resume that this log does not know
    rows           NDJSON rows as inserts
    debezium       Debezium requests, one at a time per source

`websocket` and `http` import this folder; it imports `protocol`, `debezium` and the writer's log.
"""
