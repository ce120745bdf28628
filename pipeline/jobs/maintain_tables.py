"""Maintenance as a job of a cluster: `spark-submit ... maintain_tables.py [TABLE...] [--only compact,...]`."""

from __future__ import annotations

from lakefeed.pipeline.maintenance.commands import maintain

if __name__ == "__main__":
    maintain()
