"""Spark jobs over Lakefeed's tables. Importing this package starts nothing and needs no Spark."""
