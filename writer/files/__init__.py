"""Data files: rows written as Parquet, read back, and hashed.

    parquet.py                 rows of a flush -> partitioned, sorted files in the store, with their ledger
    scan.py                    a table's files and rows, read back (verification, replay)
    row_hash.py --> xxh64.py   one hash per row, the same in Spark

In: Arrow tables and a TableState (commit/). Out: DataFiles for a commit. Imported by tables/, quarantine/,
verify.py.
"""
