"""The marker of a mirror: how far it has merged its change table, and where it resumes.

    > {"snapshot": 12, "stream": "5f..", "batch": 7, "run": "a1..", "merges": 19}

Each merge writes it into the summary of its own snapshot, so that rows and marker are one commit. From time to time it
is copied to the table's properties, for the case that all snapshots with markers have expired behind a compaction. A
copy is older, so some changes are merged again, which changes nothing.

    marker                               resume
    none, or its snapshot has expired    read the whole table as of its newest snapshot, then stream
    otherwise                            stream from the marker's snapshot

A new stream finds its first snapshot by a timestamp. Snapshots are committed by several clocks, so their times may
fall; the stream starts below the time of every snapshot that is not merged. What it reads twice does no harm.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from lakefeed.pipeline.spark.tables import Snapshot, lineage, properties

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


MARKER = "lakefeed.mirror.position"

ADDED_FILES = "added-data-files"
ADDED_RECORDS = "added-records"

# Iceberg allows a snapshot to be older than its parent by this much, and no more.
CLOCK_SKEW_MAX_MS = 60_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Marker:
    """The snapshot of the change table up to which everything is merged, and the batch that was merged last.

    `batch` is -1 before the first batch of a stream. `run` identifies the application, so that two of them notice each
    other.
    """

    snapshot: int
    stream: str
    batch: int
    run: str
    merges: int = 0

    def to_text(self) -> str:
        """Render the marker for a summary or a property."""
        return json.dumps(asdict(self), separators=(",", ":"))


def parse_marker(text: str | None) -> Marker | None:
    """Read a marker; None if there is none, or another program wrote the text."""
    try:
        return Marker(**json.loads(text)) if text else None
    except (ValueError, TypeError):
        return None


def load_lineage(spark: SparkSession, table: str) -> list[Snapshot]:
    """Return the snapshots of a table's main branch, newest first, with markers and counts of what each one added."""
    return lineage(spark, table, summary_keys=(ADDED_FILES, ADDED_RECORDS, MARKER))


def find_marker(snapshots: Sequence[Snapshot], table_properties: Mapping[str, str]) -> Marker | None:
    """Return a mirror's newest marker. After a rollback it is the one of the rows that the table has now."""
    texts = (*(snapshot.summary.get(MARKER) for snapshot in snapshots), table_properties.get(MARKER))
    return next((marker for marker in map(parse_marker, texts) if marker is not None), None)


def load_marker(spark: SparkSession, mirror: str) -> Marker | None:
    """Load the newest marker of a mirror, given by its name in SQL."""
    # The properties are read only if no snapshot has a marker.
    return find_marker(load_lineage(spark, mirror), {}) or find_marker((), properties(spark, mirror))


@dataclass(frozen=True, slots=True)
class ReadTable:
    """Read the whole table as of a snapshot."""

    snapshot: int


@dataclass(frozen=True, slots=True)
class StreamFrom:
    """Stream all snapshots after a time, in milliseconds since 1970."""

    from_ms: int


def plan_resume(snapshots: Sequence[Snapshot], marker: Marker | None) -> ReadTable | StreamFrom | None:
    """Decide where a mirror resumes; None if the change table is empty. `snapshots` are its own, newest first."""
    if not snapshots:
        return None
    ids = [snapshot.snapshot_id for snapshot in snapshots]
    if marker is None or marker.snapshot not in ids:
        return ReadTable(ids[0])
    unmerged = snapshots[: ids.index(marker.snapshot) + 1]
    return StreamFrom(min(snapshot.committed_ms for snapshot in unmerged) - CLOCK_SKEW_MAX_MS)


def completed_snapshot(snapshots: Sequence[Snapshot], snapshot_id: int, files: int) -> int | None:
    """Return the last snapshot that is complete once `files` of the given one are merged; None if it is unknown."""
    found = next((snapshot for snapshot in snapshots if snapshot.snapshot_id == snapshot_id), None)
    if found is None:
        return None
    return snapshot_id if files >= int(found.summary.get(ADDED_FILES, "0")) else found.parent_id
