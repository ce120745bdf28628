"""Spark jobs over Lakefeed's tables: tables in, tables out.

    change tables --mirrors-------> current rows, or the history of each row
    files, JDBC ----backfill------> READ changes in a change table
    any table ------maintenance---> fewer files, fewer snapshots, no orphans
    change tables --verification--> report: what is missing, duplicated or different
    consumers                       streaming queries registered as tags, so that expiry keeps what they still need
    spark                           the session, tables and errors that all of them share

Jobs run on clusters, where only the standard library, click, rich and Spark exist. The package therefore imports
nothing but lakefeed.contract, settings, logs, command_line and storage.config. Importing it neither needs nor starts
Spark.
"""
