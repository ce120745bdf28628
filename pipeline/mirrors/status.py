"""Where mirrors stand. Owns reading that, for people and for scripts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline.mirrors.lineage import Version, load_lineage
from pipeline.mirrors.markers import Marker
from pipeline.mirrors.mirror_table import load_marker, load_origin
from pipeline.mirrors.names import mirror_names
from pipeline.mirrors.origins import is_of
from pipeline.mirrors.settings import MirrorConfig
from pipeline.tables import TableName, exists, properties

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@dataclass(frozen=True, slots=True, kw_only=True)
class MirrorStatus:
    """One mirror; None where there is none of this table yet, or where its snapshot has expired."""

    table: str
    mirror: str
    mode: str
    snapshot: int | None
    snapshots_behind: int | None
    seconds_behind: float | None
    rows_behind: int | None


def load_status(
    spark: SparkSession, catalog: str, tables: Sequence[TableName], config: MirrorConfig
) -> list[MirrorStatus]:
    """Look at the mirror of each table."""
    return [_status_of(spark, catalog, table, config) for table in tables]


def _status_of(spark: SparkSession, catalog: str, table: TableName, config: MirrorConfig) -> MirrorStatus:
    settings = config.settings_of(str(table))
    names = mirror_names(table, settings, catalog)
    marker = None
    if exists(spark, names.mirror_sql) and is_of(properties(spark, names.mirror_sql), load_origin(spark, names)):
        marker = load_marker(spark, names)
    behind = missing(load_lineage(spark, names.table_sql), marker)
    return MirrorStatus(
        table=str(table),
        mirror=str(names.mirror),
        mode=settings.mode.value,
        snapshot=marker.snapshot if marker else None,
        snapshots_behind=None if behind is None else len(behind),
        seconds_behind=None if behind is None else seconds_between(behind),
        rows_behind=None if behind is None else sum(map(_rows, behind)),
    )


def missing(lineage: Sequence[Version], marker: Marker | None) -> list[Version] | None:
    """List the snapshots that a mirror has still to merge, newest first; None if that is not known."""
    ids = [version.snapshot_id for version in lineage]
    if marker is None or marker.snapshot not in ids:
        return None
    newer = lineage[: ids.index(marker.snapshot)]
    return [version for version in newer if version.operation == "append"]


def seconds_between(behind: Sequence[Version]) -> float:
    """Tell how long the oldest change that is not merged waits, measured by the table's own newest snapshot."""
    return max(0.0, (behind[0].committed_ms - behind[-1].committed_ms) / 1000) if behind else 0.0


def _rows(version: Version) -> int:
    return int(version.summary.get("added-records", "0"))
