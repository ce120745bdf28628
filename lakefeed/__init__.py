"""Lakefeed: changes of databases into Apache Iceberg tables, exactly once."""
