"""Backfill: rows that exist already, read from files or a database into a change table as READ changes.

    input --inputs--> chunks --types, texts--> table's columns --rows--> READ changes --chunks--> one snapshot per chunk

    positions    as of which change rows are    records   what a run has committed, in table properties
    commands     `lakefeed backfill`            target    the change table: create, check, alter
    runner       one run, resumable             chunks    append a chunk, find it again

A run that is interrupted at any point resumes with the next chunk. Imports verification (ledgers), mirrors and spark.
"""
