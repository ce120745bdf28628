"""Checks tables in Spark: change tables against what their snapshots recorded, mirrors against their change tables."""
