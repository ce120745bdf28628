"""Backfill: rows that exist already, read from files or a database into a change table as READ changes.

    input --inputs--> chunks --types--> table's columns --rows--> READ changes --runner--> one snapshot per chunk

    commands    `lakefeed backfill`
    inputs      [pipeline.backfill]; files and databases, divided into chunks; positions
    runner      one run, resumable: read a chunk, append it, find it again
    target      the change table: create, check, alter; what a run has committed, in its properties

A run that is interrupted at any point resumes with the next chunk. Imports verification (ledgers), mirrors and spark.
"""
