"""Rows as a source sent them, to Arrow columns: grouping, strict parsing, and the exact slow path behind it."""
