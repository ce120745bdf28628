"""Mirrors: the current rows of a change table, or the history of each row, kept by Spark.

    change table --follower--> batch --fold--> last change per key --merge--> mirror, with the marker in the same commit
                                 |                                   ^
                                 +---- deletes, truncates ----> tombstones

    commands     `lakefeed mirror`                       marker       how far a mirror has merged, where it resumes
    runner       all mirrors of one application          layout       key, columns and storage of a mirror; evolution
    follower     one mirror: full read, stream           table        the mirror as a table: create, check, alter
    merge        one batch into one mirror               tombstones   deleted rows that are remembered
    fold         changes to the last change per key      history      versions of rows, SCD type 2

All state of a mirror is in its own tables; a checkpoint only saves reading. Imported by verification and backfill;
imports maintenance, consumers and spark.
"""
