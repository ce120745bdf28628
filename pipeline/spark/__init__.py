"""Spark: session, tables, errors."""
