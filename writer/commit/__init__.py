"""Snapshots: planned, committed, expired."""
