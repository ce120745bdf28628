"""Where a mirror goes on. Owns that decision, from the change table's snapshots and the mirror's marker.

    no marker, or its snapshot has expired     read the whole table as of now, then follow
    otherwise                                  follow from the marker's snapshot on

A new stream finds its first snapshot by a time. Times of snapshots come from several clocks and may fall, so one is
chosen that no later snapshot is below: what is read twice does no harm, what is passed over would be lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from pipeline.mirrors.markers import Marker
from pipeline.tables import Snapshot

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


def plan_start(lineage: Sequence[Snapshot], marker: Marker | None) -> ReadAll | Follow | Wait:
    """Decide where to go on; `lineage` are the change table's snapshots, newest first."""
    if not lineage:
        return Wait()
    ids = [snapshot.snapshot_id for snapshot in lineage]
    if marker is None or marker.snapshot not in ids:
        return ReadAll(ids[0])
    behind = lineage[: ids.index(marker.snapshot) + 1]
    return Follow(min(_ms(snapshot.committed_at) for snapshot in behind) - CLOCK_SKEW_MAX_MS)


def _ms(moment: datetime) -> int:
    return int(moment.timestamp() * 1000)


def completed_snapshot(lineage: Sequence[Snapshot], snapshot_id: int, files: int) -> int | None:
    """Name the last snapshot that is in as a whole when `files` of the given one are; None if it is not known."""
    found = next((snapshot for snapshot in lineage if snapshot.snapshot_id == snapshot_id), None)
    if found is None:
        return None
    if files >= int(found.summary.get("added-data-files", "0")):
        return snapshot_id
    return found.parent_id
