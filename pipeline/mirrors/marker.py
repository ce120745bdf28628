"""Where a mirror goes on. Owns that decision, from the change table's snapshots and the mirror's marker.

    no marker, or its snapshot has expired     read the whole table as of now, then follow
    otherwise                                  follow from the marker's snapshot on

A new stream finds its first snapshot by a time. Times of snapshots come from several clocks and may fall, so one is
chosen that no later snapshot is below: what is read twice does no harm, what is passed over would be lost.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


# --- pipeline.mirrors.lineage -----------------------------------------------------------------------------------------
#
# The snapshots that lead to a table's present state. Owns loading them, in one query.


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


# --- pipeline.mirrors.markers -----------------------------------------------------------------------------------------
#
# How far a mirror has come, as it says itself. Owns the marker's form and which of several counts.
#
#     > {"snapshot": 12, "stream": "5f..", "batch": 7, "run": "a1..", "merges": 19}
#
# Each merge writes it into the summary of its own snapshot, so that rows and marker are one act. A copy stands among
# the
# table's properties, now and then, for when snapshots with markers have expired behind a compaction; being older, it
# only
# lets some changes be merged again, which changes nothing.


MIRROR_KEY = "lakefeed.mirror.key"
MIRROR_MODE = "lakefeed.mirror.mode"


@dataclass(frozen=True, slots=True, kw_only=True)
class Marker:
    """The change table's snapshot up to which all changes are in, and which batch of which stream brought the last.

    `batch` is -1 where no stream has brought any yet. `run` is the application, so that two of them notice each other.
    """

    snapshot: int
    stream: str
    batch: int
    run: str
    merges: int = 0

    def to_text(self) -> str:
        """Write it for a summary or a property."""
        return json.dumps(asdict(self), separators=(",", ":"))


def read_marker(text: str | None) -> Marker | None:
    """Read a marker; None where there is none, or none of ours."""
    try:
        return Marker(**json.loads(text)) if text else None
    except (ValueError, TypeError):
        return None


def find_marker(lineage: Sequence[Version], properties: Mapping[str, str]) -> Marker | None:
    """Find the newest marker of a mirror; a table that was rolled back has the one of its present rows."""
    markers = (read_marker(version.summary.get(MARKER)) for version in lineage)
    return next((marker for marker in markers if marker is not None), None) or read_marker(properties.get(MARKER))


# --- pipeline.mirrors.starts ------------------------------------------------------------------------------------------


# Iceberg lets a snapshot be older than the one before it by this much, and no more.
CLOCK_SKEW_MAX_MS = 60_000


@dataclass(frozen=True, slots=True)
class ReadAll:
    """Merge the whole table as of a snapshot."""

    snapshot: int


@dataclass(frozen=True, slots=True)
class Follow:
    """Stream from a time on, in milliseconds since 1970."""

    from_ms: int


@dataclass(frozen=True, slots=True)
class Wait:
    """The table has no snapshot yet."""


def plan_start(lineage: Sequence[Version], marker: Marker | None) -> ReadAll | Follow | Wait:
    """Decide where to go on; `lineage` are the change table's snapshots, newest first."""
    if not lineage:
        return Wait()
    ids = [version.snapshot_id for version in lineage]
    if marker is None or marker.snapshot not in ids:
        return ReadAll(ids[0])
    behind = lineage[: ids.index(marker.snapshot) + 1]
    return Follow(min(version.committed_ms for version in behind) - CLOCK_SKEW_MAX_MS)


def completed_snapshot(lineage: Sequence[Version], snapshot_id: int, files: int) -> int | None:
    """Name the last snapshot that is in as a whole when `files` of the given one are; None if it is not known."""
    found = next((version for version in lineage if version.snapshot_id == snapshot_id), None)
    if found is None:
        return None
    if files >= int(found.summary.get("added-data-files", "0")):
        return snapshot_id
    return found.parent_id
