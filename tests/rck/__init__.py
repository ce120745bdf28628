"""Iceberg's own REST compatibility kit, run against a Lakefeed that is started for it."""
