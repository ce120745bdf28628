"""Fills change tables with rows that are there already: files and databases, read by Spark, chunk by chunk."""
