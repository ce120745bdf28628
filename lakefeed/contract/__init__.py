"""The contract: what Lakefeed writes into tables, and the words for it, shared by writer, catalog and Spark pipeline.

    changes        operation, position, span, table name; the `_cdc_` columns; usable column names
    progress       the marker that every commit moves: how far sources and nodes are committed
    ledger         counts and checksums per snapshot, and the markers of backfills
    verification   compares a table with its ledgers
    consumers      streaming readers as tags, and how long these are kept
    properties     table properties; names and marks of the quarantine
    errors         errors, by what the caller does next

Pure, and standard library only: the drivers of Spark clusters import this package. It imports nothing of Lakefeed.
"""
