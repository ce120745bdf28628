"""The snapshots that lead to a table's present state. Owns loading them, in one query."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


# What of a snapshot's summary is read here: how much it added and, in a mirror's, the marker.
MARKER = "lakefeed.mirror.position"
SUMMARY_KEYS = ("added-data-files", "added-records", MARKER)


@dataclass(frozen=True, slots=True)
class Version:
    """One snapshot of a table, its summary as far as SUMMARY_KEYS."""

    snapshot_id: int
    parent_id: int | None
    committed_ms: int
    operation: str
    summary: Mapping[str, str]


def load_lineage(spark: SparkSession, table: str) -> list[Version]:
    """Load the snapshots of the main branch, newest first, as far back as they are there."""
    # Times as numbers: PySpark gives others in the driver's own zone, where an hour may come twice. Of the summaries
    # what is asked for: tables that nobody maintains have thousands.
    kept = ", ".join(f"'{key}'" for key in SUMMARY_KEYS)
    summary = f"map_filter(s.summary, (key, value) -> key IN ({kept}))"
    rows = spark.sql(
        f"SELECT s.snapshot_id, s.parent_id, unix_millis(s.committed_at), s.operation, {summary}, r.name IS NOT NULL "
        f"FROM {table}.snapshots s LEFT JOIN {table}.refs r ON r.snapshot_id = s.snapshot_id AND r.name = 'main'"
    ).collect()
    newest = next((row[0] for row in rows if row[5]), None)
    return ancestors([Version(row[0], row[1], row[2], row[3], dict(row[4])) for row in rows], newest)


def ancestors(versions: Sequence[Version], newest_id: int | None) -> list[Version]:
    """Follow snapshots from the newest back, as far as they are there."""
    by_id = {version.snapshot_id: version for version in versions}
    found = []
    while newest_id is not None and (version := by_id.pop(newest_id, None)) is not None:
        found.append(version)
        newest_id = version.parent_id
    return found
