"""What a merge knew of its mirror when it began, and whether that still holds.

Owns noticing other applications, and the property that names columns which rows may lack.

A merge folds its changes with the tombstones of that moment. Had another application deleted a row since then, the
merge would bring it back. So each attempt looks first whether the mirror's snapshot is still the one that was seen, and
if not, who has committed since: a compaction does no harm. A commit to the same files while MERGE runs is refused by
Iceberg, and the next attempt looks again. What is left is the moment from that look until MERGE has read where the
mirror stands.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline.errors import PipelineError
from pipeline.mirrors.lineage import MARKER, Version, load_lineage
from pipeline.mirrors.markers import read_marker
from pipeline.mirrors.names import MirrorNames
from pipeline.mirrors.sql_text import property_pairs
from pipeline.tables import properties

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# The columns that some change did not send, as they were called then: rows of the mirror may lack them.
UNSENT = "lakefeed.mirror.unsent"
# What Iceberg shows among the properties.
_SNAPSHOT = "current-snapshot-id"
_NO_SNAPSHOT = "none"


class TwoApplications(PipelineError):
    """Another application merges into the same mirror: a person has to stop one of them."""


class MirrorRolledBack(PipelineError):
    """The mirror is not what it was when the merge began: it has to begin again from the marker."""


def two_applications(mirror: str) -> TwoApplications:
    """Say what a person has to do."""
    return TwoApplications(f"another application merges into this mirror, stop one of them: mirror={mirror}")


@dataclass(frozen=True, slots=True)
class Seen:
    """A mirror's snapshot at some moment, and the columns that its rows may lack."""

    snapshot: int | None
    unsent: frozenset[str]


def look_at_mirror(spark: SparkSession, names: MirrorNames) -> Seen:
    """See where a mirror stands."""
    found = properties(spark, names.mirror_sql)
    return Seen(_snapshot_in(found), frozenset(json.loads(found.get(UNSENT, "[]"))))


def note_unsent(spark: SparkSession, names: MirrorNames, unsent: frozenset[str]) -> None:
    """Write down, before they are merged, which columns rows may lack from now on."""
    pairs = property_pairs({UNSENT: json.dumps(sorted(unsent))})
    spark.sql(f"ALTER TABLE {names.mirror_sql} SET TBLPROPERTIES ({pairs})")


def check_alone(spark: SparkSession, names: MirrorNames, *, seen: Seen, run: str) -> None:
    """Check that no other application has merged since the mirror was seen.

    Raises: TwoApplications, MirrorRolledBack.
    """
    if _snapshot_in(properties(spark, names.mirror_sql)) != seen.snapshot:
        check_commits(load_lineage(spark, names.mirror_sql), seen=seen, run=run, mirror=str(names.mirror))


def check_commits(lineage: Sequence[Version], *, seen: Seen, run: str, mirror: str) -> None:
    """Check the commits since a mirror was seen; `lineage` are its snapshots, newest first.

    Raises: TwoApplications, MirrorRolledBack.
    """
    for version in lineage:
        if version.snapshot_id == seen.snapshot:
            return
        marker = read_marker(version.summary.get(MARKER))
        if marker is not None and marker.run != run:
            raise two_applications(mirror)
    if seen.snapshot is not None:
        raise MirrorRolledBack(f"the mirror was rolled back during a merge, which begins again: mirror={mirror}")


def _snapshot_in(table_properties: Mapping[str, str]) -> int | None:
    text = table_properties.get(_SNAPSHOT, _NO_SNAPSHOT)
    return None if text == _NO_SNAPSHOT else int(text)
