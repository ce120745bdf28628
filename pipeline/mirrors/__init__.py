"""Mirrors: the current rows of a change table, or the history of each row, kept by Spark.

    change table --follower--> batch --fold--> last change per key --merge--> mirror, with the marker in the same commit
                                 |                                   ^
                                 +---- deletes, truncates ----> tombstones

    commands     `lakefeed mirror`                       marker       how far a mirror has merged, where it resumes
    runner       all mirrors of one application          table        key, columns, storage and origin of a mirror
    follower     one mirror: full read, stream           tombstones   deleted rows that are remembered
    merge        one batch into one mirror               history      versions of rows, SCD type 2
    fold         changes to the last change per key      settings     [pipeline.mirror], names of a mirror's tables

All state of a mirror is in its own tables; a checkpoint only saves reading. Imported by verification and backfill;
imports maintenance, consumers and spark.
"""
