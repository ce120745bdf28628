"""Where a mirror goes on. Owns that decision, from the change table's snapshots and the mirror's marker.

    no marker, or its snapshot has expired     read the whole table as of now, then follow
    otherwise                                  follow from the marker's snapshot on

A new stream finds its first snapshot by a time. Times of snapshots come from several clocks and may fall, so one is
chosen that no later snapshot is below: what is read twice does no harm, what is passed over would be lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.mirrors.lineage import Version
from pipeline.mirrors.markers import Marker

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
