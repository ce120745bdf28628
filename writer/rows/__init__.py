"""Rows: records of the log become Arrow rows in their table's columns. Pure; imports wal, wire and the shared packages.

    records --runs--> groups by table --+-- json_strict: fast, all or nothing ---+--> rows, `_cdc_rescued`,
                                        +-- json_exact:  value by value ---------+    evolved columns
                                        +-- arrow:       column by column -------+

    runs            cut the log, decode parts of it, find bad rows by bisection
    groups          the changes of one table, per encoding
    json_strict     JSON rows that fit exactly          json_exact   all other JSON rows
    arrow           Arrow rows                          values       single JSON values
    evolution       columns grow for values             declaration  columns that sources declare
    merge           two versions of a schema            comments     what column comments store
    table_settings  [tables."pattern"] sections

Nothing is lost on the way: a value is in its column exactly as sent, or in `_cdc_rescued`, or its row is refused and
goes to the quarantine (tables/quarantine.py). Used by writer.files, writer.commit, writer.tables and writer.quarantine.
"""
