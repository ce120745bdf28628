"""Verification in Spark, for tables that one machine would read too long: `lakefeed verify --spark`.

    commands.py  -->  scan.py     files of a change table --> facts, compared by lakefeed.contract.verification
                 -->  mirrors.py  a mirror compared with its change table

`pipeline.backfill` takes the row hash and tallies of its ledgers from scan.py.
"""
