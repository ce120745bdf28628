"""Tables: decoded changes of the log become snapshots, each table on its own.

    log --> feed.py: reader, applier --> table.py: received --> buffer --> rounds.py ----------> snapshot
              catch-up -------------------^    |                             |
              (tables that are behind)         +--> quarantine.py            +--> commit/, files/

    state.py, pending.py    a table's lifecycle and its uncommitted rows    flush_policy.py    when to flush
    columns.py              its schema, and rows fitted into it             memory.py          which tables are evicted
    feed_state.py           all tables, watermarks of sources               status.py          /status, /health, metrics
    context.py              what all of them use

In: a log (wal/) and a TableContext. Out: snapshots, and `Feed.status`. A table that cannot be written holds up only
itself. Imported by the service and by quarantine/.
"""
