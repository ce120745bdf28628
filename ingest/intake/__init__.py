"""Intake: from checked batches to the synced log, exactly once.

    websocket, http --> rows, debezium: number changes that have no numbers
           |                   |
           `--> Intake.offer --> queue --group--> dedup: decide --> log: persist --> dedup: record --> verdicts

    intake      the queue and group commit: the one task that touches dedup and the log
    dedup       high-water marks of sources, and refused batches that nothing may overtake
    sources     what each segment begins with (marks, adapter states), and where unknown sources resume
    rows        NDJSON rows as inserts
    debezium    Debezium requests, one at a time per source

`websocket` and `http` import this folder; it imports `protocol`, `debezium` and the writer's log.
"""
